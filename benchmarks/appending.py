"""Time `append_kv`: ``python -m benchmarks.appending --out appending.json``.

One new token for each sequence of a batch, into caches of several formats: device time by replays
of a CUDA graph, and host time of an eager call. ``torch`` indexes a plain cache, k and then v.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import Record, Results
from benchmarks.timing import time_graph, time_host, time_limit, time_wall
from flexdecode import QuantizedTensor, append_kv, quantize

__all__ = ["main"]

FORMATS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "fp8, scale of a row": {"format": "fp8"},
    "int4": {"format": "int4"},
}
_SETS = 8  # caches that calls take in turn
_LIMIT = 60.0  # seconds that one number may take

Cache = Tensor | QuantizedTensor


@dataclass(frozen=True)
class Size:
    """B sequences, in caches of Lkv slots."""

    B: int
    Hkv: int = 8
    D: int = 128
    Lkv: int = 1024


@dataclass(frozen=True)
class Step:
    """What one call appends, and to which caches."""

    k: Cache
    v: Cache
    k_new: Tensor
    v_new: Tensor
    kv_len: Tensor

    def append(self, backend: str = "auto") -> None:
        """Append by the library."""
        new = self.k_new, self.v_new
        append_kv(self.k, self.v, *new, kv_len=self.kv_len, backend=backend)

    def index(self, b: Tensor) -> None:
        """Append to plain caches by indexing."""
        assert isinstance(self.k, Tensor) and isinstance(self.v, Tensor)
        self.k[b, :, self.kv_len] = self.k_new[:, :, 0]
        self.v[b, :, self.kv_len] = self.v_new[:, :, 0]

    def is_right(self) -> bool:
        """True where an append leaves the bits that torch operations make of fresh caches."""
        mine, right = (replace(self, k=_cleared(self.k), v=_cleared(self.v)) for _ in range(2))
        mine.append()
        right.append("reference")
        pairs = zip(_memory(mine), _memory(right), strict=True)
        return all(torch.equal(x, y) and bool(x.any()) for x, y in pairs)


def _cleared(cache: Cache) -> Cache:
    if isinstance(cache, Tensor):
        return torch.zeros_like(cache)
    scale = None if cache.scale is None else torch.zeros_like(cache.scale)
    return replace(cache, data=torch.zeros_like(cache.data), scale=scale)


def _memory(step: Step) -> list[Tensor]:
    parts = []
    for cache in (step.k, step.v):
        parts += [cache] if isinstance(cache, Tensor) else [cache.data, cache.scale]
    return [x.view(torch.uint8) for x in parts if x is not None]


def steps(size: Size, format: dict[str, Any] | None, device: torch.device) -> list[Step]:
    """Make as many steps as there are sets."""
    at = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=at, device=device).bfloat16()

    def cache() -> Cache:
        x = draw(size.B, size.Hkv, size.Lkv, size.D)
        return x if format is None else quantize(x, **format)

    new = (size.B, size.Hkv, 1, size.D)
    kv_len = torch.randint(0, size.Lkv, (size.B,), generator=at, device=device)
    return [Step(cache(), cache(), draw(*new), draw(*new), kv_len) for _ in range(_SETS)]


def measure(
    size: Size, name: str, device: torch.device, *, calls: int, repeats: int
) -> Iterator[Record]:
    """Time one format at one size, on the device and on the host."""
    made = steps(size, FORMATS[name], device)
    b = torch.arange(size.B, device=device)
    ways: dict[str, list[Callable[[], None]]] = {"flexdecode": [step.append for step in made]}
    if FORMATS[name] is None:
        ways["torch"] = [partial(step.index, b) for step in made]
    for provider, runs in ways.items():
        record = partial(
            Record, group="append", case=f"B{size.B}, {name}", provider=provider,
            config=asdict(size),
        )  # fmt: skip
        try:
            with time_limit(_LIMIT):
                if device.type == "cuda":
                    on_device, _ = time_graph(runs)
                else:
                    on_device = time_wall(runs, repeats=1, device=device)
                on_host = time_host(runs[0], calls=calls, repeats=repeats, device=device)
        except Exception as error:  # every way of failing is a result here
            note = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            yield record("append", status="failed", note=note)
            continue
        right = provider != "flexdecode" or made[0].is_right()
        for operation, timing in (("append", on_device), ("host", on_host)):
            yield record(
                operation,
                status="ok" if right else "wrong",
                median=timing.median,
                p20=timing.p20,
                p80=timing.p80,
            )


def main(arguments: list[str] | None = None) -> None:
    """Time every format at every size, print a line for each number, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON to write, after every number; CSV beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes to test the benchmark")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    sizes, effort = (Size(16), Size(64)), {"calls": 200, "repeats": 11}
    if chosen.tiny:
        sizes, effort = (Size(2, 2, 16, 8),), {"calls": 2, "repeats": 2}
    results = Results(chosen.out, device)
    for size in sizes:
        for name in FORMATS:
            for record in measure(size, name, device, **effort):
                results.add(record)
                took = record.note if record.median is None else f"{record.median:8.2f} us"
                where = {"append": "device", "host": "host"}[record.operation]
                print(
                    f"{record.case:28} {record.provider:12} {where:8} {record.status:7} {took}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
