# mypy: allow-untyped-defs, allow-untyped-decorators
"""Block tables on the device: tell empty, partial and full blocks apart, then list them in order.

Two launches, one where rows are short; no synchronisation, nothing read back: a table can be built
inside a CUDA graph, from lengths that change between replays. The dense mask is never written:
`_classify_kernel` reduces each block to one byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.call import Mod, dtype_of, vector_stride
from flexdecode.kernels.launch import BoundLaunch, Launch
from flexdecode.kernels.sizes import ceil_div, next_power_of_2
from flexdecode.kernels.tiles import load_block_row, loop_bound

TILE = 1024  # mask elements that a program evaluates at a time
WHOLE_ROW = 16384  # elements of a row up to which one program does it all, in one launch
COMPACT_TILE = 1024  # block states that a program lists at a time
CLASSIFY_RUN_TIME = (
    "columns stride_kv_len kv_len stride_kv_start stride_q_offset q_offset heads nQ nKV Lq Lkv "
    "BLOCK_Q chunks"
).split()
ANY_ADDRESS = (
    "state_ptr num_ptr indices_ptr full_num_ptr full_indices_ptr kv_len_ptr kv_start_ptr "
    "q_offset_ptr tiles_ptr union_num_ptr union_indices_ptr union_full_num_ptr "
    "union_full_indices_ptr"
).split()


@triton.jit
def classify(
    b,
    h,
    first,
    last,  # query positions [first, last) of the row of blocks
    blocks,  # [BLOCKS]
    kv_len,
    mask_args,
    MASK_MOD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """States of some blocks of one row of blocks, a query row at a time: [BLOCKS] int32."""
    offs_n = tl.arange(0, KV_TILE)[None, :]
    kv_idx = blocks[:, None] * KV_BLOCK + offs_n  # [BLOCKS, KV_TILE]
    inside = (kv_idx < kv_len) & (offs_n < KV_BLOCK)
    some = tl.zeros([BLOCKS], tl.int32)
    every = tl.full([BLOCKS], 1, tl.int32)
    last = tl.where(tl.min(blocks, 0) * KV_BLOCK < kv_len, last, first)  # past the keys: all empty
    for q_idx in tl.range(loop_bound(first), loop_bound(last)):
        allowed = inside & MASK_MOD(b, h, q_idx, kv_idx, inside, mask_args)
        some = some | tl.max(allowed.to(tl.int32), 1)
        every = every & tl.min((allowed | (offs_n >= KV_BLOCK)).to(tl.int32), 1)
    return tl.where(some != 0, 1 + every, 0)


@triton.jit
def list_blocks(
    blocks,  # [C]
    state,  # [C] int32
    partial,
    full,  # how many the row lists so far
    indices_ptr,
    full_indices_ptr,  # of this row
):
    """Append some blocks to a row's lists, if there are any; return how many are listed then."""
    is_partial = (state == 1).to(tl.int32)
    is_full = (state == 2).to(tl.int32)
    if indices_ptr is not None:
        at = partial + tl.cumsum(is_partial, 0) - is_partial
        tl.store(indices_ptr + at, blocks, mask=is_partial != 0)
        at = full + tl.cumsum(is_full, 0) - is_full
        tl.store(full_indices_ptr + at, blocks, mask=is_full != 0)
    return partial + tl.sum(is_partial, 0), full + tl.sum(is_full, 0)


@triton.jit(do_not_specialize=CLASSIFY_RUN_TIME, do_not_specialize_on_alignment=ANY_ADDRESS)
def _classify_kernel(
    state_ptr,  # [B or 1, heads, nQ, nKV] uint8, written: 0 empty, 1 partial, 2 full
    num_ptr,  # [rows] int32, and the lists below: written where a program does a whole row
    indices_ptr,  # [rows, columns] int32
    full_num_ptr,  # [rows] int32
    full_indices_ptr,  # [rows, columns] int32
    columns: tl.int64,
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
    chunks: tl.int32,  # programs a row
    mask_args,
    MASK_MOD: tl.constexpr,
    DERIVE_OFFSET: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_TILE: tl.constexpr,  # KV_BLOCK, rounded up to a power of two
    BLOCKS: tl.constexpr,  # key blocks at a time
):
    """Tell apart the blocks of one row of blocks: BLOCKS of them, or all, listing them at once."""
    pid = tl.program_id(0)
    chunk = pid % chunks
    row = pid // chunks
    lengths = (kv_len_ptr, stride_kv_len, kv_len, kv_start_ptr, stride_kv_start, Lkv)
    offsets = (q_offset_ptr, stride_q_offset, q_offset)
    b, h, first_q, count, kv_len = load_block_row(
        row, heads, nQ, Lq, BLOCK_Q, lengths, offsets, tiles_ptr, DERIVE_OFFSET
    )
    row64 = row.to(tl.int64)
    state_ptr += row64 * nKV
    indices_ptr += row64 * columns
    full_indices_ptr += row64 * columns
    partial = 0
    full = 0
    last = tl.where(chunks == 1, nKV, (chunk + 1) * BLOCKS)
    for start in tl.range(loop_bound(chunk * BLOCKS), loop_bound(last), BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)  # [BLOCKS]
        state = classify(
            b,
            h,
            first_q,
            first_q + count,
            blocks,
            kv_len,
            mask_args,
            MASK_MOD,
            KV_BLOCK,
            KV_TILE,
            BLOCKS,
        )
        tl.store(state_ptr + blocks, state.to(tl.uint8), mask=blocks < nKV)
        if chunks == 1:
            partial, full = list_blocks(blocks, state, partial, full, indices_ptr, full_indices_ptr)
    if chunks == 1:
        tl.store(num_ptr + row, partial)
        tl.store(full_num_ptr + row, full)


