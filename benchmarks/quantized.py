"""Time quantised caches: ``python -m benchmarks.quantized --out quantized.json``.

Every format, dense and in pages, beside the 16-bit cache of the same length, with its own floor:
the bytes of its codes and coefficients at the measured read rate. FlashAttention-3 and FlashInfer
in fp8 and the int4 kernel of xformers stand beside it where they can be loaded (``--peers``).
``--sweep`` tries kernel options instead, which ``--jobs`` processes compile first, ``--once`` calls
without timing, and ``--tiny`` takes sizes for an interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexdecode
from benchmarks.inputs import number_of_sets
from benchmarks.peers import unpack
from benchmarks.providers import PROVIDERS, Setup, own_backend
from benchmarks.records import Record, Results
from benchmarks.timing import measure_read_rate, time_graph, time_limit, time_wall
from flexdecode import QuantizedTensor, dequantize, quantize
from flexdecode.kernels import loops

__all__ = ["FORMATS", "main"]

FORMATS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "fp8, scale of a row": {"format": "fp8"},
    "fp8, scale and shift": {"format": "fp8", "scale_dtype": torch.int32},
    "fp8, scale of a head": {"format": "fp8", "per": "head"},
    "fp8, one scale": {"format": "fp8", "per": "tensor"},
    "int8": {"format": "int8"},
    "int4": {"format": "int4"},
    "int4, 4 groups": {"format": "int4", "groups": 4},
    "int4, interleaved": {"format": "int4", "layout": "interleaved"},
    "int4, interleaved, 4 groups": {"format": "int4", "layout": "interleaved", "groups": 4},
}
# What is swept: rows of a tile, keys of a step, warps, stages, and most registers of a thread
# (0: as the compiler likes).
GRID = (
    (8, 64, 2, 3, 128),
    (8, 64, 2, 3, 168),
    (8, 64, 2, 4, 128),
    (8, 64, 4, 3, 128),
    (8, 128, 4, 3, 128),
    (8, 128, 4, 3, 168),
    (8, 32, 1, 3, 128),
    (8, 32, 1, 4, 168),
    (8, 32, 2, 4, 128),
    (8, 32, 1, 3, 0),
    (16, 64, 2, 3, 0),
    (16, 128, 4, 3, 0),
)
SWEPT = "fp8, scale of a row|fp8, one scale|^int4"
WARPS = (8, 12, 16)  # on a processor
_QUERY_FP8 = "fp8, q too"


@dataclass(frozen=True)
class Size:
    """One case: B sequences of Lkv keys; with a page size, in pages."""

    name: str
    B: int
    Lkv: int
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    page: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of k and of v."""
        slots = self.page or self.Lkv
        return self.B * self.Lkv // slots, self.Hkv, slots, self.D

    def table(self, device: torch.device) -> Tensor | None:
        """Pages in random order, or None."""
        if not self.page:
            return None
        order = torch.randperm(self.shape[0], generator=torch.Generator().manual_seed(0))
        return order.view(self.B, -1).to(device, torch.int32)


SIZES = (Size("B16 8k", 16, 8192), Size("B1 128k", 1, 131072))
PAGED = tuple(Size(f"{s.name}, pages of 64", s.B, s.Lkv, page=64) for s in SIZES)


@dataclass(frozen=True)
class KV:
    """One set of inputs."""

    q: Tensor | QuantizedTensor
    k: Tensor | QuantizedTensor
    v: Tensor | QuantizedTensor
    page_table: Tensor | None


def make(size: Size, format: dict[str, Any] | None, device: torch.device, seed: int) -> KV:
    """Draw a set and store it in a format."""
    at = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=at, device=device, dtype=torch.bfloat16)

    def stored() -> Tensor | QuantizedTensor:
        x = normal(*size.shape)
        return x if format is None else quantize(x, **format)

    return KV(normal(size.B, size.Hq, 1, size.D), stored(), stored(), size.table(device))


def error(kv: KV, out: Tensor) -> float:
    """Relative distance of the first KV head's rows from float64 on the dequantised cache."""
    group = out.shape[1] // kv.k.shape[1]
    q = dequantize(kv.q, torch.float64) if isinstance(kv.q, QuantizedTensor) else kv.q.double()

    def rows(x: Tensor | QuantizedTensor) -> Tensor:
        x = x[:, :1]
        x = dequantize(x, torch.float64) if isinstance(x, QuantizedTensor) else x.double()
        if kv.page_table is None:
            return x[0, 0]
        return x[kv.page_table[0].long(), 0].flatten(0, 1)

    scores = q[0, :group, 0] @ rows(kv.k).T * q.shape[3] ** -0.5
    right = scores.softmax(-1) @ rows(kv.v)
    distance = (out[0, :group, 0].double() - right).norm() / right.norm()
    return float(distance) if distance.isfinite() else float("inf")


