"""`attention` against the dense float64 oracle: shapes, masks, scores, lengths, poison, layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flexdecode import attention, create_block_mask
from flexdecode.masks import (
    alibi,
    bidirectional,
    causal,
    causal_documents,
    chunked,
    dilated,
    documents,
    left_padding,
    per_head,
    prefix_lm,
    relative_bias,
    right_padding,
    selected_blocks,
    sink_window,
    sliding_window,
    softcap,
    symmetric_window,
    tree,
)
from flexdecode.masks.trees import create_ancestors
from tests.backend_cases import BACKENDS, BOTH, Backend, check, every_backend, on_every_backend
from tests.helpers import dense_attention, random_inputs

# A sample of shapes in which every two values of two factors meet.

FACTORS: dict[str, list[Any]] = {
    "G": [1, 2, 3, 5, 7, 8, 16, 71],
    "Lq": [1, 2, 5, 17, 130],
    "D": [1, 4, 8, 31, 64, 80, 128, 192],
    "Dv": [None, 1, 24, 128],
    "Lkv": [1, 3, 63, 100, 129, 300],
    "mask": [None, "causal", "window", "table"],
    "lengths": ["full", "int", "ragged"],
    "shape": ["plain", "shared", "one"],
    "block": [128, 16, (32, 64)],
    "extra": ["none", "bias", "sinks", "score"],
    "dtype": [torch.float32, torch.float32, torch.bfloat16, torch.float16],
}


def pairwise(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Cases in which each pair of values of two factors occurs, greedily few."""
    names = list(factors)
    indices = [range(len(values)) for values in factors.values()]
    wanted = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in indices[a]
        for j in indices[b]
    }
    cases = []
    while wanted:
        a, i, b, j = min(wanted)
        case = {a: i, b: j}
        for c in range(len(names)):
            if c not in case:
                case[c] = max(indices[c], key=lambda value: _gain(wanted, case, c, value))
        wanted -= {
            (x, case[x], y, case[y]) for x, y in itertools.combinations(range(len(names)), 2)
        }
        cases.append({name: factors[name][case[n]] for n, name in enumerate(names)})
    return cases


def _gain(wanted: set[tuple[int, ...]], case: dict[int, int], c: int, value: int) -> int:
    return sum(
        ((x, case[x], c, value) if x < c else (c, value, x, case[x])) in wanted for x in case
    )


@pytest.mark.parametrize(
    ("backend", "case"),
    on_every_backend(pairwise(FACTORS), 9),
    ids=lambda x: str(x) if isinstance(x, Backend) else "-".join(map(str, x.values())),
)
def test_any_shape(backend: Backend, case: dict[str, Any]) -> None:
    G, Lq, Lkv = case["G"], case["Lq"], case["Lkv"]
    B = 1 if case["shape"] == "one" else 3
    Hkv = 1 if G * Lq > 500 else 2
    Bkv = 1 if case["shape"] == "shared" else B
    q, k, v = random_inputs(
        B, G * Hkv, Hkv, Lq, Lkv, case["D"], case["Dv"], Bkv=Bkv, dtype=case["dtype"]
    )
    generator = torch.Generator().manual_seed(1)
    call: dict[str, Any] = {}
    if case["lengths"] == "int":
        call["kv_len"] = (Lkv + 1) // 2
    elif case["lengths"] == "ragged":
        call["kv_len"] = torch.tensor([Lkv, 0, (Lkv + 2) // 3][:B])
    if case["extra"] == "bias":
        call["bias"] = torch.randn(1, G * Hkv, Lq, Lkv, generator=generator)
    elif case["extra"] == "sinks":
        call["sinks"] = torch.randn(G * Hkv, generator=generator)
    elif case["extra"] == "score":
        call["score_mod"] = lambda score, b, h, q_idx, kv_idx: score * 0.5 + (h - b) * 0.1
    table = (torch.rand(G * Hkv, Lkv, generator=generator) < 0.3).to(backend.device)
    masks = {
        None: None,
        "causal": causal,
        "window": sliding_window(20),
        "table": lambda b, h, q_idx, kv_idx: table[h, kv_idx],
    }
    check(backend, q, k, v, mask=masks[case["mask"]], BLOCK_SIZE=case["block"], **call)


# Every mask and score rule that comes with the library.

IDS = torch.tensor([[0] * 70 + [1] * 130 + [2] * 100, [0] * 299 + [1]])
PICKED = torch.rand(2, 2, 19, generator=torch.Generator().manual_seed(2)) < 0.4
HEADS = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1])
PARENTS = create_ancestors([-1, 0, 0, 1, 1, 2, 5])

