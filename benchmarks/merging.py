"""Time merges and shared prefixes: ``python -m benchmarks.merging --out merging.json``.

Merges of partial results, forward and backward, beside torch, FlashInfer and a copy of as many
bytes; sequences that share a prefix, by `cascade_attention`, by a plain call over copies of the
prefix, by a plain call over shared pages and by FlashInfer; and where the cascade begins to pay.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexdecode
from benchmarks.inputs import number_of_sets
from benchmarks.peers import unpack
from benchmarks.providers import PROVIDERS, Setup
from benchmarks.records import Record, Results
from benchmarks.timing import measure_read_rate, time_graph, time_limit, time_wall

__all__ = ["main"]

_LIMIT = 25.0  # seconds that one number may take
_PAGE = 64


@dataclass(frozen=True)
class Bench:
    """Where and how precisely to measure.

    Attributes
    ----------
    device : torch.device
    tiny : bool
        Sizes for a test.
    flashinfer : bool
        It can be imported.
    l2_bytes : int
    rate : float
        Bytes per second that the device reads; 0 where unknown.
    """

    device: torch.device
    tiny: bool
    flashinfer: bool
    l2_bytes: int
    rate: float

    def measure(
        self,
        record: Callable[..., Record],
        calls: Sequence[Callable[[], Any]],
        moved: int,
        right: Callable[[Any], float] | None = None,
        **more: Any,
    ) -> Record:
        """Time calls on different inputs; `right` gives the relative error of the last result."""
        try:
            with time_limit(_LIMIT):
                if self.device.type == "cuda":
                    timing, last = time_graph(calls)
                else:
                    timing, last = time_wall(calls, repeats=1, device=self.device), calls[-1]()
        except Exception as error:  # every way of failing is a result here
            note = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            return record(status="failed", note=note, **more)
        error = None if right is None else right(last)
        return record(
            status="ok" if error is None or error < 1e-2 else "wrong",
            median=timing.median,
            p20=timing.p20,
            p80=timing.p80,
            floor=moved / self.rate * 1e6 if self.rate else None,
            error=error,
            **more,
        )


def relative(found: Tensor, right: Tensor) -> float:
    """Distance in the 2-norm."""
    found, right = found.double(), right.double()
    return ((found - right).norm() / right.norm()).item()


def merges(bench: Bench) -> Iterator[Record]:
    """Time merges of eight parts and of two, small and large."""
    shapes = ((16, 32, 1, 128), (16, 32, 512, 128))
    if bench.tiny:
        shapes = ((2, 2, 1, 8), (2, 2, 3, 8))
    for shape in shapes:
        for parts, dtype in ((8, torch.bfloat16), (8, torch.float32), (2, torch.bfloat16)):
            yield from _merge(bench, parts, shape, dtype)


def _merge(
    bench: Bench, parts: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Record]:
    device = bench.device
    B, H, L, Dv = shape
    rows = B * H * L
    moved = (parts + 1) * rows * (Dv * dtype.itemsize + 4)
    count = min(number_of_sets(moved, bench.l2_bytes), 256)
    sets = [
        (
            [torch.randn(shape, device=device, dtype=dtype) for _ in range(parts)],
            [torch.randn(shape[:3], device=device) for _ in range(parts)],
        )
        for _ in range(count)
    ]
    case = f"{parts} parts of {list(shape)} {str(dtype).removeprefix('torch.')}"
    config = {"parts": parts, "B": B, "Hq": H, "Lq": L, "Dv": Dv, "itemsize": dtype.itemsize}
    record = partial(Record, "merge", "merge", case, config=config)
    outs, lses = sets[-1]
    weights = torch.stack(lses).double().softmax(0)[..., None]
    right = sum(w * out.double() for w, out in zip(weights, outs, strict=True))
    first = partial(_error_of_first, right)
    merge = flexdecode.merge_attentions
    yield bench.measure(
        partial(record, "flexdecode"), [partial(merge, *each) for each in sets], moved, first
    )
    stacks = [(torch.stack(outs), torch.stack(lses)) for outs, lses in sets]
    del sets
    yield bench.measure(
        partial(record, "flexdecode stacked"),
        [partial(merge, *each) for each in stacks],
        moved,
        first,
    )
    half = [torch.empty(2, moved // 4, device=device, dtype=torch.bfloat16) for _ in stacks]
    yield bench.measure(
        partial(record, "copy"),
        [partial(x[0].copy_, x[1]) for x in half],
        moved,
        note="a copy that moves as many bytes",
    )
    del half
    if device.type == "cuda":
        grads = (
            torch.randn(shape, device=device, dtype=dtype),
            torch.randn(shape[:3], device=device),
        )
        operator = torch.ops.flexdecode.merge_backward
        yield bench.measure(
            partial(record, "flexdecode backward"),
            [partial(operator, [o], [s], None, *grads, True, "auto") for o, s in stacks],
            (2 * parts + 1) * rows * (Dv * dtype.itemsize + 4),
        )
    torch_merge = partial(merge, backend="torch")
    yield bench.measure(
        partial(record, "torch"), [partial(torch_merge, *each) for each in stacks], moved, first
    )
    if bench.flashinfer:
        from flashinfer import merge_states

        theirs = [
            (
                o.movedim(0, 3).permute(0, 2, 3, 1, 4).reshape(B * L, parts, H, Dv),
                (s / 0.6931471805599453).permute(1, 3, 0, 2).reshape(B * L, parts, H).contiguous(),
            )
            for o, s in stacks
        ]

        def back(found: Any) -> float:
            return relative(found[0].view(B, L, H, Dv).transpose(1, 2), right)

        calls = [partial(merge_states, *each) for each in theirs]
        yield bench.measure(partial(record, "flashinfer merge_states"), calls, moved, back)


def _error_of_first(right: Tensor, found: Any) -> float:
    return relative(found[0], right)


@dataclass(frozen=True)
class Shared:
    """Sequences that share a prefix; D is 128, 32 query heads read 8 key heads."""

    B: int = 64
    prefix: int = 32768
    own: int = 1024
    Hq: int = 32
    Hkv: int = 8
    D: int = 128

    def __str__(self) -> str:
        return f"{self.B} sequences, prefix {self.prefix}, own {self.own}"


def cascades(bench: Bench, shared: Shared) -> Iterator[Record]:
    """Time one batch of sequences that share a prefix, by all means."""
    device = bench.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    B, P, S, Hkv, D = shared.B, shared.prefix, shared.own, shared.Hkv, shared.D

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    q = draw(B, shared.Hq, 1, D)
    common = draw(2, 1, Hkv, P, D)
    own = draw(2, B, Hkv, S, D)
    token = 2 * Hkv * D * dtype.itemsize
    least = (P + B * S) * token
    record = partial(Record, "cascade", "cascade", str(shared), config=vars(shared))
    whole = torch.cat([common.expand(-1, B, -1, -1, -1), own], 3)
    plain = partial(flexdecode.attention, q, *whole)
    right = plain()

    def first(found: Any) -> float:
        return relative(found, right)

    yield bench.measure(
        partial(record, "flexdecode plain"),
        [plain],
        B * (P + S) * token,
        note="the prefix copied for each sequence",
    )
    del whole, plain
    prefix = [flexdecode.SharedPrefix(*common)]
    cascade = partial(flexdecode.cascade_attention, q, *own, prefixes=prefix)
    yield bench.measure(partial(record, "flexdecode cascade"), [cascade] * 2, least, first)
    yield bench.measure(
        partial(record, "flexdecode ungrouped"),
        [partial(_ungrouped, q, common, own)],
        least,
        first,
        note="the prefix with stride 0 along the batch, then the own keys, merged",
    )
    pool, tables = _pages(common, own)
    table = torch.cat([tables[0].expand(B, -1), tables[1]], 1).contiguous()
    paged = {"page_table": table, "kv_len": P + S}
    yield bench.measure(
        partial(record, "flexdecode plain, shared pages"),
        [partial(flexdecode.attention, q, *pool, **paged)],
        least,
        first,
    )
    call = partial(flexdecode.cascade_attention, q, *pool, prefix_len=P, cascade=True, **paged)
    yield bench.measure(partial(record, "flexdecode cascade, pages"), [call], least, first)
    if bench.flashinfer:
        yield _flashinfer(
            bench, partial(record, "flashinfer cascade"), q, pool, tables, least, first
        )


def _ungrouped(q: Tensor, common: Tensor, own: Tensor) -> Tensor:
    aux = flexdecode.AuxRequest(lse=True)
    parts = [flexdecode.attention(q, *keys, return_aux=aux) for keys in (common, own)]
    return flexdecode.merge_attentions([out for out, _ in parts], [a.lse for _, a in parts])[0]


def _pages(common: Tensor, own: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Everything in one pool of pages, and the tables of the prefix and of the own keys."""
    pools, counts = [], []
    for pieces in zip(common, own, strict=True):
        cut = [x.unflatten(2, (-1, _PAGE)).transpose(1, 2).flatten(0, 1) for x in pieces]
        counts = [len(x) for x in cut]
        pools.append(torch.cat(cut))
    pages = torch.arange(sum(counts), dtype=torch.int32, device=own.device)
    return pools, [pages[: counts[0]][None], pages[counts[0] :].view(own.shape[1], -1)]


