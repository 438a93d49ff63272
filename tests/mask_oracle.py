"""What a mask allows, element by element and block by block, from plain eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdecode.tables import Extent


def dense_mask(mask: Callable[[Any, Any, Any, Any], Any], what: Extent) -> Tensor:
    """Evaluate `mask` eagerly: [B, H, Lq, Lkv], bool; False from ``kv_len`` on."""
    B, H, Lq, Lkv = what.B, what.H, what.Lq, what.Lkv
    length = torch.as_tensor(what.kv_len).long().clamp(0, Lkv).reshape(-1, 1, 1, 1)
    offset = torch.as_tensor(what.q_offset).long().reshape(-1, 1, 1, 1)
    allowed = torch.zeros(B, H, Lq, Lkv, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            n = int(length[b % len(length)])
            q_idx = torch.arange(Lq)[:, None] + offset[b % len(offset), 0]
            kv_idx = torch.arange(n)[None, :]
            if n and Lq:
                # As a user may write it: positions a mask has no business with may be negative.
                part = mask(torch.tensor(b), torch.tensor(h), q_idx, kv_idx)
                allowed[b, h, :, :n] = part
    return allowed


def dense_states(mask: Callable[[Any, Any, Any, Any], Any], what: Extent) -> Tensor:
    """Tell blocks apart by the dense mask: [B, H, nQ, nKV], uint8; 0 empty, 1 partial, 2 full."""
    allowed = dense_mask(mask, what)
    rows, columns = what.BLOCK_SIZE
    nQ, nKV = -(-what.Lq // rows), -(-what.Lkv // columns)
    states = torch.zeros(what.B, what.H, nQ, nKV, dtype=torch.uint8)
    for i in range(nQ):
        for j in range(nKV):
            block = allowed[:, :, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            some, every = block.flatten(2).any(-1), block.flatten(2).all(-1)
            length = torch.as_tensor(what.kv_len).long().clamp(0, what.Lkv).reshape(-1, 1)
            inside = (j + 1) * columns <= length  # a full block ends before the keys do
            states[:, :, i, j] = some.to(torch.uint8) + (every & inside).to(torch.uint8)
    return states
