"""What masks cost: ``python -m benchmarks.masks [--device cpu] [--out masks.json]``.

Prints one table: building block tables beside torch's ``create_block_mask``, one decode step, 4,096
replays of a captured step, and a generation loop with a new closure at every token. Times are
medians on the wall clock with the host included, unless the line says otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexdecode
from benchmarks.records import Record, Results
from benchmarks.timing import time_graph, time_host, time_limit, time_wall

__all__ = ["Sizes", "main", "measure"]

_LIMIT = 60.0  # seconds that one number may take
_TORCH_LIMIT = 90.0  # and all of torch's together, most of which its compiler takes


@dataclass(frozen=True)
class Sizes:
    """How big everything is."""

    side: int = 65536
    huge: int = 1 << 20
    window: int = 8192
    batch: int = 64
    heads: int = 32
    capacity: int = 131072
    tokens: int = 4096
    check: int = 512  # of the replays, every how many are checked

    @classmethod
    def tiny(cls) -> Sizes:
        """Sizes for a test."""
        return cls(512, 1024, 128, 2, 2, 512, 12, 4)


def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    """Each token sees itself and what came before."""
    return q_idx >= kv_idx


def document_window(documents: Tensor, window: int) -> Callable[..., Any]:
    """The last `window` tokens of the same document."""

    def rule(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        near = (q_idx >= kv_idx) & (q_idx - kv_idx < window)
        return near & (documents[q_idx] == documents[kv_idx])

    return rule


def sliding(window: int) -> Callable[..., Any]:
    """Make a new function object at every call."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window)


def documents_of(length: int, device: torch.device) -> Tensor:
    """Sorted numbers of documents of 1 to 16k tokens."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.zeros(length, dtype=torch.int64)
    sizes = torch.randint(1, 16384, (2 * length // 8192 + 64,), generator=generator).cumsum(0)
    starts[sizes[sizes < length]] = 1
    return starts.cumsum(0).to(device)


def measure(sizes: Sizes, device: torch.device, torch_too: bool) -> Iterator[Record]:
    """Take every number, the quick ones first."""
    gpu = device.type == "cuda"
    documents = documents_of(sizes.huge, device)
    rule = document_window(documents, sizes.window)
    square = f"{sizes.side}^2 causal"
    huge = f"{sizes.huge}^2 causal, documents, window {sizes.window}"

    def make(rule: Callable[..., Any], side: int) -> flexdecode.BlockMask:
        return flexdecode.create_block_mask(rule, Q_LEN=side, KV_LEN=side, device=device)

    yield from _first_calls(sizes, device)
    bounds = {square: (1e3, 64.0) if gpu else None, huge: (50e3 if gpu else 5e6, 256.0)}
    for case, mod, side in ((square, causal, sizes.side), (huge, rule, sizes.huge)):
        make_one = partial(make, mod, side)
        yield from _building(case, "flexdecode", make_one, device, bounds[case])
    yield from _decode_step(sizes, device)
    yield from _replays(sizes, device)
    yield from _generation(sizes, device)
    if torch_too:
        yield from _torch(sizes, device, square, huge, rule)


def _building(
    case: str,
    provider: str,
    make: Callable[[], Any],
    device: torch.device,
    wanted: tuple[float, float] | None = None,
    repeats: int = 9,
    limit: float = _LIMIT,
) -> Iterator[Record]:
    """Time of building tables, and the most memory that it held beside them."""
    record = partial(Record, "masks", "masks", provider=provider)
    try:
        with time_limit(limit):
            start = time.perf_counter()
            made = make()
            _wait(device)
            first = (time.perf_counter() - start) * 1e6
            tables = _table_bytes(made)
            del made
            beside = _peak(make, device)
            once = time_wall([make], repeats=1, device=device).median
            repeats = max(1, min(repeats, int(2e6 / max(once, 1.0))))
            timing = time_wall([make], repeats=repeats, device=device)
    except Exception as error:  # every way of failing is a result here
        note = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        yield record(case=case, status="failed", note=note)
        _forget(device)
        return
    longest, most = wanted if wanted else (None, None)
    yield record(
        case=case,
        median=timing.median,
        p20=timing.p20,
        p80=timing.p80,
        note=f"first call {first / 1e6:.2f} s",
        config={"wanted": longest},
    )
    if beside is not None:
        yield record(
            case=f"{case}: peak beside the tables",
            median=max(beside - tables / 2**20, 0.0),
            metric="memory",
            unit="MiB",
            note=f"tables {tables / 2**20:.1f} MiB",
            config={"wanted": most},
        )


def _table_bytes(mask: Any) -> int:
    tables = (
        getattr(mask, name)
        for name in "kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices".split()
    )
    return sum(table.numel() * table.element_size() for table in tables if table is not None)


def _peak(make: Callable[[], Any], device: torch.device) -> float | None:
    """MiB held at most during a call, its result included; None where nobody counts."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        make()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak
        before = _resident("VmRSS")
        make()
        return max(_resident("VmHWM") - before, 0.0)
    except OSError:
        return None


