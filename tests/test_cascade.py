"""Cascade attention against the dense oracle over whole sequences, on every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import (
    AuxOutput,
    BlockMask,
    SharedPrefix,
    attention,
    cascade_attention,
    create_block_mask,
    explain_cascade,
)
from flexdecode.masks import causal, sliding_window
from tests.backend_cases import BACKENDS, BOTH, Backend, every_backend, on_every_backend
from tests.helpers import assert_matches

D, DV = 16, 24


@dataclass(frozen=True)
class Tree:
    """Sequences of a prefix tree, as a cascade takes them and as whole sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    prefixes: list[SharedPrefix]
    kv_len: Tensor  # of what follows the prefixes
    whole_k: Tensor
    whole_v: Tensor
    whole_len: Tensor


def draw_tree(
    device: str,
    levels: list[tuple[int, list[int], list[int] | None]],
    own: list[int],
    *,
    Hq: int = 4,
    Hkv: int = 2,
    Lq: int = 1,
    room: int = 3,
) -> Tree:
    """Draw a tree; every slot past a valid length holds NaN.

    Parameters
    ----------
    levels : list of (capacity, valid keys of each node, node of each sequence or None)
    own : list of int
        Keys of each sequence after the prefixes.
    """
    generator = torch.Generator().manual_seed(len(levels) + Lq)

    def draw(lengths: list[int], capacity: int, width: int) -> Tensor:
        x = torch.randn(len(lengths), Hkv, capacity, width, generator=generator)
        for row, length in zip(x, lengths, strict=True):
            row[:, length:] = torch.nan
        return x

    B = len(own)
    k, v = draw(own, max(own) + room, D), draw(own, max(own) + room, DV)
    pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in own]
    prefixes = []
    for capacity, lengths, node in levels:
        node_k, node_v = draw(lengths, capacity, D), draw(lengths, capacity, DV)
        for b in range(B):
            n = 0 if node is None else node[b]
            pieces[b].append((node_k[n, :, : lengths[n]], node_v[n, :, : lengths[n]]))
        kv_len = None if lengths == [capacity] * len(lengths) else torch.tensor(lengths)
        prefixes.append(
            SharedPrefix(
                node_k.to(device),
                node_v.to(device),
                node,
                kv_len if kv_len is None else kv_len.to(device),
            )
        )
    whole = []
    for b, length in enumerate(own):
        ends = [*pieces[b], (k[b, :, :length], v[b, :, :length])]
        whole.append([torch.cat([each[i] for each in ends], 1) for i in (0, 1)])
    whole_len = torch.tensor([x[0].shape[1] for x in whole])
    longest = int(whole_len.max())
    whole_k, whole_v = (torch.full((B, Hkv, longest, w), torch.nan) for w in (D, DV))
    for b, (keys, values) in enumerate(whole):
        whole_k[b, :, : keys.shape[1]], whole_v[b, :, : keys.shape[1]] = keys, values
    q = torch.randn(B, Hq, Lq, D, generator=generator)
    tensors = [x.to(device) for x in (q, k, v)]
    ends = [x.to(device) for x in (torch.tensor(own), whole_k, whole_v, whole_len)]
    return Tree(*tensors, prefixes, *ends)


def check(
    tree: Tree,
    backend: Backend,
    *,
    mask: Any = None,
    score_mod: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    **call: Any,
) -> None:
    block_mask = None if mask is None else create_block_mask(mask, BLOCK_SIZE=BLOCK_SIZE)
    result = cascade_attention(
        tree.q,
        tree.k,
        tree.v,
        prefixes=tree.prefixes,
        kv_len=tree.kv_len,
        block_mask=block_mask,
        score_mod=score_mod,
        backend=backend.name,
        return_aux=BOTH,
        **call,
    )
    compare(tree, result, mask=mask, score_mod=score_mod, **call)


def compare(tree: Tree, result: Any, **call: Any) -> None:
    out, aux = result
    call.pop("kernel_options", None)
    assert isinstance(aux, AuxOutput)
    assert out.dtype == tree.q.dtype
    assert_matches(
        out,
        tree.q,
        tree.whole_k,
        tree.whole_v,
        lse=aux.lse,
        max_scores=aux.max_scores,
        kv_len=tree.whole_len,
        slack=2.0,
        **call,
    )


