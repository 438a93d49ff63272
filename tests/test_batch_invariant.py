"""deterministic="batch_invariant": the bits of a row depend on that row, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import AuxRequest, BlockMask, attention, create_block_mask
from flexdecode.kernels import configs
from flexdecode.masks import causal
from tests.cache_cases import KINDS, Case

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
INVARIANT = {"deterministic": "batch_invariant"}
SPAN = configs.SPAN if torch.cuda.is_available() else 128
HKV = 2 if torch.cuda.is_available() else 1
KV_LEN = [SPAN * 3 // 2 - 36, 30, 0, SPAN]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows after few keys where kernels are interpreted."""
    monkeypatch.setattr(configs, "SPAN", SPAN)


def windows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < SPAN // 4 * (h + 1)) | (kv_idx < 3))


def rows(case: Case, kind: str, packed: bool = False, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Outputs and LSE of all rows, sequence by sequence."""
    arguments = {"kernel_options": INVARIANT} | arguments
    out, aux = attention(
        **case.queries(packed),
        **case.stored(kind, seed=1),
        **arguments,
        backend="triton",
        return_aux=AuxRequest(lse=True),
    )
    return (
        torch.cat([x.flatten(0, 1) for x in case.rows(out, packed)]),
        torch.cat([x.flatten(0, 1) for x in case.rows(aux.lse, packed)]),
    )


def drawn(kv_len: list[int] = KV_LEN) -> Case:
    return Case.random(4, kv_len, [2] * len(kv_len), Hkv=HKV, device=DEVICE, dtype=DTYPE)


def equal(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("rule", [None, causal, windows])
def test_equals_the_formula(rule: Any) -> None:
    case = drawn()
    mask = None if rule is None else create_block_mask(rule, BLOCK_SIZE=64)
    out, lse = rows(case, "dense", block_mask=mask)
    outs, lses = case.expected(rule)
    tolerance = 2e-5 if DTYPE == torch.float32 else 2e-2
    for got, want in ((out, outs), (lse, lses)):
        want = torch.cat([x.flatten(0, 1) for x in want])
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rule", [None, windows])
def test_neighbours_capacity_and_layout_change_no_bit(rule: Any) -> None:
    case = drawn()
    mask = None if rule is None else create_block_mask(rule, BLOCK_SIZE=64)
    alone = [
        rows(
            Case(case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1], case.kv_len[b : b + 1]),
            "dense",
            block_mask=mask,
        )
        for b in range(len(KV_LEN))
    ]
    wanted = tuple(torch.cat([parts[i] for parts in alone]) for i in range(2))
    for kind in KINDS[:: 2 if DEVICE == "cpu" else 1]:
        assert equal(rows(case, kind, block_mask=mask), wanted), kind
    assert equal(rows(case, "paged 16", packed=True, block_mask=mask), wanted)
    # A cache with room for more: another number of splits, of which some have nothing to do.
    wide = Case(case.q, *(torch.cat([x, x], 2) for x in (case.k, case.v)), case.kv_len)
    assert equal(rows(wide, "dense", block_mask=mask), wanted)


def test_full_or_partial_is_the_same() -> None:
    longest = KV_LEN[0]
    case = drawn([longest, longest - 10])
    columns = -(-longest // 64)
    blocks = torch.arange(columns, dtype=torch.int32, device=DEVICE).view(1, 1, 1, columns)
    count = torch.full((1, 1, 1), columns, dtype=torch.int32, device=DEVICE)
    none = torch.zeros_like(count)
    partial = BlockMask.from_kv_blocks(count, blocks, BLOCK_SIZE=(2, 64))
    full = BlockMask.from_kv_blocks(none, blocks, count, blocks, BLOCK_SIZE=(2, 64))
    shuffled = BlockMask.from_kv_blocks(count, blocks.flip(-1), BLOCK_SIZE=(2, 64))
    first = rows(case, "dense", block_mask=partial)
    assert equal(first, rows(case, "dense", block_mask=full))
    assert equal(first, rows(case, "dense", block_mask=shuffled))
    assert equal(first, rows(case, "dense"))


def test_bound_masks_and_sinks() -> None:
    case = drawn()
    mask = create_block_mask(windows, BLOCK_SIZE=64)
    stored = case.stored("dense", seed=1)
    step = mask.bind(
        batch=4, heads=2 * HKV, q_len=2, kv_len=stored["kv_len"], kv_capacity=KV_LEN[0] + 3
    )
    sinks = torch.randn(2 * HKV, device=DEVICE)
    arguments = {"sinks": sinks, "kernel_options": INVARIANT, "backend": "triton"}
    q = case.queries(False)["q"]
    out = attention(q, stored["k"], stored["v"], block_mask=step, **arguments)
    assert torch.equal(out, attention(q, **stored, block_mask=mask, **arguments))


def test_options_that_would_break_it() -> None:
    q, k, v = torch.zeros(3, 1, 1, 4, 16, device=DEVICE)
    for name, value in (("num_splits", 2), ("BLOCK_M", 32)):
        with pytest.raises(ValueError, match=rf"kernel_options\['{name}'\]: expected none with"):
            attention(q, k, v, backend="triton", kernel_options=INVARIANT | {name: value})
