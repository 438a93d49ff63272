# mypy: allow-untyped-defs, allow-untyped-decorators
"""Who works on what: shares of active blocks, the same in the decode kernel and the reduction.

A *row* is one list of active blocks: a sequence, a KV head where lists differ by head, a block of
queries. A row's units are cut into equal shares, one *item* each. Either every row is cut into the
same number of splits, or (`plan_items`) the rows are cut so that all items of the launch are about
equal, as ragged batches need. The lengths are device data, so each program works the plan out for
itself, in registers: cheaper than a launch of its own, and nothing waits for the host. Where the
bits of a row must depend on that row alone, it is cut at fixed positions instead (`span_of`).
"""

import triton
import triton.language as tl

from flexdecode.kernels.configs import MIN_SHARE as _MIN_SHARE
from flexdecode.kernels.configs import MIN_UNITS as _MIN_UNITS
from flexdecode.kernels.configs import OVERSUBSCRIBE as _OVERSUBSCRIBE
from flexdecode.kernels.tiles import cdiv, load_kv_len, loop_bound

MIN_SHARE = tl.constexpr(_MIN_SHARE)
MIN_UNITS = tl.constexpr(_MIN_UNITS)
OVERSUBSCRIBE = tl.constexpr(_OVERSUBSCRIBE)


@triton.jit
def plan_items(
    lengths,  # see `load_kv_len`
    lists,  # (kv_num_blocks_ptr or None, full_kv_num_blocks_ptr or None, their strides by b and h)
    numbering,  # (rows, heads, nQ, inner, num_splits, processors), see `Layout`
    tiles_ptr,  # tiles of packed queries, see `load_query_tile`; or None
    ROWS: tl.constexpr,  # power of two, at least rows
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Items of every row, and which is its first: (items, firsts), both [ROWS] int32.

    Rows stay whole where that fills the device evenly; otherwise none is longer than a share of a
    processor's fair part. Every row has an item at least, so that empty ones are written too. Rows
    that are cut come first: short ones then fill what their long items leave.
    """
    SUBS: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    num_ptr, full_num_ptr, stride_tb, stride_th = lists
    rows, heads, nQ, inner, _, processors = numbering
    row = tl.arange(0, ROWS)
    there = row < rows
    b = row // nQ // heads
    if num_ptr is None:
        used = there
        if tiles_ptr is not None:
            b = tl.load(tiles_ptr + row % nQ, mask=there, other=-1)
            used = b >= 0
            b = tl.maximum(b, 0)
        length = load_kv_len(lengths, b.to(tl.int64), used)
        units = tl.where(used, cdiv(length, BLOCK_N), 0)
    else:
        at = b.to(tl.int64) * stride_tb + row // nQ % heads * stride_th + row % nQ
        units = tl.load(num_ptr + at, mask=there, other=0) * SUBS
        if full_num_ptr is not None:
            units += tl.load(full_num_ptr + at, mask=there, other=0) * SUBS
    units = tl.where(there, units, 0)
    total = tl.sum(units, 0)
    longest = tl.max(units, 0)
    slots = tl.maximum(processors // inner, 1)
    waves = cdiv(tl.sum((units > 0).to(tl.int32), 0), slots)
    spare = tl.where(rows * 4 <= slots * OVERSUBSCRIBE, rows, 0)  # see `fair_items`
    share = tl.maximum(cdiv(total, slots * OVERSUBSCRIBE - spare), MIN_UNITS)
    if waves * longest * 8 <= cdiv(total, slots) * 9:
        share = tl.maximum(longest, 1)
    items = tl.where(there, tl.maximum(cdiv(units, share), 1), 0)
    cut = tl.where(items > 1, items, 0)
    whole = items - cut
    firsts = tl.cumsum(cut, 0) - cut
    firsts = tl.where(items > 1, firsts, tl.cumsum(whole, 0) - whole + tl.sum(cut, 0))
    return items, firsts


@triton.jit
def find_item(item, items, firsts, ROWS: tl.constexpr):
    """Row of an item, the row's number of items (0: there is no such item), and which this is."""
    row = tl.arange(0, ROWS)
    mine = (firsts <= item) & (item < firsts + items)
    count, first = items_of(mine, items, firsts)
    return tl.sum(tl.where(mine, row, 0), 0), count, item - first


@triton.jit
def items_of(mine, items, firsts):
    """Return the number of items of the one row that is `mine`, and its first item."""
    return tl.sum(tl.where(mine, items, 0), 0), tl.sum(tl.where(mine, firsts, 0), 0)


@triton.jit
def share_of(units, items):
    """Units of each of a row's items, and how many items then have work (one at least)."""
    share = tl.maximum(cdiv(units, items), MIN_SHARE)
    return share, tl.maximum(cdiv(units, share), 1)


@triton.jit
def span_of(
    split,
    indices_ptr,  # ascending block numbers, int32, or None: every unit is listed
    count,  # how many
    kv_len,
    SPAN: tl.constexpr,  # keys of a span, a multiple of KV_BLOCK
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Listed units that begin among the keys of one span: [first, last)."""
    if indices_ptr is None:
        first = split * (SPAN // BLOCK_N)
        last = tl.minimum(first + SPAN // BLOCK_N, cdiv(kv_len, BLOCK_N))
    else:
        lower = split * (SPAN // KV_BLOCK)
        below = 0
        through = 0
        for start in tl.range(0, loop_bound(count), CHUNK):
            offs = start + tl.arange(0, CHUNK)
            numbers = tl.load(indices_ptr + offs, mask=offs < count, other=2147483647)
            below += tl.sum((numbers < lower).to(tl.int32), 0)
            through += tl.sum((numbers < lower + SPAN // KV_BLOCK).to(tl.int32), 0)
        first = below * ((KV_BLOCK + BLOCK_N - 1) // BLOCK_N)
        last = through * ((KV_BLOCK + BLOCK_N - 1) // BLOCK_N)
    return first, last
