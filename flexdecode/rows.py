"""The rows of a product on the CPU, the keys they meet, and who may see which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexdecode.evaluate import evaluate
from flexdecode.softmax import dots

if TYPE_CHECKING:
    from flexdecode.caches import CachePart
    from flexdecode.trace import Traced

__all__ = ["Allowed", "Places", "Rows", "Uncut", "scored"]


@dataclass(frozen=True, eq=False)
class Places:
    """Index arguments of the mods for X sequences by Y key heads, int64."""

    b: Tensor | int  # [X, 1, 1, 1, 1]
    h: Tensor | int  # [X or 1, Y, G, 1, 1]; 0 when nobody asks
    q_idx: Tensor | int  # [X or 1, 1, 1, T, 1]
    kv_len: Tensor | None  # [X, 1, 1, 1, 1]; None when all are equal


@dataclass(frozen=True, eq=False)
class Uncut:
    """The rows of a product, X sequences by Y key heads, and the cache that they read."""

    q: Tensor  # [X, Y, M, D], scaled, float32; M = G * T
    k: CachePart
    v: CachePart
    bias: Tensor | None  # [X or 1, Y or 1, G or 1, T, N]
    places: Callable[[], Places]  # made when a mod asks

    @property
    def copies(self) -> bool:
        """True where a cut of consecutive keys is a copy."""
        return self.k.copies or self.v.copies

    def cut(self, keys: slice | Tensor) -> Rows:
        """Some keys: views for a slice where they can be, copies for a tensor of positions."""
        bias = self.bias
        if bias is not None:
            bias = bias[..., keys] if isinstance(keys, slice) else bias.index_select(4, keys)
        return Rows(self.q, self.k.cut(keys), self.v.cut(keys), bias, self.places)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a product and the keys that they meet."""

    q: Tensor  # [X, Y, M, D], scaled, float32; M = G * T
    k: Tensor  # [X or 1, Y, N, D]
    v: Tensor  # [X or 1, Y, N, Dv]
    bias: Tensor | None  # [X or 1, Y or 1, G or 1, T, N]
    places: Callable[[], Places]  # made when a mod asks

    def laid_out(self, keys: int) -> Rows:
        """The same in memory of their own, in one order, and so many keys, the last made up."""

        def filled(x: Tensor) -> Tensor:
            return pad(x, (0, 0, 0, keys - x.shape[2])).clone(memory_format=torch.contiguous_format)

        q = self.q.clone(memory_format=torch.contiguous_format)
        bias = None if self.bias is None else pad(self.bias, (0, keys - self.bias.shape[4]))
        return Rows(q, filled(self.k), filled(self.v), bias, self.places)


@dataclass(frozen=True, eq=False)
class Allowed:
    """Who may see the keys from column ``start`` on; columns outside are open to all rows."""

    start: int
    mask: Tensor  # [X or 1, Y or 1, G or 1, T or 1, n], bool


def scored(
    rows: Rows,
    kv_idx: Callable[[], Tensor],
    rule: Traced | None,
    allowed: list[Allowed],
    T: int,
    owned: bool,
) -> tuple[Tensor, Tensor]:
    """Scores of some rows, ``-inf`` where not allowed, and values fit to be weighted by 0.

    Parameters
    ----------
    rows : Rows
    kv_idx : callable () -> Tensor [X or 1, 1, 1, 1, N], int64
        Positions of the keys, made when `rule` asks.
    rule : Traced or None
        The score mod.
    allowed : list of Allowed
    T : int
        Query rows.
    owned : bool
        ``rows.v`` is a copy, free to be written to.

    Returns
    -------
    score : Tensor, [X, Y, M, N], float32
    v : Tensor, [X or 1, Y, N, Dv], float32
        Zero where no row may see a key: NaN times 0 would be NaN.
    """
    k, v = rows.k.float(), rows.v.float()
    X, Y, M, _ = rows.q.shape
    score = dots(rows.q, k)
    if rule is None and rows.bias is None and not allowed:
        return score, v
    owned = owned or v is not rows.v  # converted
    score = score.view(X, Y, -1, T, k.shape[2])
    if rows.bias is not None:
        score.add_(rows.bias)
    if rule is not None:
        at, shape = rows.places(), score.shape
        changed = evaluate(rule, at.b, at.h, at.q_idx, kv_idx(), score)
        # Smaller than the scores, it may be the user's own tensor, not to be written to.
        score = changed if changed.shape == shape else changed.expand(shape).clone()
    for each in allowed:
        columns = slice(each.start, each.start + each.mask.shape[-1])
        score[..., columns].masked_fill_(~each.mask, -torch.inf)
        unseen = ~each.mask.any(dim=3).any(dim=2)  # [X or 1, Y or 1, n]
        if unseen.any():
            if unseen.shape[0] > v.shape[0]:
                v, owned = v.expand(X, -1, -1, -1), False
            if not owned:
                v, owned = v.clone(), True
            v[:, :, columns].masked_fill_(unseen.unsqueeze(-1), 0.0)
    return score.reshape(X, Y, M, -1), v
