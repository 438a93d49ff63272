"""Tables built by kernels, where the tensors are: in two launches and without synchronisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from flexdecode.kernels import ahead
from flexdecode.kernels.devices import is_capturing, on_device

if TYPE_CHECKING:
    from flexdecode.kernels.launch import BoundLaunch
    from flexdecode.kernels.tables import TableBuffers
    from flexdecode.tables import Extent, Tables
    from flexdecode.trace import Traced

__all__ = [
    "build_compact_device_tables",
    "build_device_tables",
    "order_lists",
    "unite_heads",
    "update_device_tables",
]

_MANY_ELEMENTS = 1 << 24  # fewer are evaluated in no more time than intervals take
_TALL_BLOCK = 8  # query rows from which on a block's corners are few beside its elements
_MOST_KEYS = 8192  # of a block: a program holds the mask of one query row over it
_STRIP_STATES = 1 << 26  # block states held at a time while compact lists are made


def build_device_tables(mask: Traced, extent: Extent) -> Tables:
    """Build the tables of `extent`.

    Parameters
    ----------
    mask : Traced
    extent : Extent
        Already reduced by `Extent.for_kernels`.

    Returns
    -------
    Tables
        Padded: as wide as the grid. Entries past a count are undefined.
    """
    from flexdecode.tables import Tables

    nQ, nKV = extent.num_blocks()
    shape = (extent.table_batch(), extent.H, nQ, nKV)
    own = _kernels().TableBuffers.empty(*shape, device=extent.device)
    tables = Tables(
        own.kv_num_blocks,
        own.kv_indices,
        own.full_kv_num_blocks,
        own.full_kv_indices,
        extent.BLOCK_SIZE,
        nKV,
        True,
        own.state,
        laid_out={"buffers": own},
    )
    ahead.tables_made(tables)
    _fill(mask, extent, own, ())
    return tables


def update_device_tables(mask: Traced, extent: Extent, tables: Tables) -> None:
    """Overwrite tables that `build_device_tables` made for an extent of these sizes.

    Lists united for key heads follow: two launches in all, or one. They are kept, and made again as
    they are until the mask, the extent or the number of united lists is another.
    """
    kernels = _kernels()
    mask = kernels.captures_moved(mask, extent.device)
    mod = kernels.lowered(mask, extent.device)
    kept: _Update | None = tables.laid_out.get("update")
    if kept is not None and kept.holds(mod, extent, tables):
        with on_device(extent.device):
            for launch in kept.launches:
                launch()
        return
    own = tables.laid_out.get("buffers")
    if own is None:  # the same tensors in another object
        own = tables.laid_out["buffers"] = kernels.TableBuffers(
            tables.states,
            tables.kv_num_blocks,
            tables.kv_indices,
            tables.full_kv_num_blocks,
            tables.full_kv_indices,
        )
    launches = _fill(mask, extent, own, tuple(tables.unions.values()))
    tables.laid_out["update"] = _Update(mod, extent, len(tables.unions), launches)


@dataclass(frozen=True, eq=False)
class _Update:
    """Launches of an update, and what they were made for."""

    mod: tuple[Any, tuple[Any, ...]]  # the mask's function and arguments, as `lower` returns them
    extent: Extent
    unions: int
    launches: list[BoundLaunch]

    def holds(self, mod: tuple[Any, tuple[Any, ...]], extent: Extent, tables: Tables) -> bool:
        """True where the same launches would be made."""
        same = self.mod is mod and self.extent is extent
        return same and self.unions == len(tables.unions)


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
    from flexdecode.tables import Tables

    kernels = _kernels()

    nQ, nKV = extent.num_blocks()
    shape = (extent.table_batch(), extent.H, nQ)
    rows = math.prod(shape)
    counts = torch.zeros((2, rows), dtype=torch.int32, device=extent.device)
    most = min(max(_STRIP_STATES // max(nKV, 1), 1), rows)
    states = torch.empty((most, nKV), dtype=torch.uint8, device=extent.device)
    strips = range(0, rows, most) if states.numel() else range(0)
    with on_device(extent.device):
        for first in strips:
            part = states[: rows - first]
            _decide(mask, extent, part, first)
            kernels.launch_count(part, *counts[:, first : first + most])
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
            kernels.launch_compact(kernels.TableBuffers(*(table[None, None] for table in lists)))
    return Tables(
        counts[0].view(shape),
        partial.view(*shape, widths[0]),
        counts[1].view(shape),
        full.view(*shape, widths[1]),
        extent.BLOCK_SIZE,
        nKV,
        True,
    )


def order_lists(tables: Tables, Hkv: int) -> TableBuffers:
    """One ascending list for each row, of partial and full blocks alike, made at every call.

    Parameters
    ----------
    tables : Tables
    Hkv : int
        Lists for each query head are united for each key head.

    Returns
    -------
    TableBuffers
        ``state`` tells partial and full blocks apart, and has as many heads as `tables`.
    """
    from flexdecode.tables import PARTIAL, table_states

    kernels = _kernels()
    states = table_states(tables) if tables.states is None else tables.states
    B, heads, nQ, nKV = states.shape
    buffers = kernels.TableBuffers.empty(B, min(heads, Hkv), nQ, nKV, states.device, states=False)
    buffers = replace(buffers, state=states.clamp(max=PARTIAL))
    with on_device(states.device):
        kernels.launch_compact(buffers)
    lists: TableBuffers = replace(buffers, state=states)
    return lists


def unite_heads(tables: Tables, Hkv: int) -> TableBuffers:
    """Lists for each key head, of blocks that any query head of its group lists.

    They are made once for given tables, and again whenever `update_device_tables` overwrites those.

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
    from flexdecode.tables import table_states

    kernels = _kernels()
    union: TableBuffers | None = tables.unions.get(Hkv)
    if union is None:
        states = table_states(tables) if tables.states is None else tables.states
        B, _, nQ, nKV = states.shape
        union = replace(
            kernels.TableBuffers.empty(B, Hkv, nQ, nKV, states.device, states=False), state=states
        )
        with on_device(states.device):
            kernels.launch_compact(union)
        # Given lists may change in place between two calls.
        if tables.states is not None and not is_capturing(states.device):
            tables.unions[Hkv] = union
    return union


