"""The kernels' balanced plan on its own, for comparison with its twin in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.worklist import plan_items


@triton.jit
def _plan_kernel(out_ptr, num_ptr, rows, inner, processors, ROWS: tl.constexpr):
    lists = (num_ptr, None, 1, 1)
    numbering = (rows, 1, 1, inner, 1, processors)
    items, _ = plan_items((None, 0, 0, None, 0, 0), lists, numbering, None, ROWS, 16, 16)
    row = tl.arange(0, ROWS)
    tl.store(out_ptr + row, items, mask=row < rows)


def planned_items(units: Tensor, inner: int, processors: int) -> list[int]:
    """Items of every row, as the kernels work them out."""
    out = torch.zeros(len(units), dtype=torch.int32)
    _plan_kernel[(1,)](out, units.int(), len(units), inner, processors, ROWS=128)
    return out.tolist()
