# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=assignment
"""Quantise new rows on their way into a cache, to the very bits of `flexdecode.quantize`.

Every step is exact or is rounded once, to nearest, as torch does it: divisions are IEEE ones,
numbers become integers by the addition of a large one, and codes of fp8, whose types do not exist
on every device, are made by integer arithmetic. Minima and maxima do not depend on an order; NaN
is followed by hand, since devices differ in what they take for the maximum of it and a number.

A row is read as *pieces*, tiles whose columns share the units that are stored: the four nibbles of
int4, or the bytes themselves. Rows of a tile are heads times groups. Formats and coefficients are
named as in `flexdecode.kernels.codes`.
"""

import triton
import triton.language as tl

from flexdecode.kernels.codes import is_int4
from flexdecode.kernels.rotary import load_rotated
from flexdecode.kernels.tiles import loop_bound

FLOAT16_MAX = tl.constexpr(65504.0)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# A float32 of this size counts in ones: 1.5 * 2**23, and its bits.
ROUNDING = tl.constexpr(12582912.0)
ROUNDING_BITS = tl.constexpr(0x4B400000)


@triton.constexpr_function
def count_sets(FORMAT, GROUPS):
    """Parts of a unit that have coefficients of their own: quarters of a row, of several groups."""
    return min(GROUPS, 4) if FORMAT == "int4" else 1


@triton.constexpr_function
def groups_of_set(FORMAT, GROUPS):
    """Groups that units fall into, one after the other."""
    return GROUPS // count_sets(FORMAT, GROUPS)


