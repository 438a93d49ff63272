"""Tile sizes, warps, stages and splits: one frozen record, chosen by plain Python from numbers.

Nothing here imports Triton, so every decision can be tested on any machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MIN_TILE = 16  # the smallest side of a matrix instruction
MIN_REST = 32  # a second piece of 16 columns costs more registers than it saves memory
MAX_BLOCK_M = 128
BLOCK_N_CHOICES = (16, 32, 64, 128, 256)
WARP_CHOICES = (1, 2, 4, 8)
STAGE_CHOICES = (1, 2, 3, 4, 5, 6, 7, 8)
MAX_SPLITS = 1024
REDUCE_ELEMENTS = 8192  # float32 partials that a program of the reduction holds at once


@dataclass(frozen=True)
class DecodeConfig:
    """How one call is cut into programs.

    Attributes
    ----------
    BLOCK_M : int
        Rows of a tile: ``TG * TQ`` real ones, padded to a power of two of at least 16.
    BLOCK_N : int
        Keys in one step of the loop, a power of two of at least 16.
    TG, TQ : int
        Query heads of the group, and query rows, that share a tile.
    num_splits : int
        Programs that share the active blocks of one tile; 1 writes straight to the output.
    num_warps, num_stages : int
        Triton's launch options for the decode kernel.
    reduce_splits : int
        Partial results that the reduction takes at a time, a power of two.
    reduce_warps : int
        Warps of a program of the reduction.
    pdl : bool
        Launch the reduction before the decode kernel ends (compute capability 9.0 or newer).
    """

    BLOCK_M: int
    BLOCK_N: int
    TG: int
    TQ: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3
    reduce_splits: int = 16
    reduce_warps: int = 4
    pdl: bool = False


@dataclass(frozen=True)
class Device:
    """What the choice needs to know about a device.

    Attributes
    ----------
    processors : int
        Streaming multiprocessors or compute units.
    shared_memory : int
        Bytes of shared memory that one program may use.
    pdl : bool
        Whether a kernel can be launched before the one that it depends on has ended.
    """

    processors: int
    shared_memory: int
    pdl: bool = False


# What the interpreter is given: small, so that tests cross tile borders.
INTERPRETED = Device(processors=8, shared_memory=1 << 30)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def split_dim(dim: int) -> tuple[int, int]:
    """Cover a head dim with one or two power-of-two pieces, wasting little.

    Returns
    -------
    pieces : (int, int)
        The second is 0 when one piece is as good.

    Examples
    --------
    >>> [split_dim(dim) for dim in (4, 80, 96, 120, 128, 576)]
    [(16, 0), (64, 32), (64, 32), (128, 0), (128, 0), (512, 64)]
    """
    whole = next_power_of_2(max(dim, MIN_TILE))
    half = whole // 2
    rest = next_power_of_2(max(dim - half, MIN_REST))
    return (half, rest) if half + rest < whole else (whole, 0)


def shared_memory_bytes(
    *, BLOCK_M: int, BLOCK_N: int, num_stages: int, D: int, Dv: int, itemsize: int
) -> int:
    """Estimate the shared memory of one decode program, in bytes, from above.

    ``num_stages - 1`` tiles of K and of V are in flight (one at least), and q and the weights pass
    through shared memory on their way into matrix operands.
    """
    d, dv = sum(split_dim(D)), sum(split_dim(Dv))
    in_flight = max(num_stages - 1, 1) * BLOCK_N * (d + dv) * itemsize
    operands = BLOCK_M * (d + 2 * BLOCK_N) * itemsize
    return in_flight + operands + 2048


def choose_config(
    *,
    B: int,
    Hkv: int,
    G: int,
    Lq: int,
    D: int,
    Dv: int,
    itemsize: int,
    keys: int,
    device: Device,
    BLOCK_Q: int | None = None,
    KV_BLOCK: int | None = None,
    options: Mapping[str, int] | None = None,
) -> DecodeConfig:
    """Choose tiles, warps, stages and splits for one call.

    Parameters
    ----------
    B, Hkv, G, Lq, D, Dv : int
        Sequences, KV heads, query heads to each, query rows, head dims of keys and of values.
    itemsize : int
        Bytes of an element of K and V.
    keys : int
        The most keys that a row may have to read: the capacity, or the longest list of active
        blocks times their size where that is known on the host.
    device : Device
        Where it runs.
    BLOCK_Q, KV_BLOCK : int, optional
        Block size of the tables; None without tables.
    options : mapping of str to int, optional
        Fixed choices: ``BLOCK_M``, ``BLOCK_N``, ``num_warps``, ``num_stages``, ``num_splits``.

    Returns
    -------
    config : DecodeConfig

    Raises
    ------
    ValueError
        An option has a value that cannot work, or nothing fits in shared memory; the message names
        the option, its value and the legal ones.

    Examples
    --------
    >>> h200 = Device(processors=132, shared_memory=232448, pdl=True)
    >>> config = choose_config(
    ...     B=1, Hkv=8, G=4, Lq=1, D=128, Dv=128, itemsize=2, keys=8192, device=h200
    ... )
    >>> config.BLOCK_M, config.num_splits
    (16, 16)
    """
    options = dict(options or {})
    TG, TQ, BLOCK_M = _choose_rows(G, Lq, BLOCK_Q, Dv, options)
    BLOCK_N, num_warps, num_stages = _choose_loop(
        BLOCK_M, D, Dv, itemsize, KV_BLOCK, keys, device, options
    )

    rows_of_q_block = min(BLOCK_Q or Lq, Lq)
    q_tiles = ceil_div(Lq, max(rows_of_q_block, 1)) * ceil_div(rows_of_q_block, TQ)
    programs = B * Hkv * ceil_div(G, TG) * q_tiles
    units = max(ceil_div(keys, BLOCK_N), 1)
    num_splits = _choose_splits(programs, units, device, options)

    # Two sizes only: each is a kernel of its own, and absent splits cost no memory traffic.
    reduce_splits = 16 if num_splits <= 16 else 64
    reduce_splits = min(reduce_splits, max(REDUCE_ELEMENTS // next_power_of_2(Dv), 1))
    return DecodeConfig(
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        TG=TG,
        TQ=TQ,
        num_splits=num_splits,
        num_warps=num_warps,
        num_stages=num_stages,
        reduce_splits=reduce_splits,
        pdl=device.pdl,
    )


def _choose_rows(
    G: int, Lq: int, BLOCK_Q: int | None, Dv: int, options: Mapping[str, int]
) -> tuple[int, int, int]:
    """Pack the group's heads and some query rows into a tile: (TG, TQ, BLOCK_M)."""
    rows = max(min(BLOCK_Q or Lq, Lq), 1)
    if "BLOCK_M" in options:
        limit = options["BLOCK_M"]
        legal = [16, 32, 64, MAX_BLOCK_M]
        if limit not in legal:
            raise ValueError(f"kernel_options['BLOCK_M']: expected one of {legal}, got {limit}")
    elif G * rows >= MAX_BLOCK_M and Dv <= 128:
        limit = MAX_BLOCK_M  # prefill: compute bound, larger tiles read K and V less often
    else:
        limit = 64 if Dv <= 256 else 32  # a row's output is Dv float32 registers
    TG = ceil_div(G, ceil_div(G, limit))
    TQ = ceil_div(rows, ceil_div(rows, max(limit // TG, 1)))
    BLOCK_M = options.get("BLOCK_M", max(MIN_TILE, next_power_of_2(TG * TQ)))
    return TG, TQ, BLOCK_M


def _choose_loop(
    BLOCK_M: int,
    D: int,
    Dv: int,
    itemsize: int,
    KV_BLOCK: int | None,
    keys: int,
    device: Device,
    options: Mapping[str, int],
) -> tuple[int, int, int]:
    """Choose (BLOCK_N, num_warps, num_stages) that fit in shared memory."""
    for name, legal in (
        ("BLOCK_N", BLOCK_N_CHOICES),
        ("num_warps", WARP_CHOICES),
        ("num_stages", STAGE_CHOICES),
    ):
        if name in options and options[name] not in legal:
            raise ValueError(
                f"kernel_options[{name!r}]: expected one of {list(legal)}, got {options[name]}"
            )

    wide = D + Dv > 384
    if itemsize >= 4:
        block_n = 32  # IEEE dots run on the ordinary units and are unrolled
    else:
        block_n = 32 if wide else 64
    if KV_BLOCK is not None:
        # The largest power of two that divides the block; odd sizes leave lanes idle instead.
        divisor = KV_BLOCK & -KV_BLOCK
        block_n = min(block_n, max(divisor, MIN_TILE))
        if divisor < MIN_TILE:
            block_n = min(64, next_power_of_2(max(min(KV_BLOCK, 64), MIN_TILE)))
    BLOCK_N = options.get("BLOCK_N", block_n)
    # The output tile lives in registers: at most 64 of them in a thread.
    num_warps = options.get("num_warps", 4 if BLOCK_M * sum(split_dim(Dv)) <= 8192 else 8)
    num_stages = options.get("num_stages", 3)

    def needed(n: int, stages: int) -> int:
        return shared_memory_bytes(
            BLOCK_M=BLOCK_M, BLOCK_N=n, num_stages=stages, D=D, Dv=Dv, itemsize=itemsize
        )

    while needed(BLOCK_N, num_stages) > device.shared_memory:
        if "num_stages" not in options and num_stages > 2:
            num_stages -= 1
        elif "BLOCK_N" not in options and BLOCK_N > MIN_TILE:
            BLOCK_N //= 2
        elif "num_stages" not in options and num_stages > 1:
            num_stages -= 1
        else:
            lower = "BLOCK_N" if BLOCK_N > MIN_TILE else "num_stages"
            lower = lower if num_stages > 1 or BLOCK_N > MIN_TILE else "BLOCK_M"
            raise ValueError(
                f"kernel_options: BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}, num_stages={num_stages} "
                f"with head dims {D} and {Dv} need {needed(BLOCK_N, num_stages)} bytes of shared "
                f"memory, the device has {device.shared_memory}: lower {lower}"
            )
    return BLOCK_N, num_warps, num_stages


def _choose_splits(programs: int, units: int, device: Device, options: Mapping[str, int]) -> int:
    """Share each tile's units among enough programs to fill the device, and no more."""
    if "num_splits" in options:
        num_splits = options["num_splits"]
        if not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(
                f"kernel_options['num_splits']: expected 1 to {MAX_SPLITS}, got {num_splits}"
            )
        return num_splits
    if programs == 0 or programs * 4 >= device.processors * 3:
        return 1
    return max(1, min(device.processors // programs, units, MAX_SPLITS))
