"""Block masks as text: a character pair for each block, or for some of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch import Tensor

from flexdecode.mask_arguments import cdiv

__all__ = ["draw_blocks"]


def draw_blocks(dense: Callable[[], Tensor], grid_size: int | tuple[int, int], limit: int) -> str:
    """Draw the blocks of a mask.

    Parameters
    ----------
    dense : callable () -> Tensor [B, H, nQ, nKV]
        1 where a block is listed, else 0; made when the other arguments are known to be good.
    grid_size, limit
        As `BlockMask.to_string` takes them.
    """
    pair = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(isinstance(n, int) and (n > 0 or n == -1) for n in pair)
    ):
        raise ValueError(
            f"grid_size: expected an int or two, above 0 or -1 for all, got {grid_size!r}"
        )
    if not isinstance(limit, int):
        raise TypeError(f"limit: expected an int, got {type(limit).__name__}")
    blocks = dense()
    rows, columns = pair
    pictures = []
    heads = itertools.product(range(blocks.shape[0]), range(blocks.shape[1]))
    for number, (b, h) in enumerate(heads):
        if number == limit:
            pictures.append("...\nto_string(limit=N) draws more, mask[b, h] a chosen one")
            break
        pictures.append(f"({b}, {h})\n" + _picture(blocks[b, h], rows, columns))
    return "\n".join(pictures)


def _picture(dense: Tensor, rows: int, columns: int) -> str:
    row_step = max(1, cdiv(dense.shape[0], rows)) if rows > 0 else 1
    column_step = max(1, cdiv(dense.shape[1], columns)) if columns > 0 else 1
    lines = []
    for r in range(0, dense.shape[0], row_step):
        line = ""
        for c in range(0, dense.shape[1], column_step):
            share = dense[r : r + row_step, c : c + column_step].float().mean().item()
            line += ("██" if share == 1 else "░░") if share else "  "
        lines.append(line)
    return "\n".join(lines)