def _fill(
    mask: Traced, extent: Extent, buffers: TableBuffers, unions: Sequence[TableBuffers]
) -> list[BoundLaunch]:
    """Write states and lists, by the way that takes less time; return what was launched."""
    kernels = _kernels()
    with on_device(extent.device):
        if _gains_by_intervals(extent):
            decided = _decide(mask, extent, buffers.state, 0)
            return [*decided, *kernels.launch_compact(buffers, unions)]
        mod = kernels.Mod(*kernels.lowered(mask, extent.device))
        return list(kernels.launch_tables(mod, buffers, unions=unions, **_positions(extent)))


def _gains_by_intervals(extent: Extent) -> bool:
    height = min(extent.BLOCK_SIZE[0], extent.Lq)
    elements = extent.entries() * height * extent.BLOCK_SIZE[1]
    return height >= _TALL_BLOCK and elements >= _MANY_ELEMENTS


def _decide(mask: Traced, extent: Extent, state: torch.Tensor, first_row: int) -> list[BoundLaunch]:
    """Write the states of the rows of blocks from `first_row` on that `state` holds."""
    kernels = _kernels()
    launches: list[BoundLaunch] = kernels.launch_intervals(
        kernels.Mod(*kernels.lowered(mask, extent.device)),
        kernels.lower_intervals(mask),
        state,
        shape=(extent.table_batch(), extent.H, *extent.num_blocks()),
        first_row=first_row,
        **_positions(extent),
    )
    return launches


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


@functools.cache
def _kernels() -> Any:
    """What needs Triton, imported once: every update asks for it."""
    from flexdecode.codegen import captures_moved, lower
    from flexdecode.interval_codegen import lower_intervals
    from flexdecode.kernels import interval_tables, tables
    from flexdecode.kernels.call import Mod
    from flexdecode.mod_text import Flavour

    def lowered(mask: Traced, device: torch.device) -> tuple[Any, tuple[Any, ...]]:
        on_gpu = device.type == "cuda"
        flavour: Flavour = "interpret" if not on_gpu else "hip" if torch.version.hip else "cuda"
        return lower(captures_moved(mask, device), flavour)

    return SimpleNamespace(
        TableBuffers=tables.TableBuffers,
        launch_compact=tables.launch_compact,
        launch_count=tables.launch_count,
        launch_tables=tables.launch_tables,
        launch_intervals=interval_tables.launch_intervals,
        lower_intervals=lower_intervals,
        lowered=lowered,
        captures_moved=captures_moved,
        Mod=Mod,
    )
