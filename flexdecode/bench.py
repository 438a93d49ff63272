"""``python -m flexdecode bench``: one mask and shape on this machine, beside dense attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexdecode import attention, create_block_mask, explain
from flexdecode.console import print_table, track

__all__ = ["Shape", "run"]

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes
    ----------
    lengths : tuple of int, tokens
        Valid keys of each sequence.
    q_len : int
        Queries of each sequence.
    Hq, Hkv : int
        Query and key heads.
    D, Dv : int
        Head dims of keys and of values.
    dtype : torch.dtype
    """

    lengths: tuple[int, ...]
    q_len: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    dtype: torch.dtype

    def tensors(self, device: torch.device | str, *, empty: bool = False) -> tuple[Tensor, ...]:
        """Make q, k and v, and the lengths: an int where they are equal, else a tensor."""
        B, Lkv = len(self.lengths), max(self.lengths)
        shapes = (
            (B, self.Hq, self.q_len, self.D),
            (B, self.Hkv, Lkv, self.D),
            (B, self.Hkv, Lkv, self.Dv),
        )
        make = torch.empty if empty else torch.randn
        return tuple(make(shape, dtype=self.dtype, device=device) for shape in shapes)

    def kv_len(self, device: torch.device | str) -> int | Tensor:
        """Return the lengths as `attention` takes them: an int where all are equal."""
        if len(set(self.lengths)) == 1:
            return self.lengths[0]
        return torch.tensor(self.lengths, dtype=torch.int32, device=device)

    def __str__(self) -> str:
        dims = f"{self.D}" if self.D == self.Dv else f"{self.D}/{self.Dv}"
        keys = f"{min(self.lengths)}" if len(set(self.lengths)) == 1 else "unequally many"
        return (
            f"{len(self.lengths)} sequences of {keys} keys, {self.q_len} queries each, "
            f"{self.Hq}/{self.Hkv} heads, head dim {dims}, {str(self.dtype).removeprefix('torch.')}"
        )


def run(shape: Shape, mask: Rule | None, score: Rule | None, device: str) -> int:
    """Time the call with its rules, without any, and torch's own; print a table.

    Parameters
    ----------
    shape : Shape
    mask, score : callable or None
        ``mask_mod`` and ``score_mod``.
    device : str

    Returns
    -------
    int
        Exit status.
    """
    place = torch.device(device)
    torch.manual_seed(0)
    q, k, v = shape.tensors(place)
    kv_len = shape.kv_len(place)
    lazy = None if mask is None else create_block_mask(mask)
    bound = None
    if lazy is not None:
        bound = lazy.bind(
            batch=len(shape.lengths),
            heads=shape.Hq,
            q_len=shape.q_len,
            kv_len=kv_len,
            kv_capacity=k.shape[2],
            device=place,
        )

    def ours(**rules: Any) -> Callable[[], object]:
        return lambda: attention(q, k, v, kv_len=kv_len, **rules)

    def moved(**rules: Any) -> int:
        return explain(q, k, v, kv_len=kv_len, **rules).traffic.must_move

    calls: list[tuple[str, Callable[[], object], int]] = []
    if bound is not None or score is not None:
        calls.append(
            (
                "flexdecode, these rules",
                ours(block_mask=bound, score_mod=score),
                moved(block_mask=lazy, score_mod=score),
            )
        )
    calls.append(("flexdecode, no rule", ours(), moved()))
    if len(set(shape.lengths)) == 1:
        whole = sum(x.numel() * x.element_size() for x in (q, k, v))
        calls.append(("SDPA, no mask", lambda: _sdpa(q, k, v), whole))
    rows = []
    for name, call, count in track(calls, "timing"):
        microseconds = _microseconds(call, place)
        rate = count / microseconds * 1e-3
        rows.append((name, f"{microseconds:,.1f} us", f"{count / 2**20:,.1f} MiB", f"{rate:,.1f}"))
    print_table(rows, ("", "one call", "must move", "GB/s"), title=f"{shape} on {place}")
    how = "Best of several rounds" if place.type == "cpu" else "Median of CUDA graph replays"
    print(f"{how}, always on the same tensors: what fits into a cache is read from there.")
    return 0


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _microseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return _graph_microseconds(call)
    call()
    times: list[float] = []
    stop = time.perf_counter() + 0.5
    while len(times) < 5 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def _graph_microseconds(call: Callable[[], object], calls: int = 20, replays: int = 15) -> float:
    """Median of replays of a graph that holds so many calls, for one of them."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times: list[float] = []
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / calls