def _resident(name: str) -> float:
    """MiB that the kernel counts for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise OSError(name)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_FIRST_CALL = """
import json, sys, time
import torch
from flexdecode import create_block_mask
device, side = torch.device(sys.argv[1]), int(sys.argv[2])
torch.zeros(8, device=device).sum().item()
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx
def strided(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 512) | (kv_idx // 64 % 4 == 0))
def build(rule):
    start = time.perf_counter()
    create_block_mask(rule, Q_LEN=side, KV_LEN=side, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
print(json.dumps([build(causal), build(strided)]))
"""


def _first_calls(sizes: Sizes, device: torch.device) -> Iterator[Record]:
    """First mask of a fresh process, and another rule after it; nothing compiled beforehand."""
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, "-c", _FIRST_CALL, str(device), str(sizes.side)],
            env=os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
        )
    names = ("first mask of a process", "first call of a new mask")
    if run.returncode:
        note = run.stderr.strip().splitlines()[-1][:120]
        yield Record("masks", "masks", names[1], "flexdecode", "failed", note=note)
        return
    for name, seconds in zip(names, json.loads(run.stdout.splitlines()[-1]), strict=True):
        case = f"{sizes.side}^2, {name}"
        config = {"wanted": 1e6 if name == names[1] else None}
        yield Record("masks", "masks", case, "flexdecode", median=seconds * 1e6, config=config)


def _lengths(sizes: Sizes, device: torch.device) -> Tensor:
    numbers = random.Random(0)
    low, high = max(sizes.capacity // 64, 1), sizes.capacity - sizes.tokens
    return torch.tensor([numbers.randint(low, high) for _ in range(sizes.batch)], device=device)


def _decode_step(sizes: Sizes, device: torch.device) -> Iterator[Record]:
    """`update()` of a bound mask: on the device, in a graph, and on the host."""
    lengths = _lengths(sizes, device)
    bound = flexdecode.create_block_mask(causal).bind(
        batch=sizes.batch,
        heads=sizes.heads,
        q_len=1,
        kv_len=lengths,
        kv_capacity=sizes.capacity,
        device=device,
    )
    case = f"update, B{sizes.batch} up to {sizes.capacity}"
    record = partial(Record, "masks", "masks", provider="flexdecode")
    if device.type == "cuda":
        timing, _ = time_graph([bound.update] * 8)
        yield record(case=f"{case}: device", median=timing.median, config={"wanted": 25.0})
        timing = time_host(bound.update, calls=100, repeats=7, device=device)
        yield record(case=f"{case}: host", median=timing.median, config={"wanted": 80.0})
    timing = time_wall([bound.update], repeats=9, device=device)
    yield record(case=f"{case}: both", median=timing.median)


def _same_tables(bound: Any, fresh: Any) -> bool:
    """Whether two masks list the same blocks in the same order."""
    for prefix in ("", "full_"):
        counts, others = (getattr(m, f"{prefix}kv_num_blocks") for m in (bound, fresh))
        if not torch.equal(counts, others):
            return False
        here, there = (getattr(m, f"{prefix}kv_indices") for m in (bound, fresh))
        place = torch.arange(max(here.shape[-1], there.shape[-1]), device=here.device)
        listed = place < counts[..., None]
        wide = [torch.nn.functional.pad(x, (0, len(place) - x.shape[-1])) for x in (here, there)]
        if not torch.equal(wide[0][listed], wide[1][listed]):
            return False
    return True


def _replays(sizes: Sizes, device: torch.device) -> Iterator[Record]:
    """Lengths grow by one a replay; tables are compared with freshly built ones now and then."""
    lengths = _lengths(sizes, device)
    mask = flexdecode.create_block_mask(sliding(sizes.window))
    arguments = {
        "batch": sizes.batch,
        "heads": sizes.heads,
        "q_len": 1,
        "kv_len": lengths,
        "kv_capacity": sizes.capacity,
    }
    bound = mask.bind(**arguments)

    def step() -> None:
        lengths.add_(1)
        bound.update()

    replay: Callable[[], None] = step
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    right = checked = 0
    samples = []
    for token in range(1, sizes.tokens + 1):
        start = time.perf_counter()
        replay()
        samples.append((time.perf_counter() - start) * 1e6)
        if token % sizes.check == 0:
            checked += 1
            right += _same_tables(bound, mask.bind(**arguments))
    yield Record(
        "masks",
        "masks",
        f"{sizes.tokens} replays" if device.type == "cuda" else f"{sizes.tokens} updates",
        "flexdecode",
        "ok" if right == checked else "wrong",
        median=statistics.median(samples),
        note=f"host time of one; tables right in {right} of {checked}",
    )


def _generation(sizes: Sizes, device: torch.device) -> Iterator[Record]:
    """Tokens one by one, each with a mask that closes over a number of its own."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    k, v = (
        torch.randn(1, 1, sizes.tokens, 16, generator=generator).to(device, dtype) for _ in range(2)
    )
    q = torch.randn(1, 2, 1, 16, generator=generator).to(device, dtype)
    before = flexdecode.compile_count()
    after_first = before
    samples = []
    out = q
    for token in range(sizes.tokens):
        start = time.perf_counter()
        mask = flexdecode.create_block_mask(sliding(1 + token // 2))
        out = flexdecode.attention(q, k, v, block_mask=mask, kv_len=token + 1)
        samples.append((time.perf_counter() - start) * 1e6)
        if token == 0:
            after_first = flexdecode.compile_count()
    compiled = flexdecode.compile_count()
    window = 1 + (sizes.tokens - 1) // 2
    newest = (x[:, :, sizes.tokens - window :] for x in (k, v))
    right = flexdecode.attention(q, *newest, backend="reference")
    good = torch.allclose(out.float(), right.float(), rtol=2e-2, atol=2e-2)
    yield Record(
        "masks",
        "masks",
        f"{sizes.tokens} tokens, a new closure each",
        "flexdecode",
        "ok" if good else "wrong",
        median=statistics.median(samples),
        note=f"host time of one; compiled {after_first - before} kernels for the first token, "
        f"{compiled - after_first} later",
        config={"later": compiled - after_first},
    )


def _torch(
    sizes: Sizes, device: torch.device, square: str, huge: str, rule: Callable[..., Any]
) -> Iterator[Record]:
    """The same tables by torch, eager and compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = _lengths(sizes, device)
    step = f"update, B{sizes.batch} up to {sizes.capacity}: both"

    def ragged(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return kv_idx < lengths[b]

    makers: dict[str, Callable[..., Any]] = {"torch": create_block_mask}
    if device.type == "cuda":
        makers["torch compiled"] = torch.compile(create_block_mask, dynamic=False)
    end = time.monotonic() + _TORCH_LIMIT
    for case, mod, batch, rows, side in (
        (square, causal, None, sizes.side, sizes.side),
        (step, ragged, sizes.batch, 1, sizes.capacity),
        (huge, rule, None, sizes.huge, sizes.huge),
    ):
        for provider, make in makers.items():
            left = min(_LIMIT, end - time.monotonic())
            why = "no time left" if left <= 0 else ""
            if case == square and device.type == "cpu" and side > 1 << 14:
                why = "the dense mask is 4 GiB"
            if why:
                yield Record("masks", "masks", case, provider, "skipped", note=why)
                continue
            _forget(device)
            call = partial(make, mod, batch, None, rows, side, device=device)
            yield from _building(case, provider, call, device, repeats=5, limit=left)


def _show(results: Results) -> None:
    """Print a markdown table, a line for each case, a column for each library."""
    providers = list(dict.fromkeys(r.provider for r in results.records))
    print(" | ".join(["", "case", *providers, "wanted", "note", ""]).strip())
    print("|---|" + "---:|" * (len(providers) + 1) + "---|")
    for case in dict.fromkeys(r.case for r in results.records):
        found = {r.provider: r for r in results.records if r.case == case}
        cells = [_cell(found.get(provider)) for provider in providers]
        own = found.get("flexdecode")
        wanted = own.config.get("wanted") if own is not None else None
        bound = f"<= {_number(wanted, own.unit)}" if own is not None and wanted else ""
        notes = [f"{r.provider}: {r.note}" for r in found.values() if r.note]
        print("| " + " | ".join([case, *cells, bound, "; ".join(notes)]) + " |")


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    if record.median is None:
        return record.status
    text = _number(record.median, record.unit)
    return text if record.status == "ok" else f"{text} ({record.status})"


def _number(value: float, unit: str) -> str:
    if unit == "us" and value >= 1e6:
        return f"{value / 1e6:.2f} s"
    if unit == "us" and value >= 1e3:
        return f"{value / 1e3:.2f} ms"
    return f"{value:.1f} {unit}"


def main(arguments: list[str] | None = None) -> Results:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file; CSV is written beside it")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test")
    parser.add_argument("--without-torch", action="store_true", help="flexdecode alone")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    sizes = Sizes.tiny() if options.tiny else Sizes()
    results = Results(options.out, device)
    try:
        for record in measure(sizes, device, not options.without_torch):
            results.add(record)
            print(f"{record.provider}: {record.case}: {_cell(record)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:  # what is there is shown
        print(f"{results.environment['gpu'] or 'CPU'}, {results.environment['versions']}")
        _show(results)
    return results


if __name__ == "__main__":
    main()