MASKS: dict[str, Callable[[str], Any]] = {
    "causal": lambda d: causal,
    "bidirectional": lambda d: bidirectional,
    "sliding_window": lambda d: sliding_window(100),
    "sliding_window_of_batch": lambda d: sliding_window(torch.tensor([1, 200], device=d)),
    "symmetric_window": lambda d: symmetric_window(30),
    "sink_window": lambda d: sink_window(4, 64),
    "prefix_lm": lambda d: prefix_lm(torch.tensor([130, 7], device=d)),
    "dilated": lambda d: dilated(3, 120),
    "chunked": lambda d: chunked(128),
    "documents": lambda d: documents(IDS.to(d)),
    "causal_documents": lambda d: causal_documents(IDS.to(d)),
    "left_padding": lambda d: causal & left_padding(torch.tensor([3, 130], device=d)),
    "right_padding": lambda d: right_padding(torch.tensor([300, 17], device=d)),
    "selected_blocks": lambda d: (
        causal & (selected_blocks(PICKED.to(d), 16, group_size=4) | sliding_window(32))
    ),
    "per_head": lambda d: per_head(HEADS.to(d), sliding_window(64), causal),
    "tree": lambda d: tree(PARENTS.to(d), 293),
    "not": lambda d: ~sliding_window(200),
}


@pytest.mark.parametrize(("backend", "name"), on_every_backend(list(MASKS), 4), ids=str)
@pytest.mark.parametrize("Lq", [1, 7])
def test_masks(backend: Backend, name: str, Lq: int) -> None:
    q, k, v = random_inputs(2, 8, 2, Lq, 300, 32)
    check(backend, q, k, v, mask=MASKS[name](backend.device))
    if not backend.slow:
        check(backend, q, k, v, mask=MASKS[name](backend.device), BLOCK_SIZE=16)


SCORES: dict[str, Callable[[str], Any]] = {
    "alibi": lambda d: alibi(8),
    "alibi_slopes": lambda d: alibi(torch.linspace(0.1, 1.0, 8, device=d)),
    "softcap": lambda d: softcap(2.0),
    "relative_bias": lambda d: relative_bias(torch.randn(8, 32, device=d)),
}


@pytest.mark.parametrize(("backend", "name"), on_every_backend(list(SCORES), 1), ids=str)
def test_score_mods(backend: Backend, name: str) -> None:
    torch.manual_seed(0)
    q, k, v = random_inputs(1, 8, 2, 3, 150, 32)
    check(backend, 2 * q, k, v, mask=causal, score_mod=SCORES[name](backend.device))


