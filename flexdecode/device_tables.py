"""Tables built by kernels, where the tensors are: in two launches and without synchronisation."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flexdecode.kernels.call import Mod
    from flexdecode.kernels.tables import TableBuffers
    from flexdecode.tables import Extent, Tables
    from flexdecode.trace import Traced

__all__ = ["build_compact_device_tables", "build_device_tables", "unite_heads"]

_MANY_ELEMENTS = 1 << 24  # fewer are evaluated in no more time than intervals take
_TALL_BLOCK = 8  # query rows from which on a block's corners are few beside its elements
_MOST_KEYS = 8192  # of a block: a program holds the mask of one query row over it
_STRIP_STATES = 1 << 26  # block states held at a time while compact lists are made


def build_device_tables(mask: Traced, extent: Extent, buffers: Tables | None = None) -> Tables:
    """Build the tables of `extent`, or overwrite `buffers` of the same sizes with them.

    Parameters
    ----------
    mask : Traced
    extent : Extent
        Already reduced by `Extent.for_mask`.
    buffers : Tables, optional
        Padded tables with full lists, contiguous.

    Returns
    -------
    Tables
        Padded: as wide as the grid. Entries past a count are undefined.
    """
    from flexdecode.kernels.tables import TableBuffers
    from flexdecode.tables import Tables

    nQ, nKV = extent.num_blocks()
    shape = (extent.table_batch(), extent.H, nQ, nKV)
    if buffers is None:
        own = TableBuffers.empty(*shape, device=extent.device)
    else:
        full_num, full, state = (
            buffers.full_kv_num_blocks,
            buffers.full_kv_indices,
            buffers.states,
        )
        assert full_num is not None and full is not None and state is not None
        own = TableBuffers(state, buffers.kv_num_blocks, buffers.kv_indices, full_num, full)
    _fill(mask, extent, own, tuple(buffers.unions.values()) if buffers is not None else ())
    return Tables(
        own.kv_num_blocks,
        own.kv_indices,
        own.full_kv_num_blocks,
        own.full_kv_indices,
        extent.BLOCK_SIZE,
        nKV,
        True,
        own.state,
        {} if buffers is None else buffers.unions,
    )


def build_compact_device_tables(mask: Traced, extent: Extent) -> Tables:
    """Build tables as wide as their longest rows; reads the two widths back from the device.

    Block states exist for some rows at a time. Where one strip holds all rows they are evaluated
    once, else once to count and once to list.

    Parameters
    ----------
    mask : Traced
    extent : Extent
        Already reduced by `Extent.for_kernels`.

    Returns
    -------
    Tables
    """
    from flexdecode.kernels.tables import TableBuffers, launch_compact, launch_count
    from flexdecode.tables import Tables

    nQ, nKV = extent.num_blocks()
    shape = (extent.table_batch(), extent.H, nQ)
    rows = math.prod(shape)
    counts = torch.zeros((2, rows), dtype=torch.int32, device=extent.device)
    most = min(max(_STRIP_STATES // max(nKV, 1), 1), rows)
    states = torch.empty((most, nKV), dtype=torch.uint8, device=extent.device)
    strips = range(0, rows, most) if states.numel() else range(0)
    with _on(extent.device):
        for first in strips:
            part = states[: rows - first]
            _decide(mask, extent, part, first)
            launch_count(part, *counts[:, first : first + most])
        widths = counts.amax(1).tolist() if rows else (0, 0)
        partial, full = (
            torch.zeros((rows, width), dtype=torch.int32, device=extent.device) for width in widths
        )
        for first in strips:
            part = states[: rows - first]
            if len(strips) > 1:
                _decide(mask, extent, part, first)
            here = slice(first, first + most)
            lists = [part, counts[0, here], partial[here], counts[1, here], full[here]]
            launch_compact(TableBuffers(*(table[None, None] for table in lists)))
    return Tables(
        counts[0].view(shape),
        partial.view(*shape, widths[0]),
        counts[1].view(shape),
        full.view(*shape, widths[1]),
        extent.BLOCK_SIZE,
        nKV,
        True,
    )


def unite_heads(tables: Tables, Hkv: int) -> TableBuffers:
    """Lists for each key head, of blocks that any query head of its group lists.

    They are made once for given tables, and again whenever `build_device_tables` overwrites those.

    Parameters
    ----------
    tables : Tables
        With lists for each of Hq query heads.
    Hkv : int
        Divides Hq.

    Returns
    -------
    TableBuffers
        ``state`` has Hq heads, the lists have Hkv.
    """
    from flexdecode.kernels.tables import TableBuffers, launch_compact
    from flexdecode.tables import table_states

    union = tables.unions.get(Hkv)
    if union is None:
        states = table_states(tables) if tables.states is None else tables.states
        B, _, nQ, nKV = states.shape
        union = dataclasses.replace(
            TableBuffers.empty(B, Hkv, nQ, nKV, states.device, states=False), state=states
        )
        launch_compact(union)
        if tables.states is not None:  # given lists may change in place between two calls
            tables.unions[Hkv] = union
    return union


def _fill(
    mask: Traced, extent: Extent, buffers: TableBuffers, unions: Sequence[TableBuffers]
) -> None:
    """Write states and lists, by the way that takes less time."""
    from flexdecode.kernels.tables import launch_compact, launch_tables

    with _on(extent.device):
        if _gains_by_intervals(extent):
            _decide(mask, extent, buffers.state, 0)
            launch_compact(buffers, unions)
            return
        launch_tables(_lowered(mask, extent.device), buffers, unions=unions, **_positions(extent))


def _gains_by_intervals(extent: Extent) -> bool:
    height = min(extent.BLOCK_SIZE[0], extent.Lq)
    elements = extent.entries() * height * extent.BLOCK_SIZE[1]
    return height >= _TALL_BLOCK and elements >= _MANY_ELEMENTS


def _decide(mask: Traced, extent: Extent, state: torch.Tensor, first_row: int) -> None:
    """Write the states of the rows of blocks from `first_row` on that `state` holds."""
    from flexdecode.interval_codegen import lower_intervals
    from flexdecode.kernels.interval_tables import launch_intervals

    launch_intervals(
        _lowered(mask, extent.device),
        lower_intervals(mask),
        state,
        shape=(extent.table_batch(), extent.H, *extent.num_blocks()),
        first_row=first_row,
        **_positions(extent),
    )


def _positions(extent: Extent) -> dict[str, Any]:
    """Sizes, lengths and positions, as the launchers take them.

    Raises
    ------
    ValueError
        A block is wider than a program can hold.
    """
    keys = extent.BLOCK_SIZE[1]
    if keys > _MOST_KEYS:
        raise ValueError(
            f"BLOCK_SIZE: expected at most {_MOST_KEYS} keys a block in kernels, got {keys}; "
            "smaller blocks skip more as well"
        )
    return {
        "kv_len": extent.kv_len,
        "q_offset": extent.q_offset,
        "Lq": extent.Lq,
        "Lkv": extent.Lkv,
        "BLOCK_SIZE": extent.BLOCK_SIZE,
        "kv_start": extent.kv_start,
        "tiles": None if extent.packed is None else extent.packed.tiles,
    }


def _lowered(mask: Traced, device: torch.device) -> Mod:
    from flexdecode.codegen import Flavour, captures_moved, lower
    from flexdecode.kernels.call import Mod

    on_gpu = device.type == "cuda"
    flavour: Flavour = "interpret" if not on_gpu else "hip" if torch.version.hip else "cuda"
    return Mod(*lower(captures_moved(mask, device), flavour))


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield
