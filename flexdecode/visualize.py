"""Pictures of block tables; matplotlib is imported when one is drawn."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexdecode.tables import EMPTY, FULL, PARTIAL

__all__ = ["legend_handles", "plot_blocks"]

# Okabe and Ito's blue and orange: told apart by colour-blind readers, and by lightness in print.
COLORS = {EMPTY: "#f2f2f2", PARTIAL: "#e69f00", FULL: "#0072b2"}
LABELS = {
    EMPTY: "empty: skipped",
    PARTIAL: "partial: the mask is applied",
    FULL: "full: no mask needed",
}


def plot_blocks(
    states: Tensor,
    BLOCK_SIZE: tuple[int, int],
    lengths: tuple[int, int],
    ax: Any = None,
    *,
    legend: bool = True,
) -> Any:
    """Draw one head of one sequence, row 0 on top as in a matrix.

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
    try:
        from matplotlib.colors import ListedColormap
    except ImportError as error:
        raise ImportError(
            "plot: drawing needs matplotlib, which is in the extra 'plot': "
            "pip install 'flexdecode[plot]'"
        ) from error
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(layout="constrained")
    edges = [
        [min(i * block, length) for i in range(count + 1)]
        for count, block, length in zip(states.shape, BLOCK_SIZE, lengths, strict=True)
    ]
    few = max(states.shape) <= 64
    ax.pcolormesh(
        edges[1],
        edges[0],
        states.cpu().numpy(),
        cmap=ListedColormap(list(COLORS.values())),
        vmin=EMPTY,
        vmax=FULL,
        edgecolors="white" if few else "none",
        linewidth=0.4 if few else 0.0,
    )
    ax.set_xlim(0, max(lengths[1], 1))
    ax.set_ylim(max(lengths[0], 1), 0)
    ax.set_xlabel(f"keys (tokens, {BLOCK_SIZE[1]} a block)")
    ax.set_ylabel(f"queries (tokens, {BLOCK_SIZE[0]} a block)")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if legend:
        ax.legend(
            handles=legend_handles(),
            loc="lower center",
            bbox_to_anchor=(0.5, 1.02),
            ncols=3,
            frameon=False,
            fontsize="small",
        )
    return ax


def legend_handles() -> list[Any]:
    """One coloured patch a state, with its meaning."""
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=color, edgecolor="#999999", label=LABELS[state])
        for state, color in COLORS.items()
    ]