def _flashinfer(
    bench: Bench,
    record: Callable[..., Record],
    q: Tensor,
    pool: list[Tensor],
    tables: list[Tensor],
    least: int,
    right: Callable[[Any], float],
) -> Record:
    """FlashInfer's two-level cascade, planned outside the clock."""
    import flashinfer

    device, B = q.device, len(q)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def int32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    try:
        with time_limit(_LIMIT):
            wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")
            steps = torch.arange(B + 1, dtype=torch.int32, device=device)
            wrapper.plan(
                [int32(0, B), steps],
                [int32(0, tables[0].shape[1]), steps * tables[1].shape[1]],
                [tables[0].flatten(), tables[1].flatten()],
                [int32(_PAGE), int32(*[_PAGE] * B)],
                q.shape[1],
                pool[0].shape[1],
                q.shape[3],
                _PAGE,
                q_data_type=q.dtype,
            )
    except Exception as error:
        return record(
            status="failed", note=f"{type(error).__name__}: {error}".splitlines()[0][:160]
        )
    flat, cache = q[:, :, 0].contiguous(), tuple(pool)

    def call() -> Tensor:
        out: Tensor = wrapper.run(flat, cache)
        return out[:, :, None]

    return bench.measure(record, [call], least, right)


def thresholds(bench: Bench) -> Iterator[Record]:
    """Time cascade and plain call side by side where one begins to beat the other."""
    sizes = [(4, 1024), (4, 8192), (16, 256), (16, 2048), (64, 128), (64, 512)]
    if bench.tiny:
        sizes = [(2, 64)]
    for B, P in sizes:
        shared = Shared(B, P, 64 if bench.tiny else 512)
        if bench.tiny:
            shared = Shared(B, P, 64, 4, 2, 16)
        dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
        q = torch.randn(B, shared.Hq, 1, shared.D, device=bench.device, dtype=dtype)
        shape = (2, B, shared.Hkv, P + shared.own, shared.D)
        token = 2 * shared.Hkv * shared.D * dtype.itemsize
        count = min(number_of_sets((P + B * shared.own) * token, bench.l2_bytes), 16)
        caches = [torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(count)]
        for cache in caches:
            cache[:, :, :, :P] = cache[:, :1, :, :P]
        report = flexdecode.explain_cascade(q, *caches[0], prefix_len=P)
        for cascade in (False, True):
            name = f"flexdecode {'cascade' if cascade else 'plain'}"
            chosen = "chosen" if report.cascades == cascade else ""
            record = partial(Record, "cascade", "threshold", str(shared), name, note=chosen)
            call = partial(flexdecode.cascade_attention, q, prefix_len=P, cascade=cascade)
            moved = ((P if cascade else B * P) + B * shared.own) * token
            yield bench.measure(record, [partial(call, *cache) for cache in caches], moved)


