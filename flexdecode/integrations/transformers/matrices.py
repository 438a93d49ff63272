"""Masks and biases that come as matrices: their shape, and rules that read them.

Rules are partials of functions and not closures, so that a compiled model can hold them.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from flexdecode.integrations.transformers.restriction import MaskFunction

__all__ = ["element", "fitting"]


def fitting(name: str, matrix: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """View a matrix as ``[B or 1, Hq or 1, Lq, Lkv]``; a static cache's may have more columns."""
    B, Hq, Lq, Lkv = *query.shape[:3], key.shape[2]
    shape = tuple(matrix.shape)
    if (
        len(shape) != 4
        or shape[0] not in (1, B)
        or shape[1] not in (1, Hq)
        or shape[2] not in (1, Lq)
        or shape[3] < Lkv
    ):
        raise ValueError(
            f"{name}: expected shape [{B} or 1, {Hq} or 1, {Lq} or 1, {Lkv} or more], got "
            f"{list(shape)}"
        )
    return matrix[..., :Lkv].expand(-1, -1, Lq, -1)


def element(matrix: Tensor) -> MaskFunction:
    """Read ``matrix [B or 1, H or 1, Lq, Lkv]``, where a size of 1 stands for all."""
    B, H = matrix.shape[:2]
    if B == 1 and H == 1:
        return functools.partial(_in_plane, matrix[0, 0])
    if H == 1:
        return functools.partial(_in_rows, matrix[:, 0])
    if B == 1:
        return functools.partial(_in_heads, matrix[0])
    return functools.partial(_in_all, matrix)


def _in_plane(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[q_idx, kv_idx]


def _in_rows(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[b, q_idx, kv_idx]


def _in_heads(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[h, q_idx, kv_idx]


def _in_all(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[b, h, q_idx, kv_idx]
