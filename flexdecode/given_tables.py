"""Tables that a caller made, for `BlockMask.from_kv_blocks` and `BlockMask.from_torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode.mask_arguments import block_size, cdiv, count
from flexdecode.tables import Tables

__all__ = ["checked_tables", "torch_arguments"]


def checked_tables(
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    BLOCK_SIZE: int | tuple[int, int],
    seq_lengths: tuple[int, int] | None,
) -> tuple[Tables, int, int | None]:
    """Check the arguments of `BlockMask.from_kv_blocks`.

    Returns
    -------
    tables : Tables
        Own views or copies, int32; the number of key blocks is -1 without `seq_lengths`.
    q_len : int
    kv_capacity : int or None
        None without `seq_lengths`.

    Raises
    ------
    ValueError, TypeError
        As `BlockMask.from_kv_blocks`.
    """
    nQ = _checked_pair("", kv_num_blocks, kv_indices, None)
    if full_kv_num_blocks is not None or full_kv_indices is not None:
        _checked_pair("full_", full_kv_num_blocks, full_kv_indices, kv_num_blocks)
    block = block_size(BLOCK_SIZE)
    q_len, capacity = nQ * block[0], None
    columns = -1  # not known before a call
    if seq_lengths is not None:
        if not isinstance(seq_lengths, (tuple, list)) or len(seq_lengths) != 2:
            raise TypeError(f"seq_lengths: expected (Q_LEN, KV_LEN), got {seq_lengths!r}")
        q_len = count("seq_lengths[0]", seq_lengths[0])
        capacity = count("seq_lengths[1]", seq_lengths[1])
        columns = cdiv(capacity, block[1])
        if cdiv(q_len, block[0]) != nQ:
            raise ValueError(
                f"seq_lengths: expected {nQ} blocks of {block[0]} queries to match "
                f"kv_num_blocks (shape {list(kv_num_blocks.shape)}), got {q_len} queries"
            )
    tables = Tables(
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, block, columns, False
    ).map(lambda table: table.detach().to(torch.int32))
    if kv_indices.device.type == "cpu":
        _check_numbers(tables)
    return tables, q_len, capacity


def _checked_pair(prefix: str, counts: Any, indices: Any, like: Tensor | None) -> int:
    """Check counts and their lists; return ``nQ``."""
    for name, table, dims in (("kv_num_blocks", counts, 3), ("kv_indices", indices, 4)):
        if not isinstance(table, Tensor):
            raise TypeError(f"{prefix}{name}: expected a Tensor, got {type(table).__name__}")
        if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
            raise TypeError(f"{prefix}{name}: expected an integer tensor, got {table.dtype}")
        if table.dim() != dims:
            wanted = "[B, H, nQ]" if dims == 3 else "[B, H, nQ, C]"
            raise ValueError(f"{prefix}{name}: expected shape {wanted}, got {list(table.shape)}")
    wanted_shape = counts.shape if like is None else like.shape
    device = counts.device if like is None else like.device
    for name, table in (("kv_num_blocks", counts), ("kv_indices", indices)):
        if table.shape[:3] != wanted_shape:
            raise ValueError(
                f"{prefix}{name}: expected first dims {list(wanted_shape)} to match "
                f"kv_num_blocks, got shape {list(table.shape)}"
            )
        if table.device != device:
            raise ValueError(
                f"{prefix}{name}: expected device {device} to match kv_num_blocks, "
                f"got {table.device}"
            )
    return int(wanted_shape[2])


def _check_numbers(tables: Tables) -> None:
    """Raise unless counts and block numbers are in range and no block is listed twice."""
    nKV = tables.num_kv_blocks
    seen: list[Tensor] = []
    for prefix, (counts, indices) in zip(("", "full_"), tables.pairs(), strict=False):
        if counts.numel() == 0:
            continue
        width = indices.shape[-1]
        low, high = int(counts.min()), int(counts.max())
        if low < 0 or high > width:
            raise ValueError(
                f"{prefix}kv_num_blocks: expected counts in [0, {width}], the width of "
                f"{prefix}kv_indices, got {low if low < 0 else high}"
            )
        listed = torch.arange(width, device=indices.device) < counts[..., None]
        inside = indices >= 0 if nKV < 0 else (indices >= 0) & (indices < nKV)
        if not bool((inside | ~listed).all()):
            wrong = int(indices[listed & ~inside][0])
            wanted = "numbers of at least 0" if nKV < 0 else f"numbers in [0, {nKV})"
            raise ValueError(f"{prefix}kv_indices: expected {wanted}, got {wrong}")
        # Every place that is not listed gets a number of its own.
        places = sum(part.shape[-1] for part in seen)
        spare = -1 - places - torch.arange(width, dtype=indices.dtype)
        seen.append(torch.where(listed, indices, spare))
    numbers = torch.cat(seen, -1).sort(-1).values if seen else torch.zeros(0, 1)
    twice = numbers[..., 1:] == numbers[..., :-1]
    if bool(twice.any()):
        wrong = int(numbers[..., 1:][twice][0])
        raise ValueError(f"kv_indices: expected each block once in a row, got {wrong} twice")


def torch_arguments(block_mask: Any) -> tuple[Any, ...]:
    """Arguments of `BlockMask.from_kv_blocks` that say what a ``BlockMask`` of torch says.

    Raises
    ------
    ValueError, TypeError
        As `BlockMask.from_torch`.
    """
    if not all(hasattr(block_mask, name) for name in ("mask_mod", "kv_indices", "BLOCK_SIZE")):
        raise TypeError(
            "block_mask: expected a BlockMask of torch.nn.attention.flex_attention, got "
            f"{type(block_mask).__name__}"
        )
    rule = block_mask.mask_mod
    name = getattr(rule, "__name__", "")
    if getattr(rule, "__module__", None) == "torch.nn.attention.flex_attention":
        if name == "noop_mask":
            rule = None
        elif name == "_sliced_mask_mod_error":
            raise ValueError(
                "block_mask: expected a mask with a mask_mod, got a torch slice, which has "
                "lost it; slice flexdecode's mask instead, or set .mask_mod"
            )
    nQ = block_mask.kv_num_blocks.shape[-1]
    q_len, kv_len = block_mask.seq_lengths
    return (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        block_mask.BLOCK_SIZE,
        rule,
        (min(q_len, nQ * block_mask.BLOCK_SIZE[0]), kv_len),  # slices keep the old length
    )
