"""The algebra of masks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flexdecode.mods import MaskMod, and_masks, mask_mod, not_mask, or_masks


@mask_mod
def even(b, h, q_idx, kv_idx):
    """True for even keys."""
    return kv_idx % 2 == 0


@mask_mod
def past(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def plain(b, h, q_idx, kv_idx):
    return kv_idx < 3


def row(mask: Any, q_idx: int = 2) -> str:
    """Keys 0 to 5 of one query, as a picture."""
    allowed = mask(0, 0, torch.tensor(q_idx), torch.arange(6))
    assert allowed.dtype == torch.bool
    return "".join(str(int(x)) for x in allowed.expand(6).tolist())


def test_operators() -> None:
    assert row(even) == "101010"
    assert row(even & past) == "101000"
    assert row(even | past) == "111010"
    assert row(~even) == "010101"
    assert row(~(even & past) & not_mask(plain)) == "000111"


def test_functions_are_the_operators() -> None:
    assert row(and_masks(even, past, plain)) == row(even & past & plain)
    assert row(or_masks(even, past, plain)) == row(even | past | plain)
    assert row(not_mask(plain)) == "000111"


def test_plain_functions_combine_from_either_side() -> None:
    assert row(plain & even) == row(even & plain) == "101000"
    assert row(plain | even) == row(even | plain) == "111010"
    assert isinstance(plain & even, MaskMod)


def test_without_arguments() -> None:
    assert row(and_masks()) == "111111"
    assert row(or_masks()) == "000000"


def test_python_numbers_are_as_good_as_tensors() -> None:
    mask = ~(even & plain)
    assert mask(0, 0, 5, 2) is False
    assert mask(0, 0, 5, 3) is True


def test_the_rule_keeps_its_name_and_documentation() -> None:
    assert even.__name__ == "even"
    assert even.__doc__ == "True for even keys."
    assert list(inspect.signature(even).parameters) == ["b", "h", "q_idx", "kv_idx"]
    assert repr(even) == "mask_mod(even)"
    assert (even & ~past).__name__ == "even_and_not_past"
    assert (even | plain).__name__ == "even_or_plain"


def test_decorating_twice_changes_nothing() -> None:
    assert mask_mod(even) is even


def test_and_or_not_are_refused() -> None:
    for ask in (lambda: even and past, lambda: even or past, lambda: not even):
        with pytest.raises(TypeError, match=r"combine masks with & \| ~"):
            ask()


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="mask_mod: expected a function, got int"):
        mask_mod(3)
    with pytest.raises(TypeError, match=r"and_masks: expected functions .* got Tensor"):
        and_masks(even, torch.ones(2))
    with pytest.raises(TypeError, match="not_mask: expected functions"):
        not_mask(None)
    with pytest.raises(TypeError):
        even & torch.ones(2)
