# mypy: allow-untyped-defs, allow-untyped-decorators
"""Who works on what: shares of active blocks, the same in the decode kernel and the reduction.

A *row* is one list of active blocks: a sequence, a KV head where lists differ by head, a block of
queries. A row's units are cut into equal shares, one *item* each. Either every row is cut into the
same number of splits, or (`plan_items`) the rows are cut so that all items of the launch are about
equal, as ragged batches need. The lengths are device data, so each program works the plan out for
itself, in registers: cheaper than a launch of its own, and nothing waits for the host. Where the
bits of a row must depend on that row alone, it is cut at fixed positions instead (`span_of`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from flexdecode.kernels.layout import LEVEL_BITS as _LEVEL_BITS
from flexdecode.kernels.layout import MAX_ITEMS as _MAX_ITEMS
from flexdecode.kernels.splits import MIN_SHARE as _MIN_SHARE
from flexdecode.kernels.splits import MIN_UNITS as _MIN_UNITS
from flexdecode.kernels.tiles import (
    cdiv,
    divide,
    load_kv_len,
    load_units,
    loop_bound,
    quotient,
    units_below,
)

LEVEL_BITS = tl.constexpr(_LEVEL_BITS)
MAX_ITEMS = tl.constexpr(_MAX_ITEMS)
# Times the counts of levels: for each level, the counts of those before it.
LATER_LEVELS = tl.constexpr(sum(1 << _LEVEL_BITS * level for level in range(1, 5)))
MIN_SHARE = tl.constexpr(_MIN_SHARE)
MIN_UNITS = tl.constexpr(_MIN_UNITS)


class Plan(NamedTuple):
    """Every row of a balanced launch and how it is cut, [ROWS] int32 each."""

    b: tl.tensor
    h: tl.tensor  # of the KV heads whose lists differ
    q_block: tl.tensor
    kv_len: tl.tensor  # of its sequence; 0 where there are lists, which do without
    full: tl.tensor  # units
    partial: tl.tensor
    items: tl.tensor  # 0: there is no such row
    shares: tl.tensor  # units of each item but the last


@triton.jit
def place_rows(row, heads, nQ, ONE_LIST: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """Sequence, KV head and block of queries of a row, or of several; see `_decode_kernel`."""
    q_block = row * 0
    h = row * 0
    if not ONE_BLOCK:
        row, q_block = divide(row, nQ)
    if not ONE_LIST:
        row, h = divide(row, heads)
    return row, h, q_block


@triton.jit
def plan_items(
    where,  # from `place_rows`
    lengths,  # see `load_kv_len`
    lists,  # (kv_num_blocks_ptr or None, full_kv_num_blocks_ptr or None, their strides by b and h)
    rows,
    num_splits,  # of all rows together, see `fair_items`
    slots,  # items that the device works on at a time
    tiles_ptr,  # tiles of packed queries, see `load_query_tile`; or None
    ROWS: tl.constexpr,  # power of two, at least rows
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the `Plan`.

    Few rows are cut into as many items as the device works on at a time. So are more rows that are
    about equally long, or they stay whole; of others none is longer than a share of a processor's
    fair part. Every row has an item at least, so that empty ones are written too.
    """
    num_ptr, full_num_ptr, stride_tb, stride_th = lists
    b, h, q_block = where
    there = tl.arange(0, ROWS) < rows
    kv_len = tl.zeros((ROWS,), tl.int32)
    if num_ptr is None:
        sequence = b
        used = there
        if tiles_ptr is not None:
            sequence = tl.load(tiles_ptr + q_block, mask=there, other=-1)
            used = sequence >= 0
            sequence = tl.maximum(sequence, 0)
        kv_len = tl.where(used, load_kv_len(lengths, sequence.to(tl.int64), used), 0)
        full, partial = units_below(kv_len, BLOCK_N)
    else:
        at = b.to(tl.int64) * stride_tb + h * stride_th + q_block
        full, partial = load_units(num_ptr, full_num_ptr, at, there, KV_BLOCK, BLOCK_N)
    units = full + partial
    total = tl.sum(units, 0)
    longest = tl.max(units, 0)
    busy = tl.sum((units > 0).to(tl.int32), 0)
    share = cdiv(total, num_splits)
    if num_splits > slots:  # or else rows are few
        share = tl.maximum(share, MIN_UNITS)
        even = cdiv(longest, tl.maximum(quotient(slots, tl.maximum(busy, 1)), 1))
        if cdiv(busy, slots) * even * 8 <= cdiv(total, slots) * 9:
            share = even
    items = tl.maximum(cdiv(units, tl.maximum(share, MIN_SHARE)), 1)
    shares = share_of(units, items, KV_BLOCK, BLOCK_N)
    return Plan(b, h, q_block, kv_len, full, partial, tl.where(there, items, 0), shares)


@triton.jit
def number_items(plan, num_splits, slots):
    """Number of each row's first item, [ROWS] int32: the longest items come first.

    Programs start in that order, each where one has ended: short items then fill what long ones
    leave, and none that is long begins late (R. L. Graham, "Bounds on multiprocessing timing
    anomalies", 1969). Ten classes of lengths are near enough to a sort.
    """
    if num_splits <= slots:
        firsts = tl.cumsum(plan.items, 0) - plan.items  # all start at once
    else:
        longest = tl.max(plan.shares, 0)
        level = 9 - quotient((plan.shares - 1) * 10, longest)
        upper, count = _number_levels(plan.items, level)
        lower, _ = _number_levels(plan.items, level - 5)
        firsts = tl.where(level < 5, upper, lower + count)
    return firsts


@triton.jit
def _number_levels(items, level):
    """Number the items of rows of levels 0 to 4, in order of levels; and how many these have.

    One scan for all: each level counts in LEVEL_BITS bits of its own, and there are MAX_ITEMS at
    the most.
    """
    here = (level >= 0) & (level < 5)
    shift = tl.where(here, level * LEVEL_BITS, 0).to(tl.int64)
    counts = tl.where(here, items, 0).to(tl.int64) << shift
    total = tl.sum(counts, 0)
    earlier = total * LATER_LEVELS
    before = tl.cumsum(counts, 0) - counts + earlier
    return ((before >> shift) & MAX_ITEMS).to(tl.int32), tl.sum(tl.where(here, items, 0), 0)


@triton.jit
def pick(mine, column):
    """Entry of a column of a plan in the one row that is `mine`; 0 where there is none."""
    return tl.sum(tl.where(mine, column, 0), 0)


@triton.jit
def share_of(units, items, KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Units of each of a row's items but the last: whole blocks, where two at least are shared."""
    SUBS: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    share = tl.maximum(cdiv(units, items), MIN_SHARE)
    if SUBS > 1:
        share = tl.where(share > 2 * SUBS, cdiv(share, SUBS) * SUBS, share)
    return share


@triton.jit
def count_working(units, share):
    """How many of a row's items have work; one at least."""
    return tl.maximum(cdiv(units, share), 1)


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
