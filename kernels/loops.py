"""The loop over keys: steps, warps, stages and registers, and the shared memory that it takes.

Nothing here imports Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexdecode.kernels.hardware import Device
from flexdecode.kernels.sizes import MIN_TILE, has_padded_piece, next_power_of_2, split_dim

DECODE_WARPS = 8  # warps on a processor that decode quantised keys and values, in tiles of 16 rows
# Most registers of a thread that decodes for smaller tiles: it says how many warps there are then.
NIBBLE_REGISTERS = 0  # 0 leaves it to the compiler
# Three programs of four warps fit on a processor then, which was best. Where a fourth would fit,
# kernels that start early put it on some processors and leave others with two. Compilers take more
# than they need where they may, and so many that there is no doubt.
BYTE_REGISTERS = 168
PAIR_REGISTERS = 255  # two programs of four warps fit on a processor then, and not three
REGISTERS = 65536  # of a processor


@dataclass(frozen=True)
class Stored:
    """How K and V are kept where one of them is quantised.

    Attributes
    ----------
    row_bytes : int
        Of one key's row of K and of V, padded as in shared memory, coefficients included.
    narrow : bool
        Rows are read in tiles of 16 columns, which several warps could not share.
    nibbles : bool
        Both are int4.
    both : bool
        Both are quantised.
    groups : int
        Most coefficients of a row.
    """

    row_bytes: int
    narrow: bool
    nibbles: bool = False
    groups: int = 1
    both: bool = False


@dataclass(frozen=True)
class Loop:
    """The loop over keys, and the shared memory that it takes."""

    BLOCK_N: int
    num_warps: int
    num_stages: int
    bytes: int
    widens: bool
    residents: int = 1  # programs that a processor holds at a time
    registers: int = 0  # most of a thread; 0 leaves it to the compiler


def choose_loop(
    BLOCK_M: int,
    D: int,
    Dv: int,
    itemsize: int,
    KV_BLOCK: int | None,
    device: Device,
    options: Mapping[str, int],
    latent: bool,
) -> Loop:
    """Choose the loop for a tile of rows; it fits in shared memory if any does.

    A latent cache is one tile for keys and values.
    """
    exact = itemsize >= 4  # IEEE dots run on the ordinary units, unrolled in registers
    # The output tile lives in registers: at most 64 of them in a thread.
    warps = 8 if exact or Dv > 256 or BLOCK_M * sum(split_dim(Dv)) > 8192 else 4
    num_warps = options.get("num_warps", warps)
    small = not exact and D + Dv <= 128
    keys = 32 if exact or (D + Dv > 384 and not latent) else 128 if small else 64
    held = 0 if latent else Dv  # columns of values beside the keys
    BLOCK_N = options.get("BLOCK_N", unit(keys, KV_BLOCK))
    deep = not exact and D + Dv <= 256 and not has_padded_piece(D) and not has_padded_piece(Dv)
    num_stages = options.get("num_stages", 4 if deep else 3)
    free = not exact and D + Dv <= 256 and BLOCK_M <= 64
    free = free and not {"BLOCK_N", "num_stages"} & options.keys()
    while True:
        needed = shared_memory_bytes(
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_stages=num_stages, D=D, Dv=held, itemsize=itemsize
        )
        stages_left = num_stages > 1 and "num_stages" not in options
        keys_left = BLOCK_N > MIN_TILE and "BLOCK_N" not in options
        if needed <= device.shared_memory or not (stages_left or keys_left):
            wide = shared_memory_bytes(
                BLOCK_M=BLOCK_M, BLOCK_N=128, num_stages=3, D=D, Dv=Dv, itemsize=itemsize
            )
            widens = free and BLOCK_N == 64 and wide <= device.shared_memory
            return Loop(BLOCK_N, num_warps, num_stages, needed, widens)
        if stages_left and (num_stages > 2 or not keys_left):
            num_stages -= 1
        else:
            BLOCK_N //= 2


def pair(loop: Loop, options: Mapping[str, int]) -> Loop:
    """Keep two programs on a processor, neither one nor three, with two tiles in flight each.

    Kernels that start early would put three on some processors and leave others with one.
    """
    if loop.num_stages == 4 and not {"BLOCK_N", "num_stages"} & options.keys():
        loop = replace(loop, num_stages=3)
    return replace(loop, registers=PAIR_REGISTERS)


def choose_quantized_loop(
    BLOCK_M: int,
    D: int,
    Dv: int,
    itemsize: int,
    stored: Stored,
    KV_BLOCK: int | None,
    page_size: int,
    device: Device,
    options: Mapping[str, int],
) -> Loop:
    """Choose the loop over quantised keys: few bytes in flight, much to do in registers."""
    most = unit(128, KV_BLOCK)
    if page_size and page_size & -page_size >= 32:
        most = min(most, page_size & -page_size)  # one look-up for a whole step
    if BLOCK_M < MIN_TILE:
        alone = stored.nibbles or stored.narrow or D + Dv > 256
        warps, keys, stages = (1, 32, 3) if alone else (4, 64, 3)
    elif BLOCK_M > 32 or D + Dv > 256 or itemsize >= 4:
        warps = 8 if BLOCK_M * sum(split_dim(Dv)) > 8192 else 1 if stored.narrow else 4
        keys, stages = 32 if itemsize >= 4 or D + Dv > 384 or stored.narrow else 64, 2
    elif stored.narrow or (stored.nibbles and stored.groups == 1):
        warps, keys, stages = 1, 32, 4
    elif stored.nibbles or most < 128:
        warps, keys, stages = 2, 64, 3
    else:
        warps, keys, stages = 4, 128, 3
    num_warps = options.get("num_warps", warps)
    BLOCK_N = options.get("BLOCK_N", min(keys, most))
    num_stages = options.get("num_stages", stages)
    d, dv = sum(split_dim(D)), sum(split_dim(Dv))
    while True:
        needed = max(num_stages, 1) * BLOCK_N * stored.row_bytes
        needed += BLOCK_M * (d + 2 * BLOCK_N) * itemsize + 12288
        if BLOCK_M >= 64:  # instructions for that many rows take keys and values from memory
            needed += BLOCK_N * (d + dv) * itemsize
        stages_left = num_stages > 1 and "num_stages" not in options
        keys_left = BLOCK_N > MIN_TILE and "BLOCK_N" not in options
        if needed <= device.shared_memory or not (stages_left or keys_left):
            residents, registers = max(DECODE_WARPS // num_warps, 1), 0
            if BLOCK_M < MIN_TILE:
                registers = NIBBLE_REGISTERS if stored.nibbles else BYTE_REGISTERS
                in_flight = max(num_stages - 1, 1) * BLOCK_N * stored.row_bytes + 4096
                residents = REGISTERS // (32 * (registers or 256) * num_warps)
                residents = max(min(residents, device.shared_memory // in_flight), 1)
            return Loop(BLOCK_N, num_warps, num_stages, needed, False, residents, registers)
        if stages_left:
            num_stages -= 1
        else:
            BLOCK_N //= 2


def spread(
    loop: Loop,
    programs: int,
    D: int,
    Dv: int,
    itemsize: int,
    BLOCK_M: int,
    KV_BLOCK: int | None,
    device: Device,
) -> Loop:
    """Take longer steps where few programs would be launched into few of the processors.

    Kernels that start early find most processors busy, and small ones are put on the rest together.
    """
    keys = unit(min(2 * loop.BLOCK_N, 128), KV_BLOCK)
    needed = shared_memory_bytes(
        BLOCK_M=BLOCK_M, BLOCK_N=keys, num_stages=loop.num_stages, D=D, Dv=Dv, itemsize=itemsize
    )
    small = loop.bytes * (2 if D + Dv > 384 else 3) <= device.shared_memory
    if programs > device.processors or not small or needed > device.shared_memory or itemsize > 2:
        return loop
    return replace(loop, BLOCK_N=max(keys, loop.BLOCK_N), bytes=max(needed, loop.bytes))


def shared_memory_bytes(
    *, BLOCK_M: int, BLOCK_N: int, num_stages: int, D: int, Dv: int, itemsize: int
) -> int:
    """Estimate the shared memory of one decode program, in bytes, from above.

    Tiles of K and of V in flight (instructions for 64 rows and more hold on to one more of them),
    q and the weights on their way into matrix operands, and room for what mods capture.
    """
    d, dv = sum(split_dim(D)), sum(split_dim(Dv))
    tiles = num_stages - 1 if BLOCK_M < 64 else num_stages
    width = tiles * (d + dv) if num_stages > 1 else max(d, dv)
    in_flight = width * BLOCK_N * itemsize
    operands = BLOCK_M * (d + 2 * BLOCK_N) * itemsize
    return in_flight + operands + 12288


def unit(most: int, KV_BLOCK: int | None) -> int:
    """Return the keys of a unit: a divisor of the block, unless that would be tiny."""
    if KV_BLOCK is None:
        return most
    divisor = KV_BLOCK & -KV_BLOCK  # the largest power of two in it
    if divisor >= MIN_TILE:
        return min(most, divisor)
    return min(most, next_power_of_2(max(KV_BLOCK, MIN_TILE)))  # leaves some lanes idle
