# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code="assignment,no-redef"
"""Tiles of quantised keys and values: codes become numbers, coefficients join after the dot.

A row of a quantised head is ``x = code * scale + shift`` (a scale and a shift for each group of
its elements). Scores need ``q @ x.T = (q @ code.T) * scale + sum(q) * shift``, and the output
``p @ x = (p * scale) @ code + sum(p * shift)``: the loop only converts codes, to the dtype of q and
without rounding. int4 codes enter as ``nibble - 8``, and their shift as ``shift + 8 * scale``, so
that neither term is much larger than the sum. That matters for values, since weights are rounded;
the products of keys are exact, and may be larger.

Rows are read as 16-bit *units* of two bytes or four nibbles. A tile of units [BLOCK_N, n] then
moves through shared memory as a tile of halves would, and gives two or four tiles of numbers,
*pieces*, whose columns lie a unit apart. The order of columns does not matter to a dot: q is
loaded, and the output stored, in the order of the pieces. Nothing is ever interleaved, and on CUDA
two units of neighbouring rows share a register, so that decoding takes three or four instructions
for two numbers. It is integer arithmetic, since fp8 types do not exist on every device, and in
assembly, since the compiler takes numbers one by one.

Formats are named "e4m3", "e5m2", "int8", "int4" (nibble j of unit c is element c + j * D / 4) and
"int4_rows" (element 4 * c + j); "" is a tensor that is not quantised. Coefficients are "words"
(int32: scale and shift, float16), "scales" (floats), or, without a row in the loop, "head" (one
scale, a float) or "".
"""

import triton
import triton.language as tl

from flexdecode.kernels.pages import key_rows
from flexdecode.kernels.tiles import dot, load_piece

# -- decoding ----

# 0x43 and a nibble are 128 + nibble as bfloat16, 0x64 and it 1024 + nibble as float16.
_INT4_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b, c, d, f, n;
    shr.u32 b, $4, 4;
    shr.u32 c, $4, 8;
    shr.u32 d, $4, 12;
    lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
    mov.b32 f, 0x3F803F80;
    mov.b32 n, 0xC308C308;
    fma.rn.bf16x2 $0, a, f, n;
    fma.rn.bf16x2 $1, b, f, n;
    fma.rn.bf16x2 $2, c, f, n;
    fma.rn.bf16x2 $3, d, f, n;
}
""")
_INT4_FLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b, c, d, f, n;
    shr.u32 b, $4, 4;
    shr.u32 c, $4, 8;
    shr.u32 d, $4, 12;
    lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 c, c, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 d, d, 0x000F000F, 0x64006400, 0xEA;
    mov.b32 f, 0x30003000;
    mov.b32 n, 0xD808D808;
    fma.rn.f16x2 $0, a, f, n;
    fma.rn.f16x2 $1, b, f, n;
    fma.rn.f16x2 $2, c, f, n;
    fma.rn.f16x2 $3, d, f, n;
}
""")
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
_E4M3_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x2800;
    prmt.b32 b, $2, 0, 0x3911;
    shr.s32 a, a, 4;
    shr.s32 b, b, 4;
    and.b32 $0, a, 0x87F087F0;
    and.b32 $1, b, 0x87F087F0;
}
""")
_E4M3_FLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x2800;
    prmt.b32 b, $2, 0, 0x3911;
    shr.s32 a, a, 1;
    shr.s32 b, b, 1;
    and.b32 $0, a, 0xBF80BF80;
    and.b32 $1, b, 0xBF80BF80;
}
""")
_E5M2_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x2800;
    prmt.b32 b, $2, 0, 0x3911;
    shr.s32 a, a, 3;
    shr.s32 b, b, 3;
    and.b32 $0, a, 0x8FE08FE0;
    and.b32 $1, b, 0x8FE08FE0;
}
""")
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
def weight_factor(FORMAT, COEFFICIENTS, DTYPE, ASSEMBLY):
    """What multiplies weights on their way into products, beside the scales of rows."""
    raised = lift(FORMAT, DTYPE, ASSEMBLY)
    return grain(FORMAT, DTYPE) if raised == 1.0 and is_by_row(COEFFICIENTS) else raised


@triton.constexpr_function
def output_factor(FORMAT, COEFFICIENTS, DTYPE, ASSEMBLY):
    """What multiplies the output then, beside the scale of a head."""
    size = grain(FORMAT, DTYPE) * lift(FORMAT, DTYPE, ASSEMBLY)
    return size / weight_factor(FORMAT, COEFFICIENTS, DTYPE, ASSEMBLY)


@triton.constexpr_function
def value_dtype(FORMAT, DTYPE):
    """What values are decoded to: float16 has no room for codes of e5m2 and weights beside them."""
    return tl.bfloat16 if FORMAT == "e5m2" and DTYPE == tl.float16 else DTYPE


@triton.constexpr_function
def is_by_row(COEFFICIENTS):
    """Whether the loop reads coefficients."""
    return COEFFICIENTS in ("words", "scales")


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
    if ASSEMBLY and DTYPE == tl.bfloat16:
        code: tl.constexpr = assembly(FORMAT, DTYPE, ABOVE)
        if is_int4(FORMAT):
            return tl.inline_asm_elementwise(
                code,
                "=r,=r,=r,=r,r",
                [units],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                code,
                "=r,=r,r",
                [units],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
    elif ASSEMBLY and DTYPE == tl.float16:
        code: tl.constexpr = assembly(FORMAT, DTYPE, ABOVE)
        if is_int4(FORMAT):
            return tl.inline_asm_elementwise(
                code,
                "=r,=r,=r,=r,r",
                [units],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return tl.inline_asm_elementwise(
                code,
                "=r,=r,r",
                [units],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
    else:
        bits = units.to(tl.int32)
        tiles = ()
        for j in tl.static_range(4 if is_int4(FORMAT) else 2):
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


# -- coefficients ----


@triton.jit
def load_scales(coefficients, lane, FACTOR: tl.constexpr):
    """Return the scales of some rows times a factor, float32 [BLOCK_N]; 0 where lane is false."""
    ptrs = coefficients[0] + coefficients[1]
    if lane is None:
        scale = tl.load(ptrs)
    else:
        scale = tl.load(ptrs, mask=lane, other=0.0)
    return scale.to(tl.float32) * FACTOR


@triton.jit
def load_words(
    coefficients,
    GROUP: tl.constexpr,
    lane,
    FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    ABOVE: tl.constexpr = False,
):
    """Return scales times a factor, and shifts, of some rows' codes, float32 [BLOCK_N] each."""
    ptrs = coefficients[0] + coefficients[1]
    if GROUP > 0:
        ptrs += GROUP * coefficients[2]
    if lane is None:
        word = tl.load(ptrs)
    else:
        word = tl.load(ptrs, mask=lane, other=0)
    scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    shift = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if is_int4(FORMAT):
        shift += scale * (-128.0 if ABOVE else 8.0)
    return scale * FACTOR, shift


