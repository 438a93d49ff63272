"""Run every kind of kernel once, small, in one process: something for ``compute-sanitizer`` to see.

``compute-sanitizer --tool memcheck python -m tests.every_kernel``; kernels are interpreted without
a GPU. Each result is compared with a formula as well. ``--part 2/8`` runs every eighth case from
the second on: several at a time compile what the sanitizer then finds on disk. ``--planted`` reads
past a tensor's end instead: a sanitizer that does not say so sees nothing else either.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402

from flexdecode import (  # noqa: E402
    BlockMask,
    append_kv,
    attention,
    cascade_attention,
    create_block_mask,
    device_tables,
    merge_attentions,
    merge_attentions_,
    quantize,
)
from flexdecode.kernels.query_tiles import write_query_tiles  # noqa: E402
from flexdecode.masks import causal, documents, sliding_window  # noqa: E402
from flexdecode.packed import PackedQueries  # noqa: E402
from flexdecode.quantization import as_tensor  # noqa: E402
from flexdecode.tables import Extent, build_tables, table_states  # noqa: E402
from flexdecode.trace import Traced, trace  # noqa: E402
from tests.attempts import FORMATS, Attempt, check  # noqa: E402
from tests.helpers import dense_attention  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CASES: dict[str, Callable[[], None]] = {}

LATER, NEAR, MANY = "(q >= k)", "(q >= k) & (q - k < 20)", "flags[h % 4, k] & (ids[k] != 2)"
FALL = "s + slopes[h] * (k - q)"

# ---- one call of attention each ----


def attempt(*kv_len: int, queries: int = 1, **fields: Any) -> Attempt:
    """Describe a call, of equally many queries a sequence where nothing else is said."""
    return Attempt(**{"kv_len": kv_len, "q_len": (queries,) * len(kv_len)} | fields)


ATTEMPTS = {
    "one split": attempt(37, 0, D=32, Dv=32, G=4, Hkv=2, dtype="bfloat16", splits=1),
    "splits": attempt(60, 0, 5, queries=3, D=20, Dv=31, G=2, splits=3),
    "more splits than keys": attempt(3, D=16, Dv=16, splits=3, mask=LATER),
    "two pieces of a head": attempt(40, D=96, Dv=96, dtype="float16", splits=3),
    "tiny heads": attempt(40, D=3, Dv=1, G=3, q_len=(2,), layout="wide"),
    "more rows than a tile": attempt(
        60, queries=60, G=3, D=32, Dv=32, dtype="bfloat16", mask=LATER
    ),
    "padding": attempt(40, 33, queries=2, kind="padded", mask=NEAR, splits=3),
    "sequences one after another": attempt(
        40, 0, 17, q_len=(5, 0, 1), packed=True, kind="gappy", mask=LATER, score=FALL
    ),
    "packed queries, bound": attempt(
        40, 9, 17, q_len=(5, 9, 1), packed=True, kind="paged 16", mask=NEAR,
        mask_kind="bound", block=(4, 16),
    ),
    "packed queries, splits": attempt(
        60, 9, q_len=(1, 4), packed=True, kind="packed", splits=3, sinks=True
    ),
    "pages of one slot": attempt(40, 1, kind="paged 1", splits=3),
    "pages of any size": attempt(40, 1, kind="paged 7", mask=NEAR, splits=3),
    "steps of whole pages": attempt(60, 9, kind="paged 8", D=16, Dv=16, splits=3),
    "pages of whole steps": attempt(
        60, 33, kind="paged 32", D=16, Dv=16, mask=LATER, block=(16, 32), splits=3
    ),
    "pages from a start": attempt(40, 9, queries=2, kind="paged 16 + start", mask=MANY),
    "captures": attempt(50, 60, queries=2, G=2, mask=MANY, score="s + table[h % 3, k]"),
    "bias and sinks": attempt(40, 50, queries=2, G=2, bias=True, sinks=True, splits=3),
    "a mask with sizes": attempt(40, 50, mask=NEAR, mask_kind="sized", block=(16, 16)),
    "a mask with positions": attempt(
        40, 50, queries=5, mask=NEAR, mask_kind="fixed", q_offset=(9, -3), block=(2, 16)
    ),
    "lists for all heads": attempt(
        40, 60, queries=5, seed=3, G=2, Hkv=2, mask=MANY, mask_kind="listed",
        block=(2, 16),
    ),
    "lists for key heads": attempt(
        40, 60, queries=5, seed=4, G=2, Hkv=2, mask=MANY, mask_kind="listed",
        block=(2, 16), splits=3,
    ),
    "lists for query heads": attempt(
        40, 60, queries=5, seed=5, G=2, Hkv=2, mask=MANY, mask_kind="listed",
        block=(2, 20),
    ),
    "batch invariant": attempt(40, 9, G=2, D=16, Dv=16, sinks=True, again="paged 7"),
    "batch invariant, lists": attempt(
        40, 60, queries=2, seed=5, G=2, mask=MANY, mask_kind="listed", block=(2, 16),
        again="padded",
    ),
    **{
        f"quantised, {name}": attempt(
            40, 17, G=2, D=32, Dv=32, k_format=name, v_format=name,
            kind=("paged 16", "dense", "padded")[place % 3],
            dtype=("bfloat16", "float16")[place % 2], splits=3, mask=NEAR if place % 2 else "",
        )
        for place, name in enumerate(FORMATS)
    },
    "quantised keys alone": attempt(40, D=32, Dv=24, k_format="int4", kind="padded"),
    "quantised values alone": attempt(
        40, queries=3, D=24, Dv=32, v_format="fp8", kind="paged 16 + start"
    ),
}  # fmt: skip
CASES |= {
    name: functools.partial(check, attempt, "triton", str(DEVICE))
    for name, attempt in ATTEMPTS.items()
}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Keep a case under its function's name."""
    CASES[function.__name__.replace("_", " ")] = function
    return function


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    at = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=at).to(DEVICE, dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def exact(q: Any, k: Any, v: Any, **call: Any) -> Tensor:
    """The dense formula, on the CPU."""
    q, k, v = (as_tensor(x.to("cpu"), torch.float32) for x in (q, k, v))
    call = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    return dense_attention(q, k, v, **call).out


# ---- what attempts cannot say ----


@case
def shares_of_ragged_rows() -> None:
    q, k, v = draw(3, 2, 1, 16), draw(3, 1, 8192, 16, seed=1), draw(3, 1, 8192, 16, seed=2)
    kv_len = torch.tensor([700, 1500, 0], device=DEVICE)
    out = attention(q, k, v, kv_len=kv_len, backend="triton")
    close(out, exact(q, k, v, kv_len=kv_len), 1e-4)


@case
def shares_of_ragged_lists() -> None:
    keys = 65536
    q, k, v = draw(2, 2, 1, 16), draw(2, 1, keys, 16, seed=1), draw(2, 1, keys, 16, seed=2)
    kv_len = torch.tensor([keys, 300], device=DEVICE)
    mask = create_block_mask(causal & sliding_window(700))
    out = attention(q, k, v, kv_len=kv_len, block_mask=mask, backend="triton")
    close(out, exact(q, k, v, kv_len=kv_len, mask=causal & sliding_window(700)), 1e-4)


@case
def lists_without_a_rule() -> None:
    """A full block that goes on beyond the last key."""
    q, k, v = draw(1, 2, 1, 16), draw(1, 1, 90, 16, seed=1), draw(1, 1, 90, 16, seed=2)
    none, one, two = (torch.tensor([[[n]]], device=DEVICE) for n in range(3))
    blocks = torch.tensor([[[[0, 2]]]], device=DEVICE)
    mask = BlockMask.from_kv_blocks(none, blocks[..., :1], two, blocks, 32)
    out = attention(q, k, v, block_mask=mask, backend="triton")
    close(out, exact(q, k, v, mask=lambda b, h, i, j: j // 32 != 1))
    mask = BlockMask.from_kv_blocks(one, blocks[..., 1:], BLOCK_SIZE=32)
    out = attention(q, k, v, block_mask=mask, backend="triton")
    close(out, exact(q, k, v, mask=lambda b, h, i, j: j // 32 == 2))


@case
def values_that_are_columns_of_the_keys() -> None:
    q, k = draw(1, 16, 1, 576, dtype=torch.bfloat16), draw(1, 1, 70, 576, dtype=torch.bfloat16)
    v = k[..., :512]
    out = attention(q, k, v, backend="triton", kernel_options={"num_splits": 2})
    close(out, exact(q, k, v), 2e-2)


@case
def float8_queries() -> None:
    q, k, v = (draw(1, h, 40, 32, dtype=torch.bfloat16, seed=h) for h in (4, 2, 1))
    v = v.expand(1, 2, 40, 32).contiguous()
    for n, per in ((1, "row"), (20, "row"), (1, "head")):
        kept = [quantize(q[:, :, :n], "fp8"), *(quantize(x, "fp8", per=per) for x in (k, v))]
        out = attention(*kept, backend="triton", kernel_options={"num_splits": 2})
        close(out, exact(*kept), 5e-2)


@case
def shares_of_packed_queries() -> None:
    q, k, v = draw(1, 2, 3, 16), draw(2, 1, 8192, 16, seed=1), draw(2, 1, 8192, 16, seed=2)
    kv_len = torch.tensor([300, 1500], device=DEVICE)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    out = attention(q, k, v, kv_len=kv_len, cu_seqlens_q=starts, backend="triton")
    for b, rows in enumerate((slice(0, 1), slice(1, 3))):
        n = int(kv_len[b])
        wanted = exact(q[:, :, rows], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        close(out[:, :, rows], wanted, 1e-4)


@case
def arithmetic() -> None:
    """Operations of rules, and ways to multiply and to add."""
    q, k, v = draw(1, 2, 3, 64), draw(1, 1, 70, 64, seed=1), draw(1, 1, 70, 64, seed=2)

    def rule(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        x = kv_idx * 0.25 - q_idx * 0.5
        y = x // 0.5 + x % 0.75 + torch.round(x) + torch.trunc(x) + (kv_idx % 5) ** (q_idx % 3)
        y = y + (kv_idx - q_idx) // 3 + (kv_idx - q_idx) % 5
        y = torch.where(torch.isnan(x), x, y) + torch.sigmoid(x) + torch.pow(x.abs() + 0.5, 1.5)
        y = torch.minimum(torch.maximum(y, x), 20 - x)
        return 9 * torch.tanh(s / 9) + 0.01 * y.clamp(-20, 20)

    wanted = exact(q, k, v, score_mod=rule)
    for options, tolerance in (
        ({}, 1e-4),
        ({"tf32": True}, 2e-2),
        ({"approx": True}, 1e-2),
        ({"partial_dtype": torch.float64, "num_splits": 3, "BLOCK_N": 16}, 1e-4),
    ):
        out = attention(q, k, v, score_mod=rule, kernel_options=options, backend="triton")
        close(out, wanted, tolerance)


@case
def a_cascade() -> None:
    q, k, v = draw(3, 4, 1, 32), draw(3, 2, 40, 32, seed=1), draw(3, 2, 40, 32, seed=2)
    k[:, :, :24], v[:, :, :24] = k[:1, :, :24].clone(), v[:1, :, :24].clone()
    out = cascade_attention(q, k, v, prefix_len=24, cascade=True, backend="triton")
    close(out, exact(q, k, v))


# ---- tables ----

GRIDS = {  # Lq, Lkv, BLOCK_SIZE, kv_len, q_offset
    "decode rows": (1, 150, (128, 16), torch.tensor([150, 7]), None),
    "tall blocks": (40, 70, (16, 24), 70, 0),
    "blocks beyond a count": (17, 33, (128, 128), torch.tensor([33, 1]), torch.tensor([5, -2])),
}
IDS, NUMBERS = torch.arange(160) // 7, torch.linspace(-1, 1, 160)


RULES = {
    "captures": documents(IDS) & causal,
    "numbers": lambda b, h, i, j: (NUMBERS[j] < 0.4) & (i - j < 9 * (h + 1)),
}


def tables(grid: str, rule: str, intervals: bool) -> None:
    """Build tables, lay them out in all ways, build them again in place."""
    Lq, Lkv, block, kv_len, q_offset = GRIDS[grid]
    mask = trace(RULES[rule], "mask")
    cpu = Extent(2, 2, Lq, Lkv, kv_len, q_offset, block, torch.device("cpu"))
    wanted = table_states(build_tables(mask, cpu))
    there = Traced(mask.graph, mask.params, tuple(x.to(DEVICE) for x in mask.captures))
    moved = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in (kv_len, q_offset)]
    extent = Extent(2, 2, Lq, Lkv, *moved, block, DEVICE).for_kernels(there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_tables, "_gains_by_intervals", lambda extent: intervals)
        built = device_tables.build_device_tables(there, extent)
        assert torch.equal(table_states(built).cpu(), wanted)
        device_tables.unite_heads(built, 1)
        device_tables.update_device_tables(there, extent, built)
        assert torch.equal(table_states(built).cpu(), wanted)
        lists = device_tables.order_lists(built, 1)
        assert torch.equal(lists.kv_num_blocks[:, 0].cpu(), (wanted > 0).any(1).sum(-1).int())
    if intervals:
        compact = device_tables.build_compact_device_tables(there, extent)
        assert torch.equal(table_states(compact).cpu(), wanted)


CASES |= {
    f"tables, {grid}, {rule}, by {'intervals' if intervals else 'elements'}": functools.partial(
        tables, grid, rule, intervals
    )
    for grid in GRIDS
    for rule in RULES
    for intervals in (False, True)
    if not (intervals and grid == "decode rows")  # which are never high enough
}


@case
def tables_of_packed_queries() -> None:
    starts, kv_len = torch.tensor([0, 5, 5, 14]), torch.tensor([40, 0, 60])
    mask = trace(RULES["captures"], "mask")
    there = Traced(mask.graph, mask.params, tuple(x.to(DEVICE) for x in mask.captures))
    tiles = torch.full((5, 5), -7, dtype=torch.int32, device=DEVICE)
    write_query_tiles(tiles, starts.to(DEVICE), 14, 8)
    packed = PackedQueries.of(starts, 14, 8)
    used = packed.tiles[0] >= 0
    assert torch.equal(tiles.cpu()[:, used], packed.tiles[:, used])
    extent = Extent(3, 2, 14, 60, kv_len, None, (8, 16), torch.device("cpu"), packed=packed)
    wanted = table_states(build_tables(mask, extent))
    packed = PackedQueries(starts.to(DEVICE), 14, 8, tiles)
    extent = replace(extent, kv_len=kv_len.to(DEVICE), device=DEVICE, packed=packed)
    for intervals in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_tables, "_gains_by_intervals", lambda extent, by=intervals: by)
            built = device_tables.build_device_tables(there, extent.for_kernels(there))
        assert torch.equal(table_states(built).cpu(), wanted)


# ---- caches and merges ----


@case
def appending() -> None:
    new = draw(2, 2, 3, 32)
    cos, sin = draw(64, 8, seed=1).cos(), draw(64, 8, seed=1).sin()
    lengths = torch.tensor([14, 29], device=DEVICE)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    packed = new[:1]
    for rows, shape, place in (
        (new, (2, 2, 40, 32), {"kv_len": 5, "rotary_cos": cos, "rotary_sin": sin}),
        (new, (5, 2, 16, 32), {"kv_len": lengths, "page_table": table}),
        (
            packed,
            (1, 2, 60, 32),
            {"kv_len": lengths, "kv_start": starts[1:] * 8, "cu_seqlens": starts,
             "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": True},
        ),
    ):  # fmt: skip
        results = []
        for device in {"cpu", str(DEVICE)}:
            caches = [torch.zeros(shape, device=device) for _ in range(2)]
            moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in place.items()}
            backend = "triton" if device == str(DEVICE) else "cpu"
            append_kv(*caches, rows.to(device), rows.to(device), **moved, backend=backend)
            results.append([x.cpu() for x in caches])
        for x, y in zip(results[0], results[-1], strict=True):
            close(x, y)
            assert bool(x.any())


@case
def appending_where_there_is_no_place() -> None:
    new = draw(2, 2, 3, 32)
    lengths = torch.tensor([14, 31], device=DEVICE)
    table = torch.tensor([[4, -1], [0, 3]], dtype=torch.int32, device=DEVICE)
    caches = [torch.zeros(5, 2, 16, 32, device=DEVICE) for _ in range(2)]
    append_kv(*caches, new, new, kv_len=lengths, page_table=table, backend="triton")
    for cache in caches:
        close(cache[4, :, 14:], new[0, :, :2])
        close(cache[3, :, 15:], new[1, :, :1])
        assert int((cache != 0).any(-1).sum()) == 2 * 3


@case
def appending_to_quantised_caches() -> None:
    new = draw(2, 2, 3, 32)
    cos, sin = draw(64, 8, seed=1).cos(), draw(64, 8, seed=1).sin()
    lengths = torch.tensor([14, 29], device=DEVICE)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    places: tuple[dict[str, Any], ...] = (
        {"page_table": table},
        {"kv_start": starts[1:] * 8, "cu_seqlens": starts},
        {"page_table": table, "rotary_cos": cos, "rotary_sin": sin},
    )
    names = [*FORMATS, ""]
    for number, pair in enumerate(zip(names, names[1:] + names[:1], strict=True)):
        place = places[number % 3]
        shape = (5, 2, 16, 32) if "page_table" in place else (1, 2, 60, 32)
        rows = new if "page_table" in place else new[:1]
        memory = []
        for backend in ("triton", "reference"):
            caches = [
                quantize(draw(*shape, seed=1), **FORMATS[name]) if name else draw(*shape, seed=1)
                for name in pair
            ]
            append_kv(*caches, rows, -rows, kv_len=lengths, **place, backend=backend)
            memory.append([as_tensor(x, torch.float64) for x in caches])
        for mine, right in zip(*memory, strict=True):
            assert torch.equal(mine, right)
        values = memory[0][1]
        if "page_table" in place:
            close(values[4, :, 14:], -new[0, :, :2], 0.5)
            close(values[3, :, 13:], -new[1], 0.5)
        else:
            close(values[0, :, 22], -new[0, :, 0], 0.5)
            close(values[0, :, 53:55], -new[0, :, 1:], 0.5)


def _merged(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge [N, ..., Dv] by the formula."""
    scores = lses
    if sinks is not None:
        scores = torch.cat([lses, sinks[:, None].expand(lses.shape[1:])[None]])
    total = scores.logsumexp(0)
    weights = (lses - total).exp()
    return (weights[..., None] * outs).sum(0), total


def merging(parts: int, stacked: bool, dtype: torch.dtype, with_sinks: bool) -> None:
    """Merge, forward and backward."""
    outs, lses = draw(parts, 2, 3, 5, 31), draw(parts, 2, 3, 5, seed=1)
    sinks = draw(3, seed=2).requires_grad_() if with_sinks else None
    leaves = [outs.to(dtype).requires_grad_(), lses.requires_grad_()]
    if stacked:
        given: list[Any] = list(leaves)
    else:  # of unlike strides
        given = [list(x.unbind(0)) for x in leaves]
        given[0][0] = given[0][0].transpose(0, 1).contiguous().transpose(0, 1)
    out, lse = merge_attentions(*given, sinks=sinks, backend="triton")
    (out.double().square().sum() + lse.double().square().sum()).backward()
    # The same by the formula in float64, on the CPU.
    tensors = [x for x in (*leaves, sinks) if x is not None]
    doubles = [x.detach().double().cpu().requires_grad_() for x in tensors]
    formula = _merged(doubles[0], doubles[1], doubles[2] if with_sinks else None)
    sum(x.square().sum() for x in formula).backward()  # type: ignore[union-attr]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    close(out.detach(), formula[0].detach(), tolerance)
    close(lse.detach(), formula[1].detach(), tolerance)
    for x, y in zip(tensors, doubles, strict=True):
        assert x.grad is not None and y.grad is not None
        close(x.grad, y.grad, 5 * tolerance)


CASES |= {
    "merging a list": functools.partial(merging, 3, False, torch.float32, True),
    "merging a long list": functools.partial(merging, 17, False, torch.bfloat16, False),
    "merging a stack": functools.partial(merging, 20, True, torch.bfloat16, True),
    "merging in float64": functools.partial(merging, 5, True, torch.float64, False),
}


@case
def merging_in_place() -> None:
    outs, lses = draw(2, 2, 3, 5, 31), draw(2, 2, 3, 5, seed=1)
    out, lse = outs[0].clone(), lses[0].clone()
    merge_attentions_(out, lse, outs[1], lses[1], backend="triton")
    wanted = _merged(outs.double(), lses.double(), None)
    close(out, wanted[0])
    close(lse, wanted[1])


# ---- what must be seen ----


@triton.jit
def _read_past_the_end(x_ptr, out_ptr, n):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, 128)
    tl.store(out_ptr + offs, tl.load(x_ptr + n + offs))


def plant() -> None:
    """Read 4 MiB past a tensor that ends after 512 bytes."""
    x, out = torch.zeros(2, 128, device=DEVICE).unbind()
    _read_past_the_end[(1,)](x.clone(), out, 1 << 20)
    torch.cuda.synchronize()


def main(words: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="tests.every_kernel")
    parser.add_argument("--part", default="1/1", help="2/8: every eighth case from the second on")
    parser.add_argument("--planted", action="store_true", help="one fault, on a GPU")
    options = parser.parse_args(words)
    if options.planted:
        plant()
        return 0
    # The interpreter computes with NumPy, which warns of inf - inf where a GPU does not.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime")
    first, step = map(int, options.part.split("/"))
    names = list(CASES)[first - 1 :: step]
    begun = time.perf_counter()
    for name in names:
        started = time.perf_counter()
        CASES[name]()
        if ON_GPU:
            torch.cuda.synchronize()
        print(f"{time.perf_counter() - started:6.2f} s  {name}", flush=True)
    print(f"{len(names)} cases in {time.perf_counter() - begun:.1f} s on {DEVICE.type}")
    return 0


if __name__ == "__main__":
    # Every tensor is then an allocation of its own, so that what is read beside it shows. Torch
    # looks when it allocates first.
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    sys.exit(main(sys.argv[1:]))
