"""Checks of arguments that masks share, and integers that each sequence has its own of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["at_least", "float_tensor", "id_tensor", "per_batch"]


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


def at_least(name: str, value: int | Tensor, least: int) -> None:
    """Refuse an int below `least`, and what is neither an int nor a tensor."""
    if isinstance(value, Tensor):
        return  # data: reading it here would wait for the device
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def id_tensor(name: str, value: Tensor, shape: str = "[N] or [B, N]") -> None:
    """Refuse what is not an integer tensor with as many dimensions as one of the shapes named."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected an integer tensor, got {type(value).__name__}")
    if value.dtype.is_floating_point or value.dtype in (torch.bool, torch.complex64):
        raise TypeError(f"{name}: expected an integer tensor, got {value.dtype}")
    _fits(name, value, shape)


def float_tensor(name: str, value: Tensor, shape: str) -> None:
    """Refuse what is not a floating-point tensor with as many dimensions as `shape`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a floating-point tensor, got {type(value).__name__}")
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating-point tensor, got {value.dtype}")
    _fits(name, value, shape)


def _fits(name: str, value: Tensor, shape: str) -> None:
    if value.ndim not in {each.count(",") + 1 for each in shape.split(" or ")}:
        raise ValueError(f"{name}: expected shape {shape}, got {list(value.shape)}")
