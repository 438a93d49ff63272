"""What interval evaluation knows of a value over boxes of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "FLOAT32_MAX",
    "LIMIT",
    "LIMITS",
    "NOTHING",
    "POSITIONS",
    "Boxes",
    "Linear",
    "Range",
    "Truth",
    "Value",
    "bounds",
    "plain",
    "spread",
]

LIMIT = 1 << 62  # bounds beyond it might overflow int64 on the way
FLOAT32_MAX = 3.4028234663852886e38
LIMITS = {
    "uint8": (0, 255),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}
NOTHING: frozenset[str] = frozenset()
POSITIONS = frozenset({"q_idx", "kv_idx"})


@dataclass(frozen=True, eq=False)
class Boxes:
    """N boxes; all fields are Tensor [N], int64; ends are inclusive.

    Where every box has one query position, `q_hi` is the same object as `q_lo`, which the analysis
    takes as a promise; likewise for keys.
    """

    b: Tensor
    h: Tensor
    q_lo: Tensor
    q_hi: Tensor
    kv_lo: Tensor
    kv_hi: Tensor


@dataclass(frozen=True, eq=False)
class Truth:
    """What is known of a boolean over each box: Tensors that broadcast to [N], bool.

    Attributes
    ----------
    must : Tensor
        Every element is True.
    may : Tensor
        An element can be True; False proves that none is.
    seen, unseen : Tensor
        Some element is proven True, proven False.
    """

    must: Tensor
    may: Tensor
    seen: Tensor
    unseen: Tensor

    @property
    def exact(self) -> bool:
        """True where each box holds one value only."""
        return self.must is self.may


@dataclass(frozen=True, eq=False)
class Linear:
    """``q * q_idx + kv * kv_idx + base``, in int64; `base` has one value a box."""

    q: int
    kv: int
    base: Tensor


@dataclass(frozen=True, eq=False)
class Range:
    """Range of a number over each box.

    Attributes
    ----------
    lo, hi : Tensor, broadcast to [N], int64 or float64
        One object where each box holds one value only.
    low, high : int or float
        Bounds over all boxes.
    depends : frozenset of str
        Positions that the value varies with inside a box.
    attained : bool or Tensor [N]
        Some element has the value `lo`, and some `hi`.
    covers : bool
        Every integer from `lo` to `hi` is some element's value.
    linear : Linear, optional
    nan : bool
        Some element may be NaN; `lo` and `hi` are of the others.
    """

    lo: Tensor
    hi: Tensor
    low: float
    high: float
    depends: frozenset[str] = NOTHING
    attained: bool | Tensor = False
    covers: bool = False
    linear: Linear | None = None
    nan: bool = False

    @property
    def exact(self) -> bool:
        """True where each box holds one value only."""
        return self.lo is self.hi

    @property
    def constant(self) -> bool:
        """True where all boxes hold the same one value."""
        return self.exact and self.low == self.high

    @property
    def finite(self) -> bool:
        """True where no element can be infinite or NaN."""
        return not self.nan and -FLOAT32_MAX < self.low and self.high < FLOAT32_MAX


Value = Range | Truth


def plain(value: Value) -> Tensor:
    """The one value that each box holds, of a value that is exact."""
    return value.must if isinstance(value, Truth) else value.lo


def bounds(lo: Tensor, hi: Tensor) -> tuple[float, float]:
    """The least and the greatest end of all boxes."""
    return lo.min().item(), hi.max().item()


def spread(flag: bool | Tensor, like: Tensor) -> Tensor:
    """`flag` as a tensor where `like` is."""
    if isinstance(flag, Tensor):
        return flag
    return torch.full((), flag, dtype=torch.bool, device=like.device)
