"""The triton backend: prints the mods, lays out tables, chooses a configuration, launches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from flexdecode.codegen import Flavour, lower
from flexdecode.kernels import configs
from flexdecode.kernels.call import BlockTables, DecodeCall, Mod
from flexdecode.kernels.decode import decode
from flexdecode.problem import Problem, Request, Result
from flexdecode.tables import Tables, union_tables
from flexdecode.trace import Traced

__all__ = ["run"]

_TUNABLE = ("BLOCK_M", "BLOCK_N", "num_splits", "num_stages", "num_warps")


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
    problem, q, v = request.problem, request.q, request.v
    rows = (problem.B, problem.Hq, problem.Lq)
    out = torch.empty((*rows, problem.Dv), dtype=q.dtype, device=q.device)
    statistics = functools.partial(torch.empty, rows, dtype=torch.float32, device=q.device)
    lse = statistics() if request.want_lse else None
    max_scores = statistics() if request.want_max else None
    resolved = request.resolved
    tables = _block_tables(resolved.tables, problem) if resolved is not None else None
    flavour = _flavour(q, request.options.get("approx"))
    bias = request.bias
    call = DecodeCall(
        q=q,
        k=request.k,
        v=v,
        out=out,
        scale=problem.scale,
        kv_len=problem.kv_len,
        q_offset=problem.q_offset,
        lse=lse,
        max_scores=max_scores,
        tables=tables,
        score_mod=_mod(request.score, flavour),
        mask_mod=_mod(resolved.mask, flavour) if resolved is not None else None,
        bias=None if bias is None else bias.expand(*rows, problem.Lkv),
        sinks=None if request.sinks is None else request.sinks.contiguous(),
        tf32=bool(request.options.get("tf32", False)),
    )
    config = _config(problem, tables, request.k, request.options)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        _decode_within_limits(call, config)
    return Result(out, lse, max_scores)


# Configurations that a device turned out to be too small for, and what ran instead.
_fitting: dict[configs.DecodeConfig, configs.DecodeConfig] = {}


def _decode_within_limits(call: DecodeCall, config: configs.DecodeConfig) -> None:
    """Launch; where the compiler needed more shared memory than estimated, take smaller tiles."""
    asked, config = config, _fitting.get(config, config)
    while True:
        try:
            return decode(call, config)
        except OutOfResources:
            if config.num_stages > 1:
                config = dataclasses.replace(config, num_stages=config.num_stages - 1)
            elif config.BLOCK_N > configs.MIN_TILE:
                config = dataclasses.replace(config, BLOCK_N=config.BLOCK_N // 2)
            else:
                raise
            _fitting[asked] = config


def _mod(traced: Traced | None, flavour: Flavour) -> Mod | None:
    return None if traced is None else Mod(*lower(traced, flavour))


def _flavour(q: Tensor, approx: bool | None) -> Flavour:
    """Hardware approximations serve 16-bit inputs, whose rounding hides them, and who asks."""
    if not q.is_cuda:
        return "interpret"
    if torch.version.hip is not None:
        return "hip"
    fast = q.dtype != torch.float32 if approx is None else approx
    return "cuda_fast" if fast else "cuda"


def _block_tables(tables: Tables, problem: Problem) -> BlockTables:
    block_state = None
    if tables.kv_num_blocks.shape[1] not in (1, problem.Hkv):
        if tables.num_kv_blocks < 0:  # given tables of unknown width
            width = -(-problem.Lkv // tables.BLOCK_SIZE[1])
            tables = dataclasses.replace(tables, num_kv_blocks=width)
        tables, block_state = union_tables(tables, problem.Hkv)
    full_num, full = tables.full_kv_num_blocks, tables.full_kv_indices
    return BlockTables(
        kv_num_blocks=tables.kv_num_blocks.contiguous(),
        kv_indices=tables.kv_indices.contiguous(),
        full_kv_num_blocks=None if full_num is None else full_num.contiguous(),
        full_kv_indices=None if full is None else full.contiguous(),
        BLOCK_SIZE=tables.BLOCK_SIZE,
        exact=tables.exact,
        block_state=block_state,
    )


def _config(
    problem: Problem, tables: BlockTables | None, k: Tensor, options: dict[str, Any]
) -> configs.DecodeConfig:
    block_q, kv_block = tables.BLOCK_SIZE if tables is not None else (None, None)
    lists = problem.B if isinstance(problem.kv_len, Tensor) else 1
    if tables is not None:
        B, heads, nQ = tables.kv_num_blocks.shape
        # A shared list is clipped nowhere, so its rows are alike; but they are numbered one by one.
        lists = problem.B * heads * nQ if max(B, heads, nQ) > 1 else 1
    keys = problem.Lkv if isinstance(problem.kv_len, Tensor) else problem.kv_len
    if tables is not None and tables.full_kv_indices is not None:
        columns = tables.kv_indices.shape[3] + tables.full_kv_indices.shape[3]
        keys = min(keys, columns * tables.BLOCK_SIZE[1])
    return _choose(
        problem.B,
        problem.Hkv,
        problem.G,
        problem.Lq,
        problem.D,
        problem.Dv,
        k.element_size(),
        configs.next_power_of_2(max(keys, 1)),
        _device(k.device),
        block_q,
        kv_block,
        lists,
        tuple((name, options[name]) for name in _TUNABLE if name in options),
    )


@functools.lru_cache(maxsize=4096)
def _choose(
    B: int,
    Hkv: int,
    G: int,
    Lq: int,
    D: int,
    Dv: int,
    itemsize: int,
    keys: int,
    device: configs.Device,
    BLOCK_Q: int | None,
    KV_BLOCK: int | None,
    lists: int,
    options: tuple[tuple[str, int], ...],
) -> configs.DecodeConfig:
    return configs.choose_config(
        B=B,
        Hkv=Hkv,
        G=G,
        Lq=Lq,
        D=D,
        Dv=Dv,
        itemsize=itemsize,
        keys=keys,
        device=device,
        BLOCK_Q=BLOCK_Q,
        KV_BLOCK=KV_BLOCK,
        lists=lists,
        options=dict(options),
    )


@functools.cache
def _device(device: torch.device) -> configs.Device:
    if device.type != "cuda":
        return configs.INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    hopper = torch.version.hip is None and properties.major >= 9
    return configs.Device(properties.multi_processor_count, shared, pdl=hopper)
