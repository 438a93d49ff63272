"""Tile sizes, warps, stages and splits: one frozen record, chosen by plain Python from numbers.

Nothing here imports Triton, so every decision can be tested on any machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

MIN_TILE = 16  # the smallest side of a matrix instruction
MIN_REST = 32  # a second piece of 16 columns costs more registers than it saves memory
MAX_BLOCK_M = 128
# Rows of a tile for head dims of 16 and below: at 64 and more, Triton 3.6 takes warp-group matrix
# instructions of 16 columns on compute capability 9.0, and the output was wrong.
SMALL_DIM_ROWS = 32
LEGAL = {
    "BLOCK_M": (8, 16, 32, 64, MAX_BLOCK_M),
    "BLOCK_N": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
}
MAX_SPLITS = 1024
CROWD = 3  # programs to a processor
FEW_ROWS = 16  # times the rows: so many processors need no more than an item each
MIN_UNITS = 4  # steps of the loop that are worth an item, where a processor gets several
PLAN_ROWS = (32, 128, 1024)  # sizes that the balanced plan is compiled for
PLAN_KEYS = 8192  # shorter rows are not worth a plan
PLAN_LISTED_KEYS = 65536  # where lists may hold so many, and commonly hold a part of them
WHOLE_KEYS = 512  # rows up to which a reduction costs more than a split saves
MIN_FILL_GAIN = 0.03  # of the device, that is worth more programs than processors
MIN_SHARE = 2  # steps of the loop that are worth a split of their own
DECODE_WARPS = 8  # warps on a processor that decode quantised keys and values, in tiles of 16 rows
# Most registers of a thread that decodes for smaller tiles: it says how many warps there are then.
NIBBLE_REGISTERS = 0  # 0 leaves it to the compiler
# Three programs of four warps fit on a processor then, which was best. Where a fourth would fit,
# kernels that start early put it on some processors and leave others with two. Compilers take more
# than they need where they may, and so many that there is no doubt.
BYTE_REGISTERS = 168
PAIR_REGISTERS = 255  # two programs of four warps fit on a processor then, and not three
REGISTERS = 65536  # of a processor
SHORT_SHARE = 16  # steps up to which all have their bounds checked if the last one has to
SPAN = 1024  # keys of a split where all are cut at the same places
FEW_SPLITS = 16  # partial results that the reduction takes at a time where there are no more
MANY_SPLITS = 64  # and where longer rows may have more
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
        Partial results that the reduction takes at a time at the most, a power of two.
    reduce_warps : int
        Warps of a program of the reduction.
    pdl : bool
        Launch each kernel before the one before it ends (compute capability 9.0 or newer).
    splits_later : bool
        Longer rows of such calls are split: if the cache may hold them, their reduction is compiled
        with the first call.
    plan_rows : int
        Where positive, shares are balanced over ragged rows, at most this many of them, and
        ``num_splits`` does not matter.
    processors : int
        Processors that a balanced launch is to fill.
    max_registers : int
        Of a thread, CUDA only; 0 leaves it to the compiler.
    span : int
        Where positive, every row is cut after as many keys, so that its bits depend on it alone.
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
    splits_later: bool = False
    plan_rows: int = 0
    processors: int = 1
    max_registers: int = 0
    span: int = 0


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
    cuda : bool
        Whether kernels may hold CUDA instructions.
    fp8_rows : int
        Least rows of a tile whose matrix instructions take e4m3; 0 where none do. Smaller tiles
        would be converted to float16, so that decoding to bfloat16 is as fast and more precise.
    arch : str
        Whose measured choices it takes, see `flexdecode.choices.Key`; none where empty.
    columns : int
        Least columns of a matrix instruction. Fewer query rows than the 16 that it takes as rows
        are its columns where they are quantised: less of it is padding.
    """

    processors: int
    shared_memory: int
    pdl: bool = False
    cuda: bool = False
    fp8_rows: int = 0
    arch: str = ""
    columns: int = 8


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


# What the interpreter is given: small, so that tests cross tile borders.
INTERPRETED = Device(processors=8, shared_memory=1 << 30, arch="interpreter")


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


