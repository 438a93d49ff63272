# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code="assignment"
"""Products of weights with fp8 values, where matrix instructions take both in e4m3."""

import triton
import triton.language as tl

from flexdecode.kernels.coefficients import load_scales
from flexdecode.kernels.pieces import count_tiles, load_units
from flexdecode.kernels.tiles import dot

# Bytes of four keys, two columns of each, become four bytes of a column, twice.
_FOUR_KEYS = tl.constexpr("""
    {
    .reg .b32 a;
    prmt.b32 a, $2, $3, 0x6420;
    prmt.b32 $1, $2, $3, 0x7531;
    mov.b32 $0, a;
    }
""")


@triton.constexpr_function
def suits_float8(FORMAT, COEFFICIENTS):
    """Whether such values are multiplied as they are where q and k are."""
    return FORMAT == "e4m3" and COEFFICIENTS != "words"


@triton.jit
def float8_pointer(ptr):
    """View an address of codes as one of e4m3 numbers."""
    return ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)


@triton.jit
def float8_columns(units, ASSEMBLY: tl.constexpr):
    """Return the two tiles of e4m3 numbers that a tile of units holds."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _FOUR_KEYS,
            "=r,=r,r,r",
            [units],
            dtype=(tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    else:
        low = units.to(tl.int8).to(tl.float8e4nv, bitcast=True)
        high = (units >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
        return low, high


@triton.jit
def accumulate_float8(
    acc,
    alpha,  # [BLOCK_M]
    p,  # [BLOCK_M, BLOCK_N], float32
    ptr,  # units, int16, at the first key
    rows,  # [BLOCK_N], int64
    coefficients,
    lane,
    seen,
    COEFFICIENTS: tl.constexpr,
    DV: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Rescale the running output and add p times values, both in e4m3.

    Rows of p are stretched over the whole range of e4m3 before they are rounded to it.
    """
    if COEFFICIENTS == "scales":
        scale = load_scales(coefficients, lane, 1.0)
        if seen is not None:
            scale = tl.where(seen, scale, 0.0)
        p = p * scale[None, :]
    top = tl.max(p, 1)  # [BLOCK_M]
    stretch = 448.0 / tl.where(top > 0.0, top, 1.0)
    p = (p * stretch[:, None]).to(tl.float8e4nv)
    shrink = (top * (1.0 / 448.0))[:, None]
    pieces = ()
    for tile in tl.static_range(count_tiles("e4m3", 1, DV)):
        units = load_units(ptr, rows, lane, tile, "e4m3", 1, DV)
        if seen is not None:
            units = tl.where(seen[:, None], units, 0)
        low, high = float8_columns(units, ASSEMBLY)
        zero = tl.zeros(acc[2 * tile].shape, tl.float32)
        low = dot(p, low, zero, "ieee")
        high = dot(p, high, zero, "ieee")
        pieces += (acc[2 * tile] * alpha[:, None] + low * shrink,)
        pieces += (acc[2 * tile + 1] * alpha[:, None] + high * shrink,)
    return pieces