@pytest.mark.parametrize(("backend", "seed"), on_every_backend(list(range(6)), 3), ids=str)
def test_random_tables(backend: Backend, seed: int) -> None:
    """A captured boolean table of any density, per batch row, head and query."""
    generator = torch.Generator().manual_seed(seed)
    B, Hkv, G, Lq, Lkv = 2, 2, (1, 3)[seed % 2], (1, 4)[seed // 2 % 2], 400
    q, k, v = random_inputs(B, G * Hkv, Hkv, Lq, Lkv, 16, seed=seed)
    keep = (
        torch.rand(B, G * Hkv, Lq, -(-Lkv // 16), generator=generator) < (0.05, 0.5, 0.9)[seed % 3]
    )
    holes = torch.rand(B, G * Hkv, Lq, Lkv, generator=generator) < 0.9
    table = (keep.repeat_interleave(16, -1)[..., :Lkv] & holes).to(backend.device)
    first = Lkv - Lq
    check(
        backend,
        q,
        k,
        v,
        mask=lambda b, h, q_idx, kv_idx: table[b, h, q_idx - first, kv_idx],
        BLOCK_SIZE=16,
    )


def lengths(backend: Backend, BLOCK_SIZE: int) -> Iterator[int]:
    """Every length once, and for every block size those around its borders."""
    if backend.slow:
        return iter((1, 17, 128, 300))
    near = (0, 1, BLOCK_SIZE - 1)
    return (n for n in range(1, 301) if BLOCK_SIZE == 32 or n % BLOCK_SIZE in near)


@every_backend
@pytest.mark.parametrize("BLOCK_SIZE", [16, 32, 64, 128])
def test_fc29_no_tail_key_is_dropped(backend: Backend, BLOCK_SIZE: int) -> None:
    q = torch.zeros(1, 1, 1, 8, device=backend.device)
    k = torch.zeros(1, 1, 300, 8, device=backend.device)
    v = torch.eye(300, device=backend.device).view(1, 1, 300, 300)
    block_mask = create_block_mask(causal, BLOCK_SIZE=BLOCK_SIZE)
    for n in lengths(backend, BLOCK_SIZE):
        expected = torch.zeros(300)
        expected[:n] = 1 / n
        for call in ({"kv_len": n}, {"kv_len": torch.tensor([n], device=backend.device)}):
            out = attention(q, k, v, block_mask=block_mask, backend=backend.name, **call)
            torch.testing.assert_close(out.view(-1).cpu(), expected, rtol=1e-6, atol=0)
        if BLOCK_SIZE != 32:  # without a mask there are no blocks
            continue
        sliced = attention(q, k[:, :, :n], v[:, :, :n], backend=backend.name)
        torch.testing.assert_close(sliced.view(-1).cpu(), expected, rtol=1e-6, atol=0)


@every_backend
def test_ragged_lengths(backend: Backend) -> None:
    q, k, v = random_inputs(5, 2, 1, 2, 300, 16)
    kv_len = torch.tensor([300, 0, 1, 129, 500])  # the last is clamped to the cache
    for mask in (None, causal, sliding_window(50)):
        out, aux = check(backend, q, k, v, mask=mask, kv_len=kv_len, slack=1.0)
        assert (out[1] == 0).all()
        assert (aux.lse[1] == -torch.inf).all()
    check(backend, q, k, v, mask=causal, kv_len=kv_len.int(), q_offset=torch.tensor(3))


@pytest.mark.parametrize("count", [5, 200])
def test_many_lists(count: int) -> None:
    """Sequences whose lists all differ, few (looped over) and many (batched)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = random_inputs(count, 4, 2, 2, 300, 16)
    kv_len = torch.randint(0, 301, (count,), generator=generator)
    bias = torch.randn(count, 1, 2, 300, generator=generator)
    picked = torch.rand(count, 2, 19, generator=generator) < 0.4
    wide = torch.rand(count, 4, 19, generator=generator) < 0.4
    cpu = BACKENDS[0]
    check(cpu, q, k, v, mask=sliding_window(70), BLOCK_SIZE=16, kv_len=kv_len, bias=bias)
    check(cpu, q, k, v, mask=selected_blocks(picked, 16, group_size=2), BLOCK_SIZE=16)
    check(cpu, q, k, v, mask=selected_blocks(wide, 16) & causal, BLOCK_SIZE=16, kv_len=kv_len)
    check(cpu, q, k[:1], v[:1], mask=causal, BLOCK_SIZE=16, kv_len=kv_len)


@every_backend
def test_fc16_per_head_masks_with_gqa(backend: Backend) -> None:
    q, k, v = random_inputs(2, 8, 2, 2, 300, 16)

    def widening(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx - kv_idx < 16 * (h + 1))

    for size in (16, 128):
        check(backend, q, k, v, mask=widening, BLOCK_SIZE=size)


@every_backend
def test_fc20_equal_requests_give_equal_bits(backend: Backend) -> None:
    for Lq, G in [(1, 4), (5, 8), (7, 8)] if not backend.slow else [(5, 8)]:
        q, k, v = random_inputs(1, 2 * G, 2, Lq, 200, 128)
        q, k, v = (x.repeat(3, 1, 1, 1) for x in (q, k, v))
        out, _ = check(backend, q, k, v, mask=causal)
        assert torch.equal(out[0], out[1])
        assert torch.equal(out[0], out[2])


@every_backend
@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (64, 128), (128, 64), (576, 512), (24, 40)])
def test_fc27_value_width_differs(backend: Backend, D: int, Dv: int) -> None:
    q, k, v = random_inputs(1, 4, 1, 2, 100, D, Dv)
    out, _ = check(backend, q, k, v, mask=causal)
    assert out.shape == (1, 4, 2, Dv)


@every_backend
def test_fc42_the_score_is_natural_and_the_mask_comes_after(backend: Backend) -> None:
    q, k, v = random_inputs(1, 2, 1, 1, 300, 16)
    for n in (1, 2, 100, 300):
        out, aux = attention(
            *(x.to(backend.device) for x in (q, k, v)),
            score_mod=lambda score, b, h, q_idx, kv_idx: 3.5,
            kv_len=n,
            return_aux=BOTH,
            backend=backend.name,
        )
        torch.testing.assert_close(
            aux.lse.cpu().float(), torch.full((1, 2, 1), 3.5 + math.log(n)), rtol=1e-6, atol=1e-6
        )
        assert (aux.max_scores == 3.5).all()
        torch.testing.assert_close(
            out.cpu(), v[:, :, :n].mean(2, keepdim=True).expand(1, 2, 1, 16), rtol=1e-5, atol=1e-6
        )
    _, aux = check(
        backend, 30 * q, k, v, mask=sliding_window(10), score_mod=softcap(1.0), slack=2.0
    )
    assert aux.max_scores.max() <= 1


@every_backend
def test_fc46_alibi_decodes_like_prefill(backend: Backend) -> None:
    q, k, v = (x.to(backend.device) for x in random_inputs(1, 8, 2, 12, 12, 16))
    call: dict[str, Any] = {"score_mod": alibi(8), "backend": backend.name}
    block_mask = create_block_mask(causal)
    full = attention(q, k, v, block_mask=block_mask, **call)
    for p in (0, 7, 11):
        row = attention(q[:, :, p : p + 1], k, v, block_mask=block_mask, kv_len=p + 1, **call)
        torch.testing.assert_close(row, full[:, :, p : p + 1], rtol=1e-5, atol=1e-6)


@every_backend
def test_fc52_a_mod_never_reads_past_its_table(backend: Backend) -> None:
    q, k, v = random_inputs(1, 2, 1, 1, 128, 16)
    table = torch.randn(127, device=backend.device)
    check(
        backend,
        q,
        k,
        v,
        mask=lambda b, h, q_idx, kv_idx: kv_idx < 127,
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[torch.clamp(kv_idx, max=126)],
    )
    out = attention(
        *(x.to(backend.device) for x in (q, k, v)),
        block_mask=create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < 127),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
        backend=backend.name,
    )
    expected = dense_attention(q, k[:, :, :127], v[:, :, :127], bias=table.cpu().view(1, 1, 1, 127))
    torch.testing.assert_close(out.cpu().double(), expected.out, rtol=1e-5, atol=1e-5)
