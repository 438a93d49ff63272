"""What lies outside the kernel: host time of a call, cost of tables, first call of a new mask."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import first_call
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


def first_calls(device: torch.device, backend: str, tiny: bool) -> Iterator[Record]:
    """Time the first calls of fresh processes, without and with a disk cache of kernels."""
    record = partial(Record, "first call", "first", provider="flexdecode")
    for state, process in first_call.run(device, backend, "tiny" if tiny else "full"):
        if isinstance(process, str):
            name = f"{first_call.TOLD['first']}, {state} disk cache"
            yield record(case=name, status="failed", note=process)
            continue
        for what, seconds in process.seconds.items():
            us = seconds * 1e6
            name = f"{first_call.TOLD[what]}, {state} disk cache"
            yield record(case=name, median=us, p20=us, p80=us)
