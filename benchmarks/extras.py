"""What lies outside the kernel: host time of a call, cost of tables, first call of a new mask."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Mask
from benchmarks.inputs import Pool
from benchmarks.providers import Provider
from benchmarks.records import Record
from benchmarks.rules import make_rules
from benchmarks.timing import time_graph, time_host, time_limit, time_wall

__all__ = ["EXTRAS", "first_calls", "host_calls", "tables"]

EXTRAS = ("tables", "host", "first")
_LIMIT = 120.0  # seconds for one number

_HOST = (
    Case("host, no mask", "host", 1, 32, 8, 1024),
    Case("host, causal", "host", 1, 32, 8, 1024, mask=Mask("causal")),
    Case(
        "host, window and softcap",
        "host",
        1,
        32,
        8,
        1024,
        mask=Mask("window", window=256),
        score="softcap",
    ),
)


def host_calls(providers: list[Provider], pool: Pool, tiny: bool) -> Iterator[Record]:
    """Time what one eager call costs the host, at a size that the GPU never waits for."""
    for case in _HOST:
        case = case.tiny() if tiny else case
        for provider in providers:
            if provider.missing() or provider.refuses(case):
                continue
            device = provider.setup.device
            inputs = pool.sets(case, 1, provider.layout(case))[0]
            with _failures("host", case.group, case.name, provider.name) as failed:
                run = provider.open(case, make_rules(case, device))
                run(inputs)
                calls, repeats = (2, 2) if tiny else (200, 11)
                timing = time_host(
                    partial(run, inputs), calls=calls, repeats=repeats, device=device
                )
                yield Record(
                    "host",
                    case.group,
                    case.name,
                    provider.name,
                    median=timing.median,
                    p20=timing.p20,
                    p80=timing.p80,
                    config=case.config(),
                )
            provider.close()
            if failed.record is not None:
                yield failed.record


class _failures:
    """Turn an error inside the block, or too long a wait, into a record."""

    def __init__(self, operation: str, group: str, case: str, provider: str) -> None:
        self.make = partial(Record, operation, group, case, provider, "failed")
        self.record: Record | None = None
        self.clock = time_limit(_LIMIT)

    def __enter__(self) -> _failures:
        self.clock.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        self.clock.__exit__(None, None, None)
        if isinstance(error, Exception):
            self.record = self.make(note=f"{type(error).__name__}: {error}".splitlines()[0][:200])
            return True
        return False


def _causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return kv_idx <= q_idx


def tables(names: set[str], device: torch.device, tiny: bool) -> Iterator[Record]:
    """Time building block tables: a long causal mask, and a decode step of a ragged batch."""
    side = 1024 if tiny else 65536
    batch, capacity = (4, 2048) if tiny else (64, 131072)
    numbers = random.Random(0)
    lengths = torch.tensor(
        [numbers.randint(capacity // 64, capacity) for _ in range(batch)], device=device
    )
    config = {"B": batch, "Hq": 32, "Lq": 1, "kv_capacity": capacity}
    record = partial(Record, "tables", "tables")
    square, step = f"create_block_mask {side}^2 causal", f"decode step B{batch}, up to {capacity}"

    def build(name: str, case: str, make: Callable[[], Any], **config: int) -> Iterator[Record]:
        with _failures("tables", "tables", case, name) as failed:
            make()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                make()
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                yield record(case, name, metric="memory", unit="MiB", median=peak, config=config)
            timing = time_wall([make], repeats=2 if tiny else 7, device=device)
            yield record(
                case, name, median=timing.median, p20=timing.p20, p80=timing.p80, config=config
            )
        if failed.record is not None:
            yield failed.record

    if "flexdecode" in names:
        import flexdecode

        yield from build(
            "flexdecode",
            square,
            lambda: flexdecode.create_block_mask(_causal, Q_LEN=side, KV_LEN=side, device=device),
            side=side,
        )
        bound = flexdecode.create_block_mask(_causal).bind(
            batch=batch, heads=32, q_len=1, kv_len=lengths, kv_capacity=capacity, device=device
        )
        with _failures("tables", "tables", f"{step}, host", "flexdecode") as failed:
            calls, repeats = (2, 2) if tiny else (100, 7)
            timing = time_host(bound.update, calls=calls, repeats=repeats, device=device)
            yield record(
                f"{step}, host",
                "flexdecode",
                median=timing.median,
                p20=timing.p20,
                p80=timing.p80,
                config=config,
            )
        if failed.record is not None:
            yield failed.record
        with _failures("tables", "tables", step, "flexdecode") as failed:
            if device.type == "cuda":
                timing, _ = time_graph([bound.update] * 8)
            else:
                timing = time_wall([bound.update], repeats=2, device=device)
            yield record(
                step,
                "flexdecode",
                median=timing.median,
                p20=timing.p20,
                p80=timing.p80,
                config=config,
                note="bind(...).update() in a CUDA graph" if device.type == "cuda" else "wall",
            )
        if failed.record is not None:
            yield failed.record
    for name, compiled in (("flex", False), ("flex_at", True)):
        if name in names:
            yield from _torch_tables(build, name, compiled, square, step, side, lengths, config)


def _torch_tables(
    build: Callable[..., Iterator[Record]],
    name: str,
    compiled: bool,
    square: str,
    step: str,
    side: int,
    lengths: Tensor,
    config: dict[str, int],
) -> Iterator[Record]:
    """The same by torch: eager under the name of flex, compiled under that of flex_at."""
    from torch.nn.attention.flex_attention import create_block_mask

    make = torch.compile(create_block_mask) if compiled else create_block_mask
    batch, capacity, device = config["B"], config["kv_capacity"], lengths.device

    def newest(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return kv_idx < lengths[b]

    yield from build(
        name, square, lambda: make(_causal, None, None, side, side, device=device), side=side
    )
    yield from build(
        name, step, lambda: make(newest, batch, None, 1, capacity, device=device), **config
    )


_FIRST_CALL = """
import json, os, sys, time
import torch
device = torch.device(sys.argv[1])
start = time.perf_counter()
import flexdecode
from flexdecode.masks import sink_window, softcap
imported = time.perf_counter() - start
B, H, L = (1, 2, 256) if sys.argv[2] == "tiny" else (1, 8, 8192)
q = torch.randn(B, H * 4, 1, 128, dtype=torch.bfloat16, device=device)
k, v = torch.randn(2, B, H, L, 128, dtype=torch.bfloat16, device=device)
if device.type == "cuda":
    torch.cuda.synchronize()
