"""Score rules ready to use: ALiBi, soft capping, T5's relative bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexdecode.mods import ScoreMod

__all__ = ["alibi", "relative_bias", "softcap"]


def alibi(slopes: int | Tensor) -> ScoreMod:
    """Add ``slope[h] * (kv_idx - q_idx)``: a penalty that grows with distance (ALiBi [1]_).

    Parameters
    ----------
    slopes : int >= 1, or Tensor [Hq], floating point
        The slopes, positive; or the number of query heads ``n``, for the paper's own. With ``m``
        the largest power of two up to ``n``, the slope of head ``h`` is ``2 ** (-8 * (h + 1) / m)``
        for the first ``m`` heads, and ``2 ** (-4 * (2 * (h - m) + 1) / m)`` for the others, as the
        authors' code interpolates.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score
        Scores are tensors in natural units.

    Raises
    ------
    TypeError
        `slopes` is neither an int nor a floating-point tensor.
    ValueError
        `slopes` is below 1, or not one-dimensional.

    References
    ----------
    .. [1] O. Press, N. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases
       Enables Input Length Extrapolation", arXiv:2108.12409, 2021.

    Examples
    --------
    The second of eight heads, at position 3:

    >>> import torch
    >>> alibi(8)(torch.zeros(4), 0, torch.tensor(1), 3, torch.arange(4))
    tensor([-0.7500, -0.5000, -0.2500,  0.0000])
    """
    if isinstance(slopes, Tensor):
        if not slopes.dtype.is_floating_point:
            raise TypeError(f"slopes: expected a floating-point tensor, got {slopes.dtype}")
        if slopes.ndim != 1:
            raise ValueError(f"slopes: expected shape [Hq], got {list(slopes.shape)}")

        def alibi(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx)

        return alibi

    if isinstance(slopes, bool) or not isinstance(slopes, int):
        raise TypeError(f"slopes: expected an int or a tensor, got {type(slopes).__name__}")
    if slopes < 1:
        raise ValueError(f"slopes: expected at least 1 head, got {slopes}")
    regular = 1 << (slopes.bit_length() - 1)  # heads of the largest power of two
    step = 8.0 / regular

    # A formula instead of a table: the rule then belongs to no device.
    def alibi_of_head_count(score, b, h, q_idx, kv_idx):
        exponent = torch.where(h < regular, h + 1.0, h - regular + 0.5) * step
        return score + torch.exp2(-exponent) * (kv_idx - q_idx)

    return alibi_of_head_count


def softcap(cap: float) -> ScoreMod:
    """Squash scores into ``(-cap, cap)``: ``cap * tanh(score / cap)`` (Gemma 2 [1]_).

    Parameters
    ----------
    cap : float > 0, logits in natural units
        The bound; Gemma 2 uses 50.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score
        Scores are tensors in natural units.

    Raises
    ------
    TypeError
        `cap` is not a number.
    ValueError
        `cap` is not positive and finite.

    References
    ----------
    .. [1] Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size",
       arXiv:2408.00118, 2024.

    Examples
    --------
    >>> import torch
    >>> softcap(50.0)(torch.tensor([1.0, 1000.0]), 0, 0, 0, 0)
    tensor([ 0.9999, 50.0000])
    """
    if isinstance(cap, bool) or not isinstance(cap, int | float):
        raise TypeError(f"cap: expected a number, got {type(cap).__name__}")
    if not 0 < cap < math.inf:
        raise ValueError(f"cap: expected a positive number, got {cap}")
    cap = float(cap)  # one kind of number, one kernel

    def softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return softcap


def relative_bias(
    table: Tensor, *, max_distance: int = 128, bidirectional: bool = False
) -> ScoreMod:
    """Add a learned bias for the bucket that the distance falls into (T5 [1]_).

    ``table[bucket(q_idx - kv_idx), h]``. Of the buckets of one direction, the first half hold one
    distance each, the rest grow logarithmically up to `max_distance`, beyond which all distances
    share the last. Without `bidirectional`, keys of the future share bucket 0.

    Parameters
    ----------
    table : Tensor, [num_buckets, Hq], floating point
        The bias of each bucket and head, ``relative_attention_bias.weight`` in T5's checkpoints.
        May change in place.
    max_distance : int, default 128, tokens
        Distance from which the last bucket serves.
    bidirectional : bool, default False
        Whether keys of the future have buckets of their own, the second half; True in encoders.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score
        T5 wants ``scale=1.0`` in `attention`.

    Raises
    ------
    TypeError
        `table` is not a floating-point tensor.
    ValueError
        `table` is not two-dimensional, has too few buckets (2, or 4 with `bidirectional`), or
        `max_distance` does not exceed the distances that have buckets of their own.

    References
    ----------
    .. [1] C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
       Transformer", arXiv:1910.10683, 2019.
    """
    if not isinstance(table, Tensor) or not table.dtype.is_floating_point:
        got = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise TypeError(f"table: expected a floating-point tensor, got {got}")
    if table.ndim != 2:
        raise ValueError(f"table: expected shape [num_buckets, Hq], got {list(table.shape)}")
    one_way = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = one_way // 2
    if exact < 1:
        raise ValueError(f"table: expected more buckets, got {table.shape[0]}")
    if max_distance <= exact:
        raise ValueError(f"max_distance: expected more than {exact}, got {max_distance}")
    # Looked up instead of computed: a logarithm at a bucket's edge may round either way.
    buckets = _t5_buckets(one_way, exact, max_distance).to(table.device)

    if not bidirectional:

        def relative_bias(score, b, h, q_idx, kv_idx):
            distance = torch.clamp(q_idx - kv_idx, 0, max_distance)
            return score + table[buckets[distance], h]

        return relative_bias

    def relative_bias_bidirectional(score, b, h, q_idx, kv_idx):
        distance = torch.clamp(torch.abs(q_idx - kv_idx), 0, max_distance)
        future = torch.where(kv_idx > q_idx, one_way, 0)
        return score + table[buckets[distance] + future, h]

    return relative_bias_bidirectional


def _t5_buckets(one_way: int, exact: int, max_distance: int) -> Tensor:
    """Bucket of each distance in [0, max_distance], as T5 rounds it in float32: int64."""
    distance = torch.arange(max_distance + 1)
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    grown = exact + (growth * (one_way - exact)).long()
    return torch.where(distance < exact, distance, grown.clamp(max=one_way - 1))