def _has_padded_piece(dim: int) -> bool:
    """Whether a head dim has a second piece that it does not fill, read under a mask."""
    first, second = split_dim(dim)
    return second > 0 and first + second > dim


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
    lists: int = 1,
    ragged: bool = False,
    bounded: bool = False,
    stored: Stored | None = None,
    page_size: int = 0,
    capacity: int = 0,
    v_in_k: bool = False,
    options: Mapping[str, int] | None = None,
) -> DecodeConfig:
    """Choose tiles, warps, stages and splits for one call.

    Parameters
    ----------
    B, Hkv, G, Lq, D, Dv : int
        Sequences, KV heads, query heads to each, query rows, head dims of keys and of values.
    itemsize : int
        Bytes of an element of K and V as the matrix instructions take them.
    keys : int
        The most keys that a row may have to read: the capacity, or the longest list of active
        blocks times their size where that is known on the host.
    device : Device
        Where it runs.
    BLOCK_Q, KV_BLOCK : int, optional
        Block size of the tables; None without tables.
    lists : int, default 1
        Lists of active blocks whose lengths may differ in ways that the host does not know.
    ragged : bool, default False
        They differ because sequences do.
    bounded : bool, default False
        Somebody who knows the lists has cut `keys` down to about the longest of them.
    stored : Stored, optional
        How K and V are kept, where quantised.
    page_size : int, default 0
        Slots of a page of the cache; 0 where it has none.
    capacity : int, default 0
        Where positive, no bit of a row may depend on anything but that row: nothing is then chosen
        by sizes of the batch or of the cache, which holds so many keys.
    v_in_k : bool, default False
        Values are columns of the keys, and not loaded apart from them.
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
    least = MIN_TILE
    if stored is not None and stored.both and itemsize == 2 and D + Dv <= 512 and not capacity:
        least = device.columns
    _check(options, D, Dv, least)
    rows = max(min(BLOCK_Q or Lq, Lq), 1)
    limit = MIN_TILE if capacity else options.get("BLOCK_M", _row_limit(G * rows, D, Dv))
    if capacity and "BLOCK_N" not in options:
        # The same steps with tables as without.
        options["BLOCK_N"] = _unit(32 if itemsize >= 4 or D + Dv > 384 else 64, KV_BLOCK)
    while True:
        TG = ceil_div(G, ceil_div(G, limit))
        TQ = ceil_div(rows, ceil_div(rows, max(limit // TG, 1)))
        BLOCK_M = options.get("BLOCK_M", max(least, next_power_of_2(TG * TQ)))
        if stored is None:
            latent = v_in_k and D > 256
            loop = _choose_loop(BLOCK_M, D, Dv, itemsize, KV_BLOCK, device, options, latent)
        else:
            loop = _choose_quantized_loop(
                BLOCK_M, D, Dv, itemsize, stored, KV_BLOCK, page_size, device, options
            )
        if loop.bytes <= device.shared_memory:
            break
        if "BLOCK_M" in options or limit == MIN_TILE:
            lowest = {"BLOCK_N": MIN_TILE, "num_stages": 1, "BLOCK_M": MIN_TILE}
            chosen = {"BLOCK_N": loop.BLOCK_N, "num_stages": loop.num_stages, "BLOCK_M": BLOCK_M}
            lower = [name for name, least in lowest.items() if chosen[name] > least]
            raise ValueError(
                f"kernel_options: {chosen} with head dims {D} and {Dv} need {loop.bytes} bytes of "
                f"shared memory, the device has {device.shared_memory}; "
                + (f"lower {' or '.join(lower)}" if lower else "these head dims cannot work here")
            )
        limit //= 2

    if capacity:
        block = KV_BLOCK or loop.BLOCK_N
        span = block * ceil_div(SPAN, block)
        return DecodeConfig(
            BLOCK_M=BLOCK_M,
            BLOCK_N=loop.BLOCK_N,
            TG=TG,
            TQ=TQ,
            num_splits=max(ceil_div(capacity, span), 1),
            num_warps=loop.num_warps,
            num_stages=loop.num_stages,
            reduce_splits=min(FEW_SPLITS, max(REDUCE_ELEMENTS // next_power_of_2(Dv), 1)),
            pdl=device.pdl,
            span=span,
        )
    least = PLAN_KEYS if ragged or bounded else PLAN_LISTED_KEYS
    plan_rows = _choose_plan(lists, least, keys, options)
    programs = B * Hkv * ceil_div(G, TG) * ceil_div(Lq, rows) * ceil_div(rows, TQ)
    units = max(ceil_div(keys, loop.BLOCK_N), 1)
    if stored is not None:
        # Decoding keeps warps busy: several programs on a processor hide one another's waits.
        device = replace(device, processors=device.processors * loop.residents)
    steps = ceil_div(KV_BLOCK or loop.BLOCK_N, loop.BLOCK_N)
    waves = stored is None and BLOCK_M == MIN_TILE
    num_splits = _choose_splits(programs, units, steps, keys, device, options, waves)
    if stored is None and not plan_rows and "BLOCK_N" not in options:
        loop = _spread(loop, programs * num_splits, D, Dv, itemsize, BLOCK_M, KV_BLOCK, device)
    wide = _unit(128, KV_BLOCK)
    # The numbers of many small pages are fetched at once then.
    gains = page_size % loop.BLOCK_N != 0
    if plan_rows and programs * FEW_ROWS > device.processors:  # see `are_few` in layout.py
        # A block is one step, or rows that may well stay whole do not meet in pairs on some.
        gains = not ragged or programs <= device.processors
    if loop.widens and wide > loop.BLOCK_N and gains:
        loop = replace(loop, BLOCK_N=wide, num_stages=3)
        if plan_rows and page_size % wide and "num_warps" not in options:
            loop = replace(loop, num_warps=8)
    elif loop.widens and page_size % loop.BLOCK_N:
        loop = replace(loop, num_stages=min(loop.num_stages, 3))
    crowd = programs * num_splits >= CROWD * device.processors and not plan_rows
    if crowd and stored is None and BLOCK_M == MIN_TILE and loop.num_warps == 4:
        loop = replace(loop, registers=PAIR_REGISTERS)
        if loop.num_stages == 4 and not {"BLOCK_N", "num_stages"} & options.keys():
            loop = replace(loop, num_stages=3)
    # Two sizes only, whatever the length: each is a kernel of its own.
    longest = _choose_splits(programs, MAX_SPLITS * MIN_SHARE, 1, WHOLE_KEYS + 1, device, {}, waves)
    reduce_splits = FEW_SPLITS if max(num_splits, longest) <= FEW_SPLITS else MANY_SPLITS
    width = next_power_of_2(Dv)
    return DecodeConfig(
        BLOCK_M=BLOCK_M,
        BLOCK_N=loop.BLOCK_N,
        TG=TG,
        TQ=TQ,
        num_splits=num_splits,
        num_warps=loop.num_warps,
        num_stages=loop.num_stages,
        reduce_splits=min(reduce_splits, max(REDUCE_ELEMENTS // width, 1)),
        # Where few are joined each thread keeps to its own columns, and none waits for another.
        reduce_warps=max(width // 128, 1) if reduce_splits == FEW_SPLITS else 4,
        pdl=device.pdl,
        splits_later=not plan_rows and num_splits == 1 < longest,
        plan_rows=plan_rows,
        processors=device.processors,
        max_registers=loop.registers if device.cuda else 0,
    )


def _check(options: Mapping[str, int], D: int, Dv: int, least: int) -> None:
    """Refuse a value that no kernel can have."""
    for name, legal in LEGAL.items():
        if name == "BLOCK_M":
            legal = tuple(size for size in legal if size >= least)
        if name == "BLOCK_M" and min(D, Dv) <= MIN_TILE:
            legal = tuple(size for size in legal if size <= SMALL_DIM_ROWS)
        if name in options and options[name] not in legal:
            raise ValueError(
                f"kernel_options[{name!r}]: expected one of {list(legal)}, got {options[name]}"
            )
    if not 1 <= options.get("num_splits", 1) <= MAX_SPLITS:
        raise ValueError(
            f"kernel_options['num_splits']: expected 1 to {MAX_SPLITS}, got {options['num_splits']}"
        )


def _row_limit(rows: int, D: int, Dv: int) -> int:
    """Return how many of the rows that share keys may share a tile."""
    if min(D, Dv) <= MIN_TILE:
        return SMALL_DIM_ROWS
    if Dv > 256:
        return 32  # a row's output is Dv float32 registers
    if rows >= MAX_BLOCK_M and Dv <= 128:
        return MAX_BLOCK_M  # prefill is compute bound; larger tiles read K and V less often
    return 64


@dataclass(frozen=True)
class _Loop:
    """The loop over keys, and the shared memory that it takes."""

    BLOCK_N: int
    num_warps: int
    num_stages: int
    bytes: int
    widens: bool
    residents: int = 1  # programs that a processor holds at a time
    registers: int = 0  # most of a thread; 0 leaves it to the compiler


def _choose_loop(
    BLOCK_M: int,
    D: int,
    Dv: int,
    itemsize: int,
    KV_BLOCK: int | None,
    device: Device,
    options: Mapping[str, int],
    latent: bool,
) -> _Loop:
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
    BLOCK_N = options.get("BLOCK_N", _unit(keys, KV_BLOCK))
    deep = not exact and D + Dv <= 256 and not _has_padded_piece(D) and not _has_padded_piece(Dv)
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
            return _Loop(BLOCK_N, num_warps, num_stages, needed, widens)
        if stages_left and (num_stages > 2 or not keys_left):
            num_stages -= 1
        else:
            BLOCK_N //= 2


def _spread(
    loop: _Loop,
    programs: int,
    D: int,
    Dv: int,
    itemsize: int,
    BLOCK_M: int,
    KV_BLOCK: int | None,
    device: Device,
) -> _Loop:
    """Take longer steps where few programs would be launched into few of the processors.

    Kernels that start early find most processors busy, and small ones are put on the rest together.
    """
    keys = _unit(min(2 * loop.BLOCK_N, 128), KV_BLOCK)
    needed = shared_memory_bytes(
        BLOCK_M=BLOCK_M, BLOCK_N=keys, num_stages=loop.num_stages, D=D, Dv=Dv, itemsize=itemsize
    )
    small = loop.bytes * (2 if D + Dv > 384 else 3) <= device.shared_memory
    if programs > device.processors or not small or needed > device.shared_memory or itemsize > 2:
        return loop
    return replace(loop, BLOCK_N=max(keys, loop.BLOCK_N), bytes=max(needed, loop.bytes))


def _choose_quantized_loop(
    BLOCK_M: int,
    D: int,
    Dv: int,
    itemsize: int,
    stored: Stored,
    KV_BLOCK: int | None,
    page_size: int,
    device: Device,
    options: Mapping[str, int],
) -> _Loop:
    """Choose the loop over quantised keys: few bytes in flight, much to do in registers."""
    most = _unit(128, KV_BLOCK)
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
            return _Loop(BLOCK_N, num_warps, num_stages, needed, False, residents, registers)
        if stages_left:
            num_stages -= 1
        else:
            BLOCK_N //= 2


def _unit(most: int, KV_BLOCK: int | None) -> int:
    """Return the keys of a unit: a divisor of the block, unless that would be tiny."""
    if KV_BLOCK is None:
        return most
    divisor = KV_BLOCK & -KV_BLOCK  # the largest power of two in it
    if divisor >= MIN_TILE:
        return min(most, divisor)
    return min(most, next_power_of_2(max(KV_BLOCK, MIN_TILE)))  # leaves some lanes idle


def _choose_plan(lists: int, least: int, keys: int, options: Mapping[str, int]) -> int:
    """Return the size of a plan that balances ragged lists, or 0 where none is worth it."""
    if lists == 1 or keys < least or "num_splits" in options:
        return 0
    return next((size for size in PLAN_ROWS if size >= lists), 0)


def _choose_splits(
    programs: int,
    units: int,
    steps: int,
    keys: int,
    device: Device,
    options: Mapping[str, int],
    waves: bool,
) -> int:
    """Share each tile's units among enough programs to fill the device, and no more.

    At most so many programs as there are processors, or, with `waves`, more of them where those
    would leave too many processors without work. Shares are whole blocks of so many `steps`, as
    `share_of` in worklist.py makes them: no program is left without one.
    """
    if "num_splits" in options:
        return options["num_splits"]
    if programs == 0 or keys <= WHOLE_KEYS:
        return 1
    splits = 1
    if programs * 4 < device.processors * 3:
        splits = max(1, min(device.processors // programs, MAX_SPLITS))
    splits, score = _shared(splits, programs, units, steps, device)
    if waves:
        most = min(units // SHORT_SHARE * 2, FEW_SPLITS, 16 * device.processors // programs)
        others = [
            _shared(more, programs, units, steps, device) for more in range(splits + 1, most + 1)
        ]
        best = max((better for _, better in others), default=score)
        if best > score + MIN_FILL_GAIN:
            return next(found for found, other in others if other > best - MIN_FILL_GAIN / 3)
    return splits


def _shared(
    splits: int, programs: int, units: int, steps: int, device: Device
) -> tuple[int, float]:
    """Splits that have work if there are so many, and the part of the device that they keep busy.

    A split costs a start of a program and its place in the reduction, measured on an H200.
    """
    share = max(ceil_div(units, splits), MIN_SHARE)
    if share > 2 * steps:
        share = ceil_div(share, steps) * steps
    splits = ceil_div(units, share)
    score = fill_of(programs * splits, device.processors) * units / (share * splits)
    if splits > 1:
        score -= 0.03 + 0.3 / share + 0.0025 * programs * splits / device.processors
    return splits, score


def fill_of(programs: int, processors: int) -> float:
    """Part of the time that so many equal programs keep a device busy, two on a processor.

    One program gets nearly the whole of a processor's bandwidth, so that a last wave of half as
    many as there is room for is as good as a full one. Those of a first wave end at about the same
    time, and where some processors have two of them and others one, nothing makes up for it. A
    small last wave does not start all at once; the numbers are a fit to times on an H200.

    Parameters
    ----------
    programs, processors : int

    Returns
    -------
    float
        At most 1.
    """
    if programs <= processors:
        return programs / processors
    waves = programs / (2 * processors)
    if waves <= 1:
        return waves
    last = waves % 1
    return waves / (waves // 1 + max(last, (1 + 1.8 * last) / 3 if last else 0.0))
