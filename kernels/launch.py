"""From one attention call to launches: numbering of programs, arguments, compiled variants.

A `Plan` holds what depends on shapes, strides and kinds alone, so that a call that looks like an
earlier one only fills in its tensors. Compiled variants are kept for all plans and launched without
Triton's own look-up, which costs more than a short kernel runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton import FutureKernel, knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from flexdecode.kernels.arguments import NO_MOD, NOT_QUANTIZED, Arguments
from flexdecode.kernels.call import Codes, DecodeCall
from flexdecode.kernels.compiling import Wanted, compile_together
from flexdecode.kernels.configs import DecodeConfig
from flexdecode.kernels.decode import _decode_kernel
from flexdecode.kernels.layout import Layout
from flexdecode.kernels.reduce import _reduce_kernel
from flexdecode.kernels.sizes import MIN_TILE, next_power_of_2, split_dim
from flexdecode.kernels.splits import FEW_SPLITS, WHOLE_KEYS

# Compiled variants and their devices by kernel, constants, options and what `Arguments` finds in a
# call.
_compiled: dict[tuple[Any, ...], Any] = {}

# For AMD, Triton counts in 32 bits from addresses whose whole allocation lies within 2 GiB.
_BY_SIZE = torch.version.hip is not None
_NEAR = (1 << 31) - 1


class Launch:
    """One kernel of a plan: its grid, compile-time constants and options."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.constants = constants
        self.options = options
        self.values = tuple(constants.values())
        self.variants: dict[Any, Any] = _compiled.setdefault(
            (kernel, self.values, tuple(options.items())), {}
        )

    def __call__(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> None:
        """Launch; `key` tells apart what Triton would compile apart, but for sizes of memory."""
        key = _full_key(key, arguments)
        variant = self.variants.get(key)
        if variant is None:
            compile_together([self.wanted(arguments)])
            variant = self._compile(key, arguments)
        if variant is None:  # the interpreter has nothing to keep
            self._run(arguments, warmup=False)
            return
        compiled, device = variant
        hooks = knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # of a profiler
            compiled[self.grid](*arguments, *self.values)
            return
        compiled.run(
            *self.grid,
            driver.active.get_current_stream(device),
            compiled.function,
            compiled.packed_metadata,
            *(None, None, None),  # metadata for hooks, and the hooks
            *arguments,
            *self.values,
        )

    def prepare(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> None:
        """Compile what a launch with these arguments will run, and run nothing."""
        key = _full_key(key, arguments)
        if key not in self.variants:
            self._compile(key, arguments)

    def is_prepared(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> bool:
        """True where a launch with these arguments finds its kernel."""
        return _full_key(key, arguments) in self.variants

    def wanted(self, arguments: Sequence[Any]) -> Wanted:
        """Return a launch with these arguments as something to compile."""
        return Wanted(self.kernel, self.grid, arguments, {**self.constants, **self.options})

    def _compile(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> Any:
        compiled = self._run(arguments, warmup=True)
        if isinstance(compiled, FutureKernel):  # another thread compiles it
            compiled = compiled.result()
        if not hasattr(compiled, "metadata"):
            return None
        # One for all threads: Triton 3.8 unloads what nobody keeps, and a graph may hold it.
        return self.variants.setdefault(key, (compiled, driver.active.get_current_device()))

    def _run(self, arguments: Sequence[Any], warmup: bool) -> Any:
        return self.kernel.run(
            *arguments, grid=self.grid, warmup=warmup, **self.constants, **self.options
        )


@dataclass(frozen=True, eq=False)
class BoundLaunch:
    """A launch with its arguments, to be made as often as wanted.

    Attributes
    ----------
    launch : Launch
    kinds : tuple
        What Triton compiles apart, but for the addresses of what a mod captures.
    arguments : sequence
    mod : tuple of Tensor and float
        Arguments of a mod.
    """

    launch: Launch
    kinds: tuple[Any, ...]
    arguments: Sequence[Any]
    mod: tuple[Any, ...] = ()

    def __call__(self) -> None:
        """Launch."""
        aligned = [x.data_ptr() & 15 == 0 for x in self.mod if type(x) is not float]
        self.launch((self.kinds, *aligned), self.arguments)


@dataclass(frozen=True, eq=False)
class Plan:
    """What calls of one shape share. Made by `make_plan`, carried out by `run_plan`.

    Attributes
    ----------
    config : DecodeConfig
    layout : Layout
    strides_*, columns : tuple of int
        As the kernels take them.
    last_strides : tuple of int
        Of q, k and v; Triton compiles for a stride of 1.
    sizes, numbering : tuple of int
        Head counts, lengths and tile sizes; then the layout; as both kernels take them.
    parts, scratch : int
        Rows of partial results, and elements of the buffer that holds them.
    decode, reduce : Launch
        ``reduce`` is None where every row has one item.
    """

    config: DecodeConfig
    layout: Layout
    strides_q: tuple[int, ...]
    strides_k: tuple[int, ...]
    strides_v: tuple[int, ...]
    strides_q_scale: tuple[int, ...]
    strides_k_codes: tuple[int, ...]
    strides_v_codes: tuple[int, ...]
    strides_out: tuple[int, ...]
    strides_bias: tuple[int, ...]
    strides_state: tuple[int, ...]
    strides_tables: tuple[int, ...]
    columns: tuple[int, ...]
    last_strides: tuple[int, ...]
    sizes: tuple[int, ...]
    numbering: tuple[int, ...]
    parts: int
    scratch: int
    decode: Launch
    reduce: Launch | None


def make_plan(call: DecodeCall, config: DecodeConfig) -> Plan:
    """Work out everything about `call` but its tensors, lengths and mods' arguments."""
    q, k, v, out, tables = call.q, call.k, call.v, call.out, call.tables
    _, Hq, Lq, D = q.shape
    Hkv = k.shape[1]
    Dv = out.shape[3]
    BLOCK_Q, KV_BLOCK = call.block_size(config.BLOCK_N)
    if config.span and tables is not None:
        KV_BLOCK = tables.BLOCK_SIZE[1]  # whatever the cache holds
    heads = Hkv if tables is not None and tables.kv_num_blocks.shape[1] > 1 else 1
    layout = Layout.of(
        B=q.shape[0],
        Hkv=Hkv,
        G=Hq // Hkv,
        Lq=Lq,
        heads=heads,
        BLOCK_Q=BLOCK_Q,
        config=config,
        nQ=None if call.tiles is None else call.tiles.shape[1],
    )
    several = config.plan_rows > 0 or config.num_splits > 1
    outer_k, outer_v, outer_q, outer_out = map(outer_strides, (k, v, q, out))
    align_k, align_v = math.gcd(16, *outer_k), math.gcd(16, *outer_v)
    align_q = math.gcd(16, *outer_q, *outer_out)
    D_0, D_1 = split_dim(D)
    DV_0, DV_1 = split_dim(Dv)
    tf32 = q.dtype == torch.float32 and call.tf32
    k_codes, v_codes = call.k_codes or NOT_QUANTIZED, call.v_codes or NOT_QUANTIZED
    state = tables.block_state if tables is not None else None
    decode = Launch(
        _decode_kernel,
        layout.programs,
        {
            "SCORE_MOD": (call.score_mod or NO_MOD).fn,
            "MASK_MOD": (call.mask_mod or NO_MOD).fn,
            "DERIVE_OFFSET": call.q_offset is None,
            "EXACT": tables is None or tables.exact,
            "ASK_FULL": tables is not None
            and tables.given
            and not tables.exact
            and call.mask_mod is not None,
            "ONE_QUERY": BLOCK_Q == 1,
            "ONE_LIST": layout.heads == 1,
            "ONE_TILE": call.tiles is None
            and layout.nQ == 1
            and layout.inner * layout.heads == Hkv,
            "ROWS": config.plan_rows,
            "SPAN": config.span,
            "ALIGN_K": align_k,
            "ALIGN_V": align_v,
            "ALIGN_Q": align_q,
            "INPUT_PRECISION": "tf32" if tf32 else "ieee",
            "Q_FORMAT": call.q_format,
            **format_constants(k_codes, v_codes),
            "FLOAT8": call.is_float8(config.BLOCK_M),
            "ASSEMBLY": call.assembly,
            "D": D,
            "D_0": D_0,
            "D_1": D_1,
            "DV": Dv,
            "DV_0": DV_0,
            "DV_1": DV_1,
            "KV_BLOCK": KV_BLOCK,
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "PAGE_SIZE": call.page_size,
            "V_IN_K": call.v_in_k,
            "LIKE_K": call.page_size > 0 and (outer_k[0], outer_k[2]) == (outer_v[0], outer_v[2]),
            "PDL": config.pdl,
        },
        {"num_warps": config.num_warps, "num_stages": config.num_stages}
        | ({"maxnreg": config.max_registers} if config.max_registers else {})
        | ({"launch_pdl": True} if config.pdl else {}),
    )
    # Float64 takes twice the registers, and a good many more for its exponentials.
    splits = max(config.reduce_splits // (4 if call.partial_dtype == torch.float64 else 1), 1)
    reduce = Launch(
        _reduce_kernel,
        out.shape[0] * Hq * (Lq if call.tiles is None else layout.nQ * BLOCK_Q),
        {
            "ROWS": config.plan_rows,
            "SPAN": config.span,
            "DV": Dv,
            "BLOCK_DV": next_power_of_2(Dv),
            "KV_BLOCK": KV_BLOCK,
            "BLOCK_N": config.BLOCK_N,
            "SPLITS": splits,
            "MORE": config.more_splits or config.num_splits > splits or splits < FEW_SPLITS,
            "PDL": config.pdl,
        },
        {"num_warps": config.reduce_warps} | ({"launch_pdl": True} if config.pdl else {}),
    )
    parts = layout.programs * layout.tile_rows if several else 0
    full = tables.full_kv_indices if tables is not None else None
    return Plan(
        config=config,
        layout=layout,
        strides_q=(*(stride // align_q for stride in outer_q), q.stride(3)),
        strides_k=(*(stride // align_k for stride in outer_k), k.stride(3)),
        strides_v=(*(stride // align_v for stride in outer_v), v.stride(3)),
        strides_q_scale=outer_strides(call.q_scale) if call.q_scale is not None else (0, 0, 0),
        strides_k_codes=coefficient_strides(k_codes),
        strides_v_codes=coefficient_strides(v_codes),
        strides_out=tuple(stride // align_q for stride in outer_out),
        strides_bias=tuple(call.bias.stride()) if call.bias is not None else (0, 0, 0, 0),
        strides_state=state_strides(state) if state is not None else (0, 0, 0),
        strides_tables=tables.strides() if tables is not None else (0, 0),
        columns=(
            tables.kv_indices.shape[3] if tables is not None else 0,
            full.shape[3] if full is not None else 0,
        ),
        last_strides=(q.stride(3), k.stride(3), v.stride(3)),
        sizes=(Hkv, Hq // Hkv, Lq, call.capacity, BLOCK_Q, config.TG, config.TQ),
        numbering=(
            layout.rows,
            layout.heads,
            layout.nQ,
            layout.inner,
            layout.num_splits,
            layout.slots,
        ),
        parts=parts,
        scratch=parts * (Dv + 2),
        decode=decode,
        reduce=reduce if several else None,
    )


def run_plan(plan: Plan, call: DecodeCall) -> Arguments | None:
    """Launch the decode kernel and, where rows may have several items, the reduction.

    Returns
    -------
    Arguments or None
        What was launched, for calls that look like this one; None where there was nothing to do.
    """
    if call.out.numel() == 0:
        return None
    arguments = Arguments(plan, call)
    arguments.launch()
    return arguments


def decode(call: DecodeCall, config: DecodeConfig) -> tuple[Plan, Arguments | None]:
    """Run one attention call, in smaller tiles where the compiler needs more memory than estimated.

    Returns
    -------
    plan : Plan
        `run_plan` carries it out again for calls that look alike.
    arguments : Arguments or None
        See `run_plan`.

    Raises
    ------
    triton.runtime.errors.OutOfResources
        The device cannot hold even the smallest tiles.
    """
    while True:
        plan = make_plan(call, config)
        if call.out.numel() == 0:
            return plan, None
        arguments = Arguments(plan, call)
        prepare(_launches(call, arguments))
        try:
            arguments.launch()
            return plan, arguments
        except OutOfResources:
            if config.num_stages > 1:
                config = replace(config, num_stages=config.num_stages - 1)
            elif config.BLOCK_N > MIN_TILE:
                config = replace(config, BLOCK_N=config.BLOCK_N // 2)
            else:
                raise


def launches_of(call: DecodeCall, config: DecodeConfig) -> list[Wanted]:
    """Return what `decode` compiles for a call, to be compiled earlier."""
    launches = _launches(call, Arguments(make_plan(call, config), call))
    return [launch.wanted(arguments) for launch, _, arguments in launches]


def _launches(
    call: DecodeCall, arguments: Arguments
) -> list[tuple[Launch, tuple[Any, ...], list[Any]]]:
    """Launches of a call and, where longer rows will be split, of one whose rows are."""
    launches = arguments.launches()
    config = arguments.plan.config
    if config.splits_later and call.capacity > WHOLE_KEYS:
        longer = make_plan(call, replace(config, num_splits=2))
        launches += Arguments(longer, call).launches()
    return launches


def prepare(launches: Sequence[tuple[Launch, tuple[Any, ...], Sequence[Any]]]) -> None:
    """Compile side by side what is to be launched, each with its key and arguments."""
    new = [
        (launch, key, arguments)
        for launch, key, arguments in launches
        if not launch.is_prepared(key, arguments)
    ]
    compile_together([launch.wanted(arguments) for launch, _, arguments in new])
    for launch, key, arguments in new:
        launch.prepare(key, arguments)


def _full_key(key: tuple[Any, ...], arguments: Sequence[Any]) -> tuple[Any, ...]:
    return (key, *_sizes(arguments)) if _BY_SIZE else key


def _sizes(arguments: Sequence[Any]) -> list[bool]:
    """Whether the allocation of each tensor is small, those of mods included."""
    found: list[bool] = []
    for x in arguments:
        if isinstance(x, Tensor):
            found.append(x.untyped_storage().size() <= _NEAR)
        elif isinstance(x, tuple):
            found += _sizes(x)
    return found


def outer_strides(x: Tensor) -> tuple[int, ...]:
    """Return (sequence, head, token) strides in elements, 0 along an axis that has one entry."""
    shape, strides = x.shape, x.stride()
    return tuple([strides[axis] if shape[axis] > 1 else 0 for axis in (0, 1, 2)])


def format_constants(k: Codes, v: Codes) -> dict[str, Any]:
    """Return the compile-time constants of kernels that say how k and v are stored, in order."""
    return {
        f"{of}_{name}": value
        for of, codes in (("K", k), ("V", v))
        for name, value in (
            ("FORMAT", codes.format),
            ("COEFFICIENTS", codes.kind),
            ("GROUPS", codes.groups),
        )
    }


def coefficient_strides(codes: Codes) -> tuple[int, ...]:
    """Return (sequence, head, token, group) strides of coefficients."""
    if codes.coefficients is None:
        return 0, 0, 0, 0
    return (*outer_strides(codes.coefficients), codes.coefficients.stride(3))


def state_strides(state: Tensor) -> tuple[int, int, int]:
    """Return (sequence, head, query block) strides of a block_state, 0 where broadcast."""
    sequences, heads, rows, columns = state.shape
    return (heads * rows * columns if sequences > 1 else 0), rows * columns, columns
