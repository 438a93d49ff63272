"""Tell empty, partial and full blocks apart, without ever holding the dense mask.

Interval evaluation decides what it can, first for big squares of blocks, then for the blocks of
those that stay undecided; elements are looked at in single blocks only, a bounded number at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexdecode.block_elements import (
    EMPTY,
    FULL,
    PARTIAL,
    Span,
    axis,
    evaluated_states,
    parts,
    reduced_states,
)
from flexdecode.evaluate import evaluate
from flexdecode.extent import Extent
from flexdecode.interval_values import Boxes
from flexdecode.intervals import BlockAnalysis

if TYPE_CHECKING:
    from flexdecode.trace import Traced

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Strip",
    "block_states",
    "block_strips",
    "packed_states",
    "undecided_boxes",
]

_UNKNOWN = 3  # undecided, inside this module only

_FEW_ELEMENTS = 1 << 17  # evaluating so many outright takes less time than intervals,
_FEW_A_CAPTURED = 16  # or so many for each captured number, which intervals have to summarise
_CHUNK = 1 << 20  # elements of the blocks evaluated at a time
_BOXES = 1 << 16  # boxes evaluated at a time
_FIRST_SQUARES = 1 << 12  # the search starts with about that many
_STRIP_BLOCKS = 1 << 20  # blocks of a strip
_STEP = 4  # and divides a square into so many rows and columns


def block_states(mask: Traced, extent: Extent) -> Tensor:
    """Tell empty, partial and full blocks apart.

    Parameters
    ----------
    mask : Traced
    extent : Extent

    Returns
    -------
    Tensor, [Bt, Ht, nQ, nKV], uint8
        `EMPTY`, `PARTIAL` or `FULL`; Bt and Ht as in `build_tables`.
    """
    reduced = extent.for_mask(mask)
    if _is_small(mask, reduced) or _cell(reduced) > _CHUNK:
        return evaluated_states(mask, reduced)
    strip = _classified_strip(mask, reduced, BlockAnalysis(mask, extent.device))
    missing = reduced.num_blocks()[1] - strip.states.shape[3] - strip.first_column
    return pad(strip.states, (strip.first_column, missing))


def packed_states(mask: Traced, extent: Extent) -> Tensor:
    """Block states of packed queries, run by run: [1, Ht, tiles, nKV], uint8; on the CPU."""
    assert extent.packed is not None
    heads = extent.H if "h" in mask.graph.uses else 1
    shape = (1, heads, *extent.num_blocks())
    states = torch.zeros(shape, dtype=torch.uint8, device=extent.device)
    for run in extent.packed.runs():
        part = block_states(mask, extent.cut(run))
        rows = run.count * part.shape[2]
        part = part.expand(run.count, -1, -1, -1).transpose(0, 1).reshape(heads, rows, -1)
        states[0, :, run.tile : run.tile + rows] = part
    return states


@dataclass(frozen=True, eq=False)
class Strip:
    """Block states of some rows of blocks.

    Attributes
    ----------
    states : Tensor, [Bt, Ht, rows, columns], uint8
    first_row, first_column : int
        Where the strip lies in the grid; blocks of its rows outside of its columns are empty.
    """

    states: Tensor
    first_row: int
    first_column: int


def block_strips(mask: Traced, extent: Extent) -> Iterator[Strip]:
    """Yield the states of a grid too big to hold, a bounded number of rows at a time."""
    reduced = extent.for_mask(mask)
    assert reduced.q_offset is not None
    nQ, nKV = reduced.num_blocks()
    analysis = BlockAnalysis(mask, extent.device)
    rows = max(_STRIP_BLOCKS // max(reduced.B * reduced.H * nKV, 1), 1)
    for first in range(0, nQ, rows):
        row = first * reduced.BLOCK_SIZE[0]
        length = min(rows * reduced.BLOCK_SIZE[0], reduced.Lq - row)
        part = replace(reduced, Lq=length, q_offset=reduced.q_offset + row)
        if _cell(part) > _CHUNK:
            yield Strip(evaluated_states(mask, part), first, 0)
        else:
            strip = _classified_strip(mask, part, analysis)
            yield replace(strip, first_row=first)


def _is_small(mask: Traced, extent: Extent) -> bool:
    """True where evaluating every element takes less time than intervals do."""
    kv_len = extent.Lkv if isinstance(extent.kv_len, Tensor) else extent.kv_len
    captured = sum(tensor.numel() for tensor in mask.captures)
    few = max(_FEW_ELEMENTS, _FEW_A_CAPTURED * captured)
    return extent.B * extent.H * extent.Lq * kv_len <= few


@dataclass(frozen=True)
class _Squares:
    """One level of the search: squares of ``size x size`` blocks, numbered row by row.

    Columns of squares before `start` and from `stop` on are left out.
    """

    extent: Extent
    size: int
    start: int
    stop: int

    @classmethod
    def all(cls, extent: Extent, size: int) -> _Squares:
        """Every square of that size."""
        return cls(extent, size, 0, -(-extent.num_blocks()[1] // size))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, rows and columns of squares."""
        rows = -(-self.extent.num_blocks()[0] // self.size)
        return self.extent.B, self.extent.H, rows, self.stop - self.start

    def divided(self) -> _Squares:
        """The squares of the next level."""
        size = self.size // _STEP
        last = -(-self.extent.num_blocks()[1] // size)
        return _Squares(self.extent, size, self.start * _STEP, min(self.stop * _STEP, last))

    def place(self, numbers: Tensor) -> _Place:
        """Where the squares of these numbers lie."""
        _, H, rows, columns = self.shape
        extent = self.extent
        b = numbers // (columns * rows * H)
        kv_len, offset = extent.kv_len, extent.q_offset
        assert offset is not None
        return _Place(
            b=b + extent.first_b,
            h=numbers // (columns * rows) % H,
            row=numbers // columns % rows * (self.size * extent.BLOCK_SIZE[0]),
            key=(numbers % columns + self.start) * (self.size * extent.BLOCK_SIZE[1]),
            kv_len=kv_len[b] if isinstance(kv_len, Tensor) else kv_len,
            q_offset=offset[b] if isinstance(offset, Tensor) else offset,
        )


@dataclass(frozen=True, eq=False)
class _Place:
    """First row and key of N squares, [N], int64, and the lengths that hold there."""

    b: Tensor
    h: Tensor
    row: Tensor
    key: Tensor
    kv_len: int | Tensor
    q_offset: int | Tensor


def _classified_strip(mask: Traced, extent: Extent, analysis: BlockAnalysis) -> Strip:
    """Block states by intervals, and by elements where those leave a block undecided."""
    size = 1
    squares = _Squares.all(extent, size)
    while math.prod(squares.shape) > _FIRST_SQUARES and squares.shape[2:] != (1, 1):
        size *= _STEP
        squares = _Squares.all(extent, size)
    states = torch.full(squares.shape, _UNKNOWN, dtype=torch.uint8, device=extent.device)
    while True:
        flat = states.view(-1)
        for numbers in _undecided(flat, _BOXES):
            flat[numbers] = _by_intervals(analysis, squares, numbers)
        if squares.size == 1:
            break
        squares, states = _cropped(squares, states)
        squares = squares.divided()
        states = states.repeat_interleave(_STEP, 3)[..., : squares.shape[3]]
        states = states.repeat_interleave(_STEP, 2)[:, :, : squares.shape[2]].contiguous()
    for numbers in _undecided(flat, max(_CHUNK // _cell(extent), 1)):
        flat[numbers] = _by_elements(mask, squares, numbers)
    return Strip(states, 0, squares.start)


def _cropped(squares: _Squares, states: Tensor) -> tuple[_Squares, Tensor]:
    """Leave out the empty columns at either end."""
    active = states.amax((0, 1, 2)).nonzero().view(-1)
    first, last = (int(active[0]), int(active[-1]) + 1) if len(active) else (0, 1)
    start = squares.start + first
    return replace(squares, start=start, stop=squares.start + last), states[..., first:last]


def _undecided(states: Tensor, most: int) -> list[Tensor]:
    """Numbers of the unknown ones among [N] states, at most `most` at a time."""
    numbers = (states == _UNKNOWN).nonzero().view(-1)
    return [numbers[part] for part in parts(len(numbers), most)]


def _cell(extent: Extent) -> int:
    """Elements of a block."""
    return min(extent.BLOCK_SIZE[0], extent.Lq) * min(extent.BLOCK_SIZE[1], extent.Lkv)


def undecided_boxes(analysis: BlockAnalysis, extent: Extent) -> Iterator[tuple[int, Boxes]]:
    """Yield, a bounded number at a time, the blocks that intervals alone leave undecided.

    Yields
    ------
    count : int
        Blocks with a valid key that were looked at.
    boxes : Boxes
        Positions of the undecided ones.
    """
    reduced = extent.for_mask(analysis.mask)
    squares = _Squares.all(reduced, 1)
    for part in parts(math.prod(squares.shape), _BOXES):
        numbers = torch.arange(part.start, part.stop, device=reduced.device)
        place = squares.place(numbers)
        numbers = numbers[place.key < place.kv_len]
        if len(numbers):
            unknown = numbers[_by_intervals(analysis, squares, numbers) == _UNKNOWN]
            yield len(numbers), _boxes(squares, squares.place(unknown))


def _boxes(squares: _Squares, place: _Place) -> Boxes:
    """Positions of squares; none past the last row or the last valid key."""
    extent = squares.extent
    high, wide = (squares.size * block for block in extent.BLOCK_SIZE)
    q_lo = place.row + place.q_offset
    q_hi = q_lo
    if high > 1 and extent.Lq > 1:
        q_hi = (place.row + high).clamp(max=extent.Lq) - 1 + place.q_offset
    kv_lo = place.key.clamp(max=extent.Lkv - 1)  # squares outside are empty, whatever comes out
    kv_hi = kv_lo
    if wide > 1 and extent.Lkv > 1:
        stop = place.key + wide
        kv_end = torch.where(stop > place.kv_len, place.kv_len, stop) - 1
        kv_hi = torch.maximum(kv_end, kv_lo)
    return Boxes(place.b, place.h, q_lo, q_hi, kv_lo, kv_hi)


def _by_intervals(analysis: BlockAnalysis, squares: _Squares, numbers: Tensor) -> Tensor:
    """State of each square, `_UNKNOWN` where its elements differ or might."""
    place = squares.place(numbers)
    inside = place.key < place.kv_len
    crossing = place.key + squares.size * squares.extent.BLOCK_SIZE[1] > place.kv_len
    truth = analysis(_boxes(squares, place))
    state = torch.full_like(numbers, _UNKNOWN, dtype=torch.uint8)
    if squares.size == 1:
        state = state.masked_fill(truth.must | (truth.seen & truth.unseen), PARTIAL)
    state = state.masked_fill(truth.must & ~crossing, FULL)
    return state.masked_fill(~(truth.may & inside), EMPTY)


def _by_elements(mask: Traced, squares: _Squares, numbers: Tensor) -> Tensor:
    """State of each block, from all its elements at once."""
    extent = squares.extent
    place = squares.place(numbers)
    rows, columns = (
        min(block, length)
        for block, length in zip(extent.BLOCK_SIZE, (extent.Lq, extent.Lkv), strict=True)
    )
    # Rows past the last and keys past the length repeat the last one: that changes no state.
    row = place.row.view(-1, 1, 1, 1) + axis(slice(0, rows), 2, extent.device)
    key = place.key.view(-1, 1, 1, 1) + axis(slice(0, columns), 3, extent.device)
    length, offset = place.kv_len, place.q_offset
    if isinstance(length, Tensor):
        length = length.view(-1, 1, 1, 1)
    if isinstance(offset, Tensor):
        offset = offset.view(-1, 1, 1, 1)
    key = torch.minimum(key, torch.as_tensor(length - 1, device=extent.device))
    allowed = evaluate(
        mask,
        place.b.view(-1, 1, 1, 1),
        place.h.view(-1, 1, 1, 1),
        row.clamp(max=extent.Lq - 1) + offset,
        key,
    )
    state = reduced_states(allowed, Span(0, rows, 0, 1), Span(0, columns, 0, 1))
    state = state.reshape(-1).expand(len(numbers))
    crossing = place.key + extent.BLOCK_SIZE[1] > place.kv_len
    return torch.where(crossing, state.clamp(max=PARTIAL), state)
