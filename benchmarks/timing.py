"""Clocks: replays of CUDA graphs, wall time, host time of a call, and the device's read rate."""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Timing",
    "measure_read_rate",
    "time_graph",
    "time_host",
    "time_limit",
    "time_wall",
]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median and the 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarise samples in microseconds."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), tenths[1], tenths[7])


class OutOfTime(Exception):
    """A step took longer than it was allowed to."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside the block once it has run this long; 0 means no limit."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def time_graph(
    calls: Sequence[Call], *, replays: int = 25, replay_us: float = 2000.0
) -> tuple[Timing, Any]:
    """Time calls on the GPU: one graph that walks all of them, replayed.

    The walk is repeated inside the graph until a replay takes about `replay_us`, so that the start
    of a replay weighs nothing.

    Parameters
    ----------
    calls : sequence of callables
        The same work on different inputs.
    replays : int
        Timed replays, after some that are not.
    replay_us : float, microseconds
        Least length of a replay.

    Returns
    -------
    Timing
        Of one call.
    Any
        What the last call of the graph returned, after the last replay.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in [*calls, *calls[:2]]:  # nothing may be compiled while the graph is captured
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, _ = _capture(calls, stream)
    once = statistics.median(_replay(graph, 5))
    rounds = max(1, min(round(replay_us / once), 512 // len(calls)))
    graph, last = _capture(list(calls) * rounds, stream)
    _replay(graph, 3)
    count = len(calls) * rounds
    return Timing.of([us / count for us in _replay(graph, replays)]), last


def _capture(calls: Sequence[Call], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph, last = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            last = call()
    return graph, last


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    events = []
    for _ in range(times):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000.0 for start, end in events]


def time_wall(calls: Sequence[Call], *, repeats: int = 5, device: torch.device) -> Timing:
    """Time calls on the wall clock, waiting for the device after each."""
    samples = []
    for call in list(calls) * repeats:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        samples.append((time.perf_counter() - start) * 1e6)
    return Timing.of(samples)


def time_host(call: Call, *, calls: int = 200, repeats: int = 11, device: torch.device) -> Timing:
    """Time what one eager call costs the host: nothing waits for the device in between."""
    call()
    samples = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    _wait(device)
    return Timing.of(samples)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_read_rate(numbers: Tensor, *, replays: int = 20) -> float:
    """Measure how fast the device reads memory: the best of a few kernels that only read.

    Parameters
    ----------
    numbers : Tensor, at least 4 GB
        What is read; its first 4 GiB if there is more.
    replays : int

    Returns
    -------
    float
        Bytes per second.
    """
    from benchmarks.read_kernel import read_sums

    words = numbers.view(torch.int32)[: 1 << 30]
    best = 0.0
    for block, steps, num_warps in ((4096, 4, 4), (4096, 8, 8), (8192, 4, 8), (2048, 8, 4)):
        timing, _ = time_graph(
            [lambda b=block, s=steps, w=num_warps: read_sums(words, b, s, w)], replays=replays
        )
        best = max(best, words.numel() * 4 / (timing.median * 1e-6))
    return best
