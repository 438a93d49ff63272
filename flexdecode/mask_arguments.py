"""Checks of what masks are made of, and their messages: ``argument: expected ..., got ...``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode.checks import MAX_POSITION, as_int
from flexdecode.trace import Traced

__all__ = [
    "block_size",
    "cdiv",
    "check_captures",
    "checked_device",
    "count",
    "find_device",
    "is_same",
    "position",
    "shown",
    "token_count",
]


def block_size(value: Any) -> tuple[int, int]:
    """Queries and keys of a block, from an int or a pair."""
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"BLOCK_SIZE: expected an int or (q, kv), got {value!r}")
    q, kv = (token_count("BLOCK_SIZE", size) for size in pair)
    if q < 1 or kv < 1:
        raise ValueError(f"BLOCK_SIZE: expected sizes of at least 1, got {value!r}")
    return q, kv


def count(name: str, value: Any) -> int:
    """A size: an int of at least 0."""
    size = as_int(value)
    if size is None:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not 0 <= size < 1 << 63:
        raise ValueError(f"{name}: expected a size of at least 0, got {size}")
    return size


def token_count(name: str, value: Any) -> int:
    """A number of tokens: an int from 0 to the most that positions may be."""
    tokens = count(name, value)
    if tokens > MAX_POSITION:
        raise ValueError(f"{name}: expected at most 2**30 tokens, got {tokens}")
    return tokens


def position(
    name: str, value: Any, B: int | None, device: torch.device | None
) -> int | Tensor | None:
    """An int, or a tensor as an own [B] int64 copy, so that tables and positions stay together."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        number = as_int(value)
        if number is None:
            raise TypeError(
                f"{name}: expected an int or an integer tensor, got {type(value).__name__}"
            )
        if not -MAX_POSITION <= number <= MAX_POSITION:
            raise ValueError(f"{name}: expected a value in [-2**30, 2**30], got {number}")
        return number
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {value.dtype}")
    if value.dim() > 1 or (value.dim() == 1 and B is not None and value.shape[0] not in (1, B)):
        raise ValueError(
            f"{name}: expected an int or a tensor of shape [{'B' if B is None else B}], "
            f"got shape {list(value.shape)}"
        )
    copy = value.detach().to(torch.int64, copy=True).reshape(-1)
    if device is not None and copy.device != device:
        raise ValueError(f"{name}: expected device {device}, got {copy.device}")
    return copy if B is None else copy.expand(B)


def find_device(device: Any, values: tuple[Any, ...]) -> torch.device:
    """The device asked for, else that of the first tensor among `values`, else the default.

    A number on the CPU (a 0-dim tensor) says nothing about where the rest is.
    """
    if device is not None:
        return checked_device(device)
    for value in values:
        if isinstance(value, Tensor) and (value.dim() or value.device.type != "cpu"):
            return value.device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def checked_device(device: Any) -> torch.device:
    """The device asked for, with its index where it is a GPU."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"device: expected a torch.device or its name, like 'cpu' or 'cuda', got {device!r}"
        ) from None
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(f"device: expected 'cpu' where torch finds no GPU, got {device!r}")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise ValueError(f"device: expected one of {count} GPUs, 'cuda:0' on, got {device!r}")
    return torch.device("cuda", index)


def check_captures(mod: Traced, device: torch.device) -> None:
    """Raise unless the captured tensors are on `device`; one number may also be on the CPU."""
    for tensor, spec in zip(mod.captures, mod.graph.captures, strict=True):
        if tensor.device != device and (tensor.dim() or tensor.device.type != "cpu"):
            raise ValueError(
                f"{mod.graph.kind}_mod: expected the captured tensor {spec.name} on {device}, "
                f"got {tensor.device}"
            )


def is_same(first: int | Tensor, second: int | Tensor) -> bool:
    """True where two positions are known to be equal without waiting for a GPU."""
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    tensors = [x for x in (first, second) if isinstance(x, Tensor)]
    if len(tensors) == 2 and tensors[0].data_ptr() == tensors[1].data_ptr():
        alike = [(x.dtype, x.numel(), x.stride() if x.numel() > 1 else ()) for x in tensors]
        if alike[0] == alike[1]:
            return True
    if any(x.device.type != "cpu" for x in tensors):
        return False
    if len(tensors) == 2 and tensors[0].shape != tensors[1].shape:
        if max(x.dim() for x in tensors) > 1 or min(x.numel() for x in tensors) != 1:
            return False
    return bool((torch.as_tensor(first) == torch.as_tensor(second)).all())


def shown(value: Any) -> str:
    """A position or length in words, without waiting for a GPU."""
    if not isinstance(value, Tensor):
        return repr(value)
    return str(value.tolist()) if value.device.type == "cpu" else "a tensor"


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size` elements."""
    return -(-size // block)
