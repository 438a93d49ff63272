"""Masks that depend on positions alone: causal, prefixes, chunks, diffusion blocks."""

from __future__ import annotations

from torch import Tensor

from flexdecode.masks.arguments import at_least, per_batch
from flexdecode.mods import MaskMod, mask_mod

__all__ = ["bidirectional", "block_diffusion", "causal", "chunked", "prefix_lm"]


@mask_mod
def causal(b, h, q_idx, kv_idx):
    """True where ``kv_idx <= q_idx``: a token sees itself and what came before [1]_.

    Parameters
    ----------
    b, h, q_idx, kv_idx : int or Tensor, int64
        Sequence, query head, query position and key position; any shapes that broadcast.

    Returns
    -------
    bool or Tensor, bool

    References
    ----------
    .. [1] A. Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, 2017.

    Examples
    --------
    >>> import torch
    >>> q_idx, kv_idx = torch.arange(3)[:, None], torch.arange(3)
    >>> causal(0, 0, q_idx, kv_idx).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return kv_idx <= q_idx


@mask_mod
def bidirectional(b, h, q_idx, kv_idx):
    """True for every key: only ``kv_len`` limits what is read.

    Parameters
    ----------
    b, h, q_idx, kv_idx : int or Tensor, int64
        Sequence, query head, query position and key position; any shapes that broadcast.

    Returns
    -------
    bool or Tensor, bool
    """
    return kv_idx >= 0


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """True for every key of the prefix, and for the past after it [1]_.

    ``kv_idx < prefix[b] or kv_idx <= q_idx``.

    Parameters
    ----------
    prefix : int >= 0, or Tensor [] or [B], integer, tokens
        Length of the part that is read in both directions.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `prefix` is negative, or a tensor of more than one dimension.
    TypeError
        `prefix` is neither an int nor an integer tensor.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
       Transformer", arXiv:1910.10683, 2019.
    """
    at_least("prefix", prefix, 0)
    length = per_batch("prefix", prefix)

    @mask_mod
    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < length(b)) | (kv_idx <= q_idx)

    return prefix_lm


def chunked(size: int) -> MaskMod:
    """True for the past within the query's own chunk (Llama 4's local layers [1]_).

    ``kv_idx <= q_idx and kv_idx // size == q_idx // size``.

    Parameters
    ----------
    size : int >= 1, tokens
        Length of a chunk; chunks start at position 0.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `size` is below 1.
    TypeError
        `size` is not an int.

    References
    ----------
    .. [1] Meta AI, "The Llama 4 herd", 2025: attention chunks of 8192 tokens.
    """
    at_least("size", size, 1)

    @mask_mod
    def chunked(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx // size == q_idx // size)

    return chunked


def block_diffusion(size: int, start: int | Tensor = 0) -> MaskMod:
    """True within the query's own block, in both directions, and for all blocks before [1]_.

    ``(kv_idx - start[b]) // size <= (q_idx - start[b]) // size``. In decoding, the queries are
    the block that is being denoised: ``Lq = size``, while earlier blocks lie in the cache.

    Parameters
    ----------
    size : int >= 1, tokens
        Length of a block.
    start : int, or Tensor [] or [B], integer, default 0, tokens
        Where a block starts: 0, or the length of a prompt behind which blocks are counted.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `size` is below 1, or `start` is a tensor of more than one dimension.
    TypeError
        One of them is not an integer.

    References
    ----------
    .. [1] M. Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion
       Language Models", arXiv:2503.09573, 2025.

    Examples
    --------
    >>> import torch
    >>> q_idx, kv_idx = torch.arange(5)[:, None], torch.arange(5)
    >>> block_diffusion(2, start=1)(0, 0, q_idx, kv_idx).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    at_least("size", size, 1)
    first = per_batch("start", start)

    @mask_mod
    def block_diffusion(b, h, q_idx, kv_idx):
        return (kv_idx - first(b)) // size <= (q_idx - first(b)) // size

    return block_diffusion
