"""Masks that keep sequences apart: packed documents, shared prefixes, padding."""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.masks.arguments import at_least, id_tensor, number, per_batch
from flexdecode.masks.positions import causal
from flexdecode.mods import MaskMod, and_masks, mask_mod

__all__ = [
    "causal_documents",
    "document_ids",
    "documents",
    "left_padding",
    "right_padding",
    "shared_prefix",
]


def documents(ids: Tensor) -> MaskMod:
    """True where query and key belong to the same document [1]_.

    ``ids[b, q_idx] == ids[b, kv_idx]``, or without ``b`` for `ids` of one dimension.

    Parameters
    ----------
    ids : Tensor, [N] or [B, N], integer
        Document of each position, in any order and with any values. ``N`` covers every position
        that is asked about, the new tokens included; a tensor with room to spare may be filled
        in place as tokens arrive. `document_ids` makes one of offsets.

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
    id_tensor("ids", ids)
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


def document_ids(offsets: Tensor, length: int) -> Tensor:
    """Turn the offsets of packed documents into the ids that `documents` takes.

    Parameters
    ----------
    offsets : Tensor, [num_documents + 1], integer, tokens
        Where each document starts, ascending from 0, and the end of the last one: ``cu_seqlens``.
    length : int >= 0, tokens
        How many ids to return. Positions behind the last document share an id of their own.

    Returns
    -------
    Tensor, [length], int32
        On the device of `offsets`, which is not waited for.

    Raises
    ------
    TypeError
        `offsets` is not an integer tensor, or `length` not an int.
    ValueError
        `offsets` is not one-dimensional, or `length` is negative.

    Examples
    --------
    >>> document_ids(torch.tensor([0, 2, 5]), 6)
    tensor([0, 0, 1, 1, 1, 2], dtype=torch.int32)
    """
    id_tensor("offsets", offsets, "[N]")
    number("length", length, 0)
    position = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), position, right=True).to(torch.int32)


def shared_prefix(prefix: int | Tensor, ids: Tensor) -> MaskMod:
    """True for the past in the prefix and in the query's own continuation of it [1]_.

    ``kv_idx <= q_idx and (kv_idx < prefix[b] or ids[b, q_idx] == ids[b, kv_idx])``: several
    answers to one prompt stand one after the other in one sequence, and do not see each other.

    Parameters
    ----------
    prefix : int >= 0, or Tensor [] or [B], integer, tokens
        Length of the part that all continuations share.
    ids : Tensor, [N] or [B, N], integer
        Continuation of each position; see `documents`. Those of the prefix do not matter.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `ids` or `prefix` is no integer.
    ValueError
        `prefix` is negative, or one of them has too many dimensions.

    References
    ----------
    .. [1] J. Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes",
       arXiv:2402.05099, 2024.
    """
    at_least("prefix", prefix, 0)
    end, same = per_batch("prefix", prefix), documents(ids)

    @mask_mod
    def shared_prefix(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((kv_idx < end(b)) | same(b, h, q_idx, kv_idx))

    return shared_prefix


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
