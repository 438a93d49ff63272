"""Arithmetic that generated mods call: Python's floor division, exact and fast functions.

Three flavours meet here. CUDA and HIP have libdevice; the interpreter, which runs kernels on numpy,
has neither libdevice nor inline assembly, so every such function has a ``portable_`` twin.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def floor_div(x, y):
    """``x // y`` of integers, rounded down as Python does; a zero divisor gives some value."""
    y = tl.where(y == 0, y + 1, y)
    q = x // y
    return tl.where((x - q * y != 0) & ((x < 0) != (y < 0)), q - 1, q)


@triton.jit
def floor_mod(x, y):
    """``x % y`` of integers, with the sign of ``y`` as Python does."""
    y = tl.where(y == 0, y + 1, y)
    r = x % y
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)


@triton.jit
def float_floor_div(x, y):
    """``x // y`` of floats."""
    return tl.floor(x / y)


@triton.jit
def float_floor_mod(x, y):
    """``x % y`` of floats, with the sign of ``y``."""
    return x - tl.floor(x / y) * y


@triton.jit
def int_pow(x, y):
    """``x ** y`` of integers, by squaring; negative exponents give 0, 1 or -1 as in torch."""
    result = x * 0 + y * 0 + 1
    base = x + y * 0
    rest = y + x * 0
    for _ in tl.static_range(63):
        result = tl.where((rest > 0) & (rest & 1 != 0), result * base, result)
        base = base * base
        rest = rest >> 1
    odd = tl.where(y & 1 == 0, 1, x)
    inverse = tl.where((x == 1) | (x == -1), odd, 0)
    return tl.where(y < 0, inverse, result)


@triton.jit
def maximum(x, y):
    """Larger of two values; NaN wins, as in torch."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """Smaller of two values; NaN wins, as in torch."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32 accuracy."""
    return libdevice.tanh(x)


@triton.jit
def portable_tanh(x):
    """Hyperbolic tangent from exp; the difference of near-equal numbers is avoided at zero."""
    small = x * (1 - x * x * (1.0 / 3 - x * x * (2.0 / 15)))
    e = tl.exp(-2 * tl.abs(x))
    large = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.05, small, tl.where(x < 0, -large, large))


@triton.jit
def fast_tanh(x):
    """Hyperbolic tangent in one instruction of sm_75 and later, about 2^-11 accurate."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def pow(x, y):
    """``x ** y`` of floats."""
    return libdevice.pow(x, y)


@triton.jit
def portable_pow(x, y):
    """``x ** y`` of floats from exp2 and log2, with the signs and zeros of IEEE pow."""
    whole = tl.floor(y) == y
    half = y * 0.5
    odd = whole & (tl.floor(half) != half)
    magnitude = tl.exp2(y * tl.log2(tl.where(x == 0, 1.0, tl.abs(x))))
    signed = tl.where((x < 0) & odd, -magnitude, magnitude)
    signed = tl.where((x < 0) & (whole == 0), float("nan"), signed)
    at_zero = tl.where(y > 0, 0.0, tl.where(y < 0, float("inf"), 1.0))
    return tl.where(x == 0, at_zero, signed)


@triton.jit
def trunc(x):
    """Round towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    """Round to the nearest whole number, halves to the even one."""
    down = tl.floor(x)
    rest = x - down
    half = down * 0.5
    is_odd = tl.floor(half) != half
    up = (rest > 0.5) | ((rest == 0.5) & is_odd)
    return tl.where(up, down + 1, down)


@triton.jit
def isnan(x):
    """True for NaN."""
    return x != x


@triton.jit
def whole(high, low):
    """The integer ``high * 2**16 + low`` from two whole floats, each below 2**16 in magnitude."""
    # The interpreter hands over plain Python floats.
    return tl.cast(high, tl.int32) * 65536 + tl.cast(low, tl.int32)


@triton.jit
def wide_whole(p3, p2, p1, p0):
    """A 64-bit integer from four whole floats of 16 bits each, the highest one signed."""
    high = tl.cast(p3, tl.int64) * 65536 + tl.cast(p2, tl.int64)
    return (high * 65536 + tl.cast(p1, tl.int64)) * 65536 + tl.cast(p0, tl.int64)