ONE = [(150, [150], None)]
# A root for all; then three nodes, unequal, one of them empty, met out of order; then two.
DEEP = [
    (70, [70], None),
    (40, [40, 0, 13], [2, 0, 1, 0, 0]),
    (9, [9, 9], [0, 0, 1, 1, 1]),
]


@every_backend
@pytest.mark.parametrize("Lq", [1, 3])
def test_one_prefix_for_all(backend: Backend, Lq: int) -> None:
    tree = draw_tree(backend.device, ONE, [40, 3, 17, 64], Lq=Lq)
    sinks = torch.tensor([0.5, -1.0, 3.0, 5.0], device=backend.device)
    check(tree, backend, sinks=sinks)
    check(tree, backend, mask=causal & sliding_window(100), sinks=sinks, BLOCK_SIZE=32)


@every_backend
def test_rules_see_sequences_heads_and_positions(backend: Backend) -> None:
    """Of a deep tree: masks and scores of b, h, q_idx and kv_idx, a bias, positions given."""
    tree = draw_tree(backend.device, DEEP, [20, 5, 33, 1, 2], Lq=2)
    numbers = torch.Generator().manual_seed(3)
    slopes = torch.randn(5, 4, generator=numbers).to(backend.device)
    keep = (torch.rand(5, 4, 200, generator=numbers) < 0.6).to(backend.device)
    bias = torch.randn(1, 4, 2, 160, generator=numbers).to(backend.device)
    bias = bias[..., : tree.whole_k.shape[2]]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return keep[b, h, kv_idx] & (kv_idx <= q_idx)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[b, h] * (q_idx - kv_idx) * 0.01

    check(tree, backend, mask=mask, score_mod=score, BLOCK_SIZE=(128, 32))
    if backend.slow:
        return
    check(tree, backend, score_mod=score, bias=bias)
    offset = torch.tensor([60, 90, 75, 200, 80], device=backend.device)
    check(
        tree,
        backend,
        mask=causal & sliding_window(30),
        bias=bias.mT.contiguous().mT,
        q_offset=offset,
        BLOCK_SIZE=16,
    )


@every_backend
def test_rows_that_see_nothing_of_a_prefix_or_at_all(backend: Backend) -> None:
    """A window inside the own keys leaves the prefix empty; rows before every key see nothing."""
    tree = draw_tree(backend.device, ONE, [40, 3, 17, 64], Lq=2)
    check(tree, backend, mask=causal & sliding_window(2))
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf], device=backend.device)
    for given in (None, sinks):
        check(tree, backend, mask=causal, q_offset=-1, sinks=given)


@pytest.mark.parametrize("splits", [1, 7])
@every_backend
def test_split_counts_with_sinks_and_empty_splits(backend: Backend, splits: int) -> None:
    """A sink joins once, however many splits and parts there are, and however many are empty."""
    tree = draw_tree(backend.device, [(70, [70], None)], [20, 3, 17, 1], Hkv=1)
    sinks = torch.tensor([2.0, -1.0, 3.0, 0.0], device=backend.device)
    options = {"num_splits": splits, "BLOCK_N": 16} if backend.name == "triton" else None
    check(tree, backend, mask=sliding_window(20), sinks=sinks, kernel_options=options)


def test_16_bit_and_wide_groups() -> None:
    """Rows of a node outnumber a tile and a block of queries."""
    cpu = BACKENDS[0]
    tree = draw_tree(cpu.device, ONE, [5] * 40, Hq=8, Hkv=1, Lq=4)
    check(tree, cpu, mask=causal)
    low = [x.bfloat16() for x in (tree.q, tree.k, tree.v, tree.whole_k, tree.whole_v)]
    prefixes = [SharedPrefix(x.k.bfloat16(), x.v.bfloat16()) for x in tree.prefixes]
    tree = Tree(*low[:3], prefixes, tree.kv_len, *low[3:], tree.whole_len)
    check(tree, cpu, mask=causal)


