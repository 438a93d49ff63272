"""Packed queries: sequences of different query counts side by side in one tensor.

Rows of a table are then *tiles* of at most ``BLOCK_Q`` queries of one sequence, in order of
sequences: ``cdiv(q_len, BLOCK_Q)`` for each, and unused ones at the end, since only the device
knows how many there are. Backends without such tiles see *runs*: neighbouring sequences with as
many queries make an ordinary batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdecode.kernels.devices import on_device
from flexdecode.quantization import as_tensor

if TYPE_CHECKING:
    from flexdecode.mask_resolution import ResolvedMask
    from flexdecode.problem import Problem, Request, Result
    from flexdecode.tables import Tables

__all__ = ["PackedQueries", "Run", "run_by_runs", "tile_size"]


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of equally many queries.

    Attributes
    ----------
    first, count : int
        Sequences.
    q_len : int
        Queries of each, at least one.
    row, tile : int
        Where they begin in the packed tensor, and among the tiles.
    """

    first: int
    count: int
    q_len: int
    row: int
    tile: int

    @property
    def sequences(self) -> slice:
        """Which sequences."""
        return slice(self.first, self.first + self.count)

    @property
    def rows(self) -> slice:
        """Which rows of the packed tensor."""
        return slice(self.row, self.row + self.count * self.q_len)


