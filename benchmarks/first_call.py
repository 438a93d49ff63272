"""First calls in fresh processes, stage by stage: ``python -m benchmarks.first_call --help``.

Every process is started twice on one temporary disk cache of Triton's: it is empty the first time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["STATES", "TOLD", "Process", "main", "run"]

STATES = ("cold", "warm")  # of the disk cache
_SIZES = {"full": (8, 8192), "tiny": (2, 256)}  # key heads and keys
TOLD = {
    "import": "import",
    "triton": "import of Triton",
    "first": "first call",
    "other numbers": "next call with other numbers",
    "new pair": "first call of other rules",
}
_HEADER = ("", *STATES)


class Process(NamedTuple):
    """What one process measured.

    Attributes
    ----------
    seconds : dict
        By the names of `TOLD`.
    stages : list of (str, float, float)
        Of the first call: name, seconds from its beginning, seconds that it took.
    compiled : list of int
        Kernels after the first call, other numbers, and other rules.
    """

    seconds: dict[str, float]
    stages: list[tuple[str, float, float]]
    compiled: list[int]


def run(
    device: torch.device, backend: str, size: str, *, one_by_one: bool = False
) -> Iterator[tuple[str, Process | str]]:
    """Start a process for each of `STATES`, and give what it measured, or the end of its error."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.first_call", "--measure", size]
    command += ["--device", str(device), "--backend", backend]
    command += ["--one-by-one"] if one_by_one else []
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(root)}
        for state in STATES:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            if ended.returncode:
                yield state, ended.stderr.strip().splitlines()[-1][:200]
            else:
                yield state, Process(*json.loads(ended.stdout.strip().splitlines()[-1]))


# ---- inside the process --------------------------------------------------------------------------