class Bench:
    """Runs cases and keeps records."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(arguments.device or found)
        self.on_gpu = self.device.type == "cuda"
        self.results = Results(arguments.out, self.device)
        self.l2_bytes = self.rate = 0
        self.start = time.perf_counter()
        if self.on_gpu and not arguments.once:
            self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
            numbers = torch.empty(1 << 30, dtype=torch.float32, device=self.device).normal_()
            self.rate = measure_read_rate(numbers, replays=10)
            self.results.environment["read_rate"] = self.rate

    def over(self) -> bool:
        """True once the run has taken as long as it may."""
        budget = self.arguments.budget
        return bool(budget) and time.perf_counter() - self.start > budget

    def sets(self, size: Size, format: dict[str, Any] | None) -> list[KV]:
        """Make sets that together are larger than the cache."""
        first = make(size, format, self.device, 0)
        moved = first.k.nbytes + first.v.nbytes
        count = number_of_sets(moved, self.l2_bytes) if self.l2_bytes else 1
        return [first, *(make(size, format, self.device, n) for n in range(1, count))]

    def measure(
        self, size: Size, name: str, provider: str, sets: list[KV], run: Callable[[KV], Tensor]
    ) -> Record:
        """Time calls and judge the last result."""
        moved = sets[0].k.nbytes + sets[0].v.nbytes
        record = partial(
            Record,
            "attention",
            "quantized",
            f"{size.name}, {name}",
            provider,
            floor=moved / self.rate * 1e6 if self.rate else None,
            config={"active_bytes": moved, "B": size.B, "Lkv": size.Lkv, "page": size.page},
        )
        try:
            with time_limit(self.arguments.limit), torch.no_grad():
                calls = [partial(run, kv) for kv in sets]
                calls[-1]()
                if self.arguments.once:
                    return record(status="skipped")
                if self.on_gpu:
                    timing, out = time_graph(calls, replays=self.arguments.replays)
                else:
                    timing = time_wall(calls, repeats=1, device=self.device)
                    out = run(sets[-1])
                wrong = error(sets[-1], out)
        except Exception as failure:
            note = f"{type(failure).__name__}: {failure}".strip().splitlines()[0][:300]
            return record(status="failed", note=note)
        allowed = 0.1 if name == _QUERY_FP8 or provider == "fa3" else 0.02
        return record(
            status="ok" if wrong <= allowed else "wrong",
            median=timing.median,
            p20=timing.p20,
            p80=timing.p80,
            error=wrong,
        )

    def keep(self, record: Record, base: float | None = None) -> None:
        """Write a record down and say so in a line."""
        self.results.add(record)
        if record.status == "skipped":
            return
        line = f"{record.case:45s} {record.provider:11s}"
        if record.median is not None:
            line += f" {record.median:8.1f} us"
        if record.percent_of_floor is not None:
            line += f" {record.percent_of_floor:4.0f} % of floor"
        if base is not None and record.median is not None:
            line += f" {base / record.median:5.2f} x bfloat16"
        if record.error is not None:
            line += f"  error {record.error:.1e}"
        print(f"{line} {record.note}" + ("" if record.status == "ok" else f" {record.status}"))

    def own(self, kv: KV, options: dict[str, Any] | None = None) -> Tensor:
        """Attend with this library."""
        found: Tensor = flexdecode.attention(
            kv.q,
            kv.k,
            kv.v,
            kv_len=None if kv.page_table is None else kv.page_table.shape[1] * kv.k.shape[2],
            page_table=kv.page_table,
            backend=own_backend(self.device),
            kernel_options=options,
        )
        return found

    def formats(self) -> list[tuple[str, dict[str, Any] | None]]:
        """Pick what was asked for."""
        only = self.arguments.only
        return [(n, f) for n, f in FORMATS.items() if only is None or re.search(only, n)]

    def run(self, sizes: tuple[Size, ...]) -> None:
        """Every format of every size, and the peers."""
        for size in sizes:
            base = None
            for name, format in self.formats():
                if self.over():
                    return
                sets = self.sets(size, format)
                record = self.measure(size, name, "flexdecode", sets, self.own)
                base = record.median if format is None else base
                self.keep(record, base)
                for peer, run in self.peers(size, name):
                    self.keep(self.measure(size, name, peer, sets, run), base)
                if name == "fp8, scale of a head":
                    sets = [KV(quantize(s.q, "fp8"), s.k, s.v, s.page_table) for s in sets]
                    record = self.measure(size, _QUERY_FP8, "flexdecode", sets, self.own)
                    self.keep(record, base)
                del sets

    def peers(self, size: Size, name: str) -> Iterator[tuple[str, Callable[[KV], Tensor]]]:
        """Yield who else reads a format."""
        setup = Setup(self.device, {}, self.arguments.peers)

        def there(peer: str) -> bool:
            return self.on_gpu and PROVIDERS[peer](setup).missing() is None

        if name == "fp8, scale of a head" and not size.page and there("fa3"):
            yield "fa3", _fa3(size, self.device)
        if name == "fp8, one scale" and size.page and there("flashinfer"):
            yield "flashinfer", _flashinfer(size, self.device)
        if name.startswith("int4, interleaved") and not size.page and there("xformers"):
            yield "xformers", _xformers(size, 4 if "groups" in name else 1)

    def sweep(self, sizes: tuple[Size, ...]) -> None:
        """Try kernel options: the rules' own choice, and the fastest of each format."""
        rules = loops.NIBBLE_REGISTERS, loops.BYTE_REGISTERS
        for size, (name, format) in itertools.product(sizes, self.formats()):
            sets = self.sets(size, format)
            found: dict[str, Record] = {}
            for registers, options in self.ways(size):
                if self.over():
                    break
                most = rules if registers is None else (registers, registers)
                loops.NIBBLE_REGISTERS, loops.BYTE_REGISTERS = most
                _forget_plans()
                run = partial(self.own, options=options)
                said = "as the rules choose"
                if options is not None:
                    said = f"{options}, {registers} registers"
                found[said] = self.measure(size, name, "flexdecode", sets, run)
            loops.NIBBLE_REGISTERS, loops.BYTE_REGISTERS = rules
            timed = [(r.median, said) for said, r in found.items() if r.median is not None]
            if not timed:
                continue
            worst = max(r.error or 0.0 for r in found.values())
            print(f"{size.name}, {name}: {len(timed)} ways, largest error {worst:.1e}")
            old = [way for way in timed if "'BLOCK_M': 16" in way[1]]
            for us, said in [*timed[:1], *sorted(timed[1:])[:6], *sorted(old)[:1]]:
                print(f"  {us:7.1f} us  {said}")
            failed = {f"  {said}: {r.note}" for said, r in found.items() if r.status == "failed"}
            print("\n".join(sorted(failed)), flush=True)

    def ways(self, size: Size) -> Iterator[tuple[int | None, dict[str, int] | None]]:
        """Yield most registers, and kernel options, of this process's part of a sweep."""
        processors = 1
        if self.on_gpu:
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        part, parts = map(int, self.arguments.part.split("/"))
        if part == 0 or not self.arguments.once:
            yield None, None  # the rules
        for rows, keys, warps, stages, registers in GRID[(part - 1) % parts :: parts]:
            fills = sorted({max(count // warps, 1) for count in WARPS})
            for fill in fills[:1] if self.arguments.once else fills:
                options = {"BLOCK_M": rows, "BLOCK_N": keys}
                options |= {"num_warps": warps, "num_stages": stages}
                splits = max(processors * fill // (size.B * size.Hkv), 2)
                yield registers, options | {"num_splits": splits}


def compile_all(given: argparse.Namespace) -> None:
    """Compile what a sweep needs, in processes of their own."""
    own = [sys.executable, "-m", "benchmarks.quantized", "--sweep", "--once"]
    if given.only:
        own += ["--only", given.only]
    workers = [
        subprocess.Popen([*own, "--part", f"{n}/{given.jobs}"], stderr=subprocess.DEVNULL)
        for n in range(given.jobs)
    ]
    for worker in workers:
        worker.wait()


def _forget_plans() -> None:
    from flexdecode.backends import triton

    triton._plans.clear()


def _fa3(size: Size, device: torch.device) -> Callable[[KV], Tensor]:
    lengths = torch.full((size.B,), size.Lkv, dtype=torch.int32, device=device)

    one = torch.ones(size.B, size.Hkv, device=device)
    queries: dict[int, Tensor] = {}

    def run(kv: KV) -> Tensor:
        assert isinstance(kv.q, Tensor)
        assert isinstance(kv.k, QuantizedTensor) and isinstance(kv.v, QuantizedTensor)
        if id(kv) not in queries:  # before the clock starts
            queries[id(kv)] = kv.q.to(torch.float8_e4m3fn).transpose(1, 2)
        q = queries[id(kv)]
        scales = [x.scale.expand(size.B, -1) for x in (kv.k, kv.v) if x.scale is not None]
        results = torch.ops._vllm_fa3_C.fwd(
            q,
            kv.k.data.transpose(1, 2),
            kv.v.data.transpose(1, 2),
            *(None,) * 8,  # k_new, v_new, q_v, out, cu_seqlens_*, seqused_q
            lengths,
            *(None,) * 8,  # max_seqlens, page_table, kv_batch_idx, leftpad_k, rotary
            one,
            *scales,
            size.D**-0.5,
            False,
            -1,
            -1,
            0.0,
            True,
            None,
            0,
            None,
            0,
            None,
            *(1, 0, None),
        )
        out: Tensor = results[0].transpose(1, 2)
        return out

    return run


def _flashinfer(size: Size, device: torch.device) -> Callable[[KV], Tensor]:
    import flashinfer

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=True, backend="fa2"
    )
    pages = size.Lkv // size.page
    starts = torch.arange(size.B + 1, dtype=torch.int32, device=device) * pages
    table = size.table(device)
    assert table is not None
    wrapper.plan(
        starts,
        table.flatten(),
        torch.full((size.B,), size.page, dtype=torch.int32, device=device),
        size.Hq,
        size.Hkv,
        size.D,
        size.page,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.float8_e4m3fn,
    )

    scales: dict[int, tuple[float, float]] = {}

    def run(kv: KV) -> Tensor:
        assert isinstance(kv.q, Tensor)
        assert isinstance(kv.k, QuantizedTensor) and isinstance(kv.v, QuantizedTensor)
        assert kv.k.scale is not None and kv.v.scale is not None
        if id(kv) not in scales:  # before the clock starts
            scales[id(kv)] = (float(kv.k.scale), float(kv.v.scale))
        k_scale, v_scale = scales[id(kv)]
        cache = (kv.k.data, kv.v.data)
        out: Tensor = wrapper.run(kv.q[:, :, 0], cache, k_scale=k_scale, v_scale=v_scale)
        return out[:, :, None]

    return run


def _xformers(size: Size, groups: int) -> Callable[[KV], Tensor]:
    from xformers.ops import fmha

    operator = type(f"Groups{groups}", (fmha.triton_splitk.FwOp,), {"NUM_GROUPS": groups})
    G = size.Hq // size.Hkv

    def run(kv: KV) -> Tensor:
        assert isinstance(kv.q, Tensor)
        assert isinstance(kv.k, QuantizedTensor) and isinstance(kv.v, QuantizedTensor)
        q = kv.q.unflatten(1, (size.Hkv, G)).permute(0, 3, 1, 2, 4)
        k, v = (
            x.data.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, G, -1) for x in (kv.k, kv.v)
        )
        inputs = fmha.Inputs(query=q, key=k, value=v)
        out, _ = operator.apply(inputs, needs_gradient=False)
        found: Tensor = out.reshape(size.B, 1, size.Hq, size.D).transpose(1, 2)
        return found

    return run


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--peers", type=Path, help="folder of packed peers, see benchmarks.peers")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds, 0 for no limit")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one number")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--sweep", action="store_true", help="try kernel options")
    parser.add_argument("--once", action="store_true", help="call each once, and time nothing")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th way of a sweep, from i on")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile before a sweep")
    parser.add_argument("--only", help="formats whose names match this")
    parser.add_argument("--dense", action="store_true", help="no pages")
    parser.add_argument("--tiny", action="store_true", help="sizes for an interpreter")
    given = parser.parse_args(arguments)
    if given.peers is not None and torch.cuda.is_available():
        given.peers = unpack(given.peers, ["fa3", "flashinfer", "xformers"])
    if given.sweep:
        given.only = given.only or SWEPT
        if given.jobs:
            compile_all(given)
    sizes = SIZES if given.dense or given.sweep else (*SIZES, *PAGED)
    if given.sweep and given.once:
        sizes = (Size("short", 2, 1024),)  # compiled for every length
    if given.tiny:
        sizes = (Size("tiny", 1, 128, 4, 2, 32), Size("tiny pages", 1, 128, 4, 2, 32, page=16))
    bench = Bench(given)
    if given.sweep:
        bench.sweep(sizes)
    else:
        bench.run(sizes)


if __name__ == "__main__":
    main()
