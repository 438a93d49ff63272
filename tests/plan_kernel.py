"""The kernels' balanced plan on its own, for comparison with its twin in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.layout import fair_items
from flexdecode.kernels.worklist import number_items, place_rows, plan_items


@triton.jit
def _plan_kernel(
    items_ptr, shares_ptr, firsts_ptr, num_ptr, rows, num_splits, slots, ROWS: tl.constexpr
):
    lists = (num_ptr, None, 1, 1)
    lengths = (None, 0, 0, None, 0, 0)
    row = tl.arange(0, ROWS)
    where = place_rows(row, 1, 1, True, True)
    plan = plan_items(where, lengths, lists, rows, num_splits, slots, None, ROWS, 32, 16)
    tl.store(items_ptr + row, plan.items, mask=row < rows)
    tl.store(shares_ptr + row, plan.shares, mask=row < rows)
    tl.store(firsts_ptr + row, number_items(plan, num_splits, slots), mask=row < rows)


def planned(blocks: Tensor, slots: int) -> tuple[list[int], list[int], list[int]]:
    """Items of rows of so many blocks of two steps each, their shares, and their first items."""
    items, shares, firsts = torch.zeros(3, len(blocks), dtype=torch.int32)
    rows = len(blocks)
    num_splits = fair_items(rows, slots)
    _plan_kernel[(1,)](items, shares, firsts, blocks.int(), rows, num_splits, slots, ROWS=128)
    return items.tolist(), shares.tolist(), firsts.tolist()
