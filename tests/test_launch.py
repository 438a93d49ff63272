"""Launching compiled kernels without Triton's look-up, and compiling them beforehand."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import FutureKernel

from flexdecode.kernels import launch as launching
from flexdecode.kernels.launch import BoundLaunch, Launch


class Launcher:
    """What a compiled kernel is launched with, as Triton makes it; it notes what it did."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        self.launched.append(((x, y, z), rest[-2:]))


class Kernel:
    """A kernel that compiles to nothing, and counts how often."""

    def __init__(self) -> None:
        self.compiled: list[bool] = []
        self.run_by = Launcher()

    def run(self, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        self.compiled.append(warmup)
        return SimpleNamespace(metadata=1, function=2, packed_metadata=3, run=self.run_by)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launching, "_compiled", {})
    return Kernel()


def test_a_kernel_is_asked_for_once(kernel: Kernel) -> None:
    for programs in (5, 6):
        Launch(kernel, programs, {"C": 8}, {})(("key",), [1])
    assert kernel.compiled == [True]
    assert kernel.run_by.launched == [((5, 1, 1), (1, 8)), ((6, 1, 1), (1, 8))]
    Launch(kernel, 5, {"C": 8}, {})(("other",), [1])
    Launch(kernel, 5, {"C": 9}, {})(("key",), [1])
    assert kernel.compiled == [True] * 3


def test_what_is_prepared_is_not_launched(kernel: Kernel) -> None:
    launch = Launch(kernel, 5, {}, {})
    launch.prepare(("key",), [1])
    launch.prepare(("key",), [1])
    assert kernel.compiled == [True] and kernel.run_by.launched == []
    launch(("key",), [7, 8])
    assert kernel.compiled == [True] and kernel.run_by.launched == [((5, 1, 1), (7, 8))]


def test_what_another_thread_compiles_is_waited_for(kernel: Kernel) -> None:
    """Triton 3.8 hands out a kernel that is not there yet."""
    there: Future[Any] = Future()
    compiled = kernel.run(grid=None, warmup=True)
    kernel.run = lambda *_, **__: FutureKernel(lambda found: None, there)  # type: ignore[method-assign]
    launch = Launch(kernel, 5, {}, {})
    there.set_result(compiled)
    launch.prepare(("key",), [1])
    assert list(launch.variants.values()) == [(compiled, 0)]


def test_threads_that_compile_the_same_launch_the_same(kernel: Kernel) -> None:
    """Triton 3.8 unloads a kernel that nothing refers to, be it in a captured graph."""
    launch = Launch(kernel, 5, {}, {})
    compile, first = kernel.run, []

    def run(*arguments: Any, **options: Any) -> Any:
        kernel.run = compile  # type: ignore[method-assign]
        launch(("key",), [1])  # another thread comes in between
        first.extend(launch.variants.values())
        return compile(*arguments, **options)

    kernel.run = run  # type: ignore[method-assign]
    launch(("key",), [2])
    assert kernel.compiled == [True, True] and len(kernel.run_by.launched) == 2
    assert len(first) == 1 and launch.variants[("key",)] is first[0]


def test_sizes_of_memory_are_other_variants_where_triton_looks_at_them(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (torch.empty(n, dtype=torch.uint8, device="meta") for n in (8, 1 << 31))
    for by_size, wanted in ((False, 1), (True, 4)):
        monkeypatch.setattr(launching, "_BY_SIZE", by_size)
        kernel.compiled.clear()
        launch = Launch(kernel, 1, {}, {"by size": by_size})
        for pair in ((small, small), (small, large), (large, small), (large, large[:8])):
            launch(("key",), [pair[0], 3, (pair[1], 1.0)])
            assert launch.is_prepared(("key",), [pair[0], 3, (pair[1], 1.0)])
        assert len(kernel.compiled) == wanted


def test_other_addresses_are_other_variants(kernel: Kernel) -> None:
    memory = torch.zeros(64)
    launch = Launch(kernel, 1, {}, {})
    for captured in (memory, memory[4:], memory[1:]):
        BoundLaunch(launch, ("kind",), [0, 0], (captured, 1.0))()
    assert len(kernel.compiled) == 2
