"""The rows of a product on the CPU, the keys they meet, and who may see which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Allowed", "Places", "Rows"]


@dataclass(frozen=True, eq=False)
class Places:
    """Index arguments of the mods for X sequences by Y key heads, int64."""

    b: Tensor  # [X, 1, 1, 1, 1]
    h: Tensor  # [X or 1, Y, G, 1, 1]
    q_idx: Tensor  # [X or 1, 1, 1, T, 1]
    kv_len: Tensor | None  # [X, 1, 1, 1, 1]; None when all are equal


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a product, X sequences by Y key heads, and what is theirs."""

    q: Tensor  # [X, Y, M, D], scaled, float32; M = G * T
    k: Tensor  # [X or 1, Y, N, D]
    v: Tensor  # [X or 1, Y, N, Dv]
    bias: Tensor | None  # [X or 1, Y or 1, G or 1, T, N]
    places: Callable[[], Places]  # made when a mod asks

    def cut(self, keys: slice | Tensor) -> Rows:
        """Some keys: views for a slice, copies for a tensor of positions."""
        if isinstance(keys, slice):
            k, v = self.k[:, :, keys], self.v[:, :, keys]
            bias = None if self.bias is None else self.bias[..., keys]
        else:
            k, v = self.k.index_select(2, keys), self.v.index_select(2, keys)
            bias = None if self.bias is None else self.bias.index_select(4, keys)
        return Rows(self.q, k, v, bias, self.places)

    def padded(self, keys: int) -> Rows:
        """As many keys, the last of them made up."""
        more = keys - self.k.shape[2]
        bias = None if self.bias is None else pad(self.bias, (0, more))
        k, v = pad(self.k, (0, 0, 0, more)), pad(self.v, (0, 0, 0, more))
        return Rows(self.q, k, v, bias, self.places)


@dataclass(frozen=True, eq=False)
class Allowed:
    """Who may see the keys from column ``start`` on; columns outside are open to all rows."""

    start: int
    mask: Tensor  # [X or 1, Y or 1, G or 1, T or 1, n], bool
