"""Score rules that depend on distance: ALiBi, T5's buckets, KERPLE, Sandwich, plain penalties."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexdecode.masks.arguments import at_least, checked_device, float_tensor, number
from flexdecode.mods import ScoreMod

__all__ = [
    "alibi",
    "distance_penalty",
    "kerple_log",
    "kerple_power",
    "relative_bias",
    "sandwich",
]


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
        float_tensor("slopes", slopes, "[Hq]")

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


def distance_penalty(weight: float | Tensor, *, limit: int | None = None) -> ScoreMod:
    """Subtract ``weight * min(|q_idx - kv_idx|, limit)``.

    Parameters
    ----------
    weight : float, or Tensor [Hq], floating point, logits a token
        What a token of distance costs, for all heads or for each. A tensor may change in place.
    limit : int >= 1, tokens, optional
        Distance from which the penalty no longer grows. Default: none.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score

    Raises
    ------
    TypeError
        `weight` is neither a number nor a floating-point tensor, or `limit` not an int.
    ValueError
        `weight` is not one-dimensional, or `limit` is below 1.

    Examples
    --------
    >>> import torch
    >>> distance_penalty(0.5, limit=2)(torch.zeros(5), 0, 0, 3, torch.arange(5))
    tensor([-1.0000, -1.0000, -0.5000,  0.0000, -0.5000])
    """
    end = 2**31 - 1 if limit is None else limit
    at_least("limit", end, 1)
    if isinstance(weight, Tensor):
        float_tensor("weight", weight, "[Hq]")
        of_head = weight

        def distance_penalty_of_head(score, b, h, q_idx, kv_idx):
            return score - of_head[h] * torch.clamp(abs(q_idx - kv_idx), max=end)

        return distance_penalty_of_head

    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(f"weight: expected a number or a tensor, got {type(weight).__name__}")
    of_all = float(weight)  # one kind of number, one kernel

    def distance_penalty(score, b, h, q_idx, kv_idx):
        return score - of_all * torch.clamp(abs(q_idx - kv_idx), max=end)

    return distance_penalty


def kerple_log(r1: Tensor, r2: Tensor) -> ScoreMod:
    """Subtract ``r1[h] * ln(1 + r2[h] * |q_idx - kv_idx|)`` (KERPLE, logarithmic [1]_).

    Parameters
    ----------
    r1, r2 : Tensor, [Hq], floating point
        The learned numbers of each head, positive. They may change in place.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score

    Raises
    ------
    TypeError
        One of them is not a floating-point tensor.
    ValueError
        One of them is not one-dimensional.

    References
    ----------
    .. [1] T.-C. Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length
       Extrapolation", arXiv:2205.09921, 2022.
    """
    float_tensor("r1", r1, "[Hq]")
    float_tensor("r2", r2, "[Hq]")

    def kerple_log(score, b, h, q_idx, kv_idx):
        return score - r1[h] * torch.log(1.0 + r2[h] * abs(q_idx - kv_idx))

    return kerple_log


def kerple_power(r1: Tensor, r2: Tensor) -> ScoreMod:
    """Subtract ``r1[h] * |q_idx - kv_idx| ** r2[h]`` (KERPLE, power [1]_).

    Parameters
    ----------
    r1, r2 : Tensor, [Hq], floating point
        The learned numbers of each head: `r1` positive, `r2` above 0 and up to 2. They may change
        in place.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score

    Raises
    ------
    TypeError
        One of them is not a floating-point tensor.
    ValueError
        One of them is not one-dimensional.

    References
    ----------
    .. [1] T.-C. Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length
       Extrapolation", arXiv:2205.09921, 2022.
    """
    float_tensor("r1", r1, "[Hq]")
    float_tensor("r2", r2, "[Hq]")

    def kerple_power(score, b, h, q_idx, kv_idx):
        return score - r1[h] * abs(q_idx - kv_idx) ** r2[h]

    return kerple_power


def sandwich(
    heads: int,
    *,
    max_distance: int = 32768,
    dim: int = 128,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """Add the inner product of two sinusoidal position embeddings (Sandwich [1]_).

    ``sum(cos(d / 10000 ** (2 * i / dim)) for i in range(dim // 2)) * heads / (8 * (h + 1))``,
    where ``d = |q_idx - kv_idx|``: no parameters to learn, and a logarithmic decay.

    Parameters
    ----------
    heads : int >= 1
        Query heads.
    max_distance : int >= 1, default 32768, tokens
        Distance from which the bias stays as it is: the sums are looked up in a table.
    dim : int >= 2, default 128
        Width of the embeddings, the paper's hyperparameter; no head dim.
    device : torch.device or str, optional
        Where the table goes: ``(max_distance + 1) * 4`` bytes. Default: torch's default device.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score

    Raises
    ------
    TypeError
        One of the numbers is not an int.
    ValueError
        One of them is too small.

    References
    ----------
    .. [1] T.-C. Chi et al., "Dissecting Transformer Length Extrapolation via the Lens of Receptive
       Field Analysis", arXiv:2212.10356, 2022.
    """
    number("heads", heads, 1)
    number("max_distance", max_distance, 1)
    number("dim", dim, 2, 1 << 16)
    distance = torch.arange(max_distance + 1, dtype=torch.float64)
    sums = torch.zeros_like(distance)
    for i in range(dim // 2):
        sums += torch.cos(distance / 10000.0 ** (2 * i / dim))
    table = sums.float().to(checked_device(device) or torch.get_default_device())
    scale = heads / 8.0

    def sandwich(score, b, h, q_idx, kv_idx):
        return score + table[torch.clamp(abs(q_idx - kv_idx), max=max_distance)] * scale / (h + 1)

    return sandwich


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
    float_tensor("table", table, "[num_buckets, Hq]")
    if not isinstance(bidirectional, bool):
        raise TypeError(f"bidirectional: expected a bool, got {type(bidirectional).__name__}")
    one_way = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = one_way // 2
    if exact < 1:
        raise ValueError(f"table: expected more buckets, got {table.shape[0]}")
    number("max_distance", max_distance, 1)
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