@dataclass(frozen=True, eq=False)
class PackedQueries:
    """Where packed queries begin, and the tiles that they make.

    Attributes
    ----------
    cu_seqlens : Tensor, [sequences + 1], int32 or int64
        Row at which each sequence's queries begin, and the end of the last.
    total : int
        Rows of q.
    BLOCK_Q : int
        Most queries of a tile.
    tiles : Tensor, [5, nQ], int32
        For each tile its sequence (-1: unused), first row, rows, place of the first one in its
        sequence, and queries of the sequence.
    """

    cu_seqlens: Tensor
    total: int
    BLOCK_Q: int
    tiles: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int, BLOCK_Q: int) -> PackedQueries:
        """Make the tiles, on a GPU by a kernel: nothing is read back."""
        nQ = -(-total // BLOCK_Q) + len(cu_seqlens) - 1
        tiles = torch.empty((5, nQ), dtype=torch.int32, device=cu_seqlens.device)
        packed = cls(cu_seqlens, total, BLOCK_Q, tiles)
        packed.update()
        return packed

    @property
    def num_tiles(self) -> int:
        """Tiles, unused ones included."""
        return self.tiles.shape[1]

    def update(self) -> None:
        """Rewrite the tiles from `cu_seqlens` as it is now."""
        if self.tiles.is_cuda:
            from flexdecode.kernels.query_tiles import write_query_tiles

            with on_device(self.tiles.device):
                write_query_tiles(self.tiles, self.cu_seqlens, self.total, self.BLOCK_Q)
            return
        self.tiles[0] = -1
        self.tiles[1:] = 0
        for run in self.runs():
            each = -(-run.q_len // self.BLOCK_Q)
            place = torch.arange(each, dtype=torch.int32) * self.BLOCK_Q
            b = torch.arange(run.count, dtype=torch.int32)[:, None]
            made = (
                run.first + b,
                run.row + b * run.q_len + place,
                (run.q_len - place).clamp(max=self.BLOCK_Q),
                place,
                torch.tensor(run.q_len, dtype=torch.int32),
            )
            columns = self.tiles[:, run.tile : run.tile + run.count * each]
            for line, value in zip(columns, made, strict=True):
                line.view(run.count, each).copy_(value.expand(run.count, each))

    def runs(self) -> list[Run]:
        """Runs that have queries; reads `cu_seqlens` on the host."""
        starts = self.cu_seqlens.tolist()
        found: list[Run] = []
        tile = 0
        for b, (row, end) in enumerate(itertools.pairwise(starts)):
            q_len = end - row
            last = found[-1] if found else None
            if q_len > 0 and last is not None and last.sequences.stop == b and last.q_len == q_len:
                found[-1] = dataclasses.replace(last, count=last.count + 1)
            elif q_len > 0:
                found.append(Run(b, 1, q_len, row, tile))
            tile += -(-q_len // self.BLOCK_Q)
        return found


def tile_size(BLOCK_Q: int, total_q: int, sequences: int) -> int:
    """Queries of a tile: about as many as a sequence has, at most `BLOCK_Q`.

    Launches have room for whole tiles; what a tile cannot fill would be programs without work.
    """
    if total_q <= sequences:
        return 1
    mean = -(-total_q // max(sequences, 1))
    return min(BLOCK_Q, max(1 << (mean - 1).bit_length(), 4))


def run_by_runs(request: Request, attend: Callable[[Request], Result]) -> Result:
    """Carry out a call with packed queries as ordinary calls, one for each run.

    Parameters
    ----------
    request : Request
        With ``problem.packed``.
    attend : callable (Request) -> Result
        Carries out an ordinary call.

    Returns
    -------
    Result
    """
    from flexdecode.problem import Result

    problem = request.problem
    assert problem.packed is not None
    shape = (1, problem.Hq, problem.Lq)
    out = torch.zeros((*shape, problem.Dv), dtype=problem.dtype, device=problem.device)
    lse = max_scores = None
    for run in problem.packed.runs():
        part = attend(_ordinary(request, run))
        if lse is None and part.lse is not None:
            lse = torch.full(shape, -torch.inf, dtype=part.lse.dtype, device=problem.device)
        if max_scores is None and part.max_scores is not None:
            max_scores = torch.full(
                shape, -torch.inf, dtype=part.max_scores.dtype, device=problem.device
            )
        for whole, piece in ((out, part.out), (lse, part.lse), (max_scores, part.max_scores)):
            if whole is not None and piece is not None:
                whole[0, :, run.rows] = piece.transpose(0, 1).flatten(1, 2)
    empty = torch.full(shape, -torch.inf, dtype=torch.float32, device=problem.device)
    if request.want_lse and lse is None:
        lse = empty
    if request.want_max and max_scores is None:
        max_scores = empty
    return Result(out, lse, max_scores)


def _ordinary(request: Request, run: Run) -> Request:
    """Cut one run out of a packed call."""
    problem, part = request.problem, run.sequences

    def batched(x: Tensor) -> Tensor:  # [1, H, total, d] -> [n, H, q_len, d]
        x = x[0, :, run.rows]
        return x.view(x.shape[0], run.count, run.q_len, x.shape[2]).transpose(0, 1)

    k, v = request.k, request.v
    if problem.page_table is None and problem.Bkv > 1:
        k, v = k[part], v[part]
    return dataclasses.replace(
        request,
        q=batched(as_tensor(request.q)),
        k=k,
        v=v,
        problem=cut_problem(problem, run),
        resolved=None if request.resolved is None else _cut_mask(request.resolved, problem, run),
        bias=None if request.bias is None else batched(request.bias),
    )


def cut_problem(problem: Problem, run: Run) -> Problem:
    """Return the problem of one run."""

    def some(x: int | Tensor | None) -> int | Tensor | None:
        return x[run.sequences] if isinstance(x, Tensor) else x

    kv_len, offset = some(problem.kv_len), some(problem.offset)
    assert kv_len is not None
    if offset is None and isinstance(kv_len, int):
        offset = kv_len - run.q_len
    pages, start = some(problem.page_table), some(problem.kv_start)
    assert not isinstance(pages, int) and not isinstance(start, int)
    return dataclasses.replace(
        problem,
        B=run.count,
        Lq=run.q_len,
        Bkv=min(problem.Bkv, run.count) if problem.page_table is None else problem.Bkv,
        kv_len=kv_len,
        offset=offset,
        page_table=pages,
        kv_start=start,
        packed=None,
        first_b=run.first,
    )


def _cut_mask(resolved: ResolvedMask, problem: Problem, run: Run) -> ResolvedMask:
    """Return the tables of one run: tiles become rows of blocks of a batch."""
    assert problem.packed is not None
    each = -(-run.q_len // problem.packed.BLOCK_Q)

    def batched(table: Tensor) -> Tensor:  # [1, H, nQ, ...] -> [n, H, rows, ...]
        table = table[0, :, run.tile : run.tile + run.count * each]
        return table.view(table.shape[0], run.count, each, *table.shape[2:]).transpose(0, 1)

    tables: Tables = resolved.tables.map(batched)
    offset = resolved.q_offset
    if isinstance(offset, Tensor):
        offset = offset[run.sequences]
    return dataclasses.replace(resolved, tables=tables, q_offset=offset)
