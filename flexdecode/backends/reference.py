"""The specification as code: dense, float64, one formula; every other backend is tested against it.

Predicates are evaluated for every (query, key) pair. Tables matter only where they are
authoritative (fixed masks); they are then spread out to a dense membership.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flexdecode.caches import Cache
from flexdecode.evaluate import evaluate
from flexdecode.packed import run_by_runs
from flexdecode.problem import Problem, Request, Result
from flexdecode.quantization import as_tensor
from flexdecode.quantized_tensor import QuantizedTensor

__all__ = ["run"]

_MAX_SCORES = 1 << 23  # elements of one dense chunk: 64 MiB of float64


def run(request: Request) -> Result:
    """Compute a call densely in float64.

    Parameters
    ----------
    request : Request

    Returns
    -------
    Result
        ``out`` in the dtype of q; ``lse`` and ``max_scores`` in float64.
    """
    problem = request.problem
    if isinstance(request.q, QuantizedTensor):
        request = dataclasses.replace(request, q=as_tensor(request.q, torch.float64))
    if problem.packed is not None:
        return run_by_runs(request, run)
    B, Hq, Lq = problem.B, problem.Hq, problem.Lq
    shape = (B, Hq, Lq)
    out = torch.zeros(*shape, problem.Dv, dtype=problem.dtype, device=problem.device)
    lse = torch.full(shape, -torch.inf, dtype=torch.float64, device=problem.device)
    top = torch.full_like(lse, -torch.inf)
    rows = max(1, _MAX_SCORES // max(1, Hq * problem.Lkv))  # query rows at a time
    step_b, step_q = max(1, rows // max(1, Lq)), min(max(1, Lq), rows)
    with torch.autocast(problem.device.type, enabled=False):
        for b in range(0, B, step_b):
            for i in range(0, Lq, step_q):
                part = slice(b, min(b + step_b, B)), slice(i, min(i + step_q, Lq))
                chunk_out, chunk_lse, chunk_top = _dense(request, *part)
                out[part[0], :, part[1]] = chunk_out.to(problem.dtype)
                lse[part[0], :, part[1]] = chunk_lse
                top[part[0], :, part[1]] = chunk_top
    return Result(out, lse if request.want_lse else None, top if request.want_max else None)


def _dense(request: Request, batch: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    problem = request.problem
    device = problem.device
    n, Lq = batch.stop - batch.start, rows.stop - rows.start
    q = as_tensor(request.q)[batch, :, rows].double()  # [n, Hq, Lq, D]
    k, v = (
        Cache.of(x, problem, torch.float64).logical(batch, problem.Lkv).double()
        for x in (request.k, request.v)
    )
    k = k.repeat_interleave(problem.G, dim=1)  # [n or 1, Hq, Lkv, D]
    v = v.repeat_interleave(problem.G, dim=1)  # [n or 1, Hq, Lkv, Dv]

    b = torch.arange(batch.start, batch.stop, device=device).view(n, 1, 1, 1)
    h = torch.arange(problem.Hq, device=device).view(1, problem.Hq, 1, 1)
    i = torch.arange(rows.start, rows.stop, device=device).view(1, 1, Lq, 1)
    q_idx = problem.q_offset_rows()[batch].view(n, 1, 1, 1) + i
    kv_idx = torch.arange(problem.Lkv, device=device).view(1, 1, 1, problem.Lkv)
    shape = (n, problem.Hq, Lq, problem.Lkv)

    score = problem.scale * (q @ k.transpose(-1, -2))
    if request.bias is not None:
        bias = request.bias if request.bias.shape[0] == 1 else request.bias[batch]
        score = score + bias[:, :, rows].double()
    if request.score is not None:
        seen_b = b + problem.first_b
        score = evaluate(
            request.score, seen_b, h, q_idx, kv_idx, score, float_dtype=torch.float64
        ).expand(shape)

    allowed = _allowed(request, b, h, q_idx, kv_idx, rows).expand(shape)
    score = score.masked_fill(~allowed, -torch.inf)
    if problem.Lkv == 0:
        top = score.new_full(shape[:3], -torch.inf)
    else:
        top = score.amax(-1)
    base = top
    if request.sinks is not None:
        sinks = request.sinks.double().view(1, problem.Hq, 1)
        base = torch.maximum(top, sinks)
    base = base.masked_fill(base == -torch.inf, 0.0)
    weights = (score - base.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    if request.sinks is not None:
        total = total + (sinks - base).exp()
    lse = total.log() + base
    # A slot that no row of a KV head may see holds anything: it must not even meet a weight of 0.
    seen = allowed.reshape(n, problem.Hkv, problem.G * Lq, problem.Lkv).any(2)  # [n, Hkv, Lkv]
    seen = seen.repeat_interleave(problem.G, dim=1).unsqueeze(-1)
    v = torch.where(seen, v, 0.0)
    out = (weights @ v) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, lse, top


def _allowed(
    request: Request, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, rows: slice
) -> Tensor:
    problem, resolved = request.problem, request.resolved
    kv_len = problem.kv_len_rows()[b.flatten()].view(b.shape)
    inside = kv_idx < kv_len
    if resolved is None:
        return inside
    if resolved.mask is None:
        rule = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=problem.device)
    else:
        rule = evaluate(
            resolved.mask, b + problem.first_b, h, q_idx, kv_idx, float_dtype=torch.float64
        )
    if resolved.tables.exact:
        return rule & inside
    tables = resolved.tables
    block = kv_idx // tables.BLOCK_SIZE[1]
    crosses = (block + 1) * tables.BLOCK_SIZE[1] > kv_len
    partial = _members(tables.kv_num_blocks, tables.kv_indices, problem, tables.BLOCK_SIZE, b, rows)
    allowed = rule & partial
    if tables.full_kv_num_blocks is not None and tables.full_kv_indices is not None:
        full = _members(
            tables.full_kv_num_blocks,
            tables.full_kv_indices,
            problem,
            tables.BLOCK_SIZE,
            b,
            rows,
        )
        allowed = allowed | (full & (rule | ~crosses))
    return allowed & inside


def _members(
    count: Tensor,
    indices: Tensor,
    problem: Problem,
    block_size: tuple[int, int],
    b: Tensor,
    rows: slice,
) -> Tensor:
    """Spread a table's lists out to [n or 1, Hq, Lq, Lkv]: True where the key's block is listed."""
    size_q, size_kv = block_size
    blocks = -(-problem.Lkv // size_kv)
    valid = torch.arange(indices.shape[-1], device=count.device) < count.unsqueeze(-1)
    # Entries past the count are undefined; blocks past the cache exist in masks longer than it.
    where = torch.where(valid, indices.long(), blocks).clamp(0, blocks)
    listed = torch.zeros(*count.shape, blocks + 1, dtype=torch.bool, device=count.device)
    listed.scatter_(-1, where, True)
    i = torch.arange(rows.start, rows.stop, device=count.device)
    j = torch.arange(problem.Lkv, device=count.device)
    listed = listed[b.flatten()] if listed.shape[0] > 1 else listed
    if listed.shape[1] not in (1, problem.Hq):
        listed = listed.repeat_interleave(problem.Hq // listed.shape[1], dim=1)
    return listed[:, :, i // size_q][..., j // size_kv]
