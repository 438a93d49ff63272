"""Bad values for every argument of every public function: a message that names the argument.

Each argument of a good call is replaced, one at a time, by each value of `tests.bad_values`. The
call works, or raises a TypeError or ValueError whose message names the argument, says what is
expected and what came. Other tests say what the messages are word for word.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import flexdecode
from flexdecode import attention, compat, create_block_mask, masks, show_code
from tests.bad_values import BAD, calls

# Arguments that messages call by another name.
CALLED = {("mask_mod", "fn"): "mask_mod", ("not_mask", "mod"): "not_mask"}
# These values are good, and say that another argument is wrong.
FINE = {
    ("attention of pages", "page_table", "None"): "k: ",
    ("attention of pages", "cu_seqlens_q", "None"): "page_table: ",
    ("append_kv", "page_table", "None"): "k_cache: ",
    ("append_kv", "cu_seqlens", "None"): "page_table: ",
    ("BlockMask.bind", "batch", "zero"): "kv_len: ",
    ("BlockMask.bind", "q_len", "zero"): "cu_seqlens_q: ",
    ("cascade_attention of one cache", "prefix_len", "None"): "prefixes: ",
    ("create_block_mask", "KV_LEN", "zero"): "kv_len: ",
    ("explain_cascade", "prefix_len", "None"): "prefixes: ",
    ("merge_attentions", "outs", "five dims"): "lses: ",
    ("merge_attentions", "outs", "float tensor"): "lses: ",
}
NOTHING_TO_GET_WRONG = {
    "AuxOutput",
    "AuxRequest",
    "BlockMask",  # made by functions
    "CascadeExplanation",
    "Explanation",
    "compile_count",
}
COMBINE = {"and_masks", "or_masks"}


@pytest.mark.parametrize("name", list(calls()))
def test_bad_values_are_named(name: str) -> None:
    function, good = calls()[name]
    function(**good)
    for argument in good:
        for kind, value in BAD.items():
            function, good = calls()[name]
            try:
                function(**{**good, argument: value})
            except (TypeError, ValueError) as error:
                message = str(error)
                wanted = CALLED.get((name, argument), argument)
                known = FINE.get((name, argument, kind))
                where = f"{argument} = {kind}: {type(error).__name__}: {message}"
                if known is not None:
                    assert message.startswith(known), where
                else:
                    assert wanted in message.split(": ")[0], where
                assert "expected" in message, where
                assert "got" in message, where
            except Exception as error:
                pytest.fail(f"{argument} = {kind}: {type(error).__name__}: {error}")


def test_every_public_function_is_there() -> None:
    covered = {name.split(" of ")[0].split(".")[-1] for name in calls()}
    public = {name for name in flexdecode.__all__ if callable(getattr(flexdecode, name))}
    public |= {name for name in masks.__all__ if not isinstance(getattr(masks, name), Rule)}
    public |= {name for name in compat.__all__ if inspect.isfunction(getattr(compat, name))} - {
        "and_masks",
        "or_masks",
    }
    assert public - covered - NOTHING_TO_GET_WRONG - COMBINE == set()


Rule = type(masks.causal)


@pytest.mark.parametrize("name", sorted(COMBINE))
def test_combining_what_is_no_function(name: str) -> None:
    for kind in ("None", "text", "float tensor", "strange"):
        with pytest.raises(TypeError, match=rf"{name}: expected functions .* got "):
            getattr(flexdecode, name)(masks.causal, BAD[kind])


# ---- rules that cannot be compiled ----

TABLE = torch.zeros(8, 8)


def branches(b, h, q_idx, kv_idx):
    if q_idx > 3:  # the line to show
        return kv_idx > 1
    return kv_idx > 0


def loops(b, h, q_idx, kv_idx):
    for _ in range(kv_idx):  # the line to show
        pass
    return kv_idx > 0


def reads(b, h, q_idx, kv_idx):
    limit = kv_idx.item()  # the line to show
    return q_idx > limit


def sorts(b, h, q_idx, kv_idx):
    found = torch.sort(kv_idx)  # the line to show
    return found.values > 0


def converts(b, h, q_idx, kv_idx):
    return float(kv_idx) > 2.0  # the line to show


def writes(b, h, q_idx, kv_idx):
    TABLE[q_idx, kv_idx] = 1.0  # the line to show
    return q_idx >= kv_idx


def chains(b, h, q_idx, kv_idx):
    return 0 <= kv_idx <= q_idx  # the line to show


def joins(b, h, q_idx, kv_idx):
    return kv_idx > 0 and kv_idx <= q_idx  # the line to show


def numpys(b, h, q_idx, kv_idx):
    return kv_idx.numpy() > 0  # the line to show


def multiplies(b, h, q_idx, kv_idx):
    return (TABLE @ TABLE)[q_idx, kv_idx] > 0  # the line to show


def searches(b, h, q_idx, kv_idx):
    return q_idx in TABLE  # the line to show


def rounds(b, h, q_idx, kv_idx):
    return round(kv_idx / 2) > 3  # the line to show


RULES: list[Any] = [branches, loops, reads, sorts, converts, writes, chains, joins, numpys]
RULES += [multiplies, searches, rounds]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_line_that_cannot_be_traced_is_shown(rule: Any) -> None:
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 8, 8)
    lines, first = inspect.getsourcelines(rule)
    at = next(n for n, line in enumerate(lines) if "the line to show" in line)
    for run in (
        lambda: attention(q, k, k, block_mask=create_block_mask(rule)),
        lambda: create_block_mask(rule, 1, 1, 1, 8, "cpu"),
        lambda: show_code(rule),
    ):
        with pytest.raises(TypeError) as caught:
            run()
        message = str(caught.value)
        assert f"test_error_catalogue.py:{first + at}" in message, message
        assert lines[at].strip() in message, message
