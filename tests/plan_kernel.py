"""The kernels' balanced plan on its own, for comparison with its twin in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.worklist import place_rows, plan_items


@triton.jit
def _plan_kernel(out_ptr, num_ptr, rows, slots, ROWS: tl.constexpr):
    lists = (num_ptr, None, 1, 1)
    lengths = (None, 0, 0, None, 0, 0)
    row = tl.arange(0, ROWS)
    where = place_rows(row, 1, 1, True, True)
    plan = plan_items(where, lengths, lists, rows, slots, None, ROWS, 16, 16)
    tl.store(out_ptr + row, plan.items, mask=row < rows)


def planned_items(units: Tensor, slots: int) -> list[int]:
    """Items of every row, as the kernels work them out."""
    out = torch.zeros(len(units), dtype=torch.int32)
    _plan_kernel[(1,)](out, units.int(), len(units), slots, ROWS=128)
    return out.tolist()
