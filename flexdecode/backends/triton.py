"""The triton backend: prints the mods, lays out tables, chooses a configuration, launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexdecode import choices
from flexdecode.codegen import captures_moved, lower
from flexdecode.device_tables import order_lists, unite_heads
from flexdecode.kernels import launch
from flexdecode.kernels.arguments import Arguments
from flexdecode.kernels.call import BlockTables, Codes, DecodeCall, Mod, format_of_codes
from flexdecode.kernels.compiling import Wanted
from flexdecode.kernels.devices import is_capturing
from flexdecode.kernels.launch import Plan, decode, run_plan
from flexdecode.mod_text import Flavour
from flexdecode.plan import (
    Lists,
    choose_plan,
    device_of,
    is_invariant,
    length_bucket,
)
from flexdecode.problem import Problem, Request, Result
from flexdecode.quantized_tensor import QuantizedTensor
from flexdecode.tables import Tables
from flexdecode.trace import Traced

__all__ = ["Repeatable", "launches_of", "lay_out", "run"]


def run(request: Request) -> Result:
    """Run one attention call on the device of its tensors.

    Parameters
    ----------
    request : Request

    Returns
    -------
    Result
        ``out`` is contiguous ``[B, Hq, Lq, Dv]``; ``lse`` and ``max_scores`` are float32.

    Raises
    ------
    ValueError
        A kernel option that cannot work on this device.
    """
    q, call = request.q, _decode_call(request)
    if q.device.type == "cuda" and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            arguments = _launch(call, request)
    else:
        arguments = _launch(call, request)
    return Result(call.out, call.lse, call.max_scores, _repeatable(request, call, arguments))


def launches_of(request: Request) -> Sequence[Wanted]:
    """What `run` compiles for a request whose tables need not have been filled.

    None where the kernels read lists that are made from the tables.
    """
    problem, resolved = request.problem, request.resolved
    if resolved is None or is_invariant(request.options):
        return ()
    if resolved.tables.kv_num_blocks.shape[1] not in (1, problem.Hkv):
        return ()
    call = _decode_call(request)
    assert call.tables is not None
    config, _ = choose_plan(request, Lists.of(call.tables), device_of(problem.device))
    return launch.launches_of(call, config)


def _decode_call(request: Request) -> DecodeCall:
    problem, q, options = request.problem, request.q, request.options
    rows = (problem.q_batch, problem.Hq, problem.Lq)
    out = torch.empty((*rows, problem.Dv), dtype=problem.dtype, device=q.device)
    lse = max_scores = None
    if request.want_lse:
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    if request.want_max:
        max_scores = torch.empty(rows, dtype=torch.float32, device=q.device)
    packed = problem.packed
    resolved, bias, sinks = request.resolved, request.bias, request.sinks
    flavour = _flavour(problem, options.get("approx"))
    k, k_codes = lay_out("k", request.k)
    v, v_codes = lay_out("v", request.v)
    return DecodeCall(
        q=q.codes.view(torch.uint8) if isinstance(q, QuantizedTensor) else q,
        k=k,
        v=v,
        out=out,
        scale=problem.scale,
        kv_len=problem.kv_len,
        q_offset=problem.offset,
        kv_start=problem.kv_start,
        page_table=problem.page_table,
        tiles=None if packed is None else packed.tiles,
        BLOCK_Q=0 if packed is None else packed.BLOCK_Q,
        lse=lse,
        max_scores=max_scores,
        tables=None if resolved is None else _block_tables(resolved.tables, problem, options),
        score_mod=_mod(request.score, flavour, q.device),
        mask_mod=None if resolved is None else _mod(resolved.mask, flavour, q.device),
        bias=None if bias is None else bias.expand(*rows, problem.Lkv),
        sinks=None if sinks is None else sinks.contiguous(),
        tf32=bool(options.get("tf32", False)),
        k_codes=k_codes,
        v_codes=v_codes,
        q_format="e4m3" if isinstance(q, QuantizedTensor) else "",
        q_scale=_row_scales(q),
        assembly=device_of(problem.device).cuda,
        fp8_rows=device_of(problem.device).fp8_rows,
        partial_dtype=options.get("partial_dtype", torch.float32),
    )


_BROUGHT = ("q", "k", "v", "out", "lse", "max_scores", "scratch")


class Repeatable:
    """Runs calls that differ from an earlier one in their tensors alone, not in any shape."""

    def __init__(
        self, request: Request, out: Tensor, arguments: Arguments, mods: list[Any]
    ) -> None:
        self.arguments = arguments
        arguments.forget(_BROUGHT)  # it must not stay alive until the next call
        self.mods = mods
        self.shape, self.strides = tuple(out.shape), out.stride()
        self.rows = self.shape[:3]
        self.dtype, self.device = out.dtype, out.device
        self.want_lse, self.want_max = request.want_lse, request.want_max

    def __call__(self, tensors: dict[str, Tensor]) -> Result | None:
        """Run a call; None where a tensor that a mod captures has another layout now.

        Parameters
        ----------
        tensors : dict of str to Tensor
            ``q``, ``k``, ``v``, and those of ``kv_len``, ``kv_start``, ``page_table`` and
            ``sinks`` that are not as in the first call.
        """
        for traced, flavour, args in self.mods:
            if lower(traced, flavour)[1] is not args:
                return None
        # In less time than `torch.empty` takes for several dims.
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        tensors = {**tensors, "out": out}
        lse = max_scores = None
        if self.want_lse:
            lse = torch.empty(self.rows, dtype=torch.float32, device=self.device)
            tensors["lse"] = lse
        if self.want_max:
            max_scores = torch.empty(self.rows, dtype=torch.float32, device=self.device)
            tensors["max_scores"] = max_scores
        self.arguments.launch_with(tensors)
        return Result(out, lse, max_scores)


def _repeatable(
    request: Request, call: DecodeCall, arguments: Arguments | None
) -> Repeatable | None:
    problem = request.problem
    if arguments is None or problem.packed is not None or request.bias is not None:
        return None
    if call.k_codes is not None or call.v_codes is not None or call.q_format:
        return None
    if request.sinks is not call.sinks or call.k is not request.k:
        return None
    if request.resolved is not None and call.tables is not None:
        own = request.resolved.tables
        momentary = own.states is None or is_invariant(request.options)
        if momentary or is_capturing(problem.device):
            if call.tables.kv_indices is not own.kv_indices:
                return None  # made from the tables, which may change in place
    rules = [request.score, None if request.resolved is None else request.resolved.mask]
    flavour = _flavour(problem, request.options.get("approx"))
    mods: list[Any] = []
    for traced in rules:
        if traced is not None:
            if captures_moved(traced, problem.device) is not traced:
                return None  # copied at every call
            mods.append((traced, flavour, lower(traced, flavour)[1]))
    return Repeatable(request, call.out, arguments, mods)


# Plans by what they depend on; a cache that grows by `torch.cat` has a new shape at every step.
_plans: dict[tuple[Any, ...], Plan] = {}
_MAX_PLANS = 1024
_FAR = (1 << 31) - 1


def _launch(call: DecodeCall, request: Request) -> Arguments | None:
    """Find or make the plan of `call`, and run it."""
    key = _signature(call, request.options)
    plan = _plans.get(key)
    if plan is not None:
        return run_plan(plan, call)
    _check_columns(request)
    lists = None if call.tables is None else Lists.of(call.tables)
    config, _ = choose_plan(request, lists, device_of(request.problem.device))
    plan, arguments = decode(call, config)
    if len(_plans) >= _MAX_PLANS:
        _plans.pop(next(iter(_plans)))
    _plans[key] = plan
    return arguments


def _check_columns(request: Request) -> None:
    """Raise where kernels could not count from one end of a row to the other in 32 bits."""
    for name, x in (("q", request.q), ("k", request.k), ("v", request.v)):
        if isinstance(x, Tensor) and x.shape[3] * abs(x.stride(3)) > _FAR:
            raise ValueError(
                f"{name}: expected elements of a row less than 2**31 apart on the triton backend, "
                f"got a stride of {x.stride(3)} for {x.shape[3]} columns; use {name}.contiguous()"
            )


def _signature(call: DecodeCall, options: dict[str, Any]) -> tuple[Any, ...]:
    """All that a plan depends on: shapes, strides and kinds, never addresses or values.

    One thing of addresses: whether values may be columns of the keys.
    """
    q, k, v, bias, tables = call.q, call.k, call.v, call.bias, call.tables
    kv_len = call.kv_len
    return (
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        q.device,
        None if bias is None else bias.stride(),
        None if call.score_mod is None else call.score_mod.fn,
        None if call.mask_mod is None else call.mask_mod.fn,
        length_bucket(kv_len) if type(kv_len) is int else None,
        k.data_ptr() == v.data_ptr(),
        call.q_offset is None,
        call.kv_start is None,
        None if call.page_table is None else call.page_table.shape,
        None if call.tiles is None else (call.tiles.shape, call.BLOCK_Q),
        None if tables is None else tables.signature(),
        None if call.k_codes is None else call.k_codes.signature(),
        None if call.v_codes is None else call.v_codes.signature(),
        None if call.q_scale is None else call.q_scale.stride(),
        call.tf32,
        tuple(options.items()) if options else None,
        choices.generation,
    )


def _mod(traced: Traced | None, flavour: Flavour, device: torch.device) -> Mod | None:
    if traced is None:
        return None
    return Mod(*lower(captures_moved(traced, device), flavour))


def lay_out(name: str, x: Tensor | QuantizedTensor) -> tuple[Tensor, Codes | None]:
    """Lay out k or v for the kernels: 16-bit units where it is quantised."""
    if not isinstance(x, QuantizedTensor):
        return x, None
    found: tuple[Tensor, Codes] | None = x.kept.get("units")
    if found is not None:
        return found
    rows = x.data if x.layout == "interleaved" else x.codes
    if rows.element_size() == 1 and (x.shape[3] % 2 or any(x.stride(i) % 2 for i in range(3))):
        raise ValueError(
            f"{name}: expected an even head dim and even strides for {x.format} on the triton "
            f"backend, got shape {list(x.shape)}, strides {[x.stride(i) for i in range(3)]}"
        )
    format = format_of_codes(str(x.format), x.layout)
    beside = x.coefficients
    kind = ""
    if beside is not None:
        kind = "words" if beside.dtype == torch.int32 else "scales" if x.by_row else "head"
    made = rows.view(torch.int16), Codes(format, kind, x.groups, beside)
    x.kept["units"] = made
    return made


def _row_scales(q: Tensor | QuantizedTensor) -> Tensor | None:
    if not isinstance(q, QuantizedTensor) or q.coefficients is None:
        return None
    return q.coefficients[..., 0]


def _flavour(problem: Problem, approx: bool | None) -> Flavour:
    """Hardware approximations serve 16-bit inputs, whose rounding hides them, and who asks."""
    if problem.device.type != "cuda":
        return "interpret"
    if torch.version.hip is not None:
        return "hip"
    fast = problem.dtype != torch.float32 if approx is None else approx
    return "cuda_fast" if fast else "cuda"


def _block_tables(tables: Tables, problem: Problem, options: dict[str, Any]) -> BlockTables:
    """Lay out tables for the kernels; once, where the library built them to serve many calls."""
    if is_invariant(options):
        return _ordered(tables, problem)
    by_head = tables.kv_num_blocks.shape[1] not in (1, problem.Hkv)
    if tables.states is None:  # given ones may change in place between two calls
        return _united(tables, problem) if by_head else _plain(tables)
    key = (problem.Hkv if by_head else 0, tables.exact)
    found: BlockTables | None = tables.laid_out.get(key)
    if found is None:
        found = _united(tables, problem) if by_head else _plain(tables)
        if not is_capturing(problem.device):
            tables.laid_out[key] = found
    return found


def _ordered(tables: Tables, problem: Problem) -> BlockTables:
    """One ascending list for each row, of all blocks that a head of its group lists."""
    tables = _with_width(tables, problem)
    lists = order_lists(tables, problem.Hkv)
    state = lists.state
    if state.shape[1] == 1:
        state = state.expand(-1, problem.Hq, -1, -1).contiguous()
    elif state.shape[1] == problem.Hkv:
        state = state.repeat_interleave(problem.G, 1)
    return BlockTables(
        lists.kv_num_blocks,
        lists.kv_indices,
        None,
        None,
        tables.BLOCK_SIZE,
        False,
        state,
        given=tables.states is None,
    )


def _with_width(tables: Tables, problem: Problem) -> Tables:
    if tables.num_kv_blocks >= 0:
        return tables
    return dataclasses.replace(tables, num_kv_blocks=-(-problem.Lkv // tables.BLOCK_SIZE[1]))


def _united(tables: Tables, problem: Problem) -> BlockTables:
    tables = _with_width(tables, problem)
    union = unite_heads(tables, problem.Hkv)
    return BlockTables(
        union.kv_num_blocks,
        union.kv_indices,
        union.full_kv_num_blocks,
        union.full_kv_indices,
        tables.BLOCK_SIZE,
        tables.exact,
        union.state,
        given=tables.states is None,
    )


def _plain(tables: Tables) -> BlockTables:
    full_num, full = tables.full_kv_num_blocks, tables.full_kv_indices
    return BlockTables(
        tables.kv_num_blocks.contiguous(),
        tables.kv_indices.contiguous(),
        None if full_num is None else full_num.contiguous(),
        None if full is None else full.contiguous(),
        tables.BLOCK_SIZE,
        tables.exact,
        given=tables.states is None,
    )
