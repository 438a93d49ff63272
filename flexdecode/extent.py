"""`Extent`: what tables are built for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdecode.problem import clamped_lengths

if TYPE_CHECKING:
    from flexdecode.packed import PackedQueries, Run
    from flexdecode.trace import Traced

__all__ = ["Extent"]


@dataclass(frozen=True, eq=False)
class Extent:
    """What tables are built for: sizes, lengths and positions of one call.

    Attributes
    ----------
    B, H : int
        Batch and query heads.
    Lq, Lkv : int
        Query rows, and capacity of the keys.
    kv_len : int or Tensor [B], int32 or int64
        Valid keys; tensor values are clamped to ``[0, Lkv - kv_start]``.
    q_offset : int, Tensor [B] of int32 or int64, or None
        Position of the first query row; None stands for ``kv_len - Lq``.
    BLOCK_SIZE : (int, int)
        Queries and keys of a block.
    device : torch.device
    kv_start : Tensor [B], int32 or int64, or None
        First slot of each sequence.
    packed : PackedQueries or None
        Rows of blocks are its tiles then, in tables of batch 1; `B` counts sequences.
    first_b : int
        What the mask sees as ``b`` of the first sequence.
    """

    B: int
    H: int
    Lq: int
    Lkv: int
    kv_len: int | Tensor
    q_offset: int | Tensor | None
    BLOCK_SIZE: tuple[int, int]
    device: torch.device
    kv_start: Tensor | None = None
    packed: PackedQueries | None = None
    first_b: int = 0

    def num_blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        columns = -(-self.Lkv // self.BLOCK_SIZE[1])
        if self.packed is not None:
            return self.packed.num_tiles, columns
        return -(-self.Lq // self.BLOCK_SIZE[0]), columns

    def table_batch(self) -> int:
        """First size of the tables."""
        return self.B if self.packed is None else 1

    def entries(self) -> int:
        """Blocks in all."""
        nQ, nKV = self.num_blocks()
        return self.table_batch() * self.H * nQ * nKV

    def cut(self, run: Run) -> Extent:
        """Extent of one run of packed queries."""

        def some(x: int | Tensor | None) -> int | Tensor | None:
            return x[run.sequences] if isinstance(x, Tensor) and x.dim() else x

        kv_len, start = some(self.kv_len), some(self.kv_start)
        assert kv_len is not None and not isinstance(start, int)
        return replace(
            self,
            B=run.count,
            Lq=run.q_len,
            kv_len=kv_len,
            q_offset=some(self.q_offset),
            kv_start=start,
            packed=None,
            first_b=self.first_b + run.first,
        )

    def for_mask(self, mask: Traced) -> Extent:
        """Return it with B and H of 1 where neither `mask` nor the lengths need them."""
        kv_len, q_offset = self.kv_len, self.q_offset
        if isinstance(kv_len, Tensor):
            kv_len = clamped_lengths(kv_len, self.kv_start, self.Lkv)
        if q_offset is None:
            q_offset = kv_len - self.Lq
        elif isinstance(q_offset, Tensor):
            q_offset = q_offset.to(torch.int64)
        return replace(self, kv_len=kv_len, q_offset=q_offset).for_kernels(mask)

    def for_kernels(self, mask: Traced) -> Extent:
        """`for_mask` without computing anything: kernels clamp lengths and derive positions."""
        uses = mask.graph.uses
        found = self._reduced.get(uses)
        if found is None:
            found = self._reduced[uses] = self._for_uses(uses)
        return found

    @functools.cached_property
    def _reduced(self) -> dict[frozenset[str], Extent]:
        return {}

    def _for_uses(self, uses: frozenset[str]) -> Extent:
        kv_len, q_offset = self.kv_len, self.q_offset
        if isinstance(kv_len, Tensor):
            kv_len = kv_len.expand(self.B)
        if "q_idx" not in uses:
            q_offset = 0
        elif isinstance(q_offset, Tensor):
            q_offset = q_offset.expand(self.B)
        by_batch = "b" in uses or isinstance(kv_len, Tensor) or isinstance(q_offset, Tensor)
        return replace(
            self,
            B=self.B if by_batch or self.packed is not None else 1,
            H=self.H if "h" in uses else 1,
            kv_len=kv_len,
            q_offset=q_offset,
            kv_start=self.kv_start if isinstance(kv_len, Tensor) else None,
        )
