"""Masks that keep sequences apart: packed documents and padding."""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.masks.per_batch import per_batch
from flexdecode.masks.positions import causal
from flexdecode.mods import MaskMod, and_masks, mask_mod

__all__ = ["causal_documents", "documents", "left_padding", "right_padding"]


def documents(ids: Tensor) -> MaskMod:
    """True where query and key belong to the same document [1]_.

    ``ids[b, q_idx] == ids[b, kv_idx]``, or without ``b`` for `ids` of one dimension.

    Parameters
    ----------
    ids : Tensor, [N] or [B, N], integer
        Document of each position, in any order and with any values. ``N`` covers every position
        that is asked about, the new tokens included; a tensor with room to spare may be filled
        in place as tokens arrive.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `ids` is not an integer tensor.
    ValueError
        `ids` has neither one nor two dimensions.

    References
    ----------
    .. [1] M. Krell et al., "Efficient Sequence Packing without Cross-contamination",
       arXiv:2107.02027, 2021.

    Examples
    --------
    >>> import torch
    >>> ids = torch.tensor([0, 0, 1, 1])
    >>> q_idx, kv_idx = torch.arange(4)[:, None], torch.arange(4)
    >>> documents(ids)(0, 0, q_idx, kv_idx).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids: expected an integer tensor, got {type(ids).__name__}")
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise TypeError(f"ids: expected an integer tensor, got {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise ValueError(f"ids: expected shape [N] or [B, N], got {list(ids.shape)}")

    if ids.ndim == 1:

        @mask_mod
        def documents(b, h, q_idx, kv_idx):
            return ids[q_idx] == ids[kv_idx]

        return documents

    @mask_mod
    def documents_per_batch(b, h, q_idx, kv_idx):
        return ids[b, q_idx] == ids[b, kv_idx]

    return documents_per_batch


def causal_documents(ids: Tensor) -> MaskMod:
    """True for the past of the query's own document: ``causal & documents(ids)``.

    Parameters
    ----------
    ids : Tensor, [N] or [B, N], integer
        See `documents`.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError, ValueError
        As `documents`.
    """
    return and_masks(causal, documents(ids))


def left_padding(start: int | Tensor) -> MaskMod:
    """True for keys that are not padding on the left: ``kv_idx >= start[b]``.

    Says nothing about the future: combine it, ``causal & left_padding(start)``. Positions keep
    counting the padding; `attention`'s ``kv_start`` is the other choice, where they do not.

    Parameters
    ----------
    start : int, or Tensor [] or [B], integer, tokens
        Position of the first real token of each sequence.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `start` is a tensor of more than one dimension.
    TypeError
        `start` is neither an int nor an integer tensor.
    """
    first = per_batch("start", start)

    @mask_mod
    def left_padding(b, h, q_idx, kv_idx):
        return kv_idx >= first(b)

    return left_padding


def right_padding(length: int | Tensor) -> MaskMod:
    """True for keys that are not padding on the right: ``kv_idx < length[b]``.

    `attention`'s ``kv_len`` does the same and moves the queries along; this mask leaves
    ``q_idx`` where it is, for prompts padded at their end.

    Parameters
    ----------
    length : int, or Tensor [] or [B], integer, tokens
        Real tokens of each sequence.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `length` is a tensor of more than one dimension.
    TypeError
        `length` is neither an int nor an integer tensor.
    """
    end = per_batch("length", length)

    @mask_mod
    def right_padding(b, h, q_idx, kv_idx):
        return kv_idx < end(b)

    return right_padding
