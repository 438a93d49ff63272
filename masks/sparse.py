"""Sparse patterns of long-document encoders, and random ones: Longformer, BigBird."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdecode.masks.arguments import at_least, per_batch
from flexdecode.mods import MaskMod, mask_mod

__all__ = ["big_bird", "longformer", "random_sparse"]

_PRIME = 2**31 - 1


def longformer(is_global: Tensor, window: int, *, dilation: int = 1) -> MaskMod:
    """True near the query, and wherever query or key is a global token (Longformer [1]_).

    ``is_global[b, q_idx] or is_global[b, kv_idx] or (|d| <= window // 2 * dilation and
    d % dilation == 0)``, where ``d = q_idx - kv_idx``. Its decoder half is
    ``causal & longformer(...)``.

    Parameters
    ----------
    is_global : Tensor, [N] or [B, N], bool
        Tokens that see everything and are seen by all. ``N`` covers every position that is asked
        about. May change in place.
    window : int >= 1, keys
        Width of the window, half of it on either side, as ``attention_window`` of the checkpoints.
    dilation : int >= 1, default 1, tokens
        Distance between two keys of the window.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `is_global` is not a bool tensor, or a number not an int.
    ValueError
        `is_global` has neither one nor two dimensions, or a number is below 1.

    References
    ----------
    .. [1] I. Beltagy, M. Peters, A. Cohan, "Longformer: The Long-Document Transformer",
       arXiv:2004.05150, 2020.
    """
    if not isinstance(is_global, Tensor) or is_global.dtype != torch.bool:
        got = is_global.dtype if isinstance(is_global, Tensor) else type(is_global).__name__
        raise TypeError(f"is_global: expected a bool tensor, got {got}")
    if is_global.ndim not in (1, 2):
        raise ValueError(f"is_global: expected shape [N] or [B, N], got {list(is_global.shape)}")
    at_least("window", window, 1)
    at_least("dilation", dilation, 1)
    reach = window // 2 * dilation

    @mask_mod
    def near(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (abs(distance) <= reach) & (distance % dilation == 0)

    @mask_mod
    def longformer(b, h, q_idx, kv_idx):
        return is_global[q_idx] | is_global[kv_idx] | near(b, h, q_idx, kv_idx)

    @mask_mod
    def longformer_per_batch(b, h, q_idx, kv_idx):
        return is_global[b, q_idx] | is_global[b, kv_idx] | near(b, h, q_idx, kv_idx)

    return longformer if is_global.ndim == 1 else longformer_per_batch


def big_bird(
    block_size: int = 64,
    *,
    window: int = 3,
    num_global: int = 1,
    num_random: int = 3,
    length: int | Tensor | None = None,
    seed: int = 0,
) -> MaskMod:
    """True for neighbouring blocks, global blocks, and a few random ones (BigBird [1]_).

    With ``i = q_idx // block_size`` and ``j = kv_idx // block_size``: ``|i - j| <= window // 2``,
    or ``i < num_global`` or ``j < num_global``, or ``j`` is one of `num_random` draws for
    ``(h, i)``. Draws are hashes, so that a row is the same in prefill and in every step of
    decoding. The decoder half is ``causal & big_bird(...)``.

    Parameters
    ----------
    block_size : int >= 1, default 64, tokens
        Tokens of a block; need not be the block size of the `BlockMask`, but its tables are made
        fastest where ``BLOCK_SIZE`` divides it.
    window : int >= 1, default 3, blocks
        Neighbouring blocks, the query's own included, half of the others on either side.
    num_global : int >= 0, default 1, blocks
        Blocks at the start that see everything and are seen by all.
    num_random : int >= 0, default 3
        Draws for each head and block of queries; two may fall on the same block.
    length : int, or Tensor [] or [B], integer, tokens, optional
        Draws are among the blocks of a sequence of this length, as in the paper. Default: among
        those up to the query's own, which is what a decoder can see.
    seed : int, default 0
        Another seed, other draws.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        One of the numbers is not an integer.
    ValueError
        One of them is too small, or `length` a tensor of more than one dimension.

    References
    ----------
    .. [1] M. Zaheer et al., "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062, 2020.
    """
    at_least("block_size", block_size, 1)
    at_least("window", window, 1)
    at_least("num_global", num_global, 0)
    at_least("num_random", num_random, 0)
    half = window // 2
    among = _own_blocks if length is None else _all_blocks(per_batch("length", length), block_size)

    @mask_mod
    def big_bird(b, h, q_idx, kv_idx):
        row, column = q_idx // block_size, kv_idx // block_size
        seen = (abs(row - column) <= half) | (row < num_global) | (column < num_global)
        for draw in range(num_random):
            seen = seen | (column == _hash(seed, h, row, draw) * among(b, row) // _PRIME)
        return seen

    return big_bird


def random_sparse(density: float, *, block_size: int = 128, seed: int = 0) -> MaskMod:
    """True for a random share of the blocks, another one for each head and block of queries.

    ``hash(seed, h, q_idx // block_size, kv_idx // block_size) < density * (2**31 - 1)``: a baseline
    for patterns that select. Sequences share the draws, and a row is the same in prefill and in
    every step of decoding. Says nothing about the future, and a query need not see itself: combine
    it, ``causal & (random_sparse(0.1) | sliding_window(64))``.

    Parameters
    ----------
    density : float in [0, 1]
        Share of the blocks that are seen, on average.
    block_size : int >= 1, default 128, tokens
        Side of a block; 1 draws for every element. Tables are made fastest where the ``BLOCK_SIZE``
        of the `BlockMask` divides it.
    seed : int, default 0
        Another seed, other draws.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `density` is not a number, or `block_size` or `seed` not an int.
    ValueError
        `density` is outside [0, 1], or `block_size` below 1.
    """
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise TypeError(f"density: expected a number, got {type(density).__name__}")
    if not 0 <= density <= 1:
        raise ValueError(f"density: expected a number from 0 to 1, got {density}")
    at_least("block_size", block_size, 1)
    limit = round(density * _PRIME)

    @mask_mod
    def random_sparse(b, h, q_idx, kv_idx):
        return _hash(seed, h, q_idx // block_size, kv_idx // block_size) < limit

    return random_sparse


def _own_blocks(b: Any, row: Any) -> Any:
    return row + 1


def _all_blocks(length: Callable[[Any], Any], block_size: int) -> Callable[[Any, Any], Any]:
    def all_blocks(b: Any, row: Any) -> Any:
        return (length(b) - 1) // block_size + 1

    return all_blocks


def _hash(*parts: Any) -> Any:
    """Mix integers into one below `_PRIME`, by multiplying and squaring modulo it.

    Sums, products and remainders, since intervals follow them: where a block of the tables lies in
    one block of the pattern, no element of it is looked at. No product leaves int64.
    """
    x = _PRIME // 3
    for part in parts:
        x = (x * 16807 + part) % _PRIME
        x = (x * x + 40692) % _PRIME
        x = (x * x + 69621) % _PRIME
    return x
