"""Tile sizes, warps, stages and splits: one frozen record, chosen by plain Python from numbers.

Nothing here imports Triton, so every decision can be tested on any machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexdecode.kernels.hardware import Device
from flexdecode.kernels.loops import (
    Stored,
    choose_loop,
    choose_quantized_loop,
    pair,
    spread,
    unit,
)
from flexdecode.kernels.sizes import MIN_TILE, ceil_div, next_power_of_2
from flexdecode.kernels.splits import (
    FEW_SPLITS,
    MAX_SPLITS,
    MIN_SHARE,
    WHOLE_KEYS,
    are_few,
    choose_splits,
)

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
CROWD = 3  # programs to a processor
PLAN_ROWS = (32, 128, 1024)  # sizes that the balanced plan is compiled for
PLAN_KEYS = 8192  # shorter rows are not worth a plan
PLAN_LISTED_KEYS = 65536  # where lists may hold so many, and commonly hold a part of them
SPAN = 1024  # keys of a split where all are cut at the same places
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
    more_splits : bool
        Rows of such calls may have more splits than the reduction takes at a time.
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
    more_splits: bool = False
    plan_rows: int = 0
    processors: int = 1
    max_registers: int = 0
    span: int = 0


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
        options["BLOCK_N"] = unit(32 if itemsize >= 4 or D + Dv > 384 else 64, KV_BLOCK)
    while True:
        TG = ceil_div(G, ceil_div(G, limit))
        TQ = ceil_div(rows, ceil_div(rows, max(limit // TG, 1)))
        BLOCK_M = options.get("BLOCK_M", max(least, next_power_of_2(TG * TQ)))
        if stored is None:
            latent = v_in_k and D > 256
            loop = choose_loop(BLOCK_M, D, Dv, itemsize, KV_BLOCK, device, options, latent)
        else:
            loop = choose_quantized_loop(
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
    num_splits = choose_splits(programs, units, steps, keys, device, options, waves)
    # What kernels are compiled for must not change with the length.
    longest = choose_splits(programs, MAX_SPLITS * MIN_SHARE, 1, WHOLE_KEYS + 1, device, {}, waves)
    most = programs * options.get("num_splits", longest)
    if stored is None and not plan_rows and "BLOCK_N" not in options:
        loop = spread(loop, most, D, Dv, itemsize, BLOCK_M, KV_BLOCK, device)
    if loop.widens:
        wide = unit(128, KV_BLOCK)
        # The numbers of many small pages are fetched at once then.
        gains = page_size % loop.BLOCK_N != 0
        if plan_rows and not are_few(programs, device.processors):
            # A block is one step, or rows that may well stay whole do not meet in pairs on some.
            gains = not ragged or programs <= device.processors
        if gains and wide > loop.BLOCK_N:
            loop = replace(loop, BLOCK_N=wide, num_stages=3)
            if plan_rows and page_size % wide:
                loop = replace(loop, num_warps=options.get("num_warps", 8))
        elif page_size % loop.BLOCK_N:
            loop = replace(loop, num_stages=min(loop.num_stages, 3))
    crowd = most >= CROWD * device.processors and not plan_rows
    if stored is None and crowd and device.cuda and BLOCK_M == MIN_TILE and loop.num_warps == 4:
        loop = pair(loop, options)
    # Two sizes only, whatever the length: each is a kernel of its own.
    more_splits = max(num_splits, longest) > FEW_SPLITS
    reduce_splits = MANY_SPLITS if more_splits else FEW_SPLITS
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
        reduce_warps=4 if more_splits else max(width // 128, 1),
        pdl=device.pdl,
        splits_later=not plan_rows and num_splits == 1 < longest,
        more_splits=more_splits or plan_rows > 0,
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


def _choose_plan(lists: int, least: int, keys: int, options: Mapping[str, int]) -> int:
    """Return the size of a plan that balances ragged lists, or 0 where none is worth it."""
    if lists == 1 or keys < least or "num_splits" in options:
        return 0
    return next((size for size in PLAN_ROWS if size >= lists), 0)
