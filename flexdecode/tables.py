"""From a mask and lengths to block tables: which key blocks hold an allowed element.

A block is *empty* (not listed), *partial* (some elements allowed; listed in ``kv_indices``) or
*full* (all allowed, none past ``kv_len``; listed in ``full_kv_indices``). The dense mask never
exists: the predicate is evaluated in chunks of bounded size and each chunk is reduced at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode.block_states import (
    EMPTY,
    FULL,
    PARTIAL,
    Strip,
    block_states,
    block_strips,
    packed_states,
)
from flexdecode.device_tables import (
    build_compact_device_tables,
    build_device_tables,
    update_device_tables,
)
from flexdecode.extent import Extent
from flexdecode.kernels.devices import is_capturing

if TYPE_CHECKING:
    from flexdecode.trace import Traced

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Extent",
    "Tables",
    "block_states",
    "build_into",
    "build_tables",
    "cached_tables",
    "table_states",
    "tables_from_mask_states",
]

_PADDED_ENTRIES = 1 << 22  # lists of bigger grids are as wide as their longest row only


@dataclass(frozen=True, eq=False)
class Tables:
    """Ordered lists of active blocks.

    Attributes
    ----------
    kv_num_blocks : Tensor, [Bt, Ht, nQ], int32
        Partial blocks of each row of blocks. ``Bt`` is 1 or B, ``Ht`` is 1, Hkv or Hq; 1 means
        that all share the row.
    kv_indices : Tensor, [Bt, Ht, nQ, C], int32
        Their block numbers; the first ``kv_num_blocks`` entries count.
    full_kv_num_blocks, full_kv_indices : Tensor or None
        The same for full blocks; both None when blocks were never told apart.
    BLOCK_SIZE : (int, int)
        Queries and keys of a block.
    num_kv_blocks : int
        Blocks along the keys; block numbers are below it. ``C`` may be smaller (compact lists).
    exact : bool
        Built for this very call: ascending, no listed block starts at or after ``kv_len`` and no
        full block crosses it. Otherwise a backend clips to ``kv_len`` itself.
    states : Tensor or None, [Bt, Ht, nQ, nKV], uint8
        The block states that the lists were made of, where they are kept.
    unions : dict of int to object
        Lists united for so many key heads; they move along when the tables are overwritten.
    laid_out : dict
        What a backend made of these very tensors.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    num_kv_blocks: int
    exact: bool
    states: Tensor | None = None
    unions: dict[int, Any] = field(default_factory=dict)
    laid_out: dict[Any, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, and launches nothing that was made for these."""
        return self.__dict__ | {"unions": {}, "laid_out": {}}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tables that are there."""
        found = (
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
        )
        return tuple(tensor for tensor in found if tensor is not None)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Counts and block numbers, of partial blocks and, where told apart, of full ones."""
        found = [(self.kv_num_blocks, self.kv_indices)]
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            found.append((self.full_kv_num_blocks, self.full_kv_indices))
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> Tables:
        """Return tables with every tensor replaced by ``change(tensor)``."""
        full_num, full = self.full_kv_num_blocks, self.full_kv_indices
        return replace(
            self,
            kv_num_blocks=change(self.kv_num_blocks),
            kv_indices=change(self.kv_indices),
            full_kv_num_blocks=None if full_num is None else change(full_num),
            full_kv_indices=None if full is None else change(full),
            states=None,
            unions={},
            laid_out={},
        )


def build_tables(mask: Traced, extent: Extent, *, compact: bool | None = None) -> Tables:
    """Build the exact tables of one call, on a GPU without synchronisation.

    Parameters
    ----------
    mask : Traced
        The predicate; it counts for rows below ``Lq`` and keys below ``kv_len`` only.
    extent : Extent
        Tables have size 1 along batch or heads where neither `mask` nor the lengths vary.
    compact : bool, optional
        See `tables_from_mask_states`.

    Returns
    -------
    Tables
    """
    if extent.packed is not None and extent.device.type != "cuda":
        states = packed_states(mask, extent)
        return tables_from_mask_states(states, extent.BLOCK_SIZE, exact=True, compact=False)
    if compact is None:
        own = extent.packed is None and extent.kv_start is None
        compact = own and extent.for_kernels(mask).entries() > _PADDED_ENTRIES
    if extent.device.type == "cuda":
        build = build_compact_device_tables if compact else build_device_tables
        return build(mask, extent.for_kernels(mask))
    if compact:
        return _compact_tables(block_strips(mask, extent), extent.for_mask(mask))
    return tables_from_mask_states(
        block_states(mask, extent), extent.BLOCK_SIZE, exact=True, compact=False
    )


def build_into(buffers: Tables, mask: Traced, extent: Extent) -> None:
    """Overwrite `buffers` with what `build_tables` would return for an extent of the same sizes.

    Addresses stay and a GPU is never waited for, so it can be captured in a graph.
    """
    if extent.device.type == "cuda":
        update_device_tables(mask, extent.for_kernels(mask), buffers)
        return
    for old, new in zip(
        buffers.tensors, build_tables(mask, extent, compact=False).tensors, strict=True
    ):
        old.copy_(new)


def tables_from_mask_states(
    states: Tensor,
    BLOCK_SIZE: tuple[int, int],
    *,
    exact: bool = False,
    compact: bool | None = None,
) -> Tables:
    """Turn block states into ordered lists.

    Parameters
    ----------
    states : Tensor, [Bt, Ht, nQ, nKV], uint8
        `EMPTY`, `PARTIAL` or `FULL`.
    BLOCK_SIZE : (int, int)
    exact : bool
        See `Tables`.
    compact : bool, optional
        Make lists as wide as the longest one (reads it from the device), not as the grid.
        Default: for huge grids only.

    Returns
    -------
    Tables
    """
    if compact is None:
        compact = states.numel() > _PADDED_ENTRIES
    partial_num, partial = _ordered(states == PARTIAL, compact)
    full_num, full = _ordered(states == FULL, compact)
    return Tables(partial_num, partial, full_num, full, BLOCK_SIZE, states.shape[-1], exact)


def _ordered(listed: Tensor, compact: bool) -> tuple[Tensor, Tensor]:
    """Counts ``[..., nQ]`` and ascending block numbers ``[..., nQ, C]`` of the True entries."""
    *rows, columns = listed.shape
    counts = listed.sum(-1, dtype=torch.int32)
    if compact:
        columns = int(counts.max()) if counts.numel() else 0
    if listed.device.type == "cpu" or listed.numel() == 0:
        indices = torch.zeros((*rows, columns), dtype=torch.int32, device=listed.device)
        if listed.numel() == 0:
            return counts, indices
        row, column = listed.reshape(-1, listed.shape[-1]).nonzero(as_tuple=True)
        if counts.numel() == 1:
            indices.view(-1)[: len(column)] = column
        elif len(column):
            # Entry j of all lists is entry j - (start of its row) of its own.
            flat = counts.view(-1)
            start = torch.arange(flat.numel(), device=flat.device) * columns - (
                flat.cumsum(0) - flat
            )
            indices.view(-1)[start[row] + torch.arange(len(row), device=flat.device)] = column.int()
        return counts, indices
    # Without synchronisation: unlisted blocks sort behind the listed ones.
    numbers = torch.arange(listed.shape[-1], dtype=torch.int32, device=listed.device)
    order = torch.where(listed, numbers, listed.shape[-1]).sort(-1).values[..., :columns]
    return counts, order.masked_fill(order == listed.shape[-1], 0)


@dataclass(frozen=True, eq=False)
class _Entries:
    """Listed blocks of a strip: counts [Bt, Ht, rows] and their columns, row by row."""

    first_row: int
    counts: Tensor
    columns: Tensor


def _compact_tables(strips: Iterator[Strip], extent: Extent) -> Tables:
    """Ordered lists as wide as the longest one, from states that come a strip at a time."""
    kinds: dict[int, list[_Entries]] = {PARTIAL: [], FULL: []}
    for strip in strips:
        rows = strip.states.reshape(-1, strip.states.shape[3])
        row, column = rows.nonzero(as_tuple=True)
        state = rows[row, column]
        column = (column + strip.first_column).to(torch.int32)
        for kind, entries in kinds.items():
            listed = state == kind
            counts = torch.bincount(row[listed], minlength=len(rows)).to(torch.int32)
            shape = strip.states.shape[:3]
            entries.append(_Entries(strip.first_row, counts.view(shape), column[listed]))
    partial, full = (_joined(entries, extent) for entries in kinds.values())
    return Tables(*partial, *full, extent.BLOCK_SIZE, extent.num_blocks()[1], True)


def _joined(parts: list[_Entries], extent: Extent) -> tuple[Tensor, Tensor]:
    shape = (extent.B, extent.H, extent.num_blocks()[0])
    counts = torch.zeros(shape, dtype=torch.int32, device=extent.device)
    for part in parts:
        counts[:, :, part.first_row : part.first_row + part.counts.shape[2]] = part.counts
    width = int(counts.max()) if counts.numel() else 0
    indices = torch.zeros((*shape, width), dtype=torch.int32, device=extent.device)
    place = torch.arange(width, device=extent.device)
    while parts:
        part = parts.pop()  # its memory is free again once it is copied
        into = indices[:, :, part.first_row : part.first_row + part.counts.shape[2]]
        into[place < part.counts[..., None]] = part.columns
    return counts, indices


def table_states(tables: Tables) -> Tensor:
    """Turn lists back into block states; entries past a count are ignored.

    Returns
    -------
    Tensor, [Bt, Ht, nQ, nKV], uint8
    """
    nKV = tables.num_kv_blocks
    shape = (*tables.kv_num_blocks.shape, nKV + 1)  # one more column takes what is not listed
    states = torch.zeros(shape, dtype=torch.uint8, device=tables.kv_num_blocks.device)
    _mark(states, tables.kv_num_blocks, tables.kv_indices, PARTIAL)
    if tables.full_kv_num_blocks is not None and tables.full_kv_indices is not None:
        _mark(states, tables.full_kv_num_blocks, tables.full_kv_indices, FULL)
    return states[..., :nKV].contiguous()


def _mark(states: Tensor, counts: Tensor, indices: Tensor, value: int) -> None:
    nKV = states.shape[-1] - 1
    place = torch.arange(indices.shape[-1], device=indices.device)
    listed = (place < counts[..., None]) & (indices >= 0) & (indices < nKV)
    states.scatter_(-1, torch.where(listed, indices, nKV).long(), value)


class _TableCache:
    """Tables that are a pure function of numbers, by value; the oldest go first."""

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.found: OrderedDict[tuple[object, ...], Tables] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> Tables | None:
        tables = self.found.get(key)
        if tables is not None:
            self.found.move_to_end(key)
        return tables

    def put(self, key: tuple[object, ...], tables: Tables) -> None:
        self.found[key] = tables
        while len(self.found) > self.entries:
            self.found.popitem(last=False)


_CACHE = _TableCache(entries=64)


def cached_tables(mask: Traced, extent: Extent) -> Tables:
    """`build_tables`, remembered where nothing but numbers goes in.

    A mask that captures tensors is never remembered: their values may change in place without
    leaving a trace.
    """
    kv_len, q_offset, device = extent.kv_len, extent.q_offset, extent.device
    pure = not (mask.captures or isinstance(kv_len, Tensor) or isinstance(q_offset, Tensor))
    pure = pure and extent.packed is None
    stream = 0
    if pure and device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        pure = not is_capturing(device)
    if not pure:
        return build_tables(mask, extent)
    H = extent.H if "h" in mask.graph.uses else 1
    B = extent.B if "b" in mask.graph.uses else 1
    params = tuple((type(number), number) for number in mask.params)
    key = (
        mask.graph.key,
        params,
        (B, H, extent.Lq, extent.Lkv, kv_len, q_offset),
        (extent.BLOCK_SIZE, device, stream),
    )
    tables = _CACHE.get(key)
    if tables is None:
        with torch.inference_mode(False), torch.no_grad():
            tables = build_tables(mask, extent)
        _CACHE.put(key, tables)
    return tables
