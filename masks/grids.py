"""Neighbourhoods of tokens that lie on a line, in an image or in a video."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexdecode.masks.arguments import checked_device, int_list, number, per_batch
from flexdecode.mods import MaskMod, and_masks, mask_mod

__all__ = ["neighborhood", "sliding_tile", "tile_order"]


def neighborhood(
    shape: Sequence[int], window: Sequence[int], *, start: int | Tensor = 0
) -> MaskMod:
    """True for the keys of a window around the query on a grid (neighborhood attention [1]_).

    The tokens of the grid follow one another in row-major order from position `start` on. Along
    each dimension of size ``n`` and window ``w``, a query at ``x`` sees ``first <= y < first + w``
    with ``first = clamp(x - w // 2, 0, n - w)``: at the border the window shifts inwards, so that
    every query sees as many keys. Tokens outside of the grid neither see nor are seen: combine
    it, ``right_padding(start) | neighborhood(...)`` for an image behind a prompt, ``causal & ...``
    where the image is being generated.

    Parameters
    ----------
    shape : sequence of 1 to 3 int, tokens
        Of the grid: ``(width,)``, ``(height, width)`` or ``(frames, height, width)``.
    window : sequence of int, tokens
        Of the window, along the same dimensions; at least 1 and at most `shape`.
    start : int, or Tensor [] or [B], integer, default 0, tokens
        Position of the first token of the grid.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        The sequences differ in length, a number is out of range, or `start` is a tensor of more
        than one dimension.
    TypeError
        A number is not an int.

    References
    ----------
    .. [1] A. Hassani et al., "Neighborhood Attention Transformer", arXiv:2204.07143, 2022.

    Examples
    --------
    The middle of the top row of an image of 3 x 5:

    >>> import torch
    >>> mask = neighborhood((3, 5), (3, 3))
    >>> mask(0, 0, torch.tensor(2), torch.arange(15)).int().reshape(3, 5)
    tensor([[0, 1, 1, 1, 0],
            [0, 1, 1, 1, 0],
            [0, 1, 1, 1, 0]], dtype=torch.int32)
    """
    _check_grid(shape, window)
    in_window = _windows(shape, window, 1, per_batch("start", start))

    @mask_mod
    def neighborhood(b, h, q_idx, kv_idx):
        return in_window(b, h, q_idx, kv_idx)

    return neighborhood


def sliding_tile(
    shape: Sequence[int],
    tile: Sequence[int],
    window: Sequence[int],
    *,
    start: int | Tensor = 0,
) -> MaskMod:
    """True for the tiles of a window around the query's tile (sliding tile attention [1]_).

    As `neighborhood`, on the grid of tiles: all tokens of a tile see the same tiles. The tokens of
    a tile must follow one another, the tiles in row-major order; `tile_order` says how to sort
    tokens so. Where a tile holds as many tokens as a block of the `BlockMask`, every block is
    empty or full.

    Parameters
    ----------
    shape : sequence of 1 to 3 int, tokens
        Of the grid: ``(width,)``, ``(height, width)`` or ``(frames, height, width)``.
    tile : sequence of int, tokens
        Of a tile; divides `shape`.
    window : sequence of int, tiles
        Of the window; at least 1 and at most ``shape / tile``.
    start : int, or Tensor [] or [B], integer, default 0, tokens
        Position of the first token of the grid.

    Returns
    -------
    MaskMod

    Raises
    ------
    ValueError
        The sequences differ in length, a number is out of range, tiles do not divide the grid, or
        `start` is a tensor of more than one dimension.
    TypeError
        A number is not an int.

    References
    ----------
    .. [1] P. Zhang et al., "Fast Video Generation with Sliding Tile Attention", arXiv:2502.04507,
       2025.
    """
    tiles = _tiles(shape, tile)
    _check_grid(tiles, window)
    in_window = _windows(tiles, window, math.prod(tile), per_batch("start", start))

    @mask_mod
    def sliding_tile(b, h, q_idx, kv_idx):
        return in_window(b, h, q_idx, kv_idx)

    return sliding_tile


def tile_order(
    shape: Sequence[int], tile: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Return the row-major places of the tokens of a grid, tile after tile.

    Parameters
    ----------
    shape : sequence of 1 to 3 int, tokens
        Of the grid.
    tile : sequence of int, tokens
        Of a tile; divides `shape`.
    device : torch.device or str, optional
        Where the tensor goes. Default: torch's current default device.

    Returns
    -------
    Tensor, [prod(shape)], int64
        ``x[..., order, :]`` sorts tokens for `sliding_tile`, and ``out[..., order.argsort(), :]``
        sorts them back.

    Raises
    ------
    ValueError
        The sequences differ in length, a number is out of range, or tiles do not divide the grid.
    TypeError
        A number is not an int.

    Examples
    --------
    >>> tile_order((2, 4), (2, 2))
    tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    tiles = _tiles(shape, tile)
    places = torch.arange(math.prod(shape), device=checked_device(device))
    split = places.reshape(*itertools.chain(*zip(tiles, tile, strict=True)))
    dims = range(split.ndim)
    return split.permute(*dims[::2], *dims[1::2]).flatten()


def _windows(
    shape: Sequence[int],
    window: Sequence[int],
    size: int,
    start: Callable[[Any], Any],
) -> MaskMod:
    """Join the windows along all dimensions of a grid of cells of `size` tokens."""
    length = size * math.prod(shape)

    @mask_mod
    def on_grid(b, h, q_idx, kv_idx):
        q, kv = q_idx - start(b), kv_idx - start(b)
        return (q >= 0) & (q < length) & (kv >= 0) & (kv < length)

    axes = []
    for cells, width in zip(reversed(shape), reversed(window), strict=True):
        axes.append(_axis(cells, width, size, start))
        size *= cells
    return and_masks(on_grid, *axes)


def _axis(cells: int, width: int, stride: int, start: Callable[[Any], Any]) -> MaskMod:
    """One dimension: its coordinate is ``position // stride % cells``."""
    half, last = width // 2, cells - width

    # Numbers of a dimension of their own, no tuples: they stay run-time parameters.
    @mask_mod
    def axis(b, h, q_idx, kv_idx):
        x = (q_idx - start(b)) // stride % cells
        y = (kv_idx - start(b)) // stride % cells
        first = torch.clamp(x - half, 0, last)
        return (y >= first) & (y < first + width)

    return axis


def _tiles(shape: Sequence[int], tile: Sequence[int]) -> list[int]:
    _check_grid(shape, tile, "tile")
    for size, side in zip(shape, tile, strict=True):
        if size % side:
            raise ValueError(
                f"tile: expected divisors of shape {list(shape)}, got {list(tile)}; pad the grid"
            )
    return [size // side for size, side in zip(shape, tile, strict=True)]


def _check_grid(shape: Sequence[int], window: Sequence[int], name: str = "window") -> None:
    shape, window = int_list("shape", shape), int_list(name, window)
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"shape: expected 1 to 3 sizes, got {len(shape)}")
    if len(window) != len(shape):
        raise ValueError(f"{name}: expected {len(shape)} sizes as in shape, got {len(window)}")
    for size, width in zip(shape, window, strict=True):
        number("shape", size, 1)
        number(name, width, 1)
        if width > size:
            raise ValueError(
                f"{name}: expected at most {list(shape)}, got {list(window)} along a dimension"
            )
