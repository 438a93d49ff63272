# mypy: allow-untyped-defs, allow-untyped-decorators
"""Tiles of packed queries: which sequence and which rows each of them holds, from device data.

Sequence b has ``cdiv(q_len, BLOCK_Q)`` tiles, in order of sequences. Row by row, a list of tiles
says: the sequence (-1: no such tile), the first row in the packed tensor, the number of rows, the
place of the first one in its sequence, and the queries of that sequence.
"""

import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.launch import Launch
from flexdecode.kernels.tiles import cdiv, loop_bound

CHUNK = 1024  # sequences, or tiles, at a time


@triton.jit(
    do_not_specialize=["stride_cu", "sequences", "total", "nQ", "BLOCK_Q"],
    do_not_specialize_on_alignment=["tiles_ptr", "cu_ptr"],
)
def _query_tiles_kernel(
    tiles_ptr,  # [5, nQ] int32, written
    cu_ptr,  # [sequences + 1]
    stride_cu: tl.int64,
    sequences: tl.int32,
    total: tl.int32,  # rows of q; none beyond is ever named
    nQ: tl.int32,
    BLOCK_Q: tl.int32,
    C: tl.constexpr,
):
    """List the tiles of one sequence, or, in the last program, those that are left over."""
    b = tl.program_id(0)
    offs = tl.arange(0, C)
    before = 0
    for start in tl.range(0, loop_bound(b), C):
        others = cu_ptr + (start + offs).to(tl.int64) * stride_cu
        there = start + offs < b
        first = tl.load(others, mask=there, other=0).to(tl.int32)
        last = tl.load(others + stride_cu, mask=there, other=0).to(tl.int32)
        queries = tl.minimum(last, total) - tl.minimum(tl.maximum(first, 0), total)
        before += tl.sum(cdiv(tl.maximum(queries, 0), BLOCK_Q), 0)
    base = 0
    queries = 0
    mine = nQ - before
    sequence = -1
    if b < sequences:
        own = cu_ptr + b.to(tl.int64) * stride_cu
        base = tl.minimum(tl.maximum(tl.load(own).to(tl.int32), 0), total)
        last = tl.minimum(tl.load(own + stride_cu).to(tl.int32), total)
        queries = tl.maximum(last - base, 0)
        mine = cdiv(queries, BLOCK_Q)
        sequence = b
    for start in tl.range(0, loop_bound(mine), C):
        tile = start + offs
        inside = (tile < mine) & (before + tile < nQ)
        row = tile * BLOCK_Q
        at = tiles_ptr + before + tile
        tl.store(at, tl.zeros([C], tl.int32) + sequence, mask=inside)
        tl.store(at + nQ, base + row, mask=inside)
        tl.store(at + 2 * nQ, tl.minimum(queries - row, BLOCK_Q), mask=inside)
        tl.store(at + 3 * nQ, row, mask=inside)
        tl.store(at + 4 * nQ, tl.zeros([C], tl.int32) + queries, mask=inside)


def write_query_tiles(tiles: Tensor, cu_seqlens_q: Tensor, total_q: int, BLOCK_Q: int) -> None:
    """Fill `tiles` from the starts of packed queries; one launch.

    Parameters
    ----------
    tiles : Tensor, [5, nQ], int32, contiguous
        ``nQ`` of ``cdiv(total_q, BLOCK_Q) + sequences`` is always enough.
    cu_seqlens_q : Tensor, [sequences + 1], int32 or int64
    total_q : int
        Rows of q.
    BLOCK_Q : int
        Most queries of a tile.
    """
    sequences = cu_seqlens_q.shape[0] - 1
    launch = Launch(_query_tiles_kernel, sequences + 1, {"C": CHUNK}, {})
    launch(
        (cu_seqlens_q.dtype, tiles.device.index),
        (
            tiles,
            cu_seqlens_q,
            cu_seqlens_q.stride(0),
            sequences,
            total_q,
            tiles.shape[1],
            BLOCK_Q,
        ),
    )
