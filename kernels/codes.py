# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code="assignment"
"""Codes of quantised keys and values, and how they become numbers.

Formats are named "e4m3", "e5m2", "int8", "int4" (nibble j of unit c is element c + j * D / 4) and
"int4_rows" (element 4 * c + j); "" is a tensor that is not quantised.

Codes are read as 16-bit *units* of two bytes or four nibbles. On CUDA two units of neighbouring
rows share a register, so that decoding takes three or four instructions for two numbers. It is
integer arithmetic, since fp8 types do not exist on every device, and in assembly, since the
compiler takes numbers one by one.
"""

import triton
import triton.language as tl


def _int4(kind, high, factor, less):
    return tl.constexpr(f"""
{{
    .reg .b32 a, b, c, d, f, n;
    shr.u32 b, $4, 4;
    shr.u32 c, $4, 8;
    shr.u32 d, $4, 12;
    lop3.b32 a, $4, 0x000F000F, {high}, 0xEA;
    lop3.b32 b, b, 0x000F000F, {high}, 0xEA;
    lop3.b32 c, c, 0x000F000F, {high}, 0xEA;
    lop3.b32 d, d, 0x000F000F, {high}, 0xEA;
    mov.b32 f, {factor};
    mov.b32 n, {less};
    fma.rn.{kind} $0, a, f, n;
    fma.rn.{kind} $1, b, f, n;
    fma.rn.{kind} $2, c, f, n;
    fma.rn.{kind} $3, d, f, n;
}}
""")


def _float8(shift, kept):
    return tl.constexpr(f"""
{{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x2800;
    prmt.b32 b, $2, 0, 0x3911;
    shr.s32 a, a, {shift};
    shr.s32 b, b, {shift};
    and.b32 $0, a, {kept};
    and.b32 $1, b, {kept};
}}
""")


# 0x43 and a nibble are 128 + nibble as bfloat16, 0x64 and it 1024 + nibble as float16.
_INT4_BFLOAT16 = _int4("bf16x2", "0x43004300", "0x3F803F80", "0xC308C308")
_INT4_FLOAT16 = _int4("f16x2", "0x64006400", "0x30003000", "0xD808D808")
# Without the subtraction, for keys: the sum of q takes care of it.
_INT4_BFLOAT16_ABOVE = tl.constexpr("""
{
    .reg .b32 b, c, d;
    shr.u32 b, $4, 4;
    shr.u32 c, $4, 8;
    shr.u32 d, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, d, 0x000F000F, 0x43004300, 0xEA;
}
""")
# The sign bit turns 128 into 256 in what is subtracted from 128 + (the lower seven bits).
_INT8_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b, c, d, n;
    shr.u32 b, $2, 8;
    lop3.b32 c, $2, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
    mov.b32 n, 0xBF80BF80;
    fma.rn.bf16x2 $0, c, n, a;
    fma.rn.bf16x2 $1, d, n, b;
}
""")
_INT8_FLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b, f, n;
    xor.b32 a, $2, 0x80808080;
    shr.u32 b, a, 8;
    lop3.b32 a, a, 0x00FF00FF, 0x64006400, 0xEA;
    lop3.b32 b, b, 0x00FF00FF, 0x64006400, 0xEA;
    mov.b32 f, 0x20002000;
    mov.b32 n, 0xC880C880;
    fma.rn.f16x2 $0, a, f, n;
    fma.rn.f16x2 $1, b, f, n;
}
""")
# A byte goes to the upper half of 16 bits, with its sign above the lower number, and is shifted to
# where the wider float has its exponent. What is missing in the exponent makes a power of two (see
# `grain`), also in the smallest numbers: matrix instructions take subnormal ones. NaN, and the
# infinities of e5m2, read as finite numbers, but by `_E5M2_FLOAT16`.
_E4M3_BFLOAT16 = _float8(4, "0x87F087F0")
_E4M3_FLOAT16 = _float8(1, "0xBF80BF80")
_E5M2_BFLOAT16 = _float8(3, "0x8FE08FE0")
_E5M2_FLOAT16 = tl.constexpr("""
{
    .reg .b32 a;
    shl.b32 a, $2, 8;
    and.b32 $1, $2, 0xFF00FF00;
    and.b32 $0, a, 0xFF00FF00;
}
""")


@triton.constexpr_function
def is_int4(FORMAT):
    """Whether a unit holds four codes, rather than two."""
    return FORMAT in ("int4", "int4_rows")


