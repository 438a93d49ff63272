"""What is asked of every way to compute attention: can it run here, has it this case, run it."""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import KVSet
from benchmarks.rules import Rules

Run = Callable[[KVSet], Tensor]  # inputs -> [B, Hq, Lq, Dv]


@dataclass(frozen=True)
class Setup:
    """What providers are told on the command line.

    Attributes
    ----------
    device : torch.device
    options : dict
        ``kernel_options`` of this library.
    peers : Path or None
        Folder with the unpacked peers, see ``benchmarks.peers``.
    """

    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)
    peers: Path | None = None


class Provider(abc.ABC):
    """One way to compute attention."""

    name: str
    own = False  # this library rather than a peer

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        return None if self.setup.device.type == "cuda" else "needs a GPU"

    def refuses(self, case: Case) -> str | None:
        """Why it has nothing for a case, or None."""
        return None

    def layout(self, case: Case) -> str:
        """Memory order of K and V that it wants."""
        return "BHLD"

    @abc.abstractmethod
    def open(self, case: Case, rules: Rules) -> Run:
        """Do what is done once per token or less often; return what is done in every layer."""

    def close(self) -> None:  # noqa: B027 (most have nothing to forget)
        """Forget the case."""

    def lengths(self, case: Case) -> Tensor | None:
        """Lengths as data, where they differ or pages ask for them: [B], int32."""
        if case.lengths is None and not case.page:
            return None
        lengths = [case.length(b) for b in range(case.B)]
        return torch.tensor(lengths, dtype=torch.int32, device=self.setup.device)


def missing_module(module: str, setup: Setup) -> str | None:
    """Why a peer's module cannot be imported, or None."""
    if setup.peers is not None:
        site = str(setup.peers / "site")
        if site not in sys.path:
            sys.path.append(site)
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken peer must not end the run
        return f"{type(error).__name__}: {error}"
    return None