@pytest.mark.parametrize(
    ("backend", "lengths"), on_every_backend(["none", "int", "tensor"], 3), ids=str
)
def test_prefix_len_equals_the_plain_call(backend: Backend, lengths: str) -> None:
    tree = draw_tree(backend.device, [(50, [50], None)], [30] * 3, Lq=2, room=0)
    q, k, v = tree.q, tree.whole_k, tree.whole_v
    kv_len = {"none": None, "int": 75, "tensor": torch.tensor([80, 50, 61])}[lengths]
    if isinstance(kv_len, Tensor):
        kv_len = kv_len.to(backend.device)
    sinks = torch.randn(4, device=backend.device)
    bias = torch.randn(3, 1, 2, 80, device=backend.device)
    call: dict[str, Any] = {"kv_len": kv_len, "bias": bias, "sinks": sinks}
    for mask in (sliding_window(40),) if backend.slow else (None, sliding_window(40)):
        block_mask = None if mask is None else create_block_mask(mask, BLOCK_SIZE=16)
        out, aux = cascade_attention(
            q,
            k,
            v,
            prefix_len=50,
            block_mask=block_mask,
            return_aux=BOTH,
            cascade=True,
            backend=backend.name,
            **call,
        )
        assert_matches(
            out, q, k, v, lse=aux.lse, max_scores=aux.max_scores, mask=mask, slack=2.0, **call
        )
    whole, _ = cascade_attention(
        q, k, v, prefix_len=50, return_aux=BOTH, backend=backend.name, cascade=False, **call
    )
    assert torch.equal(whole, attention(q, k, v, backend=backend.name, **call))


def test_the_rule_weighs_bytes() -> None:
    """Long prefixes of many sequences cascade; short ones, or lone sequences, do not."""

    def decision(B: int, prefix_len: int, **call: Any) -> Any:
        k = torch.empty(1, 8, 40000, 128, dtype=torch.bfloat16).expand(B, -1, -1, -1)
        q = torch.empty(B, 32, 1, 128, dtype=torch.bfloat16)
        return explain_cascade(q, k, k, prefix_len=prefix_len, device_name="H200", **call)

    long = decision(64, 32768)
    assert long.cascades
    # 64 reads become two: 256 rows of a key head make two tiles.
    assert long.saved == 62 * 32768 * 2 * 8 * 128 * 2
    assert long.cost == 40_000_000 + 4 * 64 * 32 * (128 * 2 + 4)
    assert "read twice instead of 64 times" in long.reason
    assert [name for name, _ in long.calls] == ["prefix 0", "own keys"]
    first, rest = (report for _, report in long.calls)
    assert first.q_shape == (1, 32, 64, 128) and first.k_shape[2] == 32768
    assert rest.q_shape == (64, 32, 1, 128) and rest.k_shape[2] == 40000 - 32768
    assert str(long).startswith("cascade    yes: the first 32768 keys are read twice")
    for B, prefix_len in ((64, 100), (1, 32768), (64, 0)):
        short = decision(B, prefix_len)
        assert not short.cascades
        assert [name for name, _ in short.calls] == ["plain call"]
    assert decision(2, 100, cascade=True).cascades
    assert not decision(64, 32768, cascade=False).cascades
    fixed = create_block_mask(causal, 1, 1, 1, 40000, device="cpu", q_offset=39999)
    assert not decision(64, 32768, block_mask=fixed).cascades
    assert "tables" in decision(64, 32768, block_mask=fixed).reason


