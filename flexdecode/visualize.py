"""Pictures of masks, attention scores and plans; matplotlib is imported when one is drawn.

Colours are Okabe and Ito's, or of the map "cividis": colour-blind readers tell them apart, and so
does print by lightness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode.api import attention
from flexdecode.block_mask import BlockMask
from flexdecode.drawing import axes, bare, color_map, figure, patches
from flexdecode.mask_creation import create_block_mask
from flexdecode.tables import EMPTY, FULL, PARTIAL, table_states

if TYPE_CHECKING:
    from flexdecode.explanation import Explanation
    from flexdecode.mods import ScoreMod

__all__ = [
    "legend_handles",
    "plot_blocks",
    "plot_heads",
    "plot_mask",
    "plot_plan",
    "plot_scores",
]

COLORS = {EMPTY: "#f2f2f2", PARTIAL: "#e69f00", FULL: "#0072b2"}
LABELS = {
    EMPTY: "empty: skipped",
    PARTIAL: "partial: the mask is applied",
    FULL: "full: no mask needed",
}
ELEMENT_COLORS = ("#f2f2f2", "#f9dfa6", "#d55e00", "#0072b2")
ELEMENT_LABELS = (
    "empty block: skipped",
    "partial block: hidden",
    "partial block: seen",
    "full block: no mask needed",
)
OWNER_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def plot_blocks(
    states: Tensor,
    BLOCK_SIZE: tuple[int, int],
    lengths: tuple[int, int],
    ax: Any = None,
    *,
    legend: bool = True,
) -> Any:
    """Draw the blocks of one head of one sequence, row 0 on top as in a matrix.

    Parameters
    ----------
    states : Tensor, [nQ, nKV], uint8
        0 empty, 1 partial, 2 full.
    BLOCK_SIZE : (int, int)
        Queries and keys of a block.
    lengths : (int, int), tokens
        Queries and keys; the last blocks may be cut.
    ax : matplotlib Axes, optional
        Where to draw. Default: a new figure.
    legend : bool, default True

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ImportError
        matplotlib is missing.
    """
    ax = axes(ax)
    edges = [
        [min(i * block, length) for i in range(count + 1)]
        for count, block, length in zip(states.shape, BLOCK_SIZE, lengths, strict=True)
    ]
    few = max(states.shape) <= 64
    ax.pcolormesh(
        edges[1],
        edges[0],
        states.cpu().numpy(),
        cmap=color_map(COLORS.values()),
        vmin=EMPTY,
        vmax=FULL,
        edgecolors="white" if few else "none",
        linewidth=0.4 if few else 0.0,
    )
    ax.set_xlim(0, max(lengths[1], 1))
    ax.set_ylim(max(lengths[0], 1), 0)
    ax.set_xlabel(f"keys (tokens, {BLOCK_SIZE[1]} a block)")
    ax.set_ylabel(f"queries (tokens, {BLOCK_SIZE[0]} a block)")
    bare(ax)
    if legend:
        ax.legend(handles=legend_handles(), ncols=3, **_ABOVE)
    return ax


def legend_handles(*, elements: bool = False) -> list[Any]:
    """One coloured patch a state, with its meaning; `elements` for those of `plot_mask`."""
    if elements:
        return patches(zip(ELEMENT_COLORS, ELEMENT_LABELS, strict=True))
    return patches((color, LABELS[state]) for state, color in COLORS.items())


def plot_mask(
    mask_mod: Callable[[Any, Any, Any, Any], Any],
    q_len: int,
    kv_len: int,
    ax: Any = None,
    *,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    b: int = 0,
    h: int = 0,
    q_offset: int | None = None,
    legend: bool = True,
) -> Any:
    """Draw a mask for one head of one sequence: its blocks, and the elements of partial ones.

    Parameters
    ----------
    mask_mod : callable (b, h, q_idx, kv_idx) -> bool
        What it captures is on the CPU.
    q_len, kv_len : int, tokens
    ax : matplotlib Axes, optional
        Where to draw. Default: a new figure.
    BLOCK_SIZE : int or (int, int), default 128
        Queries and keys of a block.
    b, h : int, default 0
        Sequence and query head.
    q_offset : int, tokens, optional
        Position of the first query. Default: ``kv_len - q_len``.
    legend : bool, default True

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ImportError
        matplotlib is missing.
    """
    ax = axes(ax)
    offset = kv_len - q_len if q_offset is None else q_offset
    picture, block = _elements(mask_mod, q_len, kv_len, BLOCK_SIZE, b, h, offset)
    ax.imshow(
        picture.numpy(),
        cmap=color_map(ELEMENT_COLORS),
        vmin=0,
        vmax=len(ELEMENT_COLORS) - 1,
        interpolation="nearest",
        extent=(0, kv_len, q_len + offset, offset),
        aspect="equal" if q_len * 4 >= kv_len else "auto",
    )
    for count, width, start, draw in (
        (kv_len, block[1], 0, ax.axvline),
        (q_len, block[0], offset, ax.axhline),
    ):
        if count // width <= 64:
            for edge in range(width, count, width):
                draw(start + edge, color="white", linewidth=0.5)
    ax.set_xlabel(f"kv_idx (tokens, {block[1]} a block)")
    ax.set_ylabel(f"q_idx (tokens, {block[0]} a block)")
    bare(ax)
    if legend:
        ax.legend(handles=legend_handles(elements=True), ncols=2, **_ABOVE)
    return ax


def plot_heads(
    mask_mod: Callable[[Any, Any, Any, Any], Any],
    q_len: int,
    kv_len: int,
    heads: int | Sequence[int],
    *,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    b: int = 0,
    q_offset: int | None = None,
    columns: int = 4,
) -> Any:
    """Draw a mask for several heads of one sequence, side by side.

    Parameters
    ----------
    mask_mod, q_len, kv_len, BLOCK_SIZE, b, q_offset
        As for `plot_mask`.
    heads : int or sequence of int
        How many query heads, or which.
    columns : int, default 4
        Pictures in a row.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ImportError
        matplotlib is missing.
    """
    chosen = list(range(heads)) if isinstance(heads, int) else list(heads)
    columns = min(columns, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    picture = figure((2.4 * columns, 2.4 * rows + 1.2))
    grid = picture.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for h, ax in zip(chosen, grid.flat, strict=False):
        plot_mask(
            mask_mod,
            q_len,
            kv_len,
            ax,
            BLOCK_SIZE=BLOCK_SIZE,
            b=b,
            h=h,
            q_offset=q_offset,
            legend=False,
        )
        ax.set_title(f"head {h}", fontsize="medium")
        ax.label_outer()
    for ax in grid.flat[len(chosen) :]:
        ax.set_visible(False)
    picture.legend(
        handles=legend_handles(elements=True), ncols=4, loc="outside upper center", frameon=False
    )
    return picture


def plot_scores(
    q: Tensor,
    k: Tensor,
    ax: Any = None,
    *,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    b: int = 0,
    h: int = 0,
    **call: Any,
) -> Any:
    """Draw how much weight each query of one head gives to each key, from the dense reference.

    Parameters
    ----------
    q, k : Tensor, [B, Hq, Lq, D], [B or 1, Hkv, Lkv, D]
        Small ones: all weights are computed.
    ax : matplotlib Axes, optional
        Where to draw. Default: a new figure.
    score_mod, block_mask, **call
        As `attention` takes them.
    b, h : int, default 0
        Sequence and query head.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ImportError
        matplotlib is missing.
    ValueError, TypeError
        What `attention` would raise.
    """
    ax = axes(ax)
    from matplotlib.colors import PowerNorm

    # With the identity for values, the output is the weights.
    ones = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:3], -1)
    call.update(score_mod=score_mod, block_mask=block_mask, backend="reference")
    found = attention(q, k, ones, **call)
    weights = (found[0] if isinstance(found, tuple) else found)[b, h].float().cpu()
    image = ax.imshow(
        weights.masked_fill(weights == 0, torch.nan).numpy(),
        cmap="cividis",
        norm=PowerNorm(0.5, 0, max(weights.max().item(), 1e-6)),  # small weights show too
        interpolation="nearest",
        aspect="equal" if weights.shape[0] * 4 >= weights.shape[1] else "auto",
    )
    ax.set_facecolor(COLORS[EMPTY])
    ax.figure.colorbar(image, ax=ax, label="weight; grey: none", shrink=0.8)
    ax.set_xlabel("keys")
    ax.set_ylabel("query rows")
    bare(ax)
    return ax


def plot_plan(explanation: Explanation, ax: Any = None, *, most: int = 40) -> Any:
    """Draw who reads what: the shares that the active blocks of each list are cut into.

    Colours and numbers tell the shares of a list apart; one program of each key head (and of each
    tile of queries) works on a share. Partial blocks are hatched.

    Parameters
    ----------
    explanation : Explanation
        From `explain`.
    ax : matplotlib Axes, optional
        Where to draw. Default: a new figure.
    most : int, default 40
        Lists that are drawn, the first ones.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ImportError
        matplotlib is missing.
    """
    work = explanation.work
    B, heads, nQ, columns = work.owners.shape
    owners, states = (x.reshape(-1, columns)[:most] for x in (work.owners, work.states))
    if ax is None:
        ax = figure((8.0, 1.4 + 0.3 * len(owners))).subplots()
    colored = torch.where(owners < 0, 0, owners % len(OWNER_COLORS) + 1)
    ax.pcolormesh(
        colored.numpy(),
        cmap=color_map([COLORS[EMPTY], *OWNER_COLORS]),
        vmin=0,
        vmax=len(OWNER_COLORS),
        edgecolors="white" if columns <= 160 else "none",
        linewidth=0.5,
    )
    for row, column in (states == PARTIAL).nonzero().tolist():
        ax.fill_between(
            (column, column + 1), row, row + 1, hatch="////", facecolor="none", edgecolor="white",
            linewidth=0.0,
        )  # fmt: skip
    for row, line in enumerate(owners.tolist()):
        _number_runs(ax, row, line)
    names = [f"b {i // nQ // heads}" for i in range(len(owners))]
    if heads > 1:
        names = [f"{name}, kv head {i // nQ % heads}" for i, name in enumerate(names)]
    if nQ > 1:
        names = [f"{name}, q block {i % nQ}" for i, name in enumerate(names)]
    ax.set_yticks([i + 0.5 for i in range(len(names))], names)
    ax.set_ylim(len(names), 0)
    ax.set_xlabel(f"key blocks ({explanation.blocks.BLOCK_SIZE[1]} tokens)")
    shares = "shares, balanced over lists" if work.balanced else f"{work.config.num_splits} splits"
    shown = f", the first {len(owners)}" if len(owners) < B * heads * nQ else ""
    ax.set_title(
        f"{B * heads * nQ} lists{shown}; {shares}; {work.busy} busy programs on "
        f"{explanation.target.name}",
        fontsize="medium",
    )
    bare(ax)
    return ax


_ABOVE: dict[str, Any] = {
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1.02),
    "frameon": False,
    "fontsize": "small",
}


def _elements(
    mask_mod: Callable[[Any, Any, Any, Any], Any],
    q_len: int,
    kv_len: int,
    BLOCK_SIZE: int | tuple[int, int],
    b: int,
    h: int,
    q_offset: int,
) -> tuple[Tensor, tuple[int, int]]:
    """Colour number of every element, [q_len, kv_len], and the size of a block."""
    mask = create_block_mask(
        mask_mod, b + 1, h + 1, q_len, kv_len, "cpu", BLOCK_SIZE, q_offset=q_offset
    )
    assert mask.tables is not None
    states = table_states(mask.tables)
    states = states[min(b, states.shape[0] - 1), min(h, states.shape[1] - 1)].long()
    for dim, (size, length) in enumerate(zip(mask.BLOCK_SIZE, (q_len, kv_len), strict=True)):
        states = states.repeat_interleave(size, dim).narrow(dim, 0, length)
    q_idx = q_offset + torch.arange(q_len)[:, None]
    allowed = torch.as_tensor(
        mask_mod(torch.tensor(b), torch.tensor(h), q_idx, torch.arange(kv_len))
    )
    picture = torch.where(states == FULL, 3, torch.where(states == EMPTY, 0, 1 + allowed.long()))
    return picture, mask.BLOCK_SIZE


def _number_runs(ax: Any, row: int, owners: list[int]) -> None:
    """Write each share's number into the first run of blocks that it owns."""
    written = set()
    for column, owner in enumerate(owners):
        if owner < 0 or owner in written:
            continue
        written.add(owner)
        end = column
        while end < len(owners) and owners[end] == owner:
            end += 1
        if (end - column) * 40 >= len(owners):
            ax.text(
                (column + end) / 2, row + 0.5, str(owner), ha="center", va="center", color="black",
                fontsize="x-small", bbox={"boxstyle": "round,pad=0.15", "fc": "white", "lw": 0},
            )  # fmt: skip
