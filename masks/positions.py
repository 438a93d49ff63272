"""Masks that depend on positions alone: causal, windows, prefixes, chunks."""

from __future__ import annotations

from torch import Tensor

from flexdecode.masks.per_batch import per_batch
from flexdecode.mods import MaskMod, mask_mod

__all__ = [
    "bidirectional",
    "causal",
    "chunked",
    "dilated",
    "prefix_lm",
    "sink_window",
    "sliding_window",
    "symmetric_window",
]


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


def sliding_window(window: int | Tensor) -> MaskMod:
    """True for the last `window` keys up to and including the query's own [1]_.

    ``kv_idx <= q_idx and q_idx - kv_idx < window``: never more than `window` keys. Projects
    disagree by one here; this is the count that Mistral and Gemma configurations state.

    Parameters
    ----------
    window : int >= 1, or Tensor [] or [B], integer, tokens
        How many keys a query sees, itself included.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `window` is below 1, or a tensor of more than one dimension.
    TypeError
        `window` is neither an int nor an integer tensor.

    References
    ----------
    .. [1] I. Beltagy, M. Peters, A. Cohan, "Longformer: The Long-Document Transformer",
       arXiv:2004.05150, 2020.

    Examples
    --------
    >>> import torch
    >>> q_idx, kv_idx = torch.arange(4)[:, None], torch.arange(4)
    >>> sliding_window(2)(0, 0, q_idx, kv_idx).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    _at_least("window", window, 1)
    width = per_batch("window", window)

    @mask_mod
    def sliding_window(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx - kv_idx < width(b))

    return sliding_window


def symmetric_window(window: int | Tensor) -> MaskMod:
    """True for keys less than `window` tokens away on either side.

    ``|q_idx - kv_idx| < window``: at most ``2 * window - 1`` keys. Its causal half is
    `sliding_window` of the same number.

    Parameters
    ----------
    window : int >= 1, or Tensor [] or [B], integer, tokens
        First distance that is out of sight.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `window` is below 1, or a tensor of more than one dimension.
    TypeError
        `window` is neither an int nor an integer tensor.
    """
    _at_least("window", window, 1)
    width = per_batch("window", window)

    @mask_mod
    def symmetric_window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < width(b)) & (kv_idx - q_idx < width(b))

    return symmetric_window


def sink_window(sinks: int, window: int | Tensor) -> MaskMod:
    """True for the first `sinks` keys and the last `window` keys of the past (StreamingLLM [1]_).

    ``kv_idx <= q_idx and (kv_idx < sinks or q_idx - kv_idx < window)``. Not the learned sink
    logits of `attention`, which take softmax mass and hold no key.

    Parameters
    ----------
    sinks : int >= 0, tokens
        Keys at the start of the sequence that stay visible.
    window : int >= 1, or Tensor [] or [B], integer, tokens
        Most recent keys, the query's own included.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `sinks` is negative, `window` is below 1, or a tensor of more than one dimension.
    TypeError
        One of them is not an integer.

    References
    ----------
    .. [1] G. Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
       arXiv:2309.17453, 2023.
    """
    _at_least("sinks", sinks, 0)
    _at_least("window", window, 1)
    width = per_batch("window", window)

    @mask_mod
    def sink_window(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < width(b)))

    return sink_window


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
    _at_least("prefix", prefix, 0)
    length = per_batch("prefix", prefix)

    @mask_mod
    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < length(b)) | (kv_idx <= q_idx)

    return prefix_lm


def dilated(dilation: int, window: int | None = None) -> MaskMod:
    """True for every `dilation`-th key of the past, counted back from the query [1]_.

    ``0 <= d``, ``d % dilation == 0`` and, with `window`, ``d < window * dilation``, where
    ``d = q_idx - kv_idx``.

    Parameters
    ----------
    dilation : int >= 1, tokens
        Distance between two keys that are seen.
    window : int >= 1, keys, optional
        How many keys a query sees, itself included. Default: as many as there are.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `dilation` or `window` is below 1.
    TypeError
        One of them is not an int.

    References
    ----------
    .. [1] R. Child et al., "Generating Long Sequences with Sparse Transformers",
       arXiv:1904.10509, 2019.
    """
    _at_least("dilation", dilation, 1)
    if window is None:

        @mask_mod
        def dilated(b, h, q_idx, kv_idx):
            return (kv_idx <= q_idx) & ((q_idx - kv_idx) % dilation == 0)

        return dilated

    _at_least("window", window, 1)
    reach = window * dilation

    @mask_mod
    def dilated_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < reach) & (distance % dilation == 0)

    return dilated_window


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
    _at_least("size", size, 1)

    @mask_mod
    def chunked(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx // size == q_idx // size)

    return chunked


def _at_least(name: str, value: int | Tensor, least: int) -> None:
    if isinstance(value, Tensor):
        return  # data: reading it here would wait for the device
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
