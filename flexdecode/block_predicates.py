"""Predicates that stand for tables: membership in the listed blocks, and slices of a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexdecode.checks import as_int
from flexdecode.tables import FULL, PARTIAL, Tables, table_states

__all__ = ["MaskRule", "Pick", "membership", "picked", "with_rows"]

MaskRule = Callable[[Any, Any, Any, Any], Any]  # (b, h, q_idx, kv_idx) -> bool


def membership(
    tables: Tables, rule: MaskRule | None, q_offset: int | Tensor, heads_per_list: int
) -> MaskRule:
    """Return what `tables` and `rule` allow together, as one predicate.

    Parameters
    ----------
    tables : Tables
    rule : callable or None
        The predicate of partial blocks; None when it is trivially true.
    q_offset : int or Tensor [B]
        Position of the first row of the tables.
    heads_per_list : int
        Query heads that share a list, when there are lists for each key head.
    """
    states = table_states(tables)
    rows, columns = tables.BLOCK_SIZE
    shared_batch, shared_heads = states.shape[0] == 1, states.shape[1] == 1
    by_batch = isinstance(q_offset, Tensor) and q_offset.numel() > 1
    shared = q_offset.reshape(()) if isinstance(q_offset, Tensor) and not by_batch else q_offset

    def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        offset = q_offset[b] if by_batch else shared  # type: ignore[index]
        row = (q_idx - offset) // rows
        batch = 0 if shared_batch else b
        head = 0 if shared_heads else h // heads_per_list
        state = states[batch, head, row, kv_idx // columns]
        inside = (row >= 0) & (kv_idx >= 0)
        if rule is None:
            return (state >= PARTIAL) & inside
        allowed = rule(b, h, q_idx, kv_idx)
        return ((state == FULL) | ((state == PARTIAL) & allowed)) & inside

    return listed


@dataclass(frozen=True)
class Pick:
    """A selection along one axis: entry ``j`` is entry ``numbers[j]`` of before.

    Attributes
    ----------
    numbers : tuple of int
    size : int
        Of the axis before.
    """

    numbers: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, index: Any, size: int, axis: int) -> Pick:
        """Read an int, slice, list or tensor; an int keeps the axis, with one entry.

        Raises
        ------
        IndexError
            An entry is out of range.
        TypeError
            The index is of another kind.
        """
        if isinstance(index, slice):
            return cls(tuple(range(size)[index]), size)
        if isinstance(index, (list, tuple)):
            index = torch.tensor(index)
        if isinstance(index, Tensor):
            if index.dtype == torch.bool:
                index = index.nonzero()
            elif index.is_floating_point():
                raise TypeError(f"index {axis}: expected integers, got {index.dtype}")
            numbers = [int(i) for i in index.reshape(-1).tolist()]
        elif (one := as_int(index)) is not None:
            numbers = [one]
        else:
            raise TypeError(
                f"index {axis}: expected an int, slice or tensor, got {type(index).__name__}"
            )
        for number in numbers:
            if not -size <= number < size:
                raise IndexError(f"index {axis}: {number} is out of range for size {size}")
        return cls(tuple(number % size for number in numbers), size)

    @property
    def is_everything(self) -> bool:
        """True where nothing is left out or moved."""
        return self.numbers == tuple(range(self.size))

    @property
    def is_run(self) -> bool:
        """True where the entries are consecutive."""
        return self.numbers == tuple(range(self.first, self.first + len(self.numbers)))

    @property
    def first(self) -> int:
        """The first entry's number before."""
        return self.numbers[0] if self.numbers else 0

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Select along `dim`; an axis of size 1 is shared by all entries and stays."""
        if self.is_everything or (tensor.shape[dim] == 1 and self.size != 1):
            return tensor
        if self.is_run:
            return tensor.narrow(dim, self.first, len(self.numbers))
        numbers = torch.tensor(self.numbers, dtype=torch.int64, device=tensor.device)
        return tensor.index_select(dim, numbers)

    def rule(self, device: torch.device) -> Callable[[Any], Any]:
        """Return the map from an entry's number now to the one before."""
        first = self.first
        if len(self.numbers) == 1:
            return lambda now: first
        if self.is_run:
            return lambda now: now + first
        numbers = torch.tensor(self.numbers, dtype=torch.int64, device=device)
        return lambda now: numbers[now]


def picked(rule: MaskRule, b: Pick, h: Pick, device: torch.device) -> MaskRule:
    """Return `rule` for a selection of batch rows and heads."""
    if not b.is_everything:
        rule = _with_batch(rule, b.rule(device))
    if not h.is_everything:
        rule = _with_heads(rule, h.rule(device))
    return rule


def _with_batch(rule: MaskRule, before: Callable[[Any], Any]) -> MaskRule:
    return lambda b, h, q_idx, kv_idx: rule(before(b), h, q_idx, kv_idx)


def _with_heads(rule: MaskRule, before: Callable[[Any], Any]) -> MaskRule:
    return lambda b, h, q_idx, kv_idx: rule(b, before(h), q_idx, kv_idx)


def with_rows(rule: MaskRule, rows: Pick, q_offset: int | Tensor, block: int) -> MaskRule:
    """Return `rule` for blocks of rows that are not consecutive.

    Parameters
    ----------
    rule : callable
    rows : Pick
        Numbers of the blocks of rows.
    q_offset : int or Tensor [B]
        Position of the first row of the selection, and with it of block ``rows.first``.
    block : int
        Rows of a block.
    """
    moved = [(number - rows.first - now) * block for now, number in enumerate(rows.numbers)]
    device = q_offset.device if isinstance(q_offset, Tensor) else None
    shift = torch.tensor(moved, dtype=torch.int64, device=device)

    def scattered(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        offset = q_offset[b] if isinstance(q_offset, Tensor) else q_offset
        return rule(b, h, q_idx + shift[(q_idx - offset) // block], kv_idx)

    return scattered
