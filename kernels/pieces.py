# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code="assignment"
"""Which columns of a quantised row its tiles hold, and how tiles are read and written.

A tile of units [BLOCK_N, n] moves through shared memory as a tile of halves would, and gives two or
four tiles of numbers, *pieces*, whose columns lie a unit apart: nothing is ever interleaved. All
that depends on the format alone is worked out by the compiler.
"""

import triton
import triton.language as tl

from flexdecode.kernels.codes import places
from flexdecode.kernels.tiles import load_piece


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