def main(arguments: list[str] | None = None) -> None:
    """Run everything, print a line for each number, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON to write, after every number; CSV beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes to test the benchmark")
    parser.add_argument("--peers", type=Path, help="folder with the peers' packed files")
    parser.add_argument("--only", default="merge,cascade,threshold", help="which of these")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    target = None
    if chosen.peers is not None:
        target = unpack(chosen.peers, ["flashinfer"])
    on_gpu = device.type == "cuda"
    missing = "no GPU"
    if on_gpu:
        missing = PROVIDERS["flashinfer"](Setup(device, {}, target)).missing() or ""
    if missing:
        print(f"flashinfer: skipped, {missing}", flush=True)
    l2_bytes, rate = 0, 0.0
    if on_gpu:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        rate = measure_read_rate(torch.ones(1 << 30, dtype=torch.int32, device=device))
        print(f"pure read: {rate / 1e12:.3f} TB/s", flush=True)
    bench = Bench(device, chosen.tiny, not missing, l2_bytes, rate)
    shared = Shared(3, 128, 64, 4, 2, 16) if chosen.tiny else Shared()
    results = Results(chosen.out, device)
    groups = {
        "merge": lambda: merges(bench),
        "cascade": lambda: cascades(bench, shared),
        "threshold": lambda: thresholds(bench),
    }
    for name in chosen.only.split(","):
        for record in groups[name]():
            results.add(record)
            floor = "" if record.floor is None else f" floor {record.floor:9.1f}"
            took = record.note if record.median is None else f"{record.median:9.1f} us{floor}"
            note = record.note if record.median is not None else ""
            text = f"{record.case:46} {record.provider:32} {record.status:7} {took}  {note}"
            print(text.rstrip(), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