@triton.constexpr_function
def places(FORMAT):
    """Numbers of a unit."""
    return 4 if is_int4(FORMAT) else 2


@triton.constexpr_function
def grain(FORMAT, DTYPE):
    """Codes are decoded as multiples of it, or of grain * lift.

    In float16 weights times scales are to suit it, in bfloat16 fp8 may keep its bits.
    """
    if DTYPE == tl.bfloat16:
        return {"e4m3": 2.0**24, "e5m2": 2.0**16}.get(FORMAT, 1.0)
    sizes = {"int4": 8.0, "int4_rows": 8.0, "int8": 128.0, "e4m3": 256.0}
    return sizes.get(FORMAT, 1.0) if DTYPE == tl.float16 else 1.0


@triton.constexpr_function
def lift(FORMAT, DTYPE, ASSEMBLY):
    """What multiplies the other side of a product where codes are decoded as tiny numbers."""
    tiny = ASSEMBLY and DTYPE == tl.bfloat16 and FORMAT in ("e4m3", "e5m2")
    return 2.0**96 if tiny else 1.0


@triton.constexpr_function
def value_dtype(FORMAT, DTYPE):
    """What values are decoded to: float16 has no room for codes of e5m2 and weights beside them."""
    return tl.bfloat16 if FORMAT == "e5m2" and DTYPE == tl.float16 else DTYPE


@triton.constexpr_function
def stay_above(FORMAT, DTYPE):
    """Whether nibbles of keys stay 128 too large, which saves an instruction."""
    return is_int4(FORMAT) and DTYPE == tl.bfloat16


@triton.constexpr_function
def assembly(FORMAT, DTYPE, ABOVE):
    """CUDA instructions that decode two units."""
    if ABOVE:
        return _INT4_BFLOAT16_ABOVE
    wide, half = {
        "int4": (_INT4_BFLOAT16, _INT4_FLOAT16),
        "int4_rows": (_INT4_BFLOAT16, _INT4_FLOAT16),
        "int8": (_INT8_BFLOAT16, _INT8_FLOAT16),
        "e4m3": (_E4M3_BFLOAT16, _E4M3_FLOAT16),
        "e5m2": (_E5M2_BFLOAT16, _E5M2_FLOAT16),
    }[FORMAT]
    return wide if DTYPE == tl.bfloat16 else half


@triton.constexpr_function
def operands(FORMAT):
    """Constraints of such instructions: the words that they make, and the one that they read."""
    return "=r," * places(FORMAT) + "r"


@triton.constexpr_function
def made_of_unit(FORMAT, DTYPE):
    """Types of the numbers of a unit."""
    return (DTYPE,) * places(FORMAT)


@triton.jit
def decode(
    units,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ABOVE: tl.constexpr = False,
):
    """Return the two or four tiles of numbers that a tile of units holds, in grains, exact.

    Nibbles come less 8, or plus 128 where `ABOVE` is true (see `stay_above`).
    """
    if ASSEMBLY and (DTYPE == tl.bfloat16 or DTYPE == tl.float16):
        return tl.inline_asm_elementwise(
            assembly(FORMAT, DTYPE, ABOVE),
            operands(FORMAT),
            [units],
            dtype=made_of_unit(FORMAT, DTYPE),
            is_pure=True,
            pack=2,
        )
    else:
        bits = units.to(tl.int32)
        tiles = ()
        for j in tl.static_range(places(FORMAT)):
            tiles += (decode_one(bits, j, FORMAT, DTYPE, ABOVE),)
        return tiles


@triton.jit
def decode_one(
    bits,
    PLACE: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    ABOVE: tl.constexpr = False,
):
    """Return one number of each unit, in grains."""
    if is_int4(FORMAT):
        x = ((bits >> (4 * PLACE)) & 15).to(tl.float32) + (128.0 if ABOVE else -8.0)
    elif FORMAT == "int8":
        x = (bits >> (8 * PLACE)).to(tl.int8).to(tl.float32)
    else:
        code = bits >> (8 * PLACE)
        sign = (code & 0x80) << 24
        if FORMAT == "e4m3":
            x = (((code & 0x7F) << 20) | sign).to(tl.float32, bitcast=True) * 2.0**120
        else:
            x = (((code & 0x7F) << 21) | sign).to(tl.float32, bitcast=True) * 2.0**112
    return (x * (1.0 / grain(FORMAT, DTYPE))).to(DTYPE)
