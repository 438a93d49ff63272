# mypy: allow-untyped-defs, allow-untyped-decorators
"""What generated interval programs call: bounds of the slice of a tensor that an index reaches."""

import triton
import triton.language as tl

from flexdecode.kernels.tiles import loop_bound


@triton.jit
def slice_bounds(
    ptr,
    base,  # [1] or [N] int64: offset that the other indices give
    stride,
    first,  # [1] or [N] int64
    last,  # alike, not below `first`
    size,
    reach,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Least and greatest of integers, or of booleans, whose index goes from `first` to `last`.

    Returns
    -------
    least, greatest : [1] or [N] int64
        ``LEAST`` and ``MOST`` where they are not known.
    known : [1] or [N] int1
        Every element was looked at: not where more than `reach` of them are meant, nor where the
        index leaves the tensor or changes sign.
    """
    STEP: tl.constexpr = 8
    first = tl.where(last < 0, first + size, first)
    last = tl.where(last < 0, last + size, last)
    known = (first >= 0) & (last < size) & (last - first < reach)
    count = tl.where(known, last - first + 1, 0)
    start = base + first * stride
    least = tl.full([start.shape[0], STEP], MOST, tl.int64)
    most = tl.full([start.shape[0], STEP], LEAST, tl.int64)
    offs = tl.arange(0, STEP)[None, :]
    for i in tl.range(0, loop_bound(tl.max(count, 0).to(tl.int32)), STEP):
        lane = i + offs < count[:, None]
        value = tl.load(ptr + start[:, None] + (i + offs) * stride, mask=lane, other=0)
        value = value.to(tl.int64)
        least = tl.minimum(least, tl.where(lane, value, MOST))
        most = tl.maximum(most, tl.where(lane, value, LEAST))
    least, most = tl.min(least, 1), tl.max(most, 1)
    return tl.where(known, least, LEAST), tl.where(known, most, MOST), known


@triton.jit
def float_slice_bounds(ptr, base, stride, first, last, size, reach):
    """`slice_bounds` of floats, as float64; infinite where not known, or where there is a NaN."""
    STEP: tl.constexpr = 8
    first = tl.where(last < 0, first + size, first)
    last = tl.where(last < 0, last + size, last)
    known = (first >= 0) & (last < size) & (last - first < reach)
    count = tl.where(known, last - first + 1, 0)
    start = base + first * stride
    least = tl.full([start.shape[0], STEP], float("inf"), tl.float64)
    most = tl.full([start.shape[0], STEP], float("-inf"), tl.float64)
    odd = tl.zeros([start.shape[0], STEP], tl.int32)
    offs = tl.arange(0, STEP)[None, :]
    for i in tl.range(0, loop_bound(tl.max(count, 0).to(tl.int32)), STEP):
        lane = i + offs < count[:, None]
        value = tl.load(ptr + start[:, None] + (i + offs) * stride, mask=lane, other=0)
        value = value.to(tl.float64)
        odd = odd | (lane & (value != value)).to(tl.int32)
        least = tl.minimum(least, tl.where(lane, value, float("inf")))
        most = tl.maximum(most, tl.where(lane, value, float("-inf")))
    known = known & (tl.max(odd, 1) == 0)
    least, most = tl.min(least, 1), tl.max(most, 1)
    infinity = float("inf")
    return tl.where(known, least, -infinity), tl.where(known, most, infinity), known
