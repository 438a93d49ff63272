"""What the host knows of a call's lists, and the configuration that the kernels run it with."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexdecode import choices
from flexdecode.kernels.call import is_within
from flexdecode.kernels.configs import DecodeConfig, choose_config
from flexdecode.kernels.hardware import INTERPRETED, Device
from flexdecode.kernels.loops import Stored
from flexdecode.kernels.sizes import MIN_TILE, ceil_div, next_power_of_2
from flexdecode.kernels.splits import MIN_SHARE, MIN_UNITS, are_few, fair_items
from flexdecode.quantization import row_bytes
from flexdecode.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from flexdecode.kernels.call import BlockTables
    from flexdecode.problem import Request
    from flexdecode.tables import Tables

Operand = Tensor | QuantizedTensor

__all__ = [
    "TUNABLE",
    "Lists",
    "Planned",
    "balanced_items",
    "block_owners",
    "choose_plan",
    "device_of",
    "is_invariant",
    "length_bucket",
    "lists_of",
    "plan_by_rules",
    "shares_of",
    "tuning_key",
]

TUNABLE = ("BLOCK_M", "BLOCK_N", "num_splits", "num_stages", "num_warps")


@dataclass(frozen=True)
class Lists:
    """Shape of the lists of active blocks, as the kernels take them.

    Attributes
    ----------
    B, heads, nQ : int
        ``heads`` is 1 or the number of key heads.
    columns : int
        Most entries of a row, partial and full.
    BLOCK_SIZE : (int, int)
    """

    B: int
    heads: int
    nQ: int
    columns: int
    BLOCK_SIZE: tuple[int, int]

    @classmethod
    def of(cls, tables: BlockTables | Tables) -> Lists:
        """Read the shape of tables."""
        columns = tables.kv_indices.shape[3]
        if tables.full_kv_indices is not None:
            columns += tables.full_kv_indices.shape[3]
        B, heads, nQ = tables.kv_num_blocks.shape
        return cls(B, heads, nQ, columns, tables.BLOCK_SIZE)


def lists_of(request: Request) -> Lists | None:
    """Shape of the lists that the triton backend will lay out, before it does."""
    if request.resolved is None:
        return None
    tables, problem = request.resolved.tables, request.problem
    lists = Lists.of(tables)
    if lists.heads not in (1, problem.Hkv):
        columns = 2 * ceil_div(problem.Lkv, tables.BLOCK_SIZE[1])
        return replace(lists, heads=problem.Hkv, columns=columns)
    return lists


def length_bucket(keys: int) -> int:
    """Lengths between two powers of two share a plan."""
    return next_power_of_2(max(keys, 1))


class Planned(NamedTuple):
    """A configuration, and what chose it: "rules", "kernel_options", or where a choice is from."""

    config: DecodeConfig
    origin: str


def choose_plan(request: Request, lists: Lists | None, device: Device) -> Planned:
    """Choose tiles and splits for a call from what the host knows of it.

    Options that the call fixes come first, then a measured choice, then the rules. A measured
    choice is taken as a whole: not where the call fixes any of its options.

    Parameters
    ----------
    request : Request
    lists : Lists or None
        None where every key may be attended. Packed queries count as one sequence of many rows
        of blocks.
    device : Device

    Raises
    ------
    ValueError
        A kernel option that cannot work on this device, or with another.
    """
    options = request.options
    if is_invariant(options):
        for name in ("BLOCK_M", "num_splits"):
            if name in options:
                raise ValueError(
                    f"kernel_options[{name!r}]: expected none with deterministic='batch_invariant'"
                    f", which cuts every row in the same way; got {options[name]}"
                )
    own = {name: options[name] for name in TUNABLE if name in options}
    sizes = _sizes(request, lists)
    if not own and not is_invariant(options) and device.arch:
        key, rows = tuning_key(request, lists, device)
        choice = choices.find(key)
        if choice is not None:
            measured = choice.options_for(rows, device.processors)
            try:
                config = choose_config(**sizes, device=device, options=measured)
                return Planned(config, choice.origin)
            except ValueError:
                pass  # measured on a device with more memory, perhaps
    config = choose_config(**sizes, device=device, options=own)
    return Planned(config, "kernel_options" if own else "rules")


def plan_by_rules(
    request: Request, lists: Lists | None, device: Device, options: dict[str, int]
) -> DecodeConfig:
    """Choose by `options` and the rules alone, whatever has been measured."""
    return choose_config(**_sizes(request, lists), device=device, options=options)


def tuning_key(request: Request, lists: Lists | None, device: Device) -> tuple[choices.Key, int]:
    """For which key a call looks up measured choices, and its rows before they fell into a bucket.

    Parameters
    ----------
    request, lists, device
        As in `choose_plan`.
    """
    sizes, problem = _sizes(request, lists), request.problem
    queries = max(min(sizes["BLOCK_Q"] or sizes["Lq"], sizes["Lq"]), 1)
    rows = max(sizes["B"] * sizes["Hkv"] * ceil_div(sizes["Lq"], queries), 1)
    work = "uniform"
    if sizes["lists"] > 1:
        work = "ragged" if sizes["ragged"] else "listed"
    q = format_of(request.q)
    key = choices.Key(
        arch=device.arch,
        D=problem.D,
        Dv=problem.Dv,
        G=problem.G,
        q="tf32" if q == "float32" and request.options.get("tf32") else q,
        k=format_of(request.k),
        v=format_of(request.v),
        queries=choices.bucket(queries),
        work=work,
        keys=choices.bucket(sizes["keys"]),
        rows=choices.bucket(rows),
        block=sizes["KV_BLOCK"] or 0,
        page=min(problem.page_size & -problem.page_size, 256),
        scored=request.score is not None or request.bias is not None,
    )
    return key, rows


def _sizes(request: Request, lists: Lists | None) -> dict[str, Any]:
    """All that `choose_config` takes beside the device and options."""
    problem, k, v = request.problem, request.k, request.v
    v_in_k = isinstance(k, Tensor) and isinstance(v, Tensor) and is_within(v, k)
    block_q = kv_block = None
    bounded = False
    ragged = isinstance(problem.kv_len, Tensor)
    keys = problem.Lkv
    if not isinstance(problem.kv_len, Tensor):
        keys = min(length_bucket(problem.kv_len), keys)
    several = problem.B if ragged else 1
    B, Lq = problem.B, problem.Lq
    if problem.packed is not None:
        B, Lq = problem.packed.num_tiles, problem.packed.BLOCK_Q
        block_q, several, ragged = Lq, B, True
    if lists is not None:
        block_q, kv_block = lists.BLOCK_SIZE
        differ = max(lists.B, lists.heads, lists.nQ) > 1
        several = problem.q_batch * lists.heads * lists.nQ if differ else 1
        bounded = lists.columns * kv_block < keys
        keys = min(keys, lists.columns * kv_block)
    return {
        "B": B,
        "Hkv": problem.Hkv,
        "G": problem.G,
        "v_in_k": v_in_k,
        "Lq": Lq,
        "D": problem.D,
        "Dv": problem.Dv,
        "itemsize": problem.dtype.itemsize,
        "keys": keys,
        "BLOCK_Q": block_q,
        "KV_BLOCK": kv_block,
        "lists": several,
        "ragged": ragged,
        "bounded": bounded,
        "stored": storage_of(request.k, request.v),
        "page_size": 0 if problem.page_table is None else problem.page_size,
        "capacity": max(problem.Lkv, 1) if is_invariant(request.options) else 0,
    }


def format_of(x: Operand) -> str:
    """How a tensor is stored, in a word: a dtype, or a format, its groups and coefficients."""
    if not isinstance(x, QuantizedTensor):
        return str(x.dtype).removeprefix("torch.")
    parts = [str(x.format)]
    if x.format == "int4":
        parts += [str(x.groups), x.layout]
    found = x.coefficients
    if found is not None:
        parts.append("words" if found.dtype == torch.int32 else "rows" if x.by_row else "heads")
    return ".".join(parts)


def is_invariant(options: dict[str, Any]) -> bool:
    """True where a row's bits are to depend on that row alone."""
    return options.get("deterministic") == "batch_invariant"