class _Clock:
    """Times what runs inside some functions of Triton's."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float, float]] = []
        self.start = 0.0
        self.here = threading.local()  # which kernel a thread is at

    def around(self, where: Any, name: str, stage: str, kernel: Callable[..., str] | None = None):  # type: ignore[no-untyped-def]
        """Time a function; `kernel` says from its arguments of which one, else as before."""
        timed = getattr(where, name, None)
        if timed is None:  # another version of Triton
            return

        @functools.wraps(timed)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if kernel is not None:
                self.here.kernel = kernel(*args).strip("_").removesuffix("_kernel") + ": "
            start = time.perf_counter()
            try:
                return timed(*args, **kwargs)
            finally:
                of = "" if stage.startswith("Triton") else getattr(self.here, "kernel", "")
                self.stages.append((of + stage, start - self.start, time.perf_counter() - start))

        for of_cache in ("cache_info", "cache_clear"):  # of a function that remembers its result
            if hasattr(timed, of_cache):
                setattr(wrapped, of_cache, getattr(timed, of_cache))
        setattr(where, name, wrapped)


def _watch_triton(clock: _Clock) -> None:
    from triton.backends.nvidia import compiler as nvidia
    from triton.backends.nvidia import driver
    from triton.compiler import code_generator, compiler
    from triton.runtime import cache

    clock.around(cache, "triton_key", "Triton: hash of itself")
    clock.around(driver.CudaUtils, "__init__", "Triton: driver, in C")
    clock.around(nvidia, "get_ptxas_version", "Triton: version of ptxas")
    clock.around(
        code_generator, "ast_to_ttir", "Python to TTIR", lambda kernel, *_: kernel.__name__
    )
    made = {
        "ttir": "passes over TTIR",
        "ttgir": "passes over TTGIR",
        "llir": "LLVM",
        "ptx": "PTX",
        "cubin": "ptxas",
    }
    for name, stage in made.items():
        method = nvidia.CUDABackend.__dict__.get(f"make_{name}")
        clock.around(nvidia.CUDABackend, f"make_{name}", stage)
        if isinstance(method, staticmethod):
            wrapped = nvidia.CUDABackend.__dict__[f"make_{name}"]
            setattr(nvidia.CUDABackend, f"make_{name}", staticmethod(wrapped))
    clock.around(
        driver.CudaLauncher, "__init__", "launcher, in C", lambda _, source, __: source.name
    )
    clock.around(
        compiler.CompiledKernel,
        "_init_handles",
        "loaded, launcher too",
        lambda kernel: kernel.src.name,
    )


def _one_by_one() -> None:
    """Let Triton compile each kernel when it is launched."""
    from flexdecode.kernels import compiling

    compiling.compile_together = lambda wanted: None


def measure(device: torch.device, backend: str, size: str, one_by_one: bool) -> Process:
    """Make the first calls of this process."""
    heads, keys = _SIZES[size]
    q = torch.randn(1, heads * 4, 1, 128, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 1, heads, keys, 128, dtype=torch.bfloat16, device=device)
    seconds: dict[str, float] = {}
    clock = _Clock()

    def time_of(name: str, act: Callable[[], Any]) -> Any:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
        return result

    flexdecode = time_of("import", lambda: __import__("flexdecode.masks"))
    if device.type == "cuda":
        time_of("triton", lambda: __import__("triton"))
        if one_by_one:
            _one_by_one()
        if torch.version.hip is None:
            _watch_triton(clock)
    compiled = []

    def call(name: str, mask: Any, score: Any) -> None:
        block_mask = flexdecode.create_block_mask(mask)
        time_of(
            name,
            lambda: flexdecode.attention(
                q, k, v, block_mask=block_mask, score_mod=score, backend=backend
            ),
        )
        compiled.append(flexdecode.compile_count())

    masks = flexdecode.masks
    clock.start = time.perf_counter()
    call("first", masks.sink_window(16, 100), masks.softcap(30.0))
    stages = list(clock.stages)
    call("other numbers", masks.sink_window(16, 77), masks.softcap(50.0))

    def strided(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & ((q_idx - kv_idx < 64) | (kv_idx % 7 == 0))

    def sloped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * 0.5 + 0.01 * (kv_idx - q_idx) / (h + 1)

    call("new pair", strided, sloped)
    return Process(seconds, stages, compiled)


# ---- the tables ----------------------------------------------------------------------------------


def _show(title: str, found: dict[str, list[Process]]) -> None:
    from flexdecode.console import print_table

    rows = []
    for name, told in TOLD.items():
        cells = []
        for state in STATES:
            times = [each.seconds[name] for each in found[state] if name in each.seconds]
            cells.append(f"{statistics.median(times):.3f}" if times else "-")
        rows.append((told, *cells))
    print_table(rows, _HEADER, title=f"{title}: seconds")
    for state in STATES:
        best = min(found[state], key=lambda each: each.seconds["first"])
        rows = [
            (stage, f"{began * 1e3:.0f}", f"{took * 1e3:.0f}")
            for stage, began, took in sorted(best.stages, key=lambda stage: stage[1])
            if took >= 1e-3
        ]
        if rows:
            print_table(
                rows,
                ("stage", "began", "took"),
                title=f"the first call in {best.seconds['first'] * 1e3:.0f} ms, {state} disk cache"
                f" (compiled: {best.compiled[0]}, other numbers {best.compiled[1]}, other rules "
                f"{best.compiled[2]})",
            )


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of processes of each kind")
    parser.add_argument(
        "--compare", action="store_true", help="also let Triton compile one kernel after the other"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton", help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=_SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--one-by-one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if chosen.measure is not None:
        print(json.dumps(measure(device, chosen.backend, chosen.measure, chosen.one_by_one)))
        return 0
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here, and without one no kernel is compiled: nothing was timed.")
        return 1
    for title, one_by_one in (("side by side", False), ("one by one", True)):
        if one_by_one and not chosen.compare:
            continue
        found: dict[str, list[Process]] = {state: [] for state in STATES}
        for _ in range(chosen.repeats):
            for state, process in run(device, chosen.backend, "full", one_by_one=one_by_one):
                if isinstance(process, str):
                    print(f"{title}, {state} disk cache: failed, {process}")
                    return 1
                found[state].append(process)
        _show(title, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
