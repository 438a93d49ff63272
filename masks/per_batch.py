"""One integer per sequence, however it is given: an int, or a tensor that may change in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["per_batch"]


def per_batch(name: str, value: int | Tensor) -> Callable[[Any], Any]:
    """Give a function ``b -> value of sequence b``.

    Parameters
    ----------
    name : str
        What to call the argument in errors.
    value : int, or Tensor [], [1] or [B], integer
        One value for all sequences, or one for each. A tensor is kept by reference.

    Returns
    -------
    callable (b) -> int or Tensor

    Raises
    ------
    TypeError
        `value` is neither an int nor an integer tensor.
    ValueError
        `value` has more than one dimension.
    """
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype in (torch.bool, torch.complex64):
            raise TypeError(f"{name}: expected an integer tensor, got {value.dtype}")
        if value.ndim > 1:
            raise ValueError(f"{name}: expected shape [] or [B], got {list(value.shape)}")
        if value.numel() == 1:
            shared = value.reshape(())  # a view: one length serves every sequence
            return lambda b: shared
        return lambda b: value[b]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int or an integer tensor, got {type(value).__name__}")
    return lambda b: value
