# mypy: allow-untyped-defs, allow-untyped-decorators
"""Block states by interval evaluation: elements are looked at where that leaves a block undecided.

A program owns some chunks of ``LANES`` blocks of one row. It first evaluates the interval program
with a chunk a lane, then, in chunks that stay undecided, with a block a lane; blocks that are left
are evaluated element by element until an allowed and a denied one are found. In small grids several
programs decide the same chunk, and each looks at some of its blocks.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.call import Mod, dtype_of, vector_stride
from flexdecode.kernels.launch import BoundLaunch, Launch
from flexdecode.kernels.sizes import ceil_div, next_power_of_2
from flexdecode.kernels.tiles import load_block_row, loop_bound

LANES = 64  # blocks, or chunks, evaluated at a time
TILE = 2048  # elements of a block evaluated at a time
PROGRAMS = 8192  # enough: beyond them a program takes several chunks
SHARED = 2048  # too few: below them, programs share the blocks of a chunk that are looked at
RUN_TIME = (
    "stride_kv_len kv_len stride_kv_start stride_q_offset q_offset heads nQ nKV Lq Lkv BLOCK_Q "
    "first_row chunks groups shares reach"
).split()
ANY_ADDRESS = "state_ptr kv_len_ptr kv_start_ptr q_offset_ptr tiles_ptr".split()
EMPTY: tl.constexpr = tl.constexpr(0)
PARTIAL: tl.constexpr = tl.constexpr(1)
FULL: tl.constexpr = tl.constexpr(2)
UNKNOWN: tl.constexpr = tl.constexpr(3)


@triton.jit
def decide(
    b,
    h,
    q_lo,  # [1] int64, and the next
    q_hi,
    blocks,  # [LANES], first block of each lane
    size,  # blocks of a lane
    kv_len,
    reach,  # most elements of a captured tensor that one lane looks at
    mask_args,
    INTERVALS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    """States of boxes that are one row of blocks high, UNKNOWN where intervals do not tell."""
    kv_lo = blocks.to(tl.int64) * KV_BLOCK
    kv_end = kv_lo + size * KV_BLOCK
    inside = kv_lo < kv_len
    crossing = kv_end > kv_len
    kv_hi = tl.maximum(tl.minimum(kv_end, kv_len) - 1, kv_lo)
    zero = tl.full((1,), 0, tl.int64)
    must, may, mixed = INTERVALS(zero + b, zero + h, q_lo, q_hi, kv_lo, kv_hi, reach, mask_args)
    partial = inside & (mixed | must) & (size == 1)
    state = tl.where(partial, PARTIAL, UNKNOWN)
    state = tl.where(inside & must & (crossing == 0), FULL, state)
    return tl.where(inside & may, state, EMPTY)


@triton.jit
def look_at(
    b,
    h,
    first,
    last,  # query positions [first, last) of the block
    block,
    kv_len,
    mask_args,
    MASK_MOD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """State of one block from its elements, ROWS query rows at a time, until it is partial."""
    offs = tl.arange(0, KV_TILE)[None, :]
    kv_idx = block * KV_BLOCK + offs
    some = 0
    denied = 0
    position = first
    while (position < last) & ((some == 0) | (denied == 0)):
        q_idx = position + tl.arange(0, ROWS)[:, None]
        lane = (q_idx < last) & (offs < KV_BLOCK)
        inside = lane & (kv_idx < kv_len)
        allowed = inside & MASK_MOD(b, h, q_idx, kv_idx, inside, mask_args)
        some = some | tl.max(tl.max(allowed.to(tl.int32), 1), 0)
        denied = denied | tl.max(tl.max((lane & (allowed == 0)).to(tl.int32), 1), 0)
        position += ROWS
    return tl.where(some == 0, EMPTY, tl.where(denied == 0, FULL, PARTIAL))


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=ANY_ADDRESS)
def _interval_kernel(
    state_ptr,  # [rows, nKV] uint8, written: 0 empty, 1 partial, 2 full
    kv_len_ptr,  # [B], or None
    stride_kv_len: tl.int64,
    kv_len: tl.int32,
    kv_start_ptr,  # [B], or None
    stride_kv_start: tl.int64,
    q_offset_ptr,  # [B], or None
    stride_q_offset: tl.int64,
    q_offset: tl.int32,
    tiles_ptr,  # [5, nQ] int32, the rows of blocks of packed queries; or None
    heads: tl.int32,
    nQ: tl.int32,
    nKV: tl.int32,
    Lq: tl.int32,
    Lkv: tl.int32,
    BLOCK_Q: tl.int32,
    first_row: tl.int32,  # of all [B or 1, heads, nQ], that state_ptr points to
    chunks: tl.int32,  # of a program, at most LANES
    groups: tl.int32,  # of chunks, in a row
    shares: tl.int32,  # programs that share the lanes of a group
    reach: tl.int32,
    mask_args,
    MASK_MOD: tl.constexpr,
    INTERVALS: tl.constexpr,
    DERIVE_OFFSET: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TILE: tl.constexpr,  # KV_BLOCK, rounded up to a power of two
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tell apart the blocks of some chunks of one row of blocks."""
    pid = tl.program_id(0)
    share = pid % shares
    pid = pid // shares
    state_ptr += (pid // groups).to(tl.int64) * nKV
    row = first_row + pid // groups
    lengths = (kv_len_ptr, stride_kv_len, kv_len, kv_start_ptr, stride_kv_start, Lkv)
    offsets = (q_offset_ptr, stride_q_offset, q_offset)
    b, h, first, queries, kv_len = load_block_row(
        row, heads, nQ, Lq, BLOCK_Q, lengths, offsets, tiles_ptr, DERIVE_OFFSET
    )
    last = first + queries
    kv_len = tl.where(queries > 0, kv_len, 0)  # without queries every block is empty
    q_lo = tl.full((1,), 0, tl.int64) + first
    q_hi = tl.full((1,), 0, tl.int64) + (last - 1)
    lanes = tl.arange(0, LANES)
    own = lanes % shares == share
    start = pid % groups * chunks * LANES  # first block
    count = tl.minimum(chunks, (nKV - start + LANES - 1) // LANES)
    of_chunks = tl.full([LANES], UNKNOWN, tl.int32)
    for chunk in tl.range(-1, loop_bound(count)):  # -1: all of them, a chunk a lane
        size = tl.where(chunk < 0, LANES, 1)
        blocks = start + tl.where(chunk < 0, 0, chunk * LANES) + lanes * size
        whole = tl.max(tl.where(lanes == chunk, of_chunks, 0), 0)
        whole = tl.where(chunk < 0, UNKNOWN, whole)
        state = tl.zeros([LANES], tl.int32) + whole
        if whole == UNKNOWN:
            state = decide(
                b, h, q_lo, q_hi, blocks, size, kv_len, reach, mask_args, INTERVALS, KV_BLOCK
            )
        if chunk < 0:
            of_chunks = state
        else:
            own_here = own & (blocks < nKV)
            state = tl.where(own_here, state, EMPTY)
            unknown = tl.sum((state == UNKNOWN).to(tl.int32), 0)
            for _ in tl.range(0, loop_bound(unknown)):
                lane = tl.min(tl.where(state == UNKNOWN, lanes, LANES), 0)
                found = look_at(
                    b,
                    h,
                    first,
                    last,
                    start + chunk * LANES + lane,
                    kv_len,
                    mask_args,
                    MASK_MOD,
                    KV_BLOCK,
                    KV_TILE,
                    ROWS,
                )
                state = tl.where(lanes == lane, found, state)
            tl.store(state_ptr + blocks, state.to(tl.uint8), mask=own_here)


def launch_intervals(
    mask: Mod,
    intervals: Any,
    state: Tensor,
    *,
    shape: tuple[int, int, int, int],
    first_row: int = 0,
    kv_len: int | Tensor,
    q_offset: int | Tensor | None,
    Lq: int,
    Lkv: int,
    BLOCK_SIZE: tuple[int, int],
    kv_start: Tensor | None = None,
    tiles: Tensor | None = None,
    lanes: int = LANES,
) -> list[BoundLaunch]:
    """Fill `state` with the block states of some rows of blocks.

    Parameters
    ----------
    mask : Mod
        A mask; see `Mod`. Its b and h are scalars here.
    intervals : triton.JITFunction
        Its interval program: ``(b, h, q_lo, q_hi, kv_lo, kv_hi, reach, args)`` gives whether all
        elements of each box are allowed, whether any may be, and whether one is and one is not.
    state : Tensor, uint8, contiguous
        Of some rows of the grid, each as wide as the grid.
    shape : (int, int, int, int)
        Of the whole grid: batch, heads, rows and columns of blocks.
    first_row : int
        Number of the first row of `state` among all rows of all heads.
    kv_len, q_offset, Lq, Lkv, BLOCK_SIZE, kv_start, tiles
        As in `tables.launch_tables`.
    lanes : int, a power of two
        Blocks evaluated at a time; another number is another kernel.

    Returns
    -------
    list of BoundLaunch
        What was launched, to be launched again.
    """
    if state.numel() == 0:
        return []
    _, heads, nQ, nKV = shape
    rows = state.numel() // nKV
    BLOCK_Q, KV_BLOCK = BLOCK_SIZE
    KV_TILE = next_power_of_2(KV_BLOCK)
    all_chunks = ceil_div(nKV, lanes)
    chunks = min(max(rows * all_chunks // PROGRAMS, 1), lanes, all_chunks)
    groups = ceil_div(all_chunks, chunks)
    shares = min(max(SHARED // (rows * groups), 1), lanes, nKV)
    kv_len_ptr, stride_kv_len, kv_len_int = vector_stride(kv_len)
    kv_start_ptr, stride_kv_start, _ = vector_stride(kv_start)
    q_offset_ptr, stride_q_offset, q_offset_int = vector_stride(q_offset)
    launch = Launch(
        _interval_kernel,
        rows * groups * shares,
        {
            "MASK_MOD": mask.fn,
            "INTERVALS": intervals,
            "DERIVE_OFFSET": q_offset is None,
            "KV_BLOCK": KV_BLOCK,
            "KV_TILE": KV_TILE,
            "ROWS": max(1, TILE // KV_TILE),
            "LANES": lanes,
        },
        {},
    )
    kinds = (
        dtype_of(kv_len_ptr),
        dtype_of(kv_start_ptr),
        dtype_of(q_offset_ptr),
        tiles is None,
        state.device.index,
    )
    arguments = (
        state,
        kv_len_ptr,
        stride_kv_len,
        kv_len_int,
        kv_start_ptr,
        stride_kv_start,
        q_offset_ptr,
        stride_q_offset,
        q_offset_int,
        tiles,
        heads,
        nQ,
        nKV,
        Lq,
        Lkv,
        BLOCK_Q,
        first_row,
        chunks,
        groups,
        shares,
        2 * max(min(BLOCK_Q, Lq), KV_BLOCK),
        mask.args,
    )
    bound = BoundLaunch(launch, kinds, arguments, mask.args)
    bound()
    return [bound]
