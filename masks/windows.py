"""Windows: keys within some distance of the query, all of them or a regular selection."""

from __future__ import annotations

from torch import Tensor

from flexdecode.masks.arguments import at_least, per_batch
from flexdecode.mods import MaskMod, mask_mod

__all__ = [
    "dilated",
    "global_window",
    "sink_window",
    "sliding_window",
    "strided",
    "symmetric_window",
]


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
    at_least("window", window, 1)
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
    at_least("window", window, 1)
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
    at_least("sinks", sinks, 0)
    at_least("window", window, 1)
    width = per_batch("window", window)

    @mask_mod
    def sink_window(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((kv_idx < sinks) | (q_idx - kv_idx < width(b)))

    return sink_window


def global_window(num_global: int, window: int | Tensor) -> MaskMod:
    """True near the query, and wherever one of the two is among the first tokens (ETC [1]_).

    ``|q_idx - kv_idx| < window or kv_idx < num_global or q_idx < num_global``. Joined with
    `causal` it is `sink_window`; `longformer` takes global tokens at any place.

    Parameters
    ----------
    num_global : int >= 0, tokens
        Tokens at the start that see everything and are seen by all.
    window : int >= 1, or Tensor [] or [B], integer, tokens
        First distance that is out of sight.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `num_global` is negative, `window` is below 1, or a tensor of more than one dimension.
    TypeError
        One of them is not an integer.

    References
    ----------
    .. [1] J. Ainslie et al., "ETC: Encoding Long and Structured Inputs in Transformers",
       arXiv:2004.08483, 2020.
    """
    at_least("num_global", num_global, 0)
    at_least("window", window, 1)
    width = per_batch("window", window)

    @mask_mod
    def global_window(b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx < width(b)) & (kv_idx - q_idx < width(b))
        return near | (kv_idx < num_global) | (q_idx < num_global)

    return global_window


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
    at_least("dilation", dilation, 1)
    if window is None:

        @mask_mod
        def dilated(b, h, q_idx, kv_idx):
            return (kv_idx <= q_idx) & ((q_idx - kv_idx) % dilation == 0)

        return dilated

    at_least("window", window, 1)
    reach = window * dilation

    @mask_mod
    def dilated_window(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < reach) & (distance % dilation == 0)

    return dilated_window


def strided(stride: int, window: int | None = None) -> MaskMod:
    """True for the last keys of the past, and for every `stride`-th one before them [1]_.

    ``0 <= d and (d < window or d % stride == 0)``, where ``d = q_idx - kv_idx``.

    Parameters
    ----------
    stride : int >= 1, tokens
        Distance between two of the far keys.
    window : int >= 1, tokens, optional
        Near keys, the query's own included. Default: `stride`, as in the paper.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        `stride` or `window` is below 1.
    TypeError
        One of them is not an int.

    References
    ----------
    .. [1] R. Child et al., "Generating Long Sequences with Sparse Transformers",
       arXiv:1904.10509, 2019.

    Examples
    --------
    >>> import torch
    >>> strided(3, window=2)(0, 0, 6, torch.arange(7)).int()
    tensor([1, 0, 0, 1, 0, 1, 1], dtype=torch.int32)
    """
    width = stride if window is None else window
    at_least("stride", stride, 1)
    at_least("window", width, 1)

    @mask_mod
    def strided(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < width) | (distance % stride == 0))

    return strided
