"""The backends by name, and how ``"auto"`` chooses; each is imported when first used."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    import torch

    from flexdecode.problem import Request, Result

__all__ = ["BACKENDS", "choose_backend", "launches_of", "load_backend"]

BACKENDS = ("auto", "triton", "cpu", "reference")

_loaded: dict[str, Callable[[Request], Result]] = {}  # name -> run


def choose_backend(name: str, device: torch.device) -> str:
    """The backend that runs tensors on `device`: ``"triton"``, ``"cpu"`` or ``"reference"``.

    Parameters
    ----------
    name : str
        What the caller asked for, one of `BACKENDS`.
    device : torch.device

    Raises
    ------
    ValueError
        The name is unknown, or the backend does not take tensors of this device.
    """
    on_gpu = device.type == "cuda" or device.type == "xpu"
    if name == "auto":
        return "triton" if on_gpu else "cpu"
    if name == "triton" and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend: expected 'auto', 'cpu' or 'reference' for tensors on {device}, got 'triton' "
            "(it takes CPU tensors only under TRITON_INTERPRET=1)"
        )
    if name == "cpu" and on_gpu:
        raise ValueError(
            f"backend: expected 'auto', 'triton' or 'reference' for tensors on {device}, got 'cpu'"
        )
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def load_backend(name: str) -> Callable[[Request], Result]:
    """The ``run`` function of a backend, imported on first use."""
    run = _loaded.get(name)
    if run is None:
        run = importlib.import_module(f"flexdecode.backends.{name}").run
        _loaded[name] = run
    return run


def launches_of(request: Request) -> Sequence[Any]:
    """What the triton backend compiles for a request whose tables need not have been filled."""
    found: Sequence[Any] = importlib.import_module("flexdecode.backends.triton").launches_of(
        request
    )
    return found
