# mypy: allow-untyped-defs, allow-untyped-decorators
"""Merge attention over disjoint sets of keys: out and LSE of every part become those of all.

Forward and backward. The parts are read where they lie, whatever their strides: through a tuple of
pointers, or along the first axis of one tensor.
"""

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.devices import on_device
from flexdecode.kernels.launch import Launch
from flexdecode.kernels.sizes import ceil_div, next_power_of_2
from flexdecode.kernels.tiles import finite_or_zero, loop_bound

MAX_PARTS = 16  # pointers that one launch takes; what a program holds at once
BATCH = 8  # parts of one tensor that a program holds at once
THREAD_BYTES = 16  # of each part, in one load
MAX_WARPS = 4
ENOUGH_PROGRAMS = 264  # two for each processor of a large GPU
MAX_ROWS = 2**31 - 2**10

RUN_TIME = (
    "stride_out_part stride_lse_part stride_o0 stride_o1 stride_o2 stride_l0 stride_l1 stride_l2 "
    "stride_t0 stride_t1 stride_t2 stride_s0 stride_s1 stride_s2 parts rows size_1 size_2 heads "
    "inner"
).split()


@triton.jit
def place(
    row,
    sizes,  # (parts, rows, size_1, size_2)
    strides,  # of three axes, and perhaps more
):
    """Where each row starts, [ROWS] int64, from its number and the strides of three axes."""
    size_1, size_2 = sizes[2], sizes[3]
    at = (row // size_2 // size_1).to(tl.int64) * strides[0]
    at += (row // size_2 % size_1).to(tl.int64) * strides[1]
    return at + (row % size_2).to(tl.int64) * strides[2]


# Legend: rows are the elements of all axes but the last, DV its size. `outs` and `lses` are tuples
# of pointers, one for each part, or of one pointer where parts lie `stride_*_part` apart (STACKED).
# `strides` is empty where all parts have the same strides, else it holds six for each part. Strides
# of outs count ALIGN elements.
@triton.jit
def place_rows(
    pointers,  # (outs, lses, strides)
    part_strides,  # (stride_out_part, stride_lse_part)
    out_strides,  # of three axes, where all parts have the same
    lse_strides,
    sizes,  # (parts, rows, size_1, size_2)
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return this program's rows, columns and lanes, and with them where its parts are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = row < sizes[1]
    row = tl.minimum(row, sizes[1] - 1)
    offs_d = tl.arange(0, BLOCK_DV)
    inside = lane[:, None] & (offs_d < DV)[None, :]
    at_out = place(row, sizes, out_strides)
    at_lse = place(row, sizes, lse_strides)
    where = (pointers, part_strides, sizes, (row, offs_d, lane, inside), at_out, at_lse)
    return row, offs_d, lane, inside, where


@triton.jit
def load_parts(
    where,  # from `place_rows`
    first,
    dtype: tl.constexpr,
    ALIGN: tl.constexpr,
    PARTS: tl.constexpr,
    STACKED: tl.constexpr,
):
    """LSE and outputs of PARTS parts from `first` on, two tuples; -inf past the last part.

    LSE are [ROWS] of `dtype`, outputs [ROWS, BLOCK_DV] of their own dtypes.
    """
    pointers, part_strides, sizes, tile, at_out, at_lse = where
    outs, lses, strides = pointers
    row, offs_d, lane, inside = tile
    parts = sizes[0]
    scores = ()
    for n in tl.static_range(PARTS):
        if STACKED:
            ptrs = lses[0] + ((first + n) * part_strides[1].to(tl.int64) + at_lse)
        elif len(strides) > 0:
            ptrs = lses[n] + place(row, sizes, strides[n][3:])
        else:
            ptrs = lses[n] + at_lse
        score = tl.load(ptrs, mask=lane & (first + n < parts), other=float("-inf"))
        scores = scores + (score.to(dtype),)  # type: ignore[assignment]  # noqa: RUF005
    values = ()
    for n in tl.static_range(PARTS):
        if STACKED:
            at = (first + n) * part_strides[0].to(tl.int64) + at_out
            ptrs = outs[0] + ((at * ALIGN)[:, None] + offs_d[None, :])
        elif len(strides) > 0:
            at = place(row, sizes, strides[n])
            ptrs = outs[n] + ((at * ALIGN)[:, None] + offs_d[None, :])
        else:
            ptrs = outs[n] + ((at_out * ALIGN)[:, None] + offs_d[None, :])
        value = tl.load(ptrs, mask=inside & (first + n < parts), other=0.0)
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
    return scores, values


@triton.jit
def greatest(m, scores, PARTS: tl.constexpr):
    """Greatest of m and the scores of all parts, [ROWS]."""
    for n in tl.static_range(PARTS):
        m = tl.maximum(m, scores[n])
    return m


@triton.jit
def keep_filled(value, score, dtype: tl.constexpr):
    """Replace what an empty part holds, a NaN perhaps, by what adds nothing even to -0.0."""
    nothing = minus_zero(value.shape[0], value.shape[1], dtype)
    return tl.where((score == float("-inf"))[:, None], nothing, value.to(dtype))


@triton.jit
def minus_zero(ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Return -0.0, what adds nothing to -0.0 either; as a constant Triton would make it 0.0."""
    return tl.zeros((ROWS, COLUMNS), dtype) * -1.0


@triton.jit(do_not_specialize=RUN_TIME)
def _merge_kernel(
    outs,
    lses,
    strides,
    sinks_ptr,  # [heads], or None
    out_ptr,
    lse_ptr,
    stride_out_part: tl.int64,
    stride_lse_part: tl.int64,
    stride_o0: tl.int64,  # of the parts' outs, where all have the same
    stride_o1: tl.int64,
    stride_o2: tl.int64,
    stride_l0: tl.int64,  # of their lses
    stride_l1: tl.int64,
    stride_l2: tl.int64,
    stride_t0: tl.int64,  # of the merged out
    stride_t1: tl.int64,
    stride_t2: tl.int64,
    stride_s0: tl.int64,  # of the merged LSE
    stride_s1: tl.int64,
    stride_s2: tl.int64,
    parts: tl.int32,
    rows: tl.int32,
    size_1: tl.int32,
    size_2: tl.int32,
    heads: tl.int32,
    inner: tl.int32,  # rows of a head that follow one another
    ALIGN: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STACKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    sizes = (parts, rows, size_1, size_2)
    row, offs_d, lane, inside, where = place_rows(
        (outs, lses, strides),
        (stride_out_part, stride_lse_part),
        (stride_o0, stride_o1, stride_o2),
        (stride_l0, stride_l1, stride_l2),
        sizes,
        DV,
        BLOCK_DV,
        ROWS,
    )
    m = tl.full((ROWS,), float("-inf"), dtype)
    l = tl.zeros((ROWS,), dtype)
    acc = minus_zero(ROWS, BLOCK_DV, dtype)
    for first in tl.range(0, loop_bound(parts), PARTS):
        scores, values = load_parts(where, first, dtype, ALIGN, PARTS, STACKED)
        m_new = greatest(m, scores, PARTS)
        m_safe = finite_or_zero(m_new)
        alpha = tl.exp(m - m_safe)
        l = l * alpha
        acc = acc * alpha[:, None]
        for n in tl.static_range(PARTS):
            weight = tl.exp(scores[n] - m_safe)
            l += weight
            acc += keep_filled(values[n], scores[n], dtype) * weight[:, None]
        m = m_new
    empty = m == float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row // inner % heads).to(dtype)
        m_new = tl.maximum(m, sink)
        m_safe = finite_or_zero(m_new)
        alpha = tl.exp(m - m_safe)
        l = l * alpha + tl.exp(sink - m_safe)
        acc = acc * alpha[:, None]
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    out = tl.where(empty[:, None], 0.0, acc * (1.0 / l)[:, None])
    at = place(row, sizes, (stride_t0, stride_t1, stride_t2)) * ALIGN
    tl.store(out_ptr + (at[:, None] + offs_d[None, :]), out, mask=inside)
    at = place(row, sizes, (stride_s0, stride_s1, stride_s2))
    tl.store(lse_ptr + at, m + tl.log(l), mask=lane)


# With w[n] = exp(lse[n] - lse), d[n] = <grad_out, out[n]> and d = sum w[n] d[n]:
# grad_outs[n] = w[n] grad_out,  grad_lses[n] = w[n] (grad_lse + d[n] - d); a sink is a part whose
# out is zero. The parts are walked twice: first for lse and d, then for the gradients.
@triton.jit(do_not_specialize=RUN_TIME)
def _merge_backward_kernel(
    outs,
    lses,
    strides,
    sinks_ptr,  # [heads], or None
    grad_out_ptr,  # contiguous, as are all gradients
    grad_lse_ptr,
    grad_outs_ptr,  # [parts, ...]
    grad_lses_ptr,
    grad_sinks_ptr,  # [rows], or None
    stride_out_part: tl.int64,
    stride_lse_part: tl.int64,
    stride_o0: tl.int64,
    stride_o1: tl.int64,
    stride_o2: tl.int64,
    stride_l0: tl.int64,
    stride_l1: tl.int64,
    stride_l2: tl.int64,
    parts: tl.int32,
    rows: tl.int32,
    size_1: tl.int32,
    size_2: tl.int32,
    heads: tl.int32,
    inner: tl.int32,
    ALIGN: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STACKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    sizes = (parts, rows, size_1, size_2)
    row, offs_d, lane, inside, where = place_rows(
        (outs, lses, strides),
        (stride_out_part, stride_lse_part),
        (stride_o0, stride_o1, stride_o2),
        (stride_l0, stride_l1, stride_l2),
        sizes,
        DV,
        BLOCK_DV,
        ROWS,
    )
    at = row.to(tl.int64) * DV
    grad = tl.load(grad_out_ptr + (at[:, None] + offs_d[None, :]), mask=inside, other=0.0).to(dtype)
    grad_lse = tl.load(grad_lse_ptr + row).to(dtype)
    m = tl.full((ROWS,), float("-inf"), dtype)
    l = tl.zeros((ROWS,), dtype)
    delta = tl.zeros((ROWS,), dtype)
    for first in tl.range(0, loop_bound(parts), PARTS):
        scores, values = load_parts(where, first, dtype, ALIGN, PARTS, STACKED)
        m_new = greatest(m, scores, PARTS)
        m_safe = finite_or_zero(m_new)
        alpha = tl.exp(m - m_safe)
        l = l * alpha
        delta = delta * alpha
        for n in tl.static_range(PARTS):
            weight = tl.exp(scores[n] - m_safe)
            l += weight
            delta += tl.sum(keep_filled(values[n], scores[n], dtype) * grad, 1) * weight
        m = m_new
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row // inner % heads).to(dtype)
        m_new = tl.maximum(m, sink)
        m_safe = finite_or_zero(m_new)
        alpha = tl.exp(m - m_safe)
        l = l * alpha + tl.exp(sink - m_safe)
        delta = delta * alpha
        m = m_new
    m_safe = finite_or_zero(m)
    scale = 1.0 / tl.where(l == 0.0, 1.0, l)
    delta = delta * scale
    if sinks_ptr is not None:
        weight = tl.exp(sink - m_safe) * scale
        tl.store(grad_sinks_ptr + row, weight * (grad_lse - delta), mask=lane)
    for first in tl.range(0, loop_bound(parts), PARTS):
        scores, values = load_parts(where, first, dtype, ALIGN, PARTS, STACKED)
        for n in tl.static_range(PARTS):
            empty = scores[n] == float("-inf")
            weight = tl.exp(scores[n] - m_safe) * scale
            slope = tl.sum(keep_filled(values[n], scores[n], dtype) * grad, 1) + grad_lse - delta
            at = (first + n) * rows.to(tl.int64) + row
            exists = first + n < parts
            slope = tl.where(empty, 0.0, weight * slope)
            tl.store(grad_lses_ptr + at, slope, mask=lane & exists)
            ptrs = grad_outs_ptr + ((at * DV)[:, None] + offs_d[None, :])
            grad_part = tl.where(empty[:, None], 0.0, grad * weight[:, None])
            tl.store(ptrs, grad_part, mask=inside & exists)


def launch_merge(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    stacked: bool,
) -> None:
    """Merge parts into `out` and `lse`, which may be one of them.

    Moves each part once, and the result once.

    Parameters
    ----------
    outs : sequence of at most `MAX_PARTS` Tensors [..., Dv], or one Tensor [N, ..., Dv]
        Any strides and floating-point dtypes.
    lses : sequence of as many Tensors [...], or one Tensor [N, ...]
        Natural log.
    sinks : Tensor, [Hq], optional
        ``Hq`` is the last axis but one of `lse`.
    out, lse : Tensor, [..., Dv] and [...]
        Overwritten; any strides, but 1 along the last axis of `out`.
    stacked : bool
        Whether there is one tensor that holds all parts.

    Raises
    ------
    ValueError
        There are 2**31 rows or more.
    """
    if out.numel() == 0 and lse.numel() == 0:
        return
    parts = _Parts(outs, lses, out, lse, stacked)
    launch = parts.launch(_merge_kernel, out.dtype)
    with on_device(out.device):
        launch(
            parts.key(sinks, out, lse),
            (
                *parts.pointers,
                sinks,
                out,
                lse,
                *parts.part_strides,
                *parts.shared_strides,
                *parts.out_strides,
                *parts.lse_strides,
                *parts.sizes,
                *_heads(lse),
            ),
        )


def launch_merge_backward(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor,
    grad_outs: Tensor,
    grad_lses: Tensor,
    grad_sinks: Tensor | None,
    *,
    stacked: bool,
) -> None:
    """Write the gradients of what `launch_merge` takes, from those of what it gives.

    Moves each part and its gradient once (parts are read twice, the second time from cache).

    Parameters
    ----------
    outs, lses, sinks, stacked
        As `launch_merge` takes them.
    grad_out, grad_lse : Tensor, [..., Dv] and [...], contiguous
    grad_outs, grad_lses : Tensor, [N, ..., Dv] and [N, ...], contiguous
        Overwritten.
    grad_sinks : Tensor, [...], contiguous, optional
        Overwritten: of each row's sink.
    """
    if grad_lses.numel() == 0:
        return
    parts = _Parts(outs, lses, grad_out, grad_lse, stacked)
    launch = parts.launch(_merge_backward_kernel, grad_out.dtype)
    with on_device(grad_out.device):
        launch(
            parts.key(sinks, grad_out, grad_lse, grad_outs, grad_lses),
            (
                *parts.pointers,
                sinks,
                grad_out,
                grad_lse,
                grad_outs,
                grad_lses,
                grad_sinks,
                *parts.part_strides,
                *parts.shared_strides,
                *parts.sizes,
                *_heads(grad_lse),
            ),
        )


class _Parts:
    """The parts of one merge as the kernels take them."""

    def __init__(
        self,
        outs: Sequence[Tensor],
        lses: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        stacked: bool,
    ) -> None:
        outs = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in outs]
        lead = 1 if stacked else 0
        tensors = (*outs, *lses, out, lse)
        leads = (*[lead] * (2 * len(outs)), 0, 0)
        sizes, strides = _joint_axes(tensors, leads, lse.shape)
        if len(sizes) > 3:
            outs, lses = [x.contiguous() for x in outs], [x.contiguous() for x in lses]
            sizes, strides = _joint_axes((*outs, *lses, out, lse), leads, lse.shape)
        if len(sizes) > 3 or math.prod(sizes) > MAX_ROWS:
            raise ValueError(f"outs: expected fewer rows than 2**31, got shape {list(out.shape)}")
        while len(sizes) < 3:
            sizes.insert(0, 1)
            for each in strides:
                each.insert(0, 0)
        count = len(outs)
        of_outs, of_lses = strides[:count], strides[count : 2 * count]
        parted = [outs[0].stride(0)] if stacked else []
        # Strides along an axis of one element are 0 by now, and take no part.
        align = math.gcd(16, *(s for each in of_outs for s in each), *strides[-2], *parted)
        of_outs = [[stride // align for stride in each] for each in of_outs]
        self.rows = math.prod(sizes)
        self.device = out.device.index
        self.align = align
        self.stacked = stacked
        self.count = outs[0].shape[0] if stacked else count
        self.tensors = (*outs, *lses)
        if stacked:
            self.part_strides = (outs[0].stride(0) // align, lses[0].stride(0))
            pointers: Any = (tuple(outs), tuple(lses))
            padding = 0
        else:
            self.part_strides = (0, 0)
            padding = next_power_of_2(count) - count
            pointers = ((*outs, *[outs[0]] * padding), (*lses, *[lses[0]] * padding))
        same = all(x == of_outs[0] for x in of_outs) and all(x == of_lses[0] for x in of_lses)
        own = [(*o, *s) for o, s in zip(of_outs, of_lses, strict=True)]
        self.strides: Any = () if same else (*own, *[own[0]] * padding)
        self.pointers = (*pointers, self.strides)
        self.shared_strides = (*of_outs[0], *of_lses[0])
        self.out_strides = tuple(s // align for s in strides[-2])
        self.lse_strides = tuple(strides[-1])
        self.sizes = (self.count, self.rows, sizes[1], sizes[2])

    def launch(self, kernel: Any, dtype: Any) -> Launch:
        """Choose tiles: whole rows, 16 bytes a thread, and enough programs to fill a device."""
        DV = self.tensors[0].shape[-1]
        BLOCK_DV = next_power_of_2(max(DV, 1))
        columns = 32 * THREAD_BYTES // self.tensors[0].element_size()  # of a warp
        most = max(MAX_WARPS * columns // BLOCK_DV, 1)
        enough = 2 if self.device is None else ENOUGH_PROGRAMS  # no device: the interpreter
        while most > 1 and ceil_div(self.rows, most) < enough:
            most //= 2
        warps = min(max(most * BLOCK_DV // columns, 1), 8)
        wide = any(x.element_size() == 8 for x in self.tensors) or dtype.itemsize == 8
        return Launch(
            kernel,
            ceil_div(self.rows, most),
            {
                "ALIGN": self.align,
                "DV": DV,
                "BLOCK_DV": BLOCK_DV,
                "ROWS": most,
                "PARTS": BATCH if self.stacked else next_power_of_2(self.count),
                "STACKED": self.stacked,
                "WIDE": wide,
            },
            {"num_warps": warps},
        )

    def key(self, sinks: Tensor | None, *others: Tensor) -> tuple[Any, ...]:
        """What Triton compiles apart beyond the constants."""
        tensors = (*self.tensors, *others)
        return (
            tuple([x.dtype for x in tensors]),
            tuple([x.data_ptr() & 15 == 0 for x in tensors]),
            None if sinks is None else (sinks.dtype, sinks.data_ptr() & 15 == 0),
            self.strides,
            self.device,
        )


def _heads(lse: Tensor) -> tuple[int, int]:
    """Heads, and rows of each that follow one another, where LSE is [..., Hq, Lq]."""
    return (lse.shape[-2], lse.shape[-1]) if lse.dim() > 1 else (1, 1)


def _joint_axes(
    tensors: Sequence[Tensor], leads: Sequence[int], shape: Sequence[int]
) -> tuple[list[int], list[list[int]]]:
    """Fuse neighbouring axes of all tensors at once, and drop those of one element.

    Returns
    -------
    sizes : list of int
    strides : list of list of int
        For each tensor, of these axes.
    """
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        here = [x.stride(axis + lead) for x, lead in zip(tensors, leads, strict=True)]
        if sizes and all(each[-1] == s * size for each, s in zip(strides, here, strict=True)):
            sizes[-1] *= size
            for each, s in zip(strides, here, strict=True):
                each[-1] = s
        else:
            sizes.append(size)
            for each, s in zip(strides, here, strict=True):
                each.append(s)
    return sizes, strides
