"""Score rules that depend on the score and the head: soft capping, temperatures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexdecode.masks.arguments import float_tensor
from flexdecode.mods import ScoreMod

__all__ = ["head_temperature", "softcap"]


def head_temperature(temperature: Tensor) -> ScoreMod:
    """Divide the scores of head ``h`` by ``temperature[h]``.

    Parameters
    ----------
    temperature : Tensor, [Hq], floating point
        Above 1 a head attends more evenly, below 1 more sharply. May change in place.

    Returns
    -------
    callable (score, b, h, q_idx, kv_idx) -> score

    Raises
    ------
    TypeError
        `temperature` is not a floating-point tensor.
    ValueError
        `temperature` is not one-dimensional.

    Examples
    --------
    >>> import torch
    >>> head_temperature(torch.tensor([1.0, 2.0]))(torch.ones(2), 0, torch.arange(2), 0, 0)
    tensor([1.0000, 0.5000])
    """
    float_tensor("temperature", temperature, "[Hq]")

    def head_temperature(score, b, h, q_idx, kv_idx):
        return score / temperature[h]

    return head_temperature


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
