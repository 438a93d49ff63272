"""Draw calls of `attention` until the time is up; print the smallest that fails as a test.

``python -m tests.fuzz --minutes 10 --backends cpu triton``, or ``make fuzz``. Kernels are
interpreted without a GPU. Each round draws anew; `--seed` repeats a run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from rich.progress import (  # noqa: E402
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from tests.attempts import Attempt, as_test, attempts, check  # noqa: E402
from tests.conftest import poisoned_memory  # noqa: E402

ROUND = 40  # calls drawn with one seed


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill new buffers with NaN, as in the tests."""
    with pytest.MonkeyPatch.context() as patch:
        poisoned_memory.__wrapped__(patch)
        yield


class Failure(Exception):
    """A call that fails, as small as it could be made."""

    def __init__(self, attempt: Attempt, backend: str, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.attempt, self.backend, self.cause = attempt, backend, cause


def run_round(backend: str, number: int, progress: Progress, task: object, end: float) -> int:
    """Draw calls with one seed; return how many were made."""
    device = "cuda" if ON_GPU and backend != "cpu" else "cpu"
    made = 0
    last: list[Attempt] = []

    @seed(number)
    @settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(attempts())
    def every(attempt: Attempt) -> None:
        nonlocal made
        if time.monotonic() > end and not last:
            return
        try:
            check(attempt, backend, device)
        except BaseException:
            last[:] = [attempt]  # hypothesis comes back to the smallest in the end
            raise
        made += 1
        progress.advance(task)  # type: ignore[arg-type]

    try:
        every()
    except KeyboardInterrupt:
        raise
    except BaseException as cause:
        if not last:
            raise
        raise Failure(last[0], backend, cause) from None
    return made


def main(words: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--backends", nargs="+", default=["cpu", "triton"])
    options = parser.parse_args(words)
    # The interpreter computes with NumPy, which warns of inf - inf where a GPU does not.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime")
    first = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {first}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    counts = dict.fromkeys(options.backends, 0)
    end = time.monotonic() + 60 * options.minutes
    number = first
    with poisoned(), Progress(*columns, TimeElapsedColumn(), disable=None) as progress:
        tasks = {name: progress.add_task(name, total=None) for name in counts}
        while time.monotonic() < end:
            for backend in counts:
                try:
                    counts[backend] += run_round(backend, number, progress, tasks[backend], end)
                except Failure as failure:
                    progress.stop()
                    traceback.print_exception(failure.cause, limit=-4)
                    print(f"\nround {number}, backend {backend}; as a test:\n")
                    print(as_test(failure.attempt, backend))
                    return 1
            number += 1
    print(
        ", ".join(f"{name}: {count} calls" for name, count in counts.items()), "equal the formula"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
