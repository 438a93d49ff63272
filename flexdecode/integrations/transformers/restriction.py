"""Rules of the user's own, on top of every model's mask."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flexdecode.mods import and_masks

__all__ = ["MaskFunction", "is_restricted", "restrict", "restriction"]

MaskFunction = Callable[[Any, Any, Any, Any], Any]

_restriction: contextvars.ContextVar[MaskFunction | None] = contextvars.ContextVar(
    "flexdecode_restriction", default=None
)
_restricted: list[MaskFunction] = []  # in force anywhere: what a compiled model can ask


@contextlib.contextmanager
def restrict(mask_mod: MaskFunction) -> Iterator[None]:
    """Within this context, also apply `mask_mod` in every layer of every registered model.

    A key is attended where the model's own mask and `mask_mod` both allow it.

    Parameters
    ----------
    mask_mod : callable (b, h, q_idx, kv_idx) -> bool
        Positions are logical: token 0 is the first real token of row ``b``, wherever left padding
        puts it. ``h`` is the query head. Layers that keep only a window of keys in their cache
        cannot show it older ones. Layers for which a model makes no mask, as in some vision
        towers, stay as they are.

    Raises
    ------
    TypeError
        `mask_mod` is not callable.
    ValueError
        A causal layer is given a matrix as its mask, which says nothing of positions.
    """
    rule = and_masks(mask_mod)  # refuses what is not callable
    outer = _restriction.get()
    token = _restriction.set(rule if outer is None else and_masks(outer, rule))
    _restricted.append(rule)
    try:
        yield
    finally:
        _restricted.remove(rule)
        _restriction.reset(token)


def restriction() -> MaskFunction | None:
    """Return the rule in force here; a compiled model can only ask `is_restricted`."""
    return _restriction.get()


def is_restricted() -> bool:
    """Whether a rule is in force; of any context where a model is being compiled."""
    if torch.compiler.is_compiling():
        return len(_restricted) > 0
    return _restriction.get() is not None
