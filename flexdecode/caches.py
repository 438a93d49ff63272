"""Keys and values by logical position, wherever a cache keeps them: dense, from a start, in pages.

What torch operations need to read a cache; the Triton kernels work addresses out themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdecode.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from flexdecode.problem import Problem

__all__ = ["Cache", "CachePart"]


@dataclass(frozen=True, eq=False)
class Cache:
    """k or v of one call.

    Attributes
    ----------
    x : Tensor or QuantizedTensor, [B or 1, Hkv, Lkv, D], or [pages, Hkv, page_size, D]
    kv_start : Tensor [B], int32 or int64, or None
        First slot of each sequence.
    page_table : Tensor [B, entries], int32, or None
    kv_len : Tensor [B], int64
        Entries of the table past it are not read.
    dtype : torch.dtype
        Of rows that were quantised.
    """

    x: Tensor | QuantizedTensor
    kv_start: Tensor | None
    page_table: Tensor | None
    kv_len: Tensor | None
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls, x: Tensor | QuantizedTensor, problem: Problem, dtype: torch.dtype = torch.float32
    ) -> Cache:
        """See `x`, the k or v of `problem`, by logical position."""
        kv_len = None if problem.page_table is None else problem.kv_len_rows()
        return cls(x, problem.kv_start, problem.page_table, kv_len, dtype)

    def rows(self, take: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the rows that ``take`` picks: a view where it is one and nothing is quantised."""
        if isinstance(self.x, QuantizedTensor):
            return self.x.gathered(take, self.dtype)
        return take(self.x)

    @property
    def moved(self) -> bool:
        """True where positions are not slots."""
        return self.kv_start is not None or self.page_table is not None

    def gathered(self, b: Tensor, h: Tensor | slice, position: Tensor) -> Tensor:
        """Copy rows out of the cache.

        Parameters
        ----------
        b : Tensor, int64
            Sequences.
        h : Tensor, int64, or slice
            Key heads; a slice adds an axis of them in front of the last.
        position : Tensor, int64
            Broadcasts with `b`, and with `h` where that is a tensor. Past the valid keys it may
            be anything at all, and the row too.

        Returns
        -------
        Tensor, [..., D], or [..., heads, D]
        """
        slot = position if self.kv_start is None else position + self.kv_start[b]
        if self.page_table is not None and self.kv_len is not None:
            size = self.x.shape[2]
            entry = (slot // size).clamp(max=self.page_table.shape[1] - 1)
            page = self.page_table[b, entry].long().masked_fill(position >= self.kv_len[b], 0)
            first, slot = page, slot % size
        else:
            slot = slot.clamp(0, self.x.shape[2] - 1)
            first = b if self.x.shape[0] > 1 else torch.zeros_like(b)
        if isinstance(h, slice):
            return self.rows(lambda x: x[:, h].transpose(1, 2)[first, slot])
        return self.rows(lambda x: x[first, h, slot])

    def logical(self, batch: slice, capacity: int) -> Tensor:
        """All positions of some sequences: [n or 1, Hkv, capacity, D]."""
        part = CachePart(self, batch, slice(0, self.x.shape[1]))
        return part.cut(torch.arange(capacity, device=self.x.device))


@dataclass(frozen=True, eq=False)
class CachePart:
    """Some sequences and key heads of a cache."""

    cache: Cache
    batch: slice
    heads: slice

    @property
    def sequences(self) -> int:
        """Sequences that are read: 1 where they share their keys."""
        shared = self.cache.x.shape[0] == 1 and not self.cache.moved
        return 1 if shared else self.batch.stop - self.batch.start

    @property
    def copies(self) -> bool:
        """True where `cut` returns memory of its own for a slice."""
        cache = self.cache
        if cache.page_table is not None or isinstance(cache.x, QuantizedTensor):
            return True
        return cache.kv_start is not None and self.sequences > 1

    def cut(self, keys: slice | Tensor) -> Tensor:
        """Return some positions: [X or 1, Y, n, D], views of the cache where they can be."""
        cache = self.cache
        if not cache.moved:
            if isinstance(keys, slice):
                return cache.rows(lambda x: self._own(x)[:, :, keys])
            chosen = keys
            return cache.rows(lambda x: self._own(x).index_select(2, chosen))
        if not self.copies and isinstance(keys, slice) and cache.kv_start is not None:
            start = int(cache.kv_start[self.batch.start])
            there = slice(start + keys.start, start + keys.stop)
            return cache.rows(lambda x: self._own(x)[:, :, there])
        if isinstance(keys, slice):
            keys = torch.arange(keys.start, keys.stop, device=cache.x.device)
        b = torch.arange(self.batch.start, self.batch.stop, device=cache.x.device)
        return cache.gathered(b[:, None], self.heads, keys).transpose(1, 2)

    def _own(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.batch.stop - self.batch.start:
            x = x[self.batch]
        return x[:, self.heads]