@triton.constexpr_function
def units_of_group(FORMAT, GROUPS, DIM):
    """Units of such a group: int16 words of int4, otherwise bytes."""
    return (DIM // 4 if is_int4(FORMAT) else DIM) // groups_of_set(FORMAT, GROUPS)


@triton.constexpr_function
def column_steps(FORMAT, DIM):
    """Elements from one unit to the next, and from one nibble of a unit to the next."""
    return {"int4": (1, DIM // 4), "int4_rows": (4, 1)}.get(FORMAT, (1, 0))


@triton.constexpr_function
def largest_code(FORMAT):
    """What the greatest magnitude of a row is stored as."""
    return {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}[FORMAT]


# -- arithmetic ----


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    """Bring x within [-LIMIT, LIMIT]; NaN stays."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def to_half(x):
    """Round to the nearest finite float16; zero has no sign."""
    return (clamp(x, FLOAT16_MAX) + 0.0).to(tl.float16)


@triton.jit
def round_down(x):
    """Round to the greatest finite float16 that is not above x."""
    near = to_half(x)
    bits = near.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -32767, bits + 1))
    below = below.to(tl.int16).to(tl.float16, bitcast=True)
    rounded = near.to(tl.float32)
    return tl.where((rounded > x) & (rounded > -FLOAT16_MAX), below, near)


@triton.jit
def pack_halves(scale, shift):
    """Make coefficient words: the scale's bits in the low half, the shift's in the high half."""
    low = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (shift.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def ratio(x, scale):
    """Return x / scale, 0 where the scale is not positive."""
    positive = scale > 0.0
    return tl.where(positive, tl.div_rn(x, tl.where(positive, scale, 1.0)), 0.0)


@triton.jit
def nearest(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Round to an integer of [LEAST, MOST], half to even, int32; 0 where x is NaN."""
    x = tl.where(x == x, x, 0.0)
    x = tl.where(x > MOST, MOST, tl.where(x < LEAST, LEAST, x))
    return (x + ROUNDING).to(tl.int32, bitcast=True) - ROUNDING_BITS


@triton.jit
def to_float8(x, FORMAT: tl.constexpr):
    """Round to the nearest finite code of fp8, half to even, int32; NaN stays."""
    # Bits of the mantissa that go, the exponent's bias less that of float32, the least number with
    # a leading one, and a float32 that counts in steps of the smallest code, with its bits.
    CUT: tl.constexpr = 20 if FORMAT == "e4m3" else 21
    BIAS: tl.constexpr = 7 - 127 if FORMAT == "e4m3" else 15 - 127
    NORMAL: tl.constexpr = 2.0**-6 if FORMAT == "e4m3" else 2.0**-14
    STEPS: tl.constexpr = 2.0**14 if FORMAT == "e4m3" else 2.0**7
    STEPS_BITS: tl.constexpr = 0x46800000 if FORMAT == "e4m3" else 0x43000000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(clamp(x, largest_code(FORMAT)))
    bits = size.to(tl.int32, bitcast=True)
    odd = (bits >> CUT) & 1
    code = ((bits + odd + ((1 << (CUT - 1)) - 1)) >> CUT) + (BIAS << (23 - CUT))
    small = (size + STEPS).to(tl.int32, bitcast=True) - STEPS_BITS
    code = tl.where(size < NORMAL, small, code)
    return sign | tl.where(x == x, code, 0x7F)


# -- coefficients of rows ----


@triton.jit
def extremes(pieces, real):
    """Least and greatest element of rows, [R] each, over pieces [R, C]; NaN where one is.

    `real`, [1, C], says which columns exist; None where all do.
    """
    least = tl.full(pieces[0].shape, float("inf"), tl.float32)
    most = -least
    unknown = tl.zeros(pieces[0].shape, tl.int32)
    for j in tl.static_range(len(pieces)):
        x = pieces[j]
        known = x == x
        unknown |= (x != x).to(tl.int32)
        if real is not None:
            known = known & real
        least = tl.minimum(least, tl.where(known, x, float("inf")))
        most = tl.maximum(most, tl.where(known, x, float("-inf")))
    unknown = tl.max(unknown, 1) > 0  # [R]
    least = tl.where(unknown, float("nan"), tl.min(least, 1))
    most = tl.where(unknown, float("nan"), tl.max(most, 1))
    return least, most


@triton.jit
def fit_nibbles(least, most):
    """Scale and shift, float16, that map [least, most] to [0, 15]."""
    # Rounded down, so that no element lies below the shift and a constant group is scale 15.
    shift = round_down(least)
    return to_half((most - shift.to(tl.float32)) * (1.0 / 15.0)), shift


@triton.jit
def fit_bytes(least, most, FORMAT: tl.constexpr):
    """Scale, float32, that maps the greater magnitude to the largest code."""
    least = tl.abs(least)
    most = tl.abs(most)
    scale = tl.where(least > most, least, most) * (1.0 / largest_code(FORMAT))
    return tl.where(scale > FLOAT32_MAX, FLOAT32_MAX, scale)


# -- rows ----


@triton.jit
def quantize_row(
    new_ptr,  # at the row
    stride_nh,
    stride_nd,
    codes_ptr,  # at its slot: int16 units of int4, otherwise uint8
    stride_ch,
    coefficients_ptr,  # at its slot, or of the first head where rows have none; or None
    stride_sh,
    stride_sg,
    cos_ptr,  # at its position, or None
    sin_ptr,
    heads,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FORMAT: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Quantise a row of all heads, rotated where asked for, and store codes and coefficients."""
    SETS: tl.constexpr = count_sets(FORMAT, GROUPS)
    TOGETHER: tl.constexpr = groups_of_set(FORMAT, GROUPS)
    UNITS: tl.constexpr = units_of_group(FORMAT, GROUPS, D)
    BLOCK_U: tl.constexpr = triton.next_power_of_2(UNITS)
    STEP: tl.constexpr = column_steps(FORMAT, D)[0]
    PIECE: tl.constexpr = column_steps(FORMAT, D)[1]
    PIECES: tl.constexpr = (4 if is_int4(FORMAT) else 1) // SETS
    row = tl.arange(0, BLOCK_H * TOGETHER)
    group = row % TOGETHER
    offs_u = tl.arange(0, BLOCK_U)[None, :]
    unit = group[:, None] * UNITS + offs_u  # [BLOCK_H * TOGETHER, BLOCK_U]
    real = None if UNITS == BLOCK_U else offs_u < UNITS
    for first in tl.range(0, loop_bound(heads), BLOCK_H):
        head = first + row // TOGETHER
        lane = head < heads
        head = head.to(tl.int64)
        there = lane[:, None] & (offs_u < UNITS)
        row_ptrs = new_ptr + head[:, None] * stride_nh
        units = tl.zeros(unit.shape, tl.int32)
        for part in tl.static_range(SETS):
            pieces = ()
            for j in tl.static_range(PIECES):
                column = unit * STEP + (part * PIECES + j) * PIECE
                x = load_rotated(
                    row_ptrs, stride_nd, column, there, cos_ptr, sin_ptr, ROTARY, INTERLEAVED
                )
                pieces += (x.to(tl.float32),)
            if COEFFICIENTS == "head":
                scale = tl.load(coefficients_ptr + head * stride_sh, mask=lane, other=1.0)
                scale = scale.to(tl.float32)
            elif COEFFICIENTS == "":
                scale = tl.full(lane.shape, 1.0, tl.float32)
            else:
                least, most = extremes(pieces, real)
                at = coefficients_ptr + head * stride_sh + (part * TOGETHER + group) * stride_sg
                if is_int4(FORMAT):
                    scale, shift = fit_nibbles(least, most)
                    tl.store(at, pack_halves(scale, shift), mask=lane)
                elif COEFFICIENTS == "words":
                    # The middle of the range costs nothing and halves what one-sided rows need.
                    shift = to_half((least + most) * 0.5)
                    middle = shift.to(tl.float32)
                    scale = to_half(fit_bytes(least - middle, most - middle, FORMAT))
                    tl.store(at, pack_halves(scale, shift), mask=lane)
                else:
                    scale = fit_bytes(least, most, FORMAT)
                    if coefficients_ptr.dtype.element_ty == tl.float16:
                        scale = to_half(scale)
                    tl.store(at, scale, mask=lane)
                scale = scale.to(tl.float32)
            for j in tl.static_range(PIECES):
                x = pieces[j]
                if COEFFICIENTS == "words":
                    x -= shift.to(tl.float32)[:, None]
                x = ratio(x, scale[:, None])
                if is_int4(FORMAT):
                    units |= nearest(x, 0.0, 15.0) << (4 * (part * PIECES + j))
                elif FORMAT == "int8":
                    units = nearest(x, -127.0, 127.0)
                else:
                    units = to_float8(x, FORMAT)
        unit_ptrs = codes_ptr + head[:, None] * stride_ch + unit
        tl.store(unit_ptrs, units.to(codes_ptr.dtype.element_ty), mask=there)
