"""Tables and progress of the command line: with rich where it is installed, plain otherwise."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

__all__ = ["has_rich", "print_table", "track"]

T = TypeVar("T")
_WIDTH = 160  # of what goes into a file or a pipe: no line is broken


def has_rich() -> bool:
    """Whether the extra ``cli`` is installed."""
    return importlib.util.find_spec("rich") is not None


def print_table(
    rows: Iterable[Sequence[str]], header: Sequence[str] | None = None, *, title: str | None = None
) -> None:
    """Print rows of text in columns: the first to the left, under a header the others to the right.

    Parameters
    ----------
    rows : iterable of sequences of str
    header : sequence of str, optional
        Names of the columns.
    title : str, optional
    """
    cells = [list(row) for row in rows]
    if title:
        print(title)
    if has_rich():
        _print_rich(cells, header)
        return
    lines = cells if header is None else [list(header), *cells]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = [
            cell.ljust(width) if not n or header is None else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(padded).rstrip())
    if sys.stdout.isatty():
        print("(plain text: tables and progress bars need rich, pip install 'flexdecode[cli]')")


def _print_rich(rows: list[list[str]], header: Sequence[str] | None) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        box=None if header is None else box.SIMPLE_HEAD,
        show_header=header is not None,
        pad_edge=False,
    )
    for n in range(len(rows[0]) if rows else 0):
        name = "" if header is None else header[n]
        align: Any = "left" if not n or header is None else "right"
        table.add_column(name, justify=align, style="bold" if not n else None, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table, markup=False, highlight=False)


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """Iterate with a progress bar on a terminal that has rich; otherwise just iterate."""
    if not (has_rich() and sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as with_bar

    yield from with_bar(items, what, console=Console(stderr=True), transient=True)


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH)
