"""How many blocks are empty, partial and full: in all, and in each list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexdecode.tables import FULL, PARTIAL

__all__ = ["BlockCounts", "Spread", "count_blocks", "valid_keys"]


class Spread(NamedTuple):
    """Blocks in all lists together, and the least, mean and most of one list."""

    total: int
    least: int
    mean: float
    most: int


@dataclass(frozen=True)
class BlockCounts:
    """Blocks of the lists that a call walks.

    A list belongs to one sequence, one head and one row of blocks. Blocks without a valid key are
    not counted.

    Attributes
    ----------
    BLOCK_SIZE : (int, int)
        Queries and keys of a block.
    lists : int
    heads : str
        Whose lists they are. In a call those of key heads: such a list holds what any query head of
        the group reads, and a block is full there when it is for all of them.
    partial, full, empty, active : Spread
        Active blocks are read: partial ones with the mask, full ones without.
    """

    BLOCK_SIZE: tuple[int, int]
    lists: int
    heads: str
    partial: Spread
    full: Spread
    empty: Spread
    active: Spread

    @property
    def blocks(self) -> int:
        """Blocks with a valid key."""
        return self.active.total + self.empty.total

    @property
    def share(self) -> float:
        """Share of the blocks that is read, between 0 and 1."""
        return self.active.total / self.blocks if self.blocks else 0.0

    def __str__(self) -> str:
        rows, columns = self.BLOCK_SIZE
        title = f"of {rows} x {columns}"
        lines = [f"{title:<14}{'total':>9}{'least':>9}{'mean':>9}{'most':>9}  of a list"]
        for name in ("active", "partial", "full", "empty"):
            total, least, mean, most = getattr(self, name)
            lines.append(f"  {name:<12}{total:>9}{least:>9}{mean:>9.1f}{most:>9}")
        lines.append(
            f"  {self.share:.1%} of {self.blocks} blocks are read; {self.lists} lists, for each "
            f"sequence, row of blocks and {self.heads}"
        )
        return "\n".join(lines)


def valid_keys(kv_len: int | Tensor, columns: int, KV_BLOCK: int) -> Tensor:
    """Keys below `kv_len` in each column of blocks: [B or 1, columns], int64, on the CPU."""
    lengths = torch.as_tensor(kv_len).reshape(-1, 1).cpu().long()
    return (lengths - torch.arange(columns) * KV_BLOCK).clamp(0, KV_BLOCK)


def count_blocks(
    states: Tensor, keys: Tensor, BLOCK_SIZE: tuple[int, int], B: int, heads: int, of: str
) -> BlockCounts:
    """Count blocks of every state.

    Parameters
    ----------
    states : Tensor, [B or 1, heads or 1, nQ, columns], uint8, on the CPU
    keys : Tensor, [B or 1, columns], int64
        See `valid_keys`; a full block that is cut counts as partial.
    BLOCK_SIZE : (int, int)
    B, heads : int
        A list that several share counts once for each.
    of : str
        See `BlockCounts.heads`.
    """
    keys = keys[:, None, None, :]
    valid = keys > 0
    full = (states == FULL) & (keys == BLOCK_SIZE[1])
    partial = ((states == FULL) | (states == PARTIAL)) & valid & ~full
    shape = (B, heads, states.shape[2])
    per_list = {
        "partial": partial.sum(-1).expand(shape),
        "full": full.sum(-1).expand(shape),
        "empty": (valid & ~full & ~partial).sum(-1).expand(shape),
    }
    per_list["active"] = per_list["partial"] + per_list["full"]
    spreads = {name: _spread(counts) for name, counts in per_list.items()}
    return BlockCounts(BLOCK_SIZE, B * heads * states.shape[2], of, **spreads)


def _spread(counts: Tensor) -> Spread:
    if counts.numel() == 0:
        return Spread(0, 0, 0.0, 0)
    total = int(counts.sum())
    return Spread(total, int(counts.min()), total / counts.numel(), int(counts.max()))
