"""The running softmax of the CPU backend: maximum M, sum L and accumulator ACC of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["State", "attended", "dots", "product"]

FEW_ROWS = 8
CACHED = 1 << 21  # elements of a float32 factor that a processor's cache may hold

_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, eq=False)
class State:
    """Softmax statistics of some rows, natural units.

    Attributes
    ----------
    m, l : Tensor [..., 1]
        Maximum (``-inf`` before any key) and sum of exponentials relative to it.
    acc : Tensor [..., Dv]
        Values weighted by the same exponentials.
    """

    m: Tensor
    l: Tensor
    acc: Tensor

    @staticmethod
    def empty(rows: torch.Size, Dv: int, dtype: torch.dtype, device: torch.device) -> State:
        """The state of rows that have seen no key."""
        m = torch.full((*rows, 1), -torch.inf, dtype=dtype, device=device)
        return State(m, torch.zeros_like(m), m.new_zeros((*rows, Dv)))

    def __getitem__(self, rows: Any) -> State:
        return State(self.m[rows], self.l[rows], self.acc[rows])

    def __setitem__(self, rows: Any, new: State) -> None:
        self.m[rows], self.l[rows], self.acc[rows] = new.m, new.l, new.acc

    def flatten(self) -> State:
        """The same memory with the two leading dimensions joined."""
        return State(self.m.flatten(0, 1), self.l.flatten(0, 1), self.acc.flatten(0, 1))

    def with_sinks(self, sinks: Tensor) -> State:
        """The state after one more logit a row, [..., 1], that gives no value."""
        m = torch.maximum(self.m, sinks)
        base = _finite(m)
        alpha = (self.m - base).exp()
        return State(m, self.l * alpha + (sinks - base).exp(), self.acc * alpha)

    def out(self) -> Tensor:
        """The normalised output, 0 where nothing was seen: [..., Dv]."""
        return self.acc / self.l.clamp(min=0.5)  # a sum holds exp(0), or nothing at all

    def lse(self) -> Tensor:
        """Log of the sum of exponentials, ``-inf`` where nothing was seen: [..., 1]."""
        return self.l.log() + _finite(self.m)


def attended(old: State | None, score: Tensor, v: Tensor) -> State:
    """The state after some more keys.

    Parameters
    ----------
    old : State or None
        None when these are the first.
    score : Tensor, [X, Y, M, N], natural units
        Scores, ``-inf`` where a key is not allowed; overwritten.
    v : Tensor, [X or 1, Y, N, Dv]
        Values, finite where no row may see them.
    """
    m = score.amax(-1, keepdim=True)
    if old is not None:
        m = torch.maximum(old.m, m)
    base = _finite(m)
    p = score.sub_(base).exp_()
    l, acc = p.sum(-1, keepdim=True), product(p, v)
    if old is not None:
        alpha = (old.m - base).exp()
        l, acc = old.l * alpha + l, old.acc * alpha + acc
    return State(m, l, acc)


def product(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w`` for x [X, Y, M, K] and w [X or 1, Y, K, N], without copying w."""
    X, Y, M, K = x.shape
    if w.shape[0] == 1 and X > 1:  # one cache for all sequences: their rows share a product
        joined = x.transpose(0, 1).reshape(1, Y, X * M, K)
        return torch.matmul(joined, w).view(Y, X, M, w.shape[3]).transpose(0, 1)
    if X > 1 and Y > 1 and w.stride(0) != Y * w.stride(1):  # matmul would copy w to join the two
        return torch.stack([torch.bmm(x[i], w[i]) for i in range(X)])
    return torch.matmul(x, w)


def dots(q: Tensor, k: Tensor) -> Tensor:
    """``q @ k^T`` for q [X, Y, M, K] and k [X or 1, Y, N, K], without copying k."""
    X, Y, M, _ = q.shape
    joined = X == 1 or Y == 1 or k.stride(0) == Y * k.stride(1)
    if M <= FEW_ROWS and k.shape[0] == X and joined and k.numel() > CACHED:
        # Matrix products stream a large left factor faster than a large right one.
        return torch.matmul(k, q.transpose(-1, -2)).transpose(-1, -2).contiguous()
    return product(q, k.transpose(-1, -2))


def _finite(m: Tensor) -> Tensor:
    # -inf - -inf is NaN: rows that have seen nothing are measured from a finite number.
    return m.clamp(min=_LOWEST)
