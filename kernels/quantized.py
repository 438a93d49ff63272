# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code="assignment"
"""Products with tiles of quantised keys and values: coefficients join after the dot.

A row of a quantised head is ``x = code * scale + shift`` (a scale and a shift for each group of
its elements). Scores need ``q @ x.T = (q @ code.T) * scale + sum(q) * shift``, and the output
``p @ x = (p * scale) @ code + sum(p * shift)``: the loop only converts codes, to the dtype of q and
without rounding. int4 codes enter as ``nibble - 8``, and their shift as ``shift + 8 * scale``, so
that neither term is much larger than the sum. That matters for values, since weights are rounded;
the products of keys are exact, and may be larger.

The order of columns does not matter to a dot: q is loaded, and the output stored, in the order of
the pieces (`flexdecode.kernels.pieces`).

A matrix instruction takes 16 rows and 8 columns at least: up to 8 query rows are its columns, which
halves instructions and registers. Tiles of values are loaded turned then.
"""

import triton
import triton.language as tl

from flexdecode.kernels.codes import decode, decode_one, grain, lift, places, stay_above
from flexdecode.kernels.coefficients import is_by_row, load_scales, load_words
from flexdecode.kernels.pieces import (
    count_pieces,
    count_tiles,
    load_units,
    piece_group,
    tile_size,
)
from flexdecode.kernels.tiles import dot


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


# -- output: a tuple of the pieces, then of each group's sums of p * shift ----


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