@triton.jit
def coefficients_of(
    ptr,  # [B or 1, Hkv, Lkv, groups]
    stride_b,
    stride_h,
    stride_n,
    stride_group,
    head_kv,
    b,
    start,  # the sequence's first slot, or None
    PAGE_SIZE: tl.constexpr,
):
    """Where a sequence's coefficients of a head are, or page 0's; and strides b, n and group."""
    if PAGE_SIZE == 0 and start is not None:
        ptr += start * stride_n
    ptr += head_kv * stride_h
    if PAGE_SIZE == 0:
        ptr += b * stride_b
    return ptr, stride_b, stride_n, stride_group


@triton.jit
def coefficients_at(
    coefficients,  # from `coefficients_of`
    pages,
    at,
):
    """Where the coefficients of a unit of keys are: a pointer, and [BLOCK_N] from there."""
    ptr, stride_b, stride_n, stride_group = coefficients
    start, rows = key_rows(pages, at, stride_b, stride_n)
    return ptr + start, rows, stride_group


# -- pieces: which columns a tile of units holds. All of these are worked out by the compiler. ----


@triton.constexpr_function
def _tiles(FORMAT, GROUPS, DIM):
    """Tiles of units that a row is read in, as (first unit, units, padded units)."""
    units = DIM // 4 if FORMAT.startswith("int4") else DIM // 2
    # Groups that share their units with others need no tile of their own.
    count = max(GROUPS // 4, 1) if FORMAT == "int4" else GROUPS
    if count > 1:
        width = units // count
        return [(t * width, width, max(triton.next_power_of_2(width), 16)) for t in range(count)]
    whole = max(triton.next_power_of_2(units), 16)
    half, rest = whole // 2, max(triton.next_power_of_2(units - whole // 2), 32)
    if half + rest < whole:
        return [(0, half, half), (half, units - half, rest)]
    return [(0, units, whole)]


@triton.constexpr_function
def places(FORMAT):
    """Numbers of a unit, which is pieces of a tile."""
    return 4 if is_int4(FORMAT) else 2


@triton.constexpr_function
def count_tiles(FORMAT, GROUPS, DIM):
    """Tiles of units of a row."""
    return len(_tiles(FORMAT, GROUPS, DIM))


@triton.constexpr_function
def count_pieces(FORMAT, GROUPS, DIM):
    """Pieces of a row: piece ``places * tile + j`` has the numbers at place j of a tile."""
    return count_tiles(FORMAT, GROUPS, DIM) * places(FORMAT)


@triton.constexpr_function
def tile_start(FORMAT, GROUPS, DIM, TILE):
    """First unit of a tile."""
    return _tiles(FORMAT, GROUPS, DIM)[TILE][0]


@triton.constexpr_function
def tile_width(FORMAT, GROUPS, DIM, TILE):
    """Units of a tile."""
    return _tiles(FORMAT, GROUPS, DIM)[TILE][1]


@triton.constexpr_function
def tile_size(FORMAT, GROUPS, DIM, TILE):
    """Units of a tile, padded for matrix instructions."""
    return _tiles(FORMAT, GROUPS, DIM)[TILE][2]


@triton.constexpr_function
def piece_start(FORMAT, GROUPS, DIM, PIECE):
    """Element at the first column of a piece."""
    unit = tile_start(FORMAT, GROUPS, DIM, PIECE // places(FORMAT))
    place = PIECE % places(FORMAT)
    return unit + place * (DIM // 4) if FORMAT == "int4" else unit * places(FORMAT) + place


@triton.constexpr_function
def piece_step(FORMAT):
    """Elements from one column of a piece to the next."""
    return 1 if FORMAT == "int4" else places(FORMAT)


@triton.constexpr_function
def piece_group(FORMAT, GROUPS, DIM, PIECE):
    """Group that the elements of a piece belong to."""
    return piece_start(FORMAT, GROUPS, DIM, PIECE) * GROUPS // DIM


@triton.jit
def load_columns(
    ptr,
    rows,  # [R], int64: where each row starts, in elements
    stride_d,
    lane,  # [R], int1
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Rows of an ordinary tensor in the pieces that a quantised row has; zero where padded."""
    pieces = ()
    for piece in tl.static_range(count_pieces(FORMAT, GROUPS, DIM)):
        pieces += (
            load_piece(
                ptr + piece_start(FORMAT, GROUPS, DIM, piece) * stride_d,
                rows,
                stride_d * piece_step(FORMAT),
                lane,
                0,
                tile_width(FORMAT, GROUPS, DIM, piece // places(FORMAT)),
                tile_size(FORMAT, GROUPS, DIM, piece // places(FORMAT)),
            ),
        )
    return pieces


@triton.jit
def store_columns(
    ptr,
    rows,  # [R], int64: where each row starts, in elements
    lane,  # [R], int1
    pieces,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Store rows that are held in the pieces of a quantised row."""
    for piece in tl.static_range(count_pieces(FORMAT, GROUPS, DIM)):
        column = tl.arange(0, tile_size(FORMAT, GROUPS, DIM, piece // places(FORMAT)))
        inside = column < tile_width(FORMAT, GROUPS, DIM, piece // places(FORMAT))
        offs_d = piece_start(FORMAT, GROUPS, DIM, piece) + column * piece_step(FORMAT)
        ptrs = ptr + (rows[:, None] + offs_d[None, :])
        tl.store(ptrs, pieces[piece], mask=lane[:, None] & inside[None, :])


# -- products of fp8, where matrix instructions take it ----

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


# -- products. A matrix instruction takes 16 rows and 8 columns at least: up to 8 query rows are its
# columns, which halves instructions and registers. Tiles of values are loaded turned then. ----


@triton.constexpr_function
def is_turned(ROWS):
    """Whether query rows are the columns of matrix instructions."""
    return ROWS < 16


@triton.jit
def dot_keys(q, tile, acc, INPUT_PRECISION: tl.constexpr):
    """Return q @ tile.T + acc."""
    if is_turned(q.shape[0]):
        return tl.trans(dot(tile, tl.trans(q), tl.trans(acc), INPUT_PRECISION))
    else:
        return dot(q, tl.trans(tile), acc, INPUT_PRECISION)


@triton.jit
def dot_values(p, tile, acc, INPUT_PRECISION: tl.constexpr):
    """Return p @ tile + acc, of a turned tile p @ tile.T + acc."""
    if is_turned(p.shape[0]):
        return tl.trans(dot(tile, tl.trans(p), tl.trans(acc), INPUT_PRECISION))
    else:
        return dot(p, tile, acc, INPUT_PRECISION)


# -- scores ----


@triton.jit
def decode_queries(pieces, FORMAT: tl.constexpr):
    """Numbers of queries whose codes are bytes: bfloat16 holds them exactly."""
    decoded = ()
    for piece in tl.static_range(len(pieces)):
        number = decode_one(pieces[piece].to(tl.int32), 0, FORMAT, tl.float32)
        decoded += (number.to(tl.bfloat16),)
    return decoded


@triton.jit
def lift_queries(pieces, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Multiply queries by what the codes of keys lack; exact."""
    FACTOR: tl.constexpr = lift(FORMAT, pieces[0].dtype, ASSEMBLY)
    if FACTOR == 1.0:
        return pieces
    else:
        lifted = ()
        for piece in tl.static_range(len(pieces)):
            lifted += ((pieces[piece].to(tl.float32) * FACTOR).to(pieces[0].dtype),)
        return lifted


@triton.jit
def sum_groups(q, FORMAT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr):
    """Sum the elements of query rows over each group: a tuple of [BLOCK_M], float32."""
    sums = ()
    for group in tl.static_range(GROUPS):
        total = tl.zeros((q[0].shape[0],), tl.float32)
        for piece in tl.static_range(count_pieces(FORMAT, GROUPS, DIM)):
            if piece_group(FORMAT, GROUPS, DIM, piece) == group:
                total += tl.sum(q[piece].to(tl.float32), 1)
        sums += (total,)
    return sums


@triton.jit
def quantized_scores(
    q,  # the format's pieces of [BLOCK_M, D]
    q_sums,  # of its groups, [BLOCK_M], where coefficients are words
    ptr,  # units, int16, at the first key
    rows,  # [BLOCK_N], int64
    coefficients,  # from `coefficients_at`
    lane,  # [BLOCK_N], int1, or None where every row may be read
    FORMAT: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Inner products of query rows with quantised key rows, float32, [BLOCK_M, BLOCK_N].

    Without coefficients of rows they are in grains and in units of the head's scale.
    """
    DTYPE: tl.constexpr = q[0].dtype
    ABOVE: tl.constexpr = stay_above(FORMAT, DTYPE)
    GRAIN: tl.constexpr = grain(FORMAT, DTYPE)
    tiles = ()
    for tile in tl.static_range(count_tiles(FORMAT, GROUPS, D)):
        units = load_units(ptr, rows, lane, tile, FORMAT, GROUPS, D)
        tiles += decode(units, FORMAT, DTYPE, ASSEMBLY, ABOVE)
    zero = tl.zeros((q[0].shape[0], rows.shape[0]), tl.float32)
    qk = zero
    for group in tl.static_range(GROUPS):
        product = zero
        for piece in tl.static_range(count_pieces(FORMAT, GROUPS, D)):
            if piece_group(FORMAT, GROUPS, D, piece) == group:
                product = dot_keys(q[piece], tiles[piece], product, INPUT_PRECISION)
        if COEFFICIENTS == "words":
            scale, shift = load_words(coefficients, group, lane, FORMAT, GRAIN, ABOVE)
            product = product * scale[None, :] + q_sums[group][:, None] * shift[None, :]
        elif COEFFICIENTS == "scales":
            scale = load_scales(coefficients, lane, GRAIN)
            product = product * scale[None, :]
        if group > 0:
            qk += product
        else:
            qk = product
    return qk


@triton.jit
def load_units(
    ptr,
    rows,
    lane,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr = False,
):
    """One tile of units of some rows, int16, [BLOCK_N, units]; or [units, BLOCK_N] where turned."""
    START: tl.constexpr = tile_start(FORMAT, GROUPS, DIM, TILE)
    END: tl.constexpr = START + tile_width(FORMAT, GROUPS, DIM, TILE)
    SIZE: tl.constexpr = tile_size(FORMAT, GROUPS, DIM, TILE)
    # Interleaved rows begin with their coefficients. Their address, not the codes', is aligned.
    SKIP: tl.constexpr = 2 * GROUPS if FORMAT == "int4_rows" else 0
    if TURNED:
        columns = START + SKIP + tl.arange(0, SIZE)
        ptrs = ptr + (rows[None, :] + columns[:, None])
        if END - START < SIZE:
            inside = (columns < END + SKIP)[:, None]
            if lane is not None:
                inside = inside & lane[None, :]
            return tl.load(ptrs, mask=inside, other=0)
        elif lane is not None:
            return tl.load(ptrs, mask=lane[None, :], other=0)
        else:
            return tl.load(ptrs)
    else:
        return load_piece(ptr, rows, 1, lane, START + SKIP, END + SKIP, SIZE)


# -- output: a tuple of the pieces, then of each group's sums of p * shift ----


@triton.jit
def zero_output(
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    GROUPS: tl.constexpr,
    DV: tl.constexpr,
):
    """Return the output of no keys; sums stay apart for each lane where rows are few."""
    acc = ()
    for piece in tl.static_range(count_pieces(FORMAT, GROUPS, DV)):
        acc += (
            tl.zeros((ROWS, tile_size(FORMAT, GROUPS, DV, piece // places(FORMAT))), tl.float32),
        )
    if COEFFICIENTS == "words":
        for _ in tl.static_range(GROUPS):
            acc += (tl.zeros((ROWS, BLOCK_N if ROWS <= 32 else 1), tl.float32),)
    return acc


@triton.jit
def accumulate_quantized(
    acc,
    alpha,  # [BLOCK_M]: rescales what is there
    p,  # [BLOCK_M, BLOCK_N], float32
    ptr,  # units, int16, at the first key
    rows,  # [BLOCK_N], int64
    coefficients,  # from `coefficients_at`
    lane,  # [BLOCK_N], int1, or None where every row may be read
    seen,  # [BLOCK_N], int1, or None: what is not seen may hold NaN
    FORMAT: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    GROUPS: tl.constexpr,
    DV: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Rescale the running output and add p times quantised value rows."""
    PIECES: tl.constexpr = count_pieces(FORMAT, GROUPS, DV)
    TURNED: tl.constexpr = is_turned(p.shape[0])
    FACTOR: tl.constexpr = weight_factor(FORMAT, COEFFICIENTS, DTYPE, ASSEMBLY)
    weights = ()  # of each group
    sums = ()
    for group in tl.static_range(GROUPS):
        weight = p
        if COEFFICIENTS == "words":
            scale, shift = load_words(coefficients, group, lane, FORMAT, FACTOR)
            if seen is not None:
                scale = tl.where(seen, scale, 0.0)
                shift = tl.where(seen, shift, 0.0)
            weight = p * scale[None, :]
            shifted = p * shift[None, :]
            if acc[PIECES].shape[1] == 1:
                shifted = tl.sum(shifted, 1, keep_dims=True)
            sums += (acc[PIECES + group] * alpha[:, None] + shifted,)
        elif COEFFICIENTS == "scales":
            scale = load_scales(coefficients, lane, FACTOR)
            if seen is not None:
                scale = tl.where(seen, scale, 0.0)
            weight = p * scale[None, :]
        elif FACTOR != 1.0:
            weight = p * FACTOR
        weights += (weight.to(DTYPE),)
    tiles = ()
    for tile in tl.static_range(count_tiles(FORMAT, GROUPS, DV)):
        units = load_units(ptr, rows, lane, tile, FORMAT, GROUPS, DV, TURNED)
        if FORMAT == "e5m2" and seen is not None:  # other codes are always finite
            units = tl.where(seen[None, :] if TURNED else seen[:, None], units, 0)
        tiles += decode(units, FORMAT, DTYPE, ASSEMBLY)
    pieces = ()
    for piece in tl.static_range(PIECES):
        weight = weights[piece_group(FORMAT, GROUPS, DV, piece)]
        pieces += (dot_values(weight, tiles[piece], acc[piece] * alpha[:, None], INPUT_PRECISION),)
    return pieces + sums


@triton.jit
def finish_output(
    acc,
    scale,  # of the head, or None
    FORMAT: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    GROUPS: tl.constexpr,
    DV: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    FLOAT8: tl.constexpr,  # made by `accumulate_float8`
):
    """Add what the shifts contribute, and return the pieces of [BLOCK_M, DV] alone."""
    FACTOR: tl.constexpr = 1.0 if FLOAT8 else output_factor(FORMAT, COEFFICIENTS, DTYPE, ASSEMBLY)
    PIECES: tl.constexpr = count_pieces(FORMAT, GROUPS, DV)
    pieces = ()
    for piece in tl.static_range(PIECES):
        found = acc[piece]
        if scale is not None:
            found = found * (scale * FACTOR)
        elif FACTOR != 1.0:
            found = found * FACTOR
        if COEFFICIENTS == "words":
            shifted = acc[PIECES + piece_group(FORMAT, GROUPS, DV, piece)]
            found += tl.sum(shifted, 1, keep_dims=True)
        pieces += (found,)
    return pieces