def call(window, cap):
    start = time.perf_counter()
    flexdecode.attention(q, k, v, block_mask=flexdecode.create_block_mask(sink_window(16, window)),
                         score_mod=softcap(cap), backend=sys.argv[3])
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
print(json.dumps({"import": imported, "first": call(100, 30.0), "other numbers": call(77, 50.0)}))
"""


def first_calls(device: torch.device, backend: str, tiny: bool) -> Iterator[Record]:
    """Time the first call of a new mask and score rule in fresh processes, without and with cache.

    A third number is the call after it with another window and cap, which compiles nothing.
    """
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(root)}
        for state in ("cold", "warm"):
            arguments = [str(device), "tiny" if tiny else "full", backend]
            run = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL, *arguments],
                env=environment,
                capture_output=True,
                text=True,
            )
            case = f"first call, {state} disk cache"
            if run.returncode:
                note = run.stderr.strip().splitlines()[-1][:200]
                yield Record("first call", "first", case, "flexdecode", "failed", note=note)
                continue
            seconds = json.loads(run.stdout.strip().splitlines()[-1])
            for what, name in (
                ("import", f"import, {state} disk cache"),
                ("first", case),
                ("other numbers", f"next call with other numbers, {state} disk cache"),
            ):
                us = seconds[what] * 1e6
                yield Record("first call", "first", name, "flexdecode", median=us, p20=us, p80=us)
