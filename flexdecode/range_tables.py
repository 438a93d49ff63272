"""Minimum and maximum of any range of a captured tensor, in a few gathers."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RangeTable"]

_FINE = 4  # ranges of up to 2 ** _FINE elements are answered exactly by overlapping windows
_MOST = 1 << 21  # bigger tensors are summarised by aligned groups only
_GROUP = 64


class RangeTable:
    """Answers "least and greatest of ``values[row, first .. last]``" for many ranges at a time.

    Short ranges are covered by two windows of a power of two elements. Longer ones take such a
    window at either end, and between them whole groups, covered by two windows of groups. That
    takes ``O(N)`` memory where a sparse table over elements would take ``O(N log N)``.

    Parameters
    ----------
    values : Tensor, [R, N], any dtype but bool, N >= 1
        NaN counts for neither end.

    Attributes
    ----------
    exact : bool
        Bounds are those of the range itself; False (in big tensors) where they are those of the
        aligned groups that it touches.
    has_nan : bool
    low, high : int or float
        Bounds of all values.
    """

    def __init__(self, values: Tensor) -> None:
        self.R, self.N = values.shape
        self.exact = values.numel() <= _MOST
        self.group = 1 << _FINE if self.exact else _GROUP
        floating = values.is_floating_point()
        nan = values.isnan() if floating else None
        self.has_nan = nan is not None and bool(nan.any())
        mins = maxs = values
        if self.has_nan:
            assert nan is not None
            mins = values.masked_fill(nan, torch.inf)
            maxs = values.masked_fill(nan, -torch.inf)
        self.low, self.high = mins.min().item(), maxs.max().item()
        self.dtype = torch.float64 if floating else torch.int64
        count = -(-self.N // self.group)
        self._groups = count
        self._coarse = [
            _windows(_grouped(part, count, self.group, largest), count.bit_length() - 1, largest)
            for part, largest in ((mins, False), (maxs, True))
        ]
        self._fine = [
            _windows(part, _FINE, largest) if self.exact else None
            for part, largest in ((mins, False), (maxs, True))
        ]
        sizes = torch.arange(1, max(count, self.group) + 1, device=values.device)
        # Exact: float64 holds these integers, and log2 of a power of two is whole.
        self._log2 = torch.log2(sizes.double()).floor().long()

    def bounds(self, row: Tensor | int, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest of each range.

        Parameters
        ----------
        row, first, last : Tensor, int64, shapes that broadcast
            ``0 <= row < R`` and ``0 <= first <= last < N``.

        Returns
        -------
        low, high : Tensor, int64 or float64
        """
        if not self.exact:
            return self._join(row, first // self.group, last // self.group)
        level = self._log2[(last - first).clamp(max=self.group - 1)]
        at = (level * self.R + row) * self.N
        head, tail = at + first, at + last + 1 - (1 << level)
        start, stop = (first + self.group - 1) // self.group, (last + 1) // self.group - 1
        inner = start <= stop
        found = []
        middle = None
        if bool(inner.any()):
            middle = self._join(row, torch.where(inner, start, 0), torch.where(inner, stop, 0))
        for side, pick in enumerate((torch.minimum, torch.maximum)):
            table = self._fine[side]
            assert table is not None
            end = pick(table[head], table[tail]).to(self.dtype)
            if middle is not None:
                end = torch.where(inner, pick(end, middle[side]), end)
            found.append(end)
        return found[0], found[1]

    def _join(self, row: Tensor | int, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        level = self._log2[stop - start]
        at = (level * self.R + row) * self._groups
        head, tail = at + start, at + stop + 1 - (1 << level)
        least, greatest = self._coarse
        return (
            torch.minimum(least[head], least[tail]).to(self.dtype),
            torch.maximum(greatest[head], greatest[tail]).to(self.dtype),
        )


def _grouped(values: Tensor, count: int, group: int, largest: bool) -> Tensor:
    missing = count * group - values.shape[1]
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], 1)
    grouped = values.reshape(values.shape[0], count, group)
    return grouped.amax(-1) if largest else grouped.amin(-1)


def _windows(values: Tensor, levels: int, largest: bool) -> Tensor:
    """Bounds of windows of 1, 2, 4, ... elements from each place on, as one flat tensor."""
    pick = torch.maximum if largest else torch.minimum
    R, N = values.shape
    found = values.new_empty((levels + 1, R, N))
    found[0] = values
    for level in range(levels):
        before, now, shift = found[level], found[level + 1], min(1 << level, N)
        # A window that would pass the end stops there.
        now[:, N - shift :] = before[:, N - shift :]
        pick(before[:, : N - shift], before[:, shift:], out=now[:, : N - shift])
    return found.view(-1)
