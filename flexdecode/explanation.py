"""`explain`: what one call of `attention` reads, who reads it, and how long that must take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexdecode.api import AuxRequest, prepare
from flexdecode.block_counts import BlockCounts, count_blocks, valid_keys
from flexdecode.block_mask import BlockMask
from flexdecode.kernels.call import is_within
from flexdecode.kernels.configs import MIN_SHARE, DecodeConfig, Device, ceil_div
from flexdecode.kernels.layout import Layout, kernel_block_size
from flexdecode.plan import (
    Lists,
    Planned,
    balanced_items,
    block_owners,
    choose_plan,
    device_of,
    lists_of,
)
from flexdecode.problem import Problem, Request
from flexdecode.quantization import row_bytes
from flexdecode.tables import FULL, PARTIAL, Extent, table_states
from flexdecode.undecided import IntervalReport, report_intervals

if TYPE_CHECKING:
    from flexdecode.mods import ScoreMod

__all__ = ["Explanation", "Target", "Traffic", "Work", "explain"]


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
class Traffic:
    """Bytes between memory and chip.

    Attributes
    ----------
    keys_values : int
        Valid keys of active blocks, and their values, once for each key head that reads them;
        values that are columns of the keys are read with those.
    bias : int
        Entries for those keys.
    captures : int
        Captured tensors of the rules, each whole; a rule may read less.
    q_out : int
        Queries and outputs.
    partials : int
        What splits leave and the reduction reads. Not a must: other splits need other bytes.
    """

    keys_values: int
    bias: int
    captures: int
    q_out: int
    partials: int

    @property
    def must_move(self) -> int:
        """All but the partial results."""
        return self.keys_values + self.bias + self.captures + self.q_out


@dataclass(frozen=True)
class Work:
    """Who works on what.

    Attributes
    ----------
    config : DecodeConfig
        Tiles, splits, warps and stages.
    origin : str
        What chose them: "rules", "kernel_options", or where the measured choice comes from.
    programs : int
        Programs of the launch.
    busy : int
        Those that have a block to work on.
    busiest, mean : float, blocks
        Work of the busiest program, and of the mean one among the busy.
    states : Tensor, [B, heads, nQ, columns], uint8
        Each block as listed: 0 not, 1 partial, 2 full. ``heads`` is 1 or the number of key heads.
        Tiles of packed queries count as sequences of one row of blocks.
    owners : Tensor, [B, heads, nQ, columns], int64
        Number of the share of its list that begins the block; -1 where it is not listed.
    """

    config: DecodeConfig
    origin: str
    programs: int
    busy: int
    busiest: float
    mean: float
    states: Tensor = field(repr=False, compare=False)
    owners: Tensor = field(repr=False, compare=False)

    @property
    def balanced(self) -> bool:
        """True where shares are balanced over lists of unequal length."""
        return self.config.plan_rows > 0


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
    rows = _Rows.of(problem)
    size = (rows.BLOCK_Q, planned.config.BLOCK_N) if lists is None else lists.BLOCK_SIZE
    states = _states(request, size, rows)
    keys = valid_keys(rows.kv_len, states.shape[3], size[1])
    blocks = count_blocks(
        states, keys, (min(size[0], problem.Lq), size[1]), rows.B, problem.Hkv, "key head"
    )
    work, parts = _work(problem, planned, lists, rows, states, keys)
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
        traffic=_traffic(request, rows, states, keys, blocks, parts),
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


def _on_host(value: Tensor) -> Tensor:
    return value.detach().cpu().long()


@dataclass(frozen=True)
class _Rows:
    """What has lists: sequences, or tiles of packed queries, each like a sequence of its own.

    Attributes
    ----------
    B, Lq, BLOCK_Q : int
        How many there are, queries of each at the most, queries of a row of blocks without tables.
    kv_len : Tensor, [B], int64, on the CPU
        Valid keys.
    tiles : Tensor, [5, B], int64, or None
        See `flexdecode.packed.PackedQueries`, without the unused ones.
    used : Tensor, [num_tiles], bool, or None
    """

    B: int
    Lq: int
    BLOCK_Q: int
    kv_len: Tensor
    tiles: Tensor | None = None
    used: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem) -> _Rows:
        kv_len = _on_host(problem.kv_len_rows())
        packed = problem.packed
        if packed is None:
            return cls(problem.B, problem.Lq, max(problem.Lq, 1), kv_len)
        tiles = _on_host(packed.tiles)
        used = tiles[0] >= 0
        tiles = tiles[:, used]
        size = packed.BLOCK_Q
        return cls(tiles.shape[1], size, size, kv_len[tiles[0]], tiles, used)

    def queries(self, nQ: int, BLOCK_Q: int) -> Tensor:
        """Queries of each row of blocks, of which the last may have fewer: [B or 1, nQ], int64."""
        if self.tiles is not None:
            return self.tiles[2, :, None]
        return (self.Lq - torch.arange(nQ) * BLOCK_Q).clamp(0, BLOCK_Q)[None]

    def by_sequence(self, slots: Tensor, sequences: int) -> Tensor:
        """Join what tiles of one sequence read, [B or 1, heads, columns]: each key counts once."""
        if self.tiles is None:
            return slots
        slots = slots.expand(self.B, -1, -1)
        joined = slots.new_zeros(sequences, *slots.shape[1:])
        whose = self.tiles[0][:, None, None].expand_as(slots)
        return joined.scatter_reduce_(0, whose, slots, "amax")


def _states(request: Request, BLOCK_SIZE: tuple[int, int], rows: _Rows) -> Tensor:
    """State of each block for each key head, as listed: [B or 1, Hkv or 1, nQ, columns], uint8."""
    problem = request.problem
    columns = ceil_div(problem.Lkv, BLOCK_SIZE[1])
    if request.resolved is None:
        nQ = ceil_div(rows.Lq, BLOCK_SIZE[0])
        return torch.full((1, 1, nQ, columns), FULL, dtype=torch.uint8)
    states = table_states(request.resolved.tables).cpu()
    if rows.used is not None:
        states = states.transpose(0, 2)[rows.used]
    states = pad(states, (0, max(columns - states.shape[3], 0)))
    if states.shape[1] in (1, problem.Hkv):
        return states
    group = states.view(states.shape[0], problem.Hkv, -1, *states.shape[2:])
    return group.amax(2).clamp(max=PARTIAL) + (group.amin(2) == FULL)


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


def _work(
    problem: Problem,
    planned: Planned,
    lists: Lists | None,
    each: _Rows,
    states: Tensor,
    keys: Tensor,
) -> tuple[Work, int]:
    """Who works on what, and how many partial results of a row that makes."""
    config = planned.config
    BLOCK_SIZE = None if lists is None else lists.BLOCK_SIZE
    BLOCK_Q, KV_BLOCK = kernel_block_size(BLOCK_SIZE, problem.Lq, problem.Lkv, config.BLOCK_N)
    heads = problem.Hkv if lists is not None and lists.heads > 1 else 1
    packed = problem.packed
    if packed is not None:
        BLOCK_Q = packed.BLOCK_Q
    layout = Layout.of(
        B=problem.q_batch,
        Hkv=problem.Hkv,
        G=problem.G,
        Lq=problem.Lq,
        heads=heads,
        BLOCK_Q=BLOCK_Q,
        config=config,
        nQ=None if packed is None else packed.num_tiles,
    )
    steps = ceil_div(KV_BLOCK, config.BLOCK_N)
    listed = states > 0
    if lists is None:
        listed = listed & (keys > 0)[:, None, None, :]
    lists_of = (each.B, heads, layout.nQ if packed is None else 1)
    units = (listed.sum(-1) * steps).expand(lists_of).reshape(-1)
    if config.plan_rows:
        items = balanced_items(units, layout.inner, config.processors)
    else:
        items = torch.full_like(units, config.num_splits)
    share = (-(-units // items)).clamp(min=MIN_SHARE)
    working = -(-units // share)
    busiest = torch.minimum(share, units)
    states = (states * listed).expand(*lists_of, -1)
    if config.span:  # cut at fixed positions: every one that a key lies before has a program
        size = BLOCK_SIZE[1] if BLOCK_SIZE is not None else KV_BLOCK
        owners = torch.arange(states.shape[3]) // (config.span // size)
        owners = torch.where(states > 0, owners, -1)
        counts = torch.nn.functional.one_hot(owners + 1, config.num_splits + 1)[..., 1:]
        busiest = counts.sum(3).amax(-1).reshape(-1) * steps
        working = (-(-keys.sum(1) // config.span)).clamp(min=1)
        working = working[:, None, None].expand(lists_of).reshape(-1)
    else:
        owners = block_owners(states, share.view(lists_of), steps)
    queries = each.queries(layout.nQ, BLOCK_Q)[:, None].expand(lists_of).reshape(-1)
    tiles = -(-queries // config.TQ) * (problem.Hkv // heads * ceil_div(problem.G, config.TG))
    busy = int((working * tiles).sum())
    mean = float((units * tiles).sum()) / (busy * steps) if busy else 0.0
    rows = queries * (problem.Hkv // heads * problem.G)
    parts = int((working * rows)[working > 1].sum())
    most = float(busiest.max()) / steps if busy else 0.0
    return Work(config, planned.origin, layout.programs, busy, most, mean, states, owners), parts


def _traffic(
    request: Request, rows: _Rows, states: Tensor, keys: Tensor, blocks: BlockCounts, parts: int
) -> Traffic:
    problem, q, k, v = request.problem, request.q, request.k, request.v
    read = (states > 0) * keys[:, None, None, :]  # [B or 1, Hkv or 1, nQ, columns], keys
    read = read.expand(rows.B, -1, -1, -1) if problem.Bkv > 1 else read
    slots = rows.by_sequence(read.amax(2) if read.shape[2] else read.sum(2), problem.B)
    if problem.Bkv == 1 and problem.kv_start is None and slots.shape[0]:
        slots = slots.amax(0, keepdim=True)  # sequences share the slots
    slots = slots.expand(-1, problem.Hkv, -1)
    a_slot = row_bytes(k)
    if not (isinstance(k, Tensor) and isinstance(v, Tensor) and is_within(v, k)):
        a_slot += row_bytes(v)
    out_row = problem.Dv * problem.dtype.itemsize
    q_out = problem.q_batch * problem.Hq * problem.Lq * (row_bytes(q) + out_row)
    captured = list(request.score.captures) if request.score is not None else []
    mask = None if request.resolved is None else request.resolved.mask
    if mask is not None and blocks.partial.total:
        captured += mask.captures
    if not blocks.active.total:
        captured = []
    whole = {(x.data_ptr(), x.shape): x.numel() * x.element_size() for x in captured}
    return Traffic(
        keys_values=int(slots.sum()) * a_slot,
        bias=_bias_bytes(request, rows, states, keys, blocks.BLOCK_SIZE[0]),
        captures=sum(whole.values()),
        q_out=q_out,
        partials=parts * (problem.Dv + 2) * 4 * 2,
    )


def _bias_bytes(request: Request, rows: _Rows, states: Tensor, keys: Tensor, BLOCK_Q: int) -> int:
    """Bytes of the entries for the keys of active blocks; what is broadcast counts once."""
    bias, problem = request.bias, request.problem
    if bias is None or bias.numel() == 0:
        return 0
    by_sequence, by_head, by_row, by_key = (
        size > 1 and stride != 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )
    by_sequence = by_row if problem.packed is not None else by_sequence  # tiles have other rows
    read = (states > 0) * (keys if by_key else keys.clamp(max=1))[:, None, None, :]
    read = read.expand(rows.B, problem.Hkv, -1, -1)
    if not by_key:
        read = read.amax(3, keepdim=True)
    if not by_sequence:
        read = read.amax(0, keepdim=True)
    if not by_head:
        read = read.amax(1, keepdim=True)
    if by_row:
        read = read * rows.queries(states.shape[2], BLOCK_Q)[:, None, :, None]
    else:
        read = read.amax(2)
    return int(read.sum()) * (problem.G if by_head else 1) * bias.element_size()
