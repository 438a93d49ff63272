"""Buffers between guard bands: a write beside a buffer shows, a read beside one is poison."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

BAND = 1024  # bytes on each side; a multiple keeps alignment as it was
BYTE = 0xFF  # NaN in every float format, -1 in every integer


class Guards:
    """The buffers made so far, each with its bands."""

    def __init__(self) -> None:
        self.memory: list[tuple[Tensor, int]] = []  # bytes, and those of the buffer
        self._empty = torch.empty

    def surround(self, shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        """Make a contiguous buffer, all of it guard bytes."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // 16) * 16
        memory = self._empty(2 * BAND + padded, dtype=torch.uint8, device=device).fill_(BYTE)
        self.memory.append((memory, size))
        return memory[BAND : BAND + size].view(dtype).view(shape)

    def inside(self, x: Tensor) -> Tensor:
        """Copy a tensor between bands, with its strides where it has gaps or another order."""
        if not x.numel():
            return x
        extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        flat = self.surround((extent,), x.dtype, x.device)
        return flat.as_strided(x.shape, x.stride()).copy_(x)

    def check(self) -> None:
        """Raise where a band was written to."""
        for memory, size in self.memory:
            bands = torch.cat([memory[:BAND], memory[BAND + size :]])
            wrong = (bands != BYTE).nonzero()
            assert not len(wrong), (
                f"{len(wrong)} bytes written beside a buffer of {size}, the first "
                f"{int(wrong[0]) - BAND} from its "
                f"{'start' if int(wrong[0]) < BAND else 'end'}"
            )


def _shape(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)


@contextlib.contextmanager
def guarded() -> Iterator[Guards]:
    """Put every buffer that torch makes meanwhile between bands, and look at them in the end."""
    guards = Guards()

    def empty(*sizes: Any, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
        assert not rest, rest
        dtype = torch.get_default_dtype() if dtype is None else dtype
        return guards.surround(_shape(sizes), dtype, "cpu" if device is None else device)

    def empty_like(x: Tensor, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
        made = x.is_contiguous() and not rest
        assert made, "expected a contiguous tensor"
        return guards.surround(x.shape, dtype or x.dtype, device or x.device)

    def new_empty(x: Tensor, *sizes: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return guards.surround(_shape(sizes), dtype or x.dtype, device or x.device)

    def zeros(*sizes: Any, **options: Any) -> Tensor:
        return empty(*sizes, **options).zero_()

    def full(size: Any, value: Any, **options: Any) -> Tensor:
        options.setdefault("dtype", torch.tensor(value).dtype)
        return empty(size, **options).fill_(value)

    with pytest.MonkeyPatch.context() as patch:
        for name, made in (("empty", empty), ("zeros", zeros), ("full", full)):
            patch.setattr(torch, name, made)
        patch.setattr(torch, "empty_like", empty_like)
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        yield guards
    guards.check()
