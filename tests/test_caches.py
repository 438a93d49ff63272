"""Every mask on every cache: lengths, starts, pages and packed queries against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexdecode
from flexdecode import AuxRequest, attention, create_block_mask
from tests.cache_cases import KINDS, Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("reference", "triton") if DEVICE == "cuda" else ("reference", "cpu", "triton")
Q_LENS = ([1, 1, 1, 1], [3, 3, 3, 3], [2, 0, 5, 1])
KV_LENS = ([37, 0, 130, 5], [1, 200, 64, 65])
TABLE = torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) < 0.4
DOCS = torch.arange(400) // 23


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def sinks_and_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 40) | (kv_idx < 3))


def rules(device: str) -> dict[str, Callable[..., Any] | None]:
    docs, table = DOCS.to(device), TABLE.to(device)

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return docs[q_idx.clamp(min=0)] == docs[kv_idx]

    def random_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[(b * 3 + h) % 8, kv_idx // 32]

    def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx) < 10 * (h + 1)

    return {
        "none": None,
        "causal": causal,
        "sinks and window": sinks_and_window,
        "documents": documents,
        "random blocks": random_blocks,
        "by head": by_head,
    }


def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.02 * (h + 1 + b) * (q_idx - kv_idx)


def check(case: Case, packed: bool, out: Tensor, lse: Tensor, want: tuple[Any, Any]) -> None:
    tolerance = 2e-5 if out.dtype == torch.float32 else 2e-2
    for got, lse_got, out_b, lse_b in zip(
        case.rows(out, packed), case.rows(lse, packed), *want, strict=True
    ):
        torch.testing.assert_close(got.double(), out_b, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse_got.double(), lse_b, atol=tolerance, rtol=tolerance)


PAIRS = [
    (kind, name, (i + j) % 3, (i + 2 * j) % 2)
    for i, kind in enumerate(KINDS)
    for j, name in enumerate(rules("cpu"))
]


@pytest.mark.parametrize(
    ("backend", "kind", "name", "queries", "lengths"),
    [
        (backend, *pair)
        for backend in BACKENDS
        for place, pair in enumerate(PAIRS)
        # Interpreted kernels take a second: each cache with half of the rules, and the other way.
        if backend != "triton" or DEVICE == "cuda" or (place // 6 + place) % 2 == 0
    ],
)
def test_equals_the_formula(backend: str, kind: str, name: str, queries: int, lengths: int) -> None:
    q_len = Q_LENS[queries]
    packed = len(set(q_len)) > 1
    case = Case.random(queries, KV_LENS[lengths], q_len, device=DEVICE)
    rule = rules(DEVICE)[name]
    score = slope if (queries + lengths) % 2 else None
    mask = None if rule is None else create_block_mask(rule, BLOCK_SIZE=(8, 32))
    out, aux = attention(
        **case.queries(packed),
        **case.stored(kind),
        block_mask=mask,
        score_mod=score,
        backend=backend,
        return_aux=AuxRequest(lse=True),
    )
    check(case, packed, out, aux.lse, case.expected(rule, score))


@pytest.mark.parametrize(
    ("backend", "kind", "queries"),
    [
        (backend, kind, queries)
        for backend in BACKENDS
        for place, kind in enumerate(KINDS)
        for queries in (0, 2)
        if backend != "triton" or DEVICE == "cuda" or place % 2 == queries // 2
    ],
)
def test_bound_masks_follow_lengths_starts_and_pages(backend: str, kind: str, queries: int) -> None:
    case = Case.random(5, [30, 0, 130, 5], Q_LENS[queries], device=DEVICE)
    packed = queries == 2
    stored, q = case.stored(kind, seed=1), case.queries(packed)
    capacity = 300
    mask = create_block_mask(sinks_and_window, BLOCK_SIZE=32)
    names = ("kv_len", "kv_start", "page_table")
    data = {name: stored[name] for name in names if name in stored}
    data |= {"cu_seqlens_q": q["cu_seqlens_q"]} if packed else {}
    bound = mask.bind(batch=4, heads=4, q_len=q["q"].shape[2], kv_capacity=capacity, **data)
    for step, kv_len in enumerate(([30, 0, 130, 5], [131, 2, 64, 0])):
        case = Case.random(step + 7, kv_len, Q_LENS[queries][::-1] if step else Q_LENS[queries],
                           device=DEVICE)  # fmt: skip
        moved, q = case.stored(kind, seed=step), case.queries(packed)
        for name in data:
            new = (moved | q)[name]
            if name == "page_table":  # the bound table is wide enough for both
                data[name].fill_(-1)
                width = min(new.shape[1], data[name].shape[1])
                assert bool((new[:, width:] == -1).all())
                data[name][:, :width] = new[:, :width]
            else:
                data[name].copy_(new)
        bound.update()
        out, aux = attention(
            q["q"],
            moved["k"],
            moved["v"],
            block_mask=bound,
            backend=backend,
            return_aux=AuxRequest(lse=True),
        )
        check(case, packed, out, aux.lse, case.expected(sinks_and_window))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [1, 3])
def test_packed_queries_with_offsets_bias_and_sinks(backend: str, splits: int) -> None:
    case = Case.random(11, [70, 33, 0, 90], [4, 0, 1, 9], device=DEVICE, Hkv=1, G=3)
    offsets = [5, 0, 2, -3]
    q = case.queries(True)
    at = torch.Generator().manual_seed(2)
    stored = case.stored("paged 16")
    bias = torch.randn(1, 3, 14, stored["page_table"].shape[1] * 16, generator=at).to(DEVICE)
    sinks = torch.randn(3, generator=at).to(DEVICE)
    out, aux = attention(
        **q,
        **stored,
        block_mask=create_block_mask(causal, BLOCK_SIZE=16),
        q_offset=torch.tensor(offsets, device=DEVICE),
        bias=bias,
        sinks=sinks,
        backend=backend,
        return_aux=AuxRequest(lse=True),
        kernel_options={"num_splits": splits},
    )
    first = [0, 4, 4, 5]

    def biased(score: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        row = first[int(b)] + q_idx - offsets[int(b)]
        return score + bias[0].double()[h, row, kv_idx]

    outs, lses = case.expected(causal, biased, q_offset=offsets)
    total = [torch.logaddexp(lse, sinks.double()[:, None]) for lse in lses]
    outs = [
        out_b * (lse - both).exp()[..., None]
        for out_b, lse, both in zip(outs, lses, total, strict=True)
    ]
    check(case, True, out, aux.lse, (outs, total))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_may_be_shared_and_repeated(backend: str) -> None:
    case = Case.random(1, [40, 40], [1, 1], device=DEVICE)
    case.k[1], case.v[1] = case.k[0], case.v[0]
    case.k[:, :, 16:32], case.v[:, :, 16:32] = case.k[:, :, :16], case.v[:, :, :16]
    stored = case.stored("paged 16")
    table = stored["page_table"]
    table[1] = table[0]
    table[:, 1] = table[0, 0]
    out, aux = attention(
        **case.queries(False), **stored, backend=backend, return_aux=AuxRequest(lse=True)
    )
    check(case, False, out, aux.lse, case.expected())


def test_the_default_length_ends_at_the_cache() -> None:
    case = Case.random(2, [40, 25, 12], [2, 2, 2], device=DEVICE)
    stored = case.stored("padded")
    want = case.expected(causal)
    del stored["kv_len"]
    for backend in BACKENDS:
        out, aux = attention(
            **case.queries(False),
            **stored,
            block_mask=create_block_mask(causal),
            backend=backend,
            return_aux=AuxRequest(lse=True),
        )
        check(case, False, out, aux.lse, want)


def test_lengths_beyond_the_cache_are_cut_where_it_ends() -> None:
    case = Case.random(2, [40, 25], [1, 1], device=DEVICE)
    stored = case.stored("padded")
    stored["kv_len"] += 1000
    for backend in BACKENDS:
        out, aux = attention(
            **case.queries(False),
            **stored,
            block_mask=create_block_mask(causal),
            backend=backend,
            return_aux=AuxRequest(lse=True),
        )
        check(case, False, out, aux.lse, case.expected(causal))


@pytest.mark.parametrize("total", [[0, 0], [], [0, 0, 0]])
def test_no_queries_at_all(total: list[int]) -> None:
    case = Case.random(2, [40] * len(total) or [1], total or [0], device=DEVICE)
    q = case.queries(True)
    for backend in BACKENDS:
        out, aux = attention(
            **q, **case.stored("dense"), backend=backend, return_aux=AuxRequest(lse=True)
        )
        assert out.shape == q["q"].shape
        assert aux.lse.shape == out.shape[:3]


def refused(match: str, **changes: Any) -> None:
    case = Case.random(3, [40, 30], [2, 3], device=DEVICE)
    given = case.queries(True) | case.stored("paged 16") | changes
    with pytest.raises((ValueError, TypeError), match=match):
        attention(**given)


def test_bad_arguments_are_named() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    refused("page_table: expected an int32 tensor, got torch.int64", page_table=table.long())
    refused(r"page_table: expected shape \[2, max_pages\]", page_table=table[:1])
    refused("page_table: expected a Tensor, got list", page_table=[[0]])
    refused("kv_len: expected an int or a tensor", kv_len=None)
    refused("cu_seqlens_q: expected an int32 or int64 tensor", cu_seqlens_q=starts.float())
    refused(r"cu_seqlens_q: expected shape \[sequences \+ 1\]", cu_seqlens_q=starts[None])
    refused("kv_start: expected an int32 or int64 tensor, got int", kv_start=3)
    refused(r"kv_start: expected an int or a tensor of shape \[2\]", kv_start=starts)
    refused("q: expected batch 1 with cu_seqlens_q", q=torch.zeros(2, 4, 5, 16, device=DEVICE))
    sized = create_block_mask(causal, Q_LEN=5, KV_LEN=40, device=DEVICE)
    refused("block_mask: expected a lazy or bound mask with cu_seqlens_q", block_mask=sized)


@pytest.mark.parametrize("starts", [[0, 2, 4], [1, 2, 5], [0, 6, 5]])
def test_starts_that_do_not_cover_the_queries(
    starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXDECODE_CHECK", "1")
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    refused("cu_seqlens_q: expected", cu_seqlens_q=cu_seqlens)


def test_pages_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXDECODE_CHECK", "1")
    case = Case.random(3, [40, 30], [2, 3], device=DEVICE)
    given = case.queries(True) | case.stored("paged 16")
    attention(**given)
    given["page_table"][1, 1] = 99
    with pytest.raises(ValueError, match=r"page_table: expected pages in \[0, \d+\), got 99 at"):
        attention(**given)


def test_packed_keys_need_lengths() -> None:
    case = Case.random(3, [40, 30], [1, 1], device=DEVICE)
    given = case.queries(False) | case.stored("packed")
    del given["kv_len"]
    with pytest.raises(ValueError, match="kv_len: expected an int or a tensor"):
        attention(**given)


def test_tiles_are_as_the_kernel_writes_them() -> None:
    pytest.importorskip("triton")
    from flexdecode.kernels.query_tiles import write_query_tiles
    from flexdecode.packed import PackedQueries

    for lengths in ([3, 0, 9, 1, 1, 0], [0, 0], [17], [4, 4, 4]):
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        for BLOCK_Q in (1, 4, 16):
            wanted = PackedQueries.of(starts, sum(lengths), BLOCK_Q)
            tiles = torch.full_like(wanted.tiles, -77, device=DEVICE)
            write_query_tiles(tiles, starts.to(DEVICE), sum(lengths), BLOCK_Q)
            used = wanted.tiles[0] >= 0
            assert torch.equal(tiles[0].cpu(), wanted.tiles[0])
            assert torch.equal(tiles[:, used].cpu(), wanted.tiles[:, used])


def test_one_kernel_serves_all_lengths_and_tables() -> None:
    if DEVICE == "cpu":
        pytest.skip("nothing is compiled in the interpreter")
    mask = create_block_mask(causal)
    counts = []
    for n in range(3, 12):
        case = Case.random(n, [n, 2 * n, 40 - n], [1, 1, 1], device=DEVICE)
        attention(**case.queries(False), **case.stored("paged 16"), block_mask=mask)
        counts.append(flexdecode.compile_count())
    assert counts[2] == counts[-1]
