"""`explain`: what one call of `attention` reads, who reads it, and how long that must take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode.api import AuxRequest, prepare
from flexdecode.block_counts import BlockCounts, count_blocks, valid_keys
from flexdecode.block_mask import BlockMask
from flexdecode.kernels.hardware import Device
from flexdecode.plan import (
    choose_plan,
    device_of,
    lists_of,
)
from flexdecode.problem import Problem
from flexdecode.tables import Extent
from flexdecode.undecided import IntervalReport, report_intervals
from flexdecode.workload import Rows, Traffic, Work, count_traffic, count_work, listed_states

if TYPE_CHECKING:
    from flexdecode.mods import ScoreMod

__all__ = ["Explanation", "Target", "explain"]


@dataclass(frozen=True)
class Target:
    """The device that a plan is for.

    Attributes
    ----------
    name : str
    device : Device
    peak : float or None
        Memory bandwidth by its data sheet, bytes/s, where known.
    assumed : bool
        Neither asked for nor here: stands in for the missing GPU.
    """

    name: str
    device: Device
    peak: float | None = None
    assumed: bool = False


_KNOWN = {
    "A100": Target("A100", Device(108, 166912, arch="cuda:80"), 2.039e12),
    "H100": Target("H100", Device(132, 232448, pdl=True, arch="cuda:90"), 3.35e12),
    "H200": Target("H200", Device(132, 232448, pdl=True, arch="cuda:90"), 4.8e12),
    "B200": Target("B200", Device(148, 232448, pdl=True, arch="cuda:100"), 8.0e12),
    "MI300X": Target("MI300X", Device(304, 65536, arch="hip:gfx942", columns=16), 5.3e12),
}


@dataclass(frozen=True)
class Explanation:
    """What one call of `attention` does; made by `explain`, printed by ``print``.

    Attributes
    ----------
    q_shape, k_shape, v_shape : tuple of int
        After heads or sequences that were only repeated have been taken out of k and v.
    dtype : torch.dtype
    target : Target
    blocks : BlockCounts
        Without a mask, blocks are the steps of the kernel's loop. Of packed queries, each tile has
        lists of its own.
    work : Work
    traffic : Traffic
    intervals : IntervalReport or None
        None without a rule, where its blocks are too many, or where queries are packed.
    bandwidth : float or None
        Bytes/s.
    """

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    dtype: torch.dtype
    target: Target
    blocks: BlockCounts
    work: Work
    traffic: Traffic
    intervals: IntervalReport | None
    bandwidth: float | None

    @property
    def roofline_us(self) -> float | None:
        """Microseconds that moving the bytes takes at least; None without a bandwidth."""
        return None if self.bandwidth is None else self.traffic.must_move / self.bandwidth * 1e6

    def __str__(self) -> str:
        return "\n".join(f"{name:<11}{line}".rstrip() for name, line in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        q, k, v = (list(shape) for shape in (self.q_shape, self.k_shape, self.v_shape))
        yield "call", f"q {q}, k {k}, v {v}, {str(self.dtype).removeprefix('torch.')}"
        yield "device", self._device()
        first, *rest = str(self.blocks).splitlines()
        yield "blocks", first
        yield from (("", line) for line in rest)
        yield from _interval_lines(self.intervals)
        work, config = self.work, self.work.config
        splits = "1 split" if config.num_splits == 1 else f"{config.num_splits} splits"
        if config.span:
            splits += f" after every {config.span} keys"
        yield (
            "plan",
            f"{'balanced shares' if work.balanced else splits} of each list, "
            f"tiles of {config.BLOCK_M} rows ({config.TG} heads x {config.TQ} queries) and "
            f"{config.BLOCK_N} keys, {config.num_warps} warps, {config.num_stages} stages",
        )
        if work.origin != "rules":
            yield "", f"chosen by {work.origin}"
        yield (
            "programs",
            f"{work.programs}, {work.busy} with work; busiest {work.busiest:.1f} blocks, "
            f"mean {work.mean:.1f}",
        )
        traffic = self.traffic
        yield "bytes", f"{traffic.must_move:>15,} must move"
        for name, count in (
            ("K and V of active blocks", traffic.keys_values),
            ("bias", traffic.bias),
            ("captured tensors", traffic.captures),
            ("q and out", traffic.q_out),
        ):
            if count:
                yield "", f"{count:>15,}   {name}"
        if traffic.partials:
            yield "", f"{traffic.partials:>15,} partial results besides, written and read"
        if self.bandwidth is not None and self.roofline_us is not None:
            yield "roofline", f"{self.roofline_us:.1f} us at {self.bandwidth / 1e12:.2f} TB/s"

    def _device(self) -> str:
        target = self.target
        text = f"{target.name}: {target.device.processors} processors"
        return text + (", assumed, since there is no GPU" if target.assumed else "")


def _interval_lines(report: IntervalReport | None) -> Iterator[tuple[str, str]]:
    if report is None:
        return
    yield "intervals", f"decide {report.decided} of {report.blocks} blocks without their elements"
    for part in report.parts[:3]:
        captures = f" (captures {', '.join(part.captures)})" if part.captures else ""
        yield "", f"  {part.blocks} unknown because of {part.expression}{captures}"
    if len(report.parts) > 3:
        yield "", f"  and {len(report.parts) - 3} more parts"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    kv_len: int | Tensor | None = None,
    kv_start: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
    device_name: str | None = None,
    processors: int | None = None,
    bandwidth: float | None = None,
) -> Explanation:
    """Say what `attention` would do with these arguments on a GPU, without running it.

    Reads lengths and tables on the host, and so waits for the device.

    Parameters
    ----------
    q, k, v, score_mod, block_mask, scale, kv_len, kv_start, q_offset, page_table, cu_seqlens_q,\
    bias, sinks, return_aux, backend, kernel_options
        As `attention` takes and checks them. Whatever the backend, the plan is the triton one's.
    device_name : str, optional
        ``"A100"``, ``"H100"``, ``"H200"``, ``"B200"`` or ``"MI300X"``: plan for that device.
        Default: the GPU of q, else the current one, else an H200.
    processors : int >= 1, optional
        Streaming multiprocessors or compute units, where not all of the device's.
    bandwidth : float > 0, bytes/s, optional
        For the roofline time. Default: the data sheet's of a device that was named or assumed.

    Returns
    -------
    Explanation

    Raises
    ------
    ValueError, TypeError
        What `attention` would raise, or the device is unknown.

    Examples
    --------
    >>> import torch
    >>> from flexdecode import create_block_mask, explain
    >>> from flexdecode.masks import sliding_window
    >>> q = torch.randn(1, 8, 1, 64)
    >>> k, v = torch.randn(2, 1, 2, 4096, 64)
    >>> mask = create_block_mask(sliding_window(1000))
    >>> report = explain(q, k, v, block_mask=mask, device_name="H200")
    >>> report.blocks.active.total, report.blocks.blocks
    (16, 64)
    """
    target = _target(q, device_name, processors)
    if bandwidth is not None:
        if isinstance(bandwidth, bool) or not isinstance(bandwidth, (int, float)):
            raise TypeError(f"bandwidth: expected a number, got {type(bandwidth).__name__}")
        if not bandwidth > 0:
            raise ValueError(f"bandwidth: expected bytes/s above 0, got {bandwidth}")
    request, _ = prepare(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        kv_len=kv_len,
        kv_start=kv_start,
        q_offset=q_offset,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        bias=bias,
        sinks=sinks,
        return_aux=return_aux,
        backend=backend,
        kernel_options=kernel_options,
    )
    problem, resolved = request.problem, request.resolved
    lists = lists_of(request)
    planned = choose_plan(request, lists, target.device)
    rows = Rows.of(problem)
    size = (rows.BLOCK_Q, planned.config.BLOCK_N) if lists is None else lists.BLOCK_SIZE
    states = listed_states(request, size, rows)
    keys = valid_keys(rows.kv_len, states.shape[3], size[1])
    blocks = count_blocks(
        states, keys, (min(size[0], problem.Lq), size[1]), rows.B, problem.Hkv, "key head"
    )
    work, parts = count_work(problem, planned, lists, rows, states, keys)
    report = None
    ruled = isinstance(block_mask, BlockMask) and block_mask.source == "rule"
    ruled = ruled and problem.packed is None
    if ruled and resolved is not None and resolved.mask is not None:
        report = report_intervals(resolved.mask, _extent(problem, size))
    return Explanation(
        q_shape=tuple(q.shape),
        k_shape=tuple(request.k.shape),
        v_shape=tuple(request.v.shape),
        dtype=problem.dtype,
        target=target,
        blocks=blocks,
        work=work,
        traffic=count_traffic(request, rows, states, keys, blocks, parts),
        intervals=report,
        bandwidth=target.peak if bandwidth is None else float(bandwidth),
    )


def _target(q: Tensor, device_name: str | None, processors: int | None) -> Target:
    if device_name is not None:
        if not isinstance(device_name, str) or device_name not in _KNOWN:
            raise ValueError(
                f"device_name: expected one of {', '.join(_KNOWN)}, got {device_name!r}"
            )
        target = _KNOWN[device_name]
    elif torch.cuda.is_available():
        here = isinstance(q, Tensor) and q.is_cuda
        place = q.device if here else torch.device("cuda", torch.cuda.current_device())
        target = Target(torch.cuda.get_device_name(place), device_of(place))
    else:
        known = _KNOWN["H200"]
        target = Target(known.name, known.device, known.peak, assumed=True)
    if processors is None:
        return target
    if isinstance(processors, bool) or not isinstance(processors, int) or processors < 1:
        raise ValueError(f"processors: expected an int of at least 1, got {processors!r}")
    device = replace(target.device, processors=processors)
    return Target(target.name, device, target.peak, target.assumed)


def _extent(problem: Problem, BLOCK_SIZE: tuple[int, int]) -> Extent:
    return Extent(
        problem.B,
        problem.Hq,
        problem.Lq,
        problem.Lkv,
        problem.kv_len,
        problem.offset,
        BLOCK_SIZE,
        problem.device,
    )
