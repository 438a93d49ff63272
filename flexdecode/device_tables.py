"""Tables built by kernels, where the tensors are: two launches and no synchronisation."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flexdecode.kernels.tables import TableBuffers
    from flexdecode.tables import Extent, Tables
    from flexdecode.trace import Traced

__all__ = ["build_device_tables", "unite_heads"]


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
    from flexdecode.kernels.tables import TableBuffers, launch_compact
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
    _launch(mask, extent, own)
    for union in buffers.unions.values() if buffers is not None else ():
        launch_compact(union)
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


def _launch(mask: Traced, extent: Extent, buffers: object) -> None:
    from flexdecode.codegen import Flavour, captures_moved, lower
    from flexdecode.kernels.call import Mod
    from flexdecode.kernels.tables import TableBuffers, launch_tables

    assert isinstance(buffers, TableBuffers)
    on_gpu = extent.device.type == "cuda"
    flavour: Flavour = "interpret" if not on_gpu else "hip" if torch.version.hip else "cuda"
    with torch.cuda.device(extent.device) if on_gpu else contextlib.nullcontext():
        launch_tables(
            Mod(*lower(captures_moved(mask, extent.device), flavour)),
            buffers,
            kv_len=extent.kv_len,
            q_offset=extent.q_offset,
            Lq=extent.Lq,
            Lkv=extent.Lkv,
            BLOCK_SIZE=extent.BLOCK_SIZE,
            kv_start=extent.kv_start,
            tiles=None if extent.packed is None else extent.packed.tiles,
        )
