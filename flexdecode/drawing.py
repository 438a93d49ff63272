"""What all pictures share: figures, colors, legends; matplotlib is imported when one is drawn."""

from __future__ import annotations

from typing import Any

__all__ = ["axes", "bare", "color_map", "figure", "patches"]


def axes(ax: Any) -> Any:
    """Return `ax`, or the axes of a new figure."""
    return figure(None).subplots() if ax is None else ax


def figure(size: tuple[float, float] | None) -> Any:
    """Make a figure of so many inches; matplotlib's default without a size."""
    _require_matplotlib()
    from matplotlib import pyplot

    return pyplot.figure(figsize=size, layout="constrained")


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "plot: drawing needs matplotlib, which is in the extra 'plot': "
            "pip install 'flexdecode[plot]'"
        ) from error


def color_map(colors: Any) -> Any:
    """Make a map that gives the n-th color to the number n."""
    _require_matplotlib()
    from matplotlib.colors import ListedColormap

    return ListedColormap(list(colors))


def patches(entries: Any) -> list[Any]:
    """Make legend entries of (color, label)."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=color, edgecolor="#999999", label=label) for color, label in entries]


def bare(ax: Any) -> None:
    """Take away tick marks and frame."""
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
