"""Masks of speculative decoding: a tree of draft tokens behind a common prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexdecode.masks.per_batch import per_batch
from flexdecode.mods import MaskMod, mask_mod

__all__ = ["create_ancestors", "tree"]


def tree(ancestors: Tensor, prefix: int | Tensor) -> MaskMod:
    """True for the whole prefix, and within the tree for a token's ancestors and itself [1]_.

    ``kv_idx < prefix[b]``, or ``ancestors[q_idx - prefix[b], kv_idx - prefix[b]]`` inside the tree.

    Parameters
    ----------
    ancestors : Tensor, [T, T] or [B, T, T], bool
        True at ``[i, j]`` where draft token ``j`` is ``i`` itself or one of its ancestors; see
        `create_ancestors`. May change in place from step to step.
    prefix : int, or Tensor [] or [B], integer, tokens
        Position of the first draft token: the tree is the queries ``prefix[b] + [0, T)`` and the
        keys of the same positions. Keys past the tree are not seen.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `ancestors` is not a bool tensor, or `prefix` not an integer.
    ValueError
        `ancestors` is not square, is empty, or has another number of dimensions.

    References
    ----------
    .. [1] X. Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based
       Speculative Inference and Verification", arXiv:2305.09781, 2023.

    Examples
    --------
    Two drafts, 1 and 2, for what follows token 0, after a prefix of two tokens:

    >>> import torch
    >>> mask = tree(create_ancestors([-1, 0, 0]), prefix=2)
    >>> mask(0, 0, torch.arange(2, 5)[:, None], torch.arange(5)).int()
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    if not isinstance(ancestors, Tensor) or ancestors.dtype != torch.bool:
        got = ancestors.dtype if isinstance(ancestors, Tensor) else type(ancestors).__name__
        raise TypeError(f"ancestors: expected a bool tensor, got {got}")
    if ancestors.ndim not in (2, 3) or ancestors.shape[-1] != ancestors.shape[-2]:
        raise ValueError(
            f"ancestors: expected shape [T, T] or [B, T, T], got {list(ancestors.shape)}"
        )
    size = ancestors.shape[-1]
    if size == 0:
        raise ValueError("ancestors: expected at least one draft token, got none")
    last = size - 1
    start = per_batch("prefix", prefix)

    if ancestors.ndim == 2:

        @mask_mod
        def tree(b, h, q_idx, kv_idx):
            # Rows and columns are clamped, since prefix keys ask outside the matrix.
            row = torch.clamp(q_idx - start(b), 0, last)
            column = torch.clamp(kv_idx - start(b), 0, last)
            inside = kv_idx < start(b) + size
            return (kv_idx < start(b)) | (inside & ancestors[row, column])

        return tree

    @mask_mod
    def tree_per_batch(b, h, q_idx, kv_idx):
        row = torch.clamp(q_idx - start(b), 0, last)
        column = torch.clamp(kv_idx - start(b), 0, last)
        inside = kv_idx < start(b) + size
        return (kv_idx < start(b)) | (inside & ancestors[b, row, column])

    return tree_per_batch


def create_ancestors(parents: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Turn a tree given by parents into the matrix that `tree` takes.

    Parameters
    ----------
    parents : sequence of int, length T
        Parent of each draft token, which comes before it; -1 for a child of the prefix.
    device : torch.device or str, optional
        Where the matrix goes. Default: torch's current default device.

    Returns
    -------
    Tensor, [T, T], bool
        True at ``[i, j]`` where ``j`` is ``i`` or one of its ancestors.

    Raises
    ------
    ValueError
        A parent does not come before its child.

    Examples
    --------
    >>> create_ancestors([-1, 0, 0, 1]).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    rows: list[list[bool]] = []
    for token, parent in enumerate(parents):
        if not -1 <= parent < token:
            raise ValueError(
                f"parents: expected the parent of token {token} in [-1, {token}), got {parent}"
            )
        row = list(rows[parent]) if parent >= 0 else [False] * len(parents)
        row[token] = True
        rows.append(row)
    return torch.tensor(rows, dtype=torch.bool, device=device).reshape(len(rows), len(rows))
