"""Records of one attention call: what is asked for, what a backend gets, what it gives back."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexdecode.mask_resolution import ResolvedMask
    from flexdecode.packed import PackedQueries
    from flexdecode.quantized_tensor import QuantizedTensor
    from flexdecode.trace import Traced

__all__ = ["Problem", "Request", "Result"]


@dataclass(frozen=True, eq=False)
class Problem:
    """The sizes, lengths and positions of one call, checked.

    Sizes are Python ints; lengths and positions are data: an int when all sequences share it, or
    a tensor on ``device`` that is never read on the host.

    Attributes
    ----------
    B, Hq, Hkv, G, Lq, Lkv, D, Dv, Bkv : int
        Sequences, query heads, key heads, ``Hq // Hkv``, query rows (of all sequences where they
        are packed), slots that a sequence can reach, head dims of q/k and of v, and the first size
        of k/v (B, 1 when shared, or the number of pages).
    scale : float
        Multiplies the dot product.
    dtype, device
        Those of q; bfloat16 where q is quantised.
    kv_len : int or Tensor [B], int32 or int64
        Valid keys; a tensor may hold values outside ``[0, Lkv - kv_start]``, see `kv_len_rows`.
    offset : int, Tensor [B], int64, or None
        Position of each sequence's first query row; None stands for ``kv_len - Lq`` of a tensor
        ``kv_len`` or of packed queries, which kernels work out themselves. `q_offset` works it out
        here, where queries are not packed.
    kv_start : Tensor [B], int32 or int64, or None
        First slot of each sequence; ``kv_len`` is a tensor then.
    page_table : Tensor [B, entries], int32, or None
        Pages of each sequence's slots.
    page_size : int
        Slots of a page, or 0.
    packed : PackedQueries or None
        Which rows of q are whose; q then has a batch of 1.
    first_b : int
        What mods see as ``b`` of the first sequence.
    """

    B: int
    Hq: int
    Hkv: int
    G: int
    Lq: int
    Lkv: int
    D: int
    Dv: int
    Bkv: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    kv_len: int | Tensor
    offset: int | Tensor | None
    kv_start: Tensor | None = None
    page_table: Tensor | None = None
    page_size: int = 0
    packed: PackedQueries | None = None
    first_b: int = 0

    @property
    def q_batch(self) -> int:
        """First size of q and of the output."""
        return self.B if self.packed is None else 1

    @functools.cached_property
    def q_offset(self) -> int | Tensor:
        """Position of each sequence's first query row: int or Tensor [B], int64."""
        if self.offset is not None:
            return self.offset
        if isinstance(self.kv_len, Tensor):
            return self.kv_len_rows() - self.Lq
        return self.kv_len - self.Lq

    def kv_len_rows(self) -> Tensor:
        """Valid keys of each sequence: Tensor [B], int64, within ``[0, Lkv - kv_start]``."""
        if isinstance(self.kv_len, Tensor):
            return clamped_lengths(self.kv_len, self.kv_start, self.Lkv)
        return torch.full((self.B,), self.kv_len, dtype=torch.int64, device=self.device)

    def q_offset_rows(self) -> Tensor:
        """Position of each sequence's first query row: Tensor [B], int64."""
        if isinstance(self.q_offset, Tensor):
            return self.q_offset
        return torch.full((self.B,), self.q_offset, dtype=torch.int64, device=self.device)


def clamped_lengths(kv_len: Tensor, kv_start: Tensor | None, capacity: int) -> Tensor:
    """Lengths [B], int64, between none and what the slots from `kv_start` on can hold."""
    kv_len = kv_len.to(torch.int64)
    if kv_start is None:
        return kv_len.clamp(0, capacity)
    return torch.minimum(kv_len, capacity - kv_start.to(torch.int64)).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Request:
    """One attention call, ready to run: what every backend's ``run`` takes.

    Attributes
    ----------
    q : Tensor or QuantizedTensor, [B, Hq, Lq, D], or [1, Hq, Lq, D] where packed
    k : Tensor or QuantizedTensor, [Bkv, Hkv, Lkv, D], or [Bkv, Hkv, page_size, D] with a page table
    v : Tensor or QuantizedTensor, like k with Dv; of a format of its own
    problem : Problem
        Its offset is already the mask's own where the mask has one.
    score : Traced or None
        The score rule.
    resolved : ResolvedMask or None
        Predicate and tables for this very call; None when every key may be attended.
    bias : Tensor [B or 1, Hq or 1, Lq, Lkv] or None
        Added to the scaled score before ``score``.
    sinks : Tensor [Hq] or None
        One logit a head that joins the denominator once.
    want_lse, want_max : bool
        Which statistics to return.
    options : dict
        Checked ``kernel_options``.
    """

    q: Tensor | QuantizedTensor
    k: Tensor | QuantizedTensor
    v: Tensor | QuantizedTensor
    problem: Problem
    score: Traced | None
    resolved: ResolvedMask | None
    bias: Tensor | None
    sinks: Tensor | None
    want_lse: bool
    want_max: bool
    options: dict[str, Any]


class Result(NamedTuple):
    """What a backend returns.

    Attributes
    ----------
    out : Tensor, [B, Hq, Lq, Dv], dtype of q
    lse, max_scores : Tensor [B, Hq, Lq], float32 (float64 from the reference), or None
        Natural log and natural units; ``-inf`` where nothing is allowed.
    repeatable : callable (dict of str to Tensor) -> Result or None, or None
        Runs calls that differ in their tensors alone, where the backend can.
    """

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None
    repeatable: Callable[[dict[str, Tensor]], Result | None] | None = None