@triton.jit(
    do_not_specialize="nKV nQ group columns full_columns rows union_group".split(),
    do_not_specialize_on_alignment=ANY_ADDRESS,
)
def _compact_kernel(
    state_ptr,  # [lists, group, nQ, nKV] uint8
    num_ptr,  # [rows] int32, written
    indices_ptr,  # [rows, columns] int32, written up to the count; None: count only
    full_num_ptr,  # [rows] int32, written
    full_indices_ptr,  # [rows, full_columns] int32, written up to the count; or None
    nKV: tl.int32,
    nQ: tl.int32,
    group: tl.int32,
    columns: tl.int64,
    full_columns: tl.int64,
    rows: tl.int32,
    union_num_ptr,  # where there are more rows: the same states listed by other groups
    union_indices_ptr,
    union_full_num_ptr,
    union_full_indices_ptr,
    union_group: tl.int32,
    C: tl.constexpr,
):
    """List the partial and the full blocks of one row, ascending.

    A row may stand for a group of heads: it lists what any of them does, as full what is for all.
    """
    row = tl.program_id(0).to(tl.int64)
    if indices_ptr is not None:
        if row >= rows:
            row = row - rows
            group = union_group
            num_ptr = union_num_ptr
            indices_ptr = union_indices_ptr
            full_num_ptr = union_full_num_ptr
            full_indices_ptr = union_full_indices_ptr
    state_ptr += (row // nQ * group * nQ + row % nQ) * nKV
    if indices_ptr is not None:
        indices_ptr += row * columns
        full_indices_ptr += row * full_columns
    partial = 0
    full = 0
    for start in tl.range(0, loop_bound(nKV), C):
        blocks = start + tl.arange(0, C)  # [C]
        state = tl.load(state_ptr + blocks, mask=blocks < nKV, other=0).to(tl.int32)
        for head in tl.range(1, loop_bound(group)):
            other_ptr = state_ptr + nQ.to(tl.int64) * nKV * head
            other = tl.load(other_ptr + blocks, mask=blocks < nKV, other=0).to(tl.int32)
            # The same on all heads: itself; otherwise partial, if anyone lists it.
            state = tl.where(state == other, state, 1)
        partial, full = list_blocks(blocks, state, partial, full, indices_ptr, full_indices_ptr)
    tl.store(num_ptr + row, partial)
    tl.store(full_num_ptr + row, full)


@dataclass(frozen=True, eq=False)
class TableBuffers:
    """Where tables are written.

    Attributes
    ----------
    state : Tensor, [B or 1, heads or heads * group, nQ, nKV], uint8, contiguous
    kv_num_blocks, full_kv_num_blocks : Tensor, [B or 1, heads, nQ], int32, contiguous
    kv_indices, full_kv_indices : Tensor, [B or 1, heads, nQ, columns], int32, contiguous
        Wide enough; entries past a count are left as they are.
    """

    state: Tensor
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor

    @property
    def group(self) -> int:
        """Heads that share a list."""
        return self.state.shape[1] // self.kv_num_blocks.shape[1]

    @classmethod
    def empty(
        cls, B: int, heads: int, nQ: int, nKV: int, device: torch.device, *, states: bool = True
    ) -> "TableBuffers":
        """Allocate, `states` too or none of them.

        Each apart: inductor of torch 2.11 loses where slices of one buffer begin if an operator
        writes them.
        """
        shape = (B, heads, nQ)

        def counts() -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def lists() -> Tensor:
            return torch.empty((*shape, nKV), dtype=torch.int32, device=device)

        state = torch.empty((*shape, nKV if states else 0), dtype=torch.uint8, device=device)
        return cls(state, counts(), lists(), counts(), lists())


def launch_tables(
    mask: Mod,
    buffers: TableBuffers,
    *,
    kv_len: int | Tensor,
    q_offset: int | Tensor | None,
    Lq: int,
    Lkv: int,
    BLOCK_SIZE: tuple[int, int],
    kv_start: Tensor | None = None,
    tiles: Tensor | None = None,
    unions: Sequence[TableBuffers] = (),
) -> list[BoundLaunch]:
    """Fill `buffers` with the tables of `mask`, in two launches at most if there is one union.

    Parameters
    ----------
    mask : Mod
        A mask; see `Mod`. Its b and h are scalars here, q_idx too.
    buffers : TableBuffers
    kv_len : int or Tensor [B]
        Clamped to ``[0, Lkv]``.
    q_offset : int, Tensor [B] or None
        None stands for ``kv_len - Lq``.
    Lq, Lkv : int
    BLOCK_SIZE : (int, int)
    kv_start : Tensor [B], optional
        Slots that are not a sequence's own, before its keys.
    tiles : Tensor, [5, nQ], int32, contiguous, optional
        What each row of blocks holds, where queries are packed; see `write_query_tiles`.
    unions : sequence of TableBuffers
        As in `launch_compact`: filled too.

    Returns
    -------
    list of BoundLaunch
        What was launched: again, it fills them from the tensors as they are then.
    """
    B, heads, nQ, nKV = buffers.state.shape
    if buffers.state.numel() == 0:
        for lists in (buffers, *unions):
            lists.kv_num_blocks.zero_()
            lists.full_kv_num_blocks.zero_()
        return []
    BLOCK_Q, KV_BLOCK = BLOCK_SIZE
    KV_TILE = next_power_of_2(KV_BLOCK)
    BLOCKS = max(1, TILE // KV_TILE)  # whatever the length: another value is another kernel
    elements = nKV * KV_TILE * min(BLOCK_Q, Lq)  # of a row
    chunks = 1 if elements <= WHOLE_ROW else ceil_div(nKV, BLOCKS)
    kv_len_ptr, stride_kv_len, kv_len_int = vector_stride(kv_len)
    kv_start_ptr, stride_kv_start, _ = vector_stride(kv_start)
    q_offset_ptr, stride_q_offset, q_offset_int = vector_stride(q_offset)
    rows = B * heads * nQ
    launch = Launch(
        _classify_kernel,
        rows * chunks,
        {
            "MASK_MOD": mask.fn,
            "DERIVE_OFFSET": q_offset is None,
            "KV_BLOCK": KV_BLOCK,
            "KV_TILE": KV_TILE,
            "BLOCKS": BLOCKS,
        },
        {},
    )
    kinds = (
        dtype_of(kv_len_ptr),
        dtype_of(kv_start_ptr),
        dtype_of(q_offset_ptr),
        tiles is None,
        buffers.state.device.index,
    )
    arguments = (
        buffers.state,
        buffers.kv_num_blocks,
        buffers.kv_indices,
        buffers.full_kv_num_blocks,
        buffers.full_kv_indices,
        buffers.kv_indices.shape[3],
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
        chunks,
        mask.args,
    )
    classify = BoundLaunch(launch, kinds, arguments, mask.args)
    classify()
    if chunks > 1:
        return [classify, *launch_compact(buffers, unions)]
    return [classify, *[launch for union in unions for launch in launch_compact(union)]]


def launch_compact(buffers: TableBuffers, unions: Sequence[TableBuffers] = ()) -> list[BoundLaunch]:
    """Fill the lists of `buffers` from its states, in the same launch those of one union.

    Parameters
    ----------
    buffers : TableBuffers
    unions : sequence of TableBuffers
        Of the same states, with lists for groups of heads.

    Returns
    -------
    list of BoundLaunch
        What was launched.
    """
    rows = buffers.kv_num_blocks.numel()
    if rows == 0:
        return []
    union = unions[0] if unions else None
    more = buffers if union is None else union  # of as many columns
    compact = _bound_compact(
        rows + (0 if union is None else union.kv_num_blocks.numel()),
        buffers.state,
        buffers.kv_num_blocks,
        buffers.kv_indices,
        buffers.full_kv_num_blocks,
        buffers.full_kv_indices,
        buffers.state.shape[3],
        buffers.state.shape[2],
        buffers.group,
        buffers.kv_indices.shape[3],
        buffers.full_kv_indices.shape[3],
        rows,
        more.kv_num_blocks,
        more.kv_indices,
        more.full_kv_num_blocks,
        more.full_kv_indices,
        more.group,
    )
    compact()
    return [compact, *[launch for further in unions[1:] for launch in launch_compact(further)]]


def launch_count(state: Tensor, num: Tensor, full_num: Tensor) -> None:
    """Count the partial and the full blocks of each row.

    Parameters
    ----------
    state : Tensor, [rows, nKV], uint8, contiguous
    num, full_num : Tensor, [rows], int32, contiguous
        Written.
    """
    rows, nKV = state.shape
    tables = (num, None, full_num, None)
    _bound_compact(rows, state, *tables, nKV, rows, 1, 0, 0, rows, *tables, 1)()


def _bound_compact(rows: int, state: Tensor, *arguments: Any) -> BoundLaunch:
    launch = Launch(_compact_kernel, rows, {"C": COMPACT_TILE}, {})
    kinds = (arguments[1] is None, state.device.index)
    return BoundLaunch(launch, kinds, (state, *arguments))
