"""A kernel that only reads: what the device's memory gives at best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["read_sums"]


@triton.jit
def _read_sums(words_ptr, sums_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        total += tl.load(words_ptr + offsets + step * BLOCK)
    tl.store(sums_ptr + program, tl.sum(total))


def read_sums(words: Tensor, block: int, steps: int, num_warps: int) -> Tensor:
    """Sum int32 words in stretches of ``block * steps``; a remainder is left out.

    Parameters
    ----------
    words : Tensor, [N], int32
    block, steps, num_warps : int
        Words loaded at a time, loads of a program, its warps.

    Returns
    -------
    Tensor, [N // (block * steps)], int32
        The sums, modulo 2**32.
    """
    programs = words.numel() // (block * steps)
    sums = torch.empty(programs, dtype=torch.int32, device=words.device)
    _read_sums[(programs,)](words, sums, block, steps, num_warps=num_warps)
    return sums
