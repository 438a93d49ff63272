"""The kernels' balanced plan on its own, for comparison with its twin in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.layout import Layout
from flexdecode.kernels.worklist import number_items, place_rows, plan_items


@triton.jit
def _plan_kernel(
    items_ptr,
    shares_ptr,
    firsts_ptr,
    num_ptr,
    rows,
    num_splits,
    slots,
    ROWS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    lists = (num_ptr, None, 1, 1)
    lengths = (None, 0, 0, None, 0, 0)
    row = tl.arange(0, ROWS)
    where = place_rows(row, 1, 1, True, True)
    plan = plan_items(where, lengths, lists, rows, num_splits, slots, None, ROWS, KV_BLOCK, 16)
    tl.store(items_ptr + row, plan.items, mask=row < rows)
    tl.store(shares_ptr + row, plan.shares, mask=row < rows)
    tl.store(firsts_ptr + row, number_items(plan, num_splits, slots), mask=row < rows)


def planned(blocks: Tensor, steps: int, layout: Layout, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plan rows of so many blocks, [rows], of so many steps each, in a plan of `size` rows.

    Returns
    -------
    items, shares, firsts : Tensor, [rows], int64
    """
    found = torch.zeros(3, len(blocks), dtype=torch.int32)
    sizes = (layout.rows, layout.num_splits, layout.slots)
    _plan_kernel[(1,)](*found, blocks.int(), *sizes, ROWS=size, KV_BLOCK=16 * steps)
    items, shares, firsts = found.long()
    return items, shares, firsts