def test_closures_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step packs the rules anew, and finds their traces again."""
    import flexdecode.trace as tracing

    tree = draw_tree("cpu", DEEP, [20, 5, 33, 1, 2])
    traced = []
    original = tracing._trace
    monkeypatch.setattr(
        tracing, "_trace", lambda *args: (traced.append(args[0]), original(*args))[1]
    )
    for window in (10, 20, 30):
        check(tree, BACKENDS[0], mask=causal & sliding_window(window))
        if window == 10:
            traced.clear()
    assert not traced


def into_pages(
    pieces: list[tuple[Tensor, Tensor]], size: int, device: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Scatter keys and values [Hkv, n, D] over one pool of pages; NaN lies around them."""
    counts = [-(-max(keys.shape[1], 1) // size) for keys, _ in pieces]
    shuffled = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(0))
    pools = [
        torch.full((len(shuffled), x.shape[0], size, x.shape[2]), torch.nan) for x in pieces[0]
    ]
    tables, used = [], 0
    for piece, count in zip(pieces, counts, strict=True):
        pages = shuffled[used : used + count]
        used += count
        for pool, x in zip(pools, piece, strict=True):
            for slot in range(x.shape[1]):
                pool[pages[slot // size], :, slot % size] = x[:, slot]
        tables.append(pages.int())
    wide = max(counts)
    tables = [torch.nn.functional.pad(x, (0, wide - len(x)), value=-7) for x in tables]
    return pools[0].to(device), pools[1].to(device), [x.to(device) for x in tables]


@every_backend
@pytest.mark.parametrize("prefix_len", [32, 40])
def test_paged_caches_with_a_common_prefix(backend: Backend, prefix_len: int) -> None:
    """Pages that all sequences share, or equal ones where the prefix ends within a page."""
    tree = draw_tree(backend.device, [(prefix_len, [prefix_len], None)], [20, 3, 0], Lq=2)
    whole = [
        (k[:, :n].cpu(), v[:, :n].cpu())
        for k, v, n in zip(tree.whole_k, tree.whole_v, tree.whole_len.tolist(), strict=True)
    ]
    k, v, tables = into_pages(whole, 16, backend.device)
    if prefix_len == 32:
        for table in tables[1:]:
            table[:2] = tables[0][:2]
    result = cascade_attention(
        tree.q,
        k,
        v,
        prefix_len=prefix_len,
        page_table=torch.stack(tables),
        kv_len=tree.whole_len,
        block_mask=create_block_mask(causal & sliding_window(37), BLOCK_SIZE=16),
        return_aux=BOTH,
        backend=backend.name,
        cascade=True,
    )
    compare(tree, result, mask=causal & sliding_window(37))


@every_backend
def test_a_tree_in_one_pool_of_pages(backend: Backend) -> None:
    tree = draw_tree(backend.device, DEEP, [20, 5, 33, 1, 2])
    pieces, counts = [], []
    for level in tree.prefixes:
        lengths = [level.k.shape[2]] * len(level.k)
        if isinstance(level.kv_len, Tensor):
            lengths = level.kv_len.tolist()
        counts.append(lengths)
        pieces += [(k[:, :n], v[:, :n]) for k, v, n in zip(level.k, level.v, lengths, strict=True)]
    own = tree.kv_len.tolist()
    pieces += [(k[:, :n], v[:, :n]) for k, v, n in zip(tree.k, tree.v, own, strict=True)]
    pieces = [(k.cpu(), v.cpu()) for k, v in pieces]
    k, v, tables = into_pages(pieces, 8, backend.device)
    prefixes = []
    for level, lengths in zip(tree.prefixes, counts, strict=True):
        mine, tables = tables[: len(lengths)], tables[len(lengths) :]
        kv_len = torch.tensor(lengths, device=backend.device)
        prefixes.append(SharedPrefix(k, v, level.node, kv_len, torch.stack(mine)))
    result = cascade_attention(
        tree.q,
        k,
        v,
        prefixes=prefixes,
        page_table=torch.stack(tables),
        kv_len=tree.kv_len,
        block_mask=create_block_mask(causal, BLOCK_SIZE=32),
        return_aux=BOTH,
        backend=backend.name,
    )
    compare(tree, result, mask=causal)


@every_backend
@pytest.mark.parametrize("node", [None, [0, 1, 1, 1]])
def test_packed_queries(backend: Backend, node: list[int] | None) -> None:
    """Sequences with 3, 0, 1 and 2 queries, under a rule of b and positions."""
    lengths = [60] if node is None else [60, 41]
    tree = draw_tree(backend.device, [(60, lengths, node)], [20, 5, 33, 8], Lq=3)
    cu = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32, device=backend.device)
    q = tree.q.transpose(0, 1).reshape(1, 4, 12, D)[:, :, :6]
    windows = torch.tensor([30, 5, 70, 9], device=backend.device)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (q_idx - kv_idx < windows[b] * (h + 1))

    call: dict[str, Any] = {
        "block_mask": create_block_mask(mask, BLOCK_SIZE=(128, 16)),
        "cu_seqlens_q": cu,
        "return_aux": BOTH,
        "sinks": torch.tensor([0.0, -torch.inf, 1.0, 2.0], device=backend.device),
    }
    out, aux = cascade_attention(
        q,
        tree.k,
        tree.v,
        prefixes=tree.prefixes,
        kv_len=tree.kv_len,
        backend=backend.name,
        **call,
    )
    exact, exact_aux = attention(
        q, tree.whole_k, tree.whole_v, kv_len=tree.whole_len, backend="reference", **call
    )
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, exact, **close)
    torch.testing.assert_close(aux.lse.double(), exact_aux.lse, **close)
    torch.testing.assert_close(aux.max_scores.double(), exact_aux.max_scores, **close)


@every_backend
def test_starts_of_left_padded_caches(backend: Backend) -> None:
    tree = draw_tree(backend.device, [(50, [50], None)], [20, 3, 11], Lq=2)
    starts = torch.tensor([4, 0, 9], device=backend.device)
    k, v = (x.new_full((3, 2, 90, x.shape[3]), torch.nan) for x in (tree.whole_k, tree.whole_v))
    for b, (start, n) in enumerate(zip(starts.tolist(), tree.whole_len.tolist(), strict=True)):
        k[b, :, start : start + n] = tree.whole_k[b, :, :n]
        v[b, :, start : start + n] = tree.whole_v[b, :, :n]
    result = cascade_attention(
        tree.q,
        k,
        v,
        prefix_len=50,
        kv_start=starts,
        kv_len=tree.whole_len,
        block_mask=create_block_mask(causal & sliding_window(40)),
        return_aux=BOTH,
        backend=backend.name,
        cascade=True,
    )
    compare(tree, result, mask=causal & sliding_window(40))


Q = torch.zeros(2, 4, 1, 8)
K = torch.zeros(2, 2, 5, 8)
P = SharedPrefix(K[:1], K[:1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({}, ValueError, r"prefixes: expected either prefixes or prefix_len, got neither"),
        ({"prefixes": [P], "prefix_len": 2}, ValueError, r"prefixes: .* got both"),
        ({"prefix_len": 6}, ValueError, r"prefix_len: expected a value in \[0, 5\], got 6"),
        ({"prefix_len": 3, "kv_len": 2}, ValueError, r"prefix_len: expected .* \[0, 2\], got 3"),
        ({"prefix_len": 2.0}, TypeError, r"prefix_len: expected an int, got float"),
        ({"prefixes": [K]}, TypeError, r"prefixes\[0\]: expected a SharedPrefix, got Tensor"),
        ({"prefixes": [SharedPrefix(K, K)]}, ValueError, r"prefixes\[0\].node: .* one of 2"),
        (
            {"prefixes": [P, SharedPrefix(K, K, [0, 2])]},
            ValueError,
            r"prefixes\[1\].node: expected 2 numbers in \[0, 2\), got \[0, 2\]",
        ),
        ({"prefixes": [P], "cascade": False}, ValueError, r"cascade: expected True"),
        (
            {"prefixes": [SharedPrefix(K[:1, :1], K[:1, :1])]},
            ValueError,
            r"prefixes: expected 2 key heads to match k, got 1",
        ),
        (
            {"prefixes": [SharedPrefix(K, K, page_table=torch.zeros(1, 1).int())]},
            ValueError,
            r"prefixes\[0\].kv_len: expected lengths beside a page_table",
        ),
        (
            {"prefixes": [SharedPrefix(K, K, [1, 0])], "cu_seqlens_q": torch.tensor([0, 1, 1])},
            ValueError,
            r"prefixes: expected sequences in the order of their nodes .* got node \[1, 0\]",
        ),
        ({"prefixes": [P], "sinks": torch.zeros(3)}, ValueError, r"sinks: expected shape \[4\]"),
    ],
)
def test_bad_input(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cascade_attention(Q, K, K, **call)


def test_masks_without_a_rule_are_refused() -> None:
    table = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(table, table[..., None] * 0)
    with pytest.raises(ValueError, match="block_mask: expected a rule for a cascade"):
        cascade_attention(Q, K, K, prefixes=[P], block_mask=mask)