def storage_of(k: Operand, v: Operand) -> Stored | None:
    """How k and v are kept, or None where neither is quantised."""
    quantized = [x for x in (k, v) if isinstance(x, QuantizedTensor)]
    if not quantized:
        return None
    # Padded: a row of 96 bytes takes 128.
    size = sum(next_power_of_2(row_bytes(x)) for x in (k, v))
    columns = [
        x.shape[3] // 4 // (x.groups if x.layout == "interleaved" else max(x.groups // 4, 1))
        if x.format == "int4"
        else x.shape[3] // 2
        for x in quantized
    ]
    return Stored(
        size,
        narrow=min(columns) <= MIN_TILE,
        nibbles=len(quantized) == 2 and all(x.format == "int4" for x in quantized),
        groups=max(x.groups for x in quantized),
        both=len(quantized) == 2,
    )


@functools.cache
def device_of(device: torch.device) -> Device:
    """What the choice needs to know about a device; CPU tensors mean the interpreter."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    cuda = torch.version.hip is None
    hopper = cuda and properties.major >= 9
    fp8_rows = 0
    if cuda and (properties.major, properties.minor) >= (8, 9):
        fp8_rows = 64 if properties.major in (9, 10) else 16  # of warp groups, or of a warp
    count = properties.multi_processor_count
    return Device(
        count,
        shared,
        pdl=hopper,
        cuda=cuda,
        fp8_rows=fp8_rows,
        arch=choices.arch_of(device),
        columns=8 if cuda else MIN_TILE,
    )


def balanced_items(units: Tensor, slots: int) -> Tensor:
    """Items of every row of a balanced launch: what `plan_items` works out in the kernels.

    Parameters
    ----------
    units : Tensor, [rows], int64
        Steps of the loop that each row asks for.
    slots : int
        Items that the device works on at a time.

    Returns
    -------
    Tensor, [rows], int64
    """
    if len(units) == 0:
        return units
    total, longest, busy = int(units.sum()), int(units.max()), int((units > 0).sum())
    share = ceil_div(total, fair_items(len(units), slots))
    if not are_few(len(units), slots):
        even = ceil_div(longest, max(slots // max(busy, 1), 1))
        are_even = ceil_div(busy, slots) * even * 8 <= ceil_div(total, slots) * 9
        share = even if are_even else max(share, MIN_UNITS)
    return (-(-units // max(share, MIN_SHARE))).clamp(min=1)


def shares_of(units: Tensor, items: Tensor, steps: int) -> Tensor:
    """Steps of each of a row's items but the last: what `share_of` works out in the kernels.

    Parameters
    ----------
    units, items : Tensor, [...], int64
        Steps of the loop that each row asks for, and its items.
    steps : int
        Steps of a block.

    Returns
    -------
    Tensor, [...], int64
    """
    share = (-(-units // items)).clamp(min=MIN_SHARE)
    return torch.where(share > 2 * steps, -(-share // steps) * steps, share)


def block_owners(states: Tensor, share: Tensor, steps: int) -> Tensor:
    """Which share of its list each block falls into, full blocks first as in the kernels.

    Parameters
    ----------
    states : Tensor, [..., columns], uint8
        0 not listed, 1 partial, 2 full.
    share : Tensor, [...], int64
        Steps of each share.
    steps : int
        Steps of a block.

    Returns
    -------
    Tensor, [..., columns], int64
        Number of the share that begins the block; -1 where it is not listed.
    """
    full, listed = states == 2, states > 0
    behind = full.sum(-1, keepdim=True) + (states == 1).cumsum(-1)
    place = torch.where(full, full.cumsum(-1), behind) - 1
    return torch.where(listed, place * steps // share[..., None].clamp(min=1), -1)
