"""No kernel writes or reads beside a buffer: outputs, scratch, tables and caches between guards.

On a CPU in the interpreter, on a GPU as compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from flexdecode import (
    AuxRequest,
    QuantizedTensor,
    append_kv,
    attention,
    create_block_mask,
    merge_attentions,
    quantize,
)
from flexdecode.masks import causal, sliding_window
from tests.cache_cases import Case
from tests.guards import BYTE, guarded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = (torch.arange(200) // 23).to(DEVICE)
SLOPES = torch.linspace(0.1, 0.2, 12).to(DEVICE)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 11 * (h + 1))


def within(ids: Tensor) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: ids[torch.clamp(q_idx, min=0)] == ids[kv_idx]


def biased(slopes: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)


# kind of cache, lengths, queries, D, Dv, mask, options
VARIANTS: dict[str, tuple[str, list[int], list[int], int, int, Any, dict[str, Any]]] = {
    "whole": ("dense", [37, 0], [1, 1], 8, 8, None, {"num_splits": 1}),
    "splits": ("dense", [70, 0, 5], [3, 3, 3], 20, 31, None, {"num_splits": 3, "BLOCK_N": 16}),
    "more splits than keys": ("dense", [3], [1], 16, 16, window, {"num_splits": 7}),
    "padded": ("padded", [70, 33], [2, 2], 96, 40, window, {"num_splits": 2, "BLOCK_N": 16}),
    "packed": ("gappy", [40, 0, 17], [5, 0, 1], 8, 24, window, {}),
    "pages": ("paged 7", [40, 1], [1, 1], 16, 8, window, {"num_splits": 2, "BLOCK_N": 16}),
    "pages from a start": ("paged 16 + start", [40, 9], [2, 2], 8, 8, "ids", {}),
    "captures": ("dense", [50, 70], [2, 2], 8, 8, "ids", {}),
    "wide": ("dense", [20], [1], 192, 128, None, {"num_splits": 2, "BLOCK_N": 16}),
    "float64 partials": ("dense", [70], [1], 8, 8, window, {"num_splits": 3, "BLOCK_N": 16,
                                                            "partial_dtype": torch.float64}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_stays_within_its_buffers(name: str) -> None:
    kind, kv_len, q_len, D, Dv, rule, options = VARIANTS[name]
    case = Case.random(3, kv_len, q_len, G=3, D=D, Dv=Dv, device=DEVICE)
    packed = len(set(q_len)) > 1
    arguments = {**case.queries(packed), **case.stored(kind)}
    ids, slopes = IDS[: max(kv_len)], SLOPES[:6]
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with guarded() as guards:
        arguments = {name: guards.inside(x) for name, x in arguments.items()}
        ids, slopes, sinks = (guards.inside(x) for x in (ids, slopes, sinks))
        mask = {"ids": within(ids), None: None}.get(rule, rule)
        given = len(guards.memory)
        out, aux = attention(
            **arguments,
            block_mask=None if mask is None else create_block_mask(mask, BLOCK_SIZE=16),
            score_mod=biased(slopes),
            sinks=sinks,
            backend="triton",
            kernel_options=options,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )
        assert len(guards.memory) - given >= 3, "at least the output and two statistics"
    outs, lses = case.expected(mask, biased(slopes))
    for mine, lse, own_out, own_lse in zip(
        case.rows(out, packed), case.rows(aux.lse, packed), outs, lses, strict=True
    ):
        total = torch.logaddexp(own_lse, sinks.double()[:, None])
        torch.testing.assert_close(lse.double(), total, rtol=2e-5, atol=2e-5)
        share = (own_lse - total).exp()[..., None]
        torch.testing.assert_close(mine.double(), own_out * share, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_bound_tables_stay_within_their_buffers(packed: bool) -> None:
    case = Case.random(1, [90, 0, 31], [2, 0, 5] if packed else [3, 3, 3], device=DEVICE)
    arguments = {**case.queries(packed), **case.stored("paged 16")}
    with guarded() as guards:
        arguments = {name: guards.inside(x) for name, x in arguments.items()}
        names = ("kv_len", "page_table", "cu_seqlens_q")
        bound = create_block_mask(window, BLOCK_SIZE=(4, 16)).bind(
            batch=3, heads=4, q_len=arguments["q"].shape[2], kv_capacity=96,
            **{name: arguments[name] for name in names if name in arguments},
        )  # fmt: skip
        for lengths in ([90, 0, 31], [7, 90, 90], [90, 0, 31]):
            arguments["kv_len"].copy_(torch.tensor(lengths))
            bound.update()
            guards.check()
        out = attention(*(arguments[name] for name in "qkv"), block_mask=bound, backend="triton")
    for mine, own in zip(case.rows(out, packed), case.expected(window)[0], strict=True):
        torch.testing.assert_close(mine.double(), own, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["int4", "rows", "fp8", "int8"])
def test_quantised_caches_stay_within_their_buffers(form: str) -> None:
    case = Case.random(2, [40, 17], [1, 1], D=32, device=DEVICE)
    options = {"format": "int4", "layout": "interleaved"} if form == "rows" else {"format": form}
    kept = [quantize(x, **options) for x in (case.k, case.v)]
    with guarded() as guards:
        k, v = (
            QuantizedTensor(
                guards.inside(x.data),
                None if x.scale is None else guards.inside(x.scale),
                x.format,
                layout=x.layout,
                dtype=x.dtype,
            )
            for x in kept
        )
        q = guards.inside(torch.stack(case.q))
        call: dict[str, Any] = {"kv_len": case.kv_len, "kernel_options": {"num_splits": 2}}
        out = attention(q, k, v, backend="triton", **call)
    expected = attention(q, *kept, backend="reference", kv_len=case.kv_len)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"format": "int4"},
        {"format": "int4", "groups": 8},
        {"format": "int4", "groups": 2, "layout": "interleaved"},
        {"format": "fp8"},
        {"format": "fp8", "scale_dtype": torch.int32},
        {"format": "fp8_e5m2", "per": "head"},
        {"format": "int8", "scale_dtype": torch.float16},
    ],
    ids=lambda form: " ".join(map(str, form.values())) or "plain",
)
@pytest.mark.parametrize("D", [32, 40])  # whole tiles, and such with columns that do not exist
def test_appending_writes_the_new_rows_alone(form: dict[str, Any], D: int) -> None:
    new = torch.randn(2, 3, 3, D, device=DEVICE)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([14, 29], device=DEVICE)
    with guarded() as guards:
        empty = torch.zeros(5, 3, 16, D, device=DEVICE)
        if not form:
            caches = [guards.inside(empty) for _ in range(2)]
            buffers = caches
        else:
            made = [quantize(empty, **form) for _ in range(2)]
            caches = [
                replace(
                    x,
                    data=guards.inside(x.data),
                    scale=None if x.scale is None else guards.inside(x.scale),
                )
                for x in made
            ]
            parts = [y for x in caches for y in (x.data, x.scale)]
            buffers = [y for y in parts if y is not None and y.dim() > 1]
        for x in buffers:
            x.view(torch.uint8).fill_(BYTE) if x.element_size() == 1 else x.view(
                {2: torch.int16, 4: torch.int32}[x.element_size()]
            ).fill_(-1)
        new = guards.inside(new)
        append_kv(*caches, new, new, kv_len=lengths, page_table=table, backend="triton")
    slots = torch.zeros(5, 16, dtype=torch.bool, device=DEVICE)
    for b in range(2):
        for position in range(int(lengths[b]), int(lengths[b]) + 3):
            slots[table[b, position // 16], position % 16] = True
    for x in buffers:
        written = x.contiguous().view(torch.uint8).view(*x.shape[:3], -1) != BYTE
        assert bool(written.any(-1).any(1)[slots].all())
        assert not bool(written.any(-1).any(1)[~slots].any())


def test_merging_stays_within_its_buffers() -> None:
    outs = [torch.randn(3, 2, 5, 31, device=DEVICE) for _ in range(3)]
    lses = [torch.randn(3, 2, 5, device=DEVICE) for _ in range(3)]
    with guarded() as guards:
        given = [guards.inside(x) for x in (*outs, *lses)]
        out, lse = merge_attentions(given[:3], given[3:], backend="triton")
    weights = torch.stack(lses).double().softmax(0)
    wanted = (weights[..., None] * torch.stack(outs).double()).sum(0)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.stack(lses).double().logsumexp(0))


def test_the_backward_pass_of_merging_stays_within_its_buffers() -> None:
    tensors = [torch.randn(3, 2, 5, 31, device=DEVICE) for _ in range(2)]
    tensors += [torch.randn(3, 2, 5, device=DEVICE) for _ in range(2)]
    grads = []
    for double in (False, True):
        leaves = [(x.double() if double else x).clone().requires_grad_() for x in tensors]
        if double:
            weights = torch.stack(leaves[2:]).softmax(0)
            out = (weights[..., None] * torch.stack(leaves[:2])).sum(0)
            out.square().sum().backward()
        else:
            with guarded():
                out, _ = merge_attentions(leaves[:2], leaves[2:], backend="triton")
                out.square().sum().backward()
        grads.append([x.grad.double() for x in leaves])
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_guards_see_what_is_written_beside() -> None:
    for at in (-1, 4):
        with pytest.raises(AssertionError, match="written beside a buffer of 16"), guarded():
            torch.empty(4).as_strided((1,), (1,), 256 + at).zero_()


def test_a_full_table_row_is_enough() -> None:
    """Sequences whose keys fill every slot and page, with nothing behind."""
    case = Case.random(4, [32, 32], [1, 1], device=DEVICE)
    with guarded() as guards:
        k, v = (guards.inside(x) for x in (case.k, case.v))
        mask = create_block_mask(causal & sliding_window(32), BLOCK_SIZE=32)
        out = attention(torch.stack(case.q), k, v, block_mask=mask, backend="triton")
    for mine, own in zip(out, case.expected(causal)[0], strict=True):
        torch.testing.assert_close(mine.double(), own, rtol=2e-5, atol=2e-5)
