"""What a call will launch after its first kernel: compiled beside that one.

A lazy mask's tables are built by a kernel, and the call that reads them is laid out when that has
been launched. Where none is compiled yet, one would wait for the other. Imports no Triton.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any


class Later:
    """Within, what ``wanted(tables)`` returns is compiled beside the kernel that fills the tables.

    Parameters
    ----------
    wanted : callable (Tables) -> sequence of Wanted
        Called only if that kernel has to be compiled, and before it is launched.
    """

    __slots__ = ("_tables", "_token", "_wanted")

    def __init__(self, wanted: Callable[[Any], Sequence[Any]]) -> None:
        self._wanted = wanted
        self._tables: Any = None

    def __enter__(self) -> None:
        self._token: Token[Later | None] = _current.set(self)

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)


_current: ContextVar[Later | None] = ContextVar("flexdecode later launches", default=None)


def tables_made(tables: Any) -> None:
    """Tell of tables that have been allocated, and are to be filled next."""
    later = _current.get()
    if later is not None:
        later._tables = tables


def take() -> Sequence[Any]:
    """Return the launches to compile beside the present one; none the next time."""
    later = _current.get()
    if later is None or later._tables is None:
        return ()
    tables, later._tables = later._tables, None
    return later._wanted(tables)
