"""Fixtures of all tests, and what has to be set before torch and Triton are imported."""

from __future__ import annotations

import os

# Small tensors: more threads than this cost more than they give, and several workers have a
# processor each. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
# Threads that spin while they wait slow a busy machine down by much.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import forks

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Kernels then run in Triton's interpreter; read when Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def patch_triton_language_once_a_launch() -> None:
    """Halve the time that interpreted kernels take.

    The interpreter patches triton.language for the launch and again for each function that a kernel
    calls. Once is enough: Triton's own functions read another module, which then stays patched.
    """
    interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    patch_and_call = interpreted.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = self.rewritten_fn.get(self.fn)
        return known(*args, **kwargs) if known else patch_and_call(self, *args, **kwargs)

    interpreted.__call__ = call


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    patch_triton_language_once_a_launch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` on a machine without one."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:  # keywords hold names of folders too
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Run a function where kernels are compiled, see `tests.forks`."""
    with forks(tmp_path_factory.mktemp("forks")) as run:
        yield run


@pytest.fixture
def fresh_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk cache for Triton, for tests that count compilations."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new floating-point buffers with NaN, so that an element left unwritten shows.

    Fresh memory is often zero, and a zero hides a missing store.
    """

    def poison(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
            buffer = allocate(*args, **kwargs)
            return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer

        return allocate_nan

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
