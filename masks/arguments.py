"""Checks of arguments that masks share, and integers that each sequence has its own of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "at_least",
    "checked_device",
    "float_tensor",
    "id_tensor",
    "int_list",
    "lengths",
    "number",
    "per_batch",
]


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
        _of_integers(name, value)
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
    """Refuse an int below `least`, and what is neither an int nor an integer tensor."""
    if isinstance(value, Tensor):  # data: reading it here would wait for the device
        _of_integers(name, value)
    else:
        number(name, value, least, (1 << 63) - 1)


def number(name: str, value: Any, least: int, most: int = 1 << 30) -> None:
    """Refuse what is not an int from `least` to `most`, by default as far as positions go."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name}: expected at most {most}, got {value}")


def lengths(name: str, value: Any, device: torch.device) -> None:
    """Refuse what is neither an int that positions reach nor an integer tensor on `device`."""
    if not isinstance(value, Tensor):
        return number(name, value, 0)
    _of_integers(name, value)
    if value.device != device or value.ndim > 1 or not value.numel():
        raise ValueError(
            f"{name}: expected an int or a tensor [B] on {device}, got {list(value.shape)} on "
            f"{value.device}"
        )


def int_list(name: str, value: Any) -> list[int]:
    """Refuse what is not a sequence of int; return it as a list."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: expected a sequence of int, got {type(value).__name__}")
    for each in value:
        if isinstance(each, bool) or not isinstance(each, int):
            raise TypeError(f"{name}: expected a sequence of int, got one with {each!r}")
    return list(value)


def checked_device(value: Any) -> Any:
    """Refuse what names no device; None stays None."""
    try:
        return None if value is None else torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"device: expected a torch.device or its name, like 'cpu' or 'cuda', got {value!r}"
        ) from None


def id_tensor(name: str, value: Tensor, shape: str = "[N] or [B, N]") -> None:
    """Refuse what is not an integer tensor with as many dimensions as one of the shapes named."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected an integer tensor, got {type(value).__name__}")
    _of_integers(name, value)
    _fits(name, value, shape)


def float_tensor(name: str, value: Tensor, shape: str) -> None:
    """Refuse what is not a floating-point tensor with as many dimensions as `shape`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a floating-point tensor, got {type(value).__name__}")
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating-point tensor, got {value.dtype}")
    _fits(name, value, shape)


def _of_integers(name: str, value: Tensor) -> None:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer tensor, got {value.dtype}")


def _fits(name: str, value: Tensor, shape: str) -> None:
    if value.ndim not in {each.count(",") + 1 for each in shape.split(" or ")}:
        raise ValueError(f"{name}: expected shape {shape}, got {list(value.shape)}")
