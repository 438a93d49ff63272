"""Attention over a cache whose keys are spread over ranks: context parallelism for decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flexdecode import api, checks
from flexdecode.api import AuxOutput, AuxRequest
from flexdecode.block_mask import BlockMask
from flexdecode.exchange import check_ranks, exchange, rank_of
from flexdecode.merging import merge_attentions
from flexdecode.placement import (
    Interleaved,
    Place,
    check_rule,
    local_lengths,
    place_of,
    placed_mask,
    placed_score,
)

if TYPE_CHECKING:
    from flexdecode.bound_mask import BoundMask
    from flexdecode.mods import ScoreMod
    from flexdecode.quantized_tensor import QuantizedTensor

__all__ = ["Interleaved", "attention", "bind", "locate"]

_MAX_SCORES = 16  # score rules whose wrapped form a bound mask keeps


@dataclass(frozen=True, eq=False)
class _Shard:
    """Where the keys of a bound mask are, and score rules that were wrapped for them."""

    place: Place
    scores: dict[int, tuple[ScoreMod, ScoreMod]] = field(default_factory=dict)

    def wrap(self, score_mod: ScoreMod) -> ScoreMod:
        """Return the same wrapped rule for the same rule, so that repeated calls are recognised."""
        found = self.scores.get(id(score_mod))
        if found is None or found[0] is not score_mod:
            found = score_mod, placed_score(score_mod, self.place)
            self.scores[id(score_mod)] = found
            while len(self.scores) > _MAX_SCORES:
                del self.scores[next(iter(self.scores))]
        return found[1]


_bound: WeakKeyDictionary[BlockMask, _Shard] = WeakKeyDictionary()


def attention(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    *,
    group: dist.ProcessGroup | None = None,
    kv_position: int | Tensor | Interleaved | Place | None = None,
    scatter_heads: bool = False,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    kv_len: int | Tensor | None = None,
    kv_start: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attend as `flexdecode.attention` does, to keys that are spread over the ranks of a group.

    Every rank holds the same queries and its own keys. It attends to those without sinks; outputs
    and LSE of all ranks then travel once, and each rank merges them, with the sinks [1]_. Rules see
    positions in the whole sequence on every rank.

    A collective operation: all ranks of the group call it, with arguments that differ only in the
    keys and what describes them (`k`, `v`, `kv_len`, `kv_start`, `kv_position`, `page_table`,
    `bias`).

    Parameters
    ----------
    q : Tensor, [B, Hq, Lq, D], or [1, Hq, total_q, D] with `cu_seqlens_q`
        The same on all ranks.
    k, v : Tensor or QuantizedTensor
        This rank's keys and values, as in `flexdecode.attention`. A rank may have none.
    group : torch.distributed.ProcessGroup, default all ranks
        NCCL for tensors on GPUs, gloo on CPUs.
    kv_position : optional
        Positions of this rank's keys in their sequences:

        - None: shards follow one another in the order of ranks;
        - int or Tensor [B], int32 or int64: position of the first key, others follow;
        - `Interleaved`: dealt out in turn;
        - callable ``(b, slot) -> position``: anything else, traced as a rule is; ``slot`` counts
          this rank's keys of sequence ``b`` from 0.

        Only rules ask for it.
    scatter_heads : bool, default False
        Return to each rank its own ``Hq / ranks`` heads, in the order of ranks, which takes
        ``1 / ranks`` of the traffic.
    block_mask : BlockMask, optional
        A rule over whole sequences, `create_block_mask` with or without sizes, or what `bind`
        returned.
    score_mod : callable (score, b, h, q_idx, kv_idx) -> score, optional
        Over whole sequences.
    kv_len : int or Tensor [B], tokens; default all of k
        Valid keys *of this rank*; `Interleaved.local_len` turns whole lengths into it.
    q_offset : int or Tensor [B], tokens
        Position of the first query row in the whole sequence. Default: the last query sits on the
        last key of the whole sequence.
    bias : Tensor, [B or 1, Hq or 1, Lq, Lkv]
        Columns of this rank's keys.
    sinks : Tensor, [Hq], floating point
        The same on all ranks, of all heads; join each row once.
    scale, kv_start, page_table, cu_seqlens_q, return_aux, backend, kernel_options
        As in `flexdecode.attention`; `kv_start` and `page_table` are this rank's own.

    Returns
    -------
    out : Tensor, [B, Hq, Lq, Dv], dtype of q
        Equal on all ranks, bit for bit. ``Hq / ranks`` heads with `scatter_heads`.
    aux : AuxOutput
        Only with `return_aux`; of the whole sequence, equal on all ranks, heads as in `out`.

    Raises
    ------
    ValueError
        No process group is initialised, this rank is not in `group`, the mask is not a rule, or as
        `flexdecode.attention`. What one rank alone finds leaves the others waiting for it. Under
        ``FLEXDECODE_CHECK=1`` also, on all ranks, where they were called differently.
    TypeError
        As `flexdecode.attention`.

    See Also
    --------
    bind : Build the tables once for each token, for use in every layer.
    locate : Positions of shards that follow one another, once for each token.
    flexdecode.merge_attentions : The merge alone.

    Notes
    -----
    One collective of ``B * Hq * Lq`` rows: ``Dv`` numbers in the dtype of `out`, a float32 LSE, and
    a float32 maximum where it is asked for. With rules and neither `q_offset` nor a bound mask, or
    with rules and no `kv_position`, a collective of ``B`` lengths comes first. Nothing waits for
    the device, so that a CUDA graph can capture the call where the group's backend can be captured.

    References
    ----------
    .. [1] V. Shyam et al., "Tree Attention: Topology-aware Decoding for Long-Context Attention on
       GPU clusters", arXiv:2408.04093, 2024.

    Examples
    --------
    A group of one; more ranks differ in nothing but the keys they pass:

    >>> import torch
    >>> import torch.distributed as dist
    >>> import flexdecode
    >>> from flexdecode.distributed import attention
    >>> from flexdecode.masks import sliding_window
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, (k, v) = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 2, 300, 64)
    >>> mask = flexdecode.create_block_mask(sliding_window(100))
    >>> out = attention(q, k, v, block_mask=mask)
    >>> torch.equal(out, flexdecode.attention(q, k, v, block_mask=mask))
    True
    >>> dist.destroy_process_group()
    """
    rank, ranks = rank_of(group)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "dim") or x.dim() != 4:
            got = list(x.shape) if hasattr(x, "dim") else type(x).__name__
            raise ValueError(f"{name}: expected [batch, heads, length, head dim], got {got}")
    Hq = q.shape[1]
    if scatter_heads and Hq % ranks:
        raise ValueError(f"scatter_heads: expected heads in {ranks} equal parts, got {Hq} heads")
    if sinks is not None:
        sinks = checks.check_sinks(sinks, Hq, q.device)
    if return_aux is not None:
        checks.check_return_aux(return_aux)
    want_max = return_aux is not None and bool(return_aux.max_scores)

    shard = _bound.get(block_mask) if isinstance(block_mask, BlockMask) else None
    ruled = shard is None and (score_mod is not None or block_mask is not None)
    if ruled:
        check_rule(block_mask, q_offset)
    if ruled and block_mask is not None and block_mask.q_offset is not None:
        q_offset = block_mask.q_offset
    gathers = ruled and (kv_position is None or q_offset is None)
    if checks.is_checking():
        check_ranks(group, ranks, q, v, max_scores=want_max, gathers=gathers, heads=scatter_heads)
    if shard is not None:
        if kv_position is not None:
            raise ValueError(
                "kv_position: expected None, the block_mask is bound to one; leave it out"
            )
        score_mod = None if score_mod is None else shard.wrap(score_mod)
    elif ruled:
        B = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        if gathers:
            lengths = local_lengths(q, k, B, kv_len, kv_start, page_table)
            first, total = locate(lengths, group=group)
            if kv_position is None:
                kv_position = first
            if q_offset is None:
                q_offset = total - (q.shape[2] if cu_seqlens_q is None else cu_seqlens_q.diff())
        assert kv_position is not None
        place = place_of(kv_position, rank, ranks, B, q.device)
        if score_mod is not None:
            score_mod = placed_score(score_mod, place)
        if block_mask is not None:
            block_mask = placed_mask(block_mask, place)

    alone = ranks == 1
    found = api.attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        kv_len=kv_len,
        kv_start=kv_start,
        q_offset=q_offset,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        bias=bias,
        sinks=sinks if alone else None,
        return_aux=return_aux if alone else AuxRequest(lse=True, max_scores=want_max),
        backend=backend,
        kernel_options=kernel_options,
    )
    if alone:
        return found
    out, aux = found
    parts = [x for x in (out, aux.lse, aux.max_scores) if x is not None]
    if scatter_heads:
        own = Hq // ranks
        parts = [x.reshape(x.shape[0], ranks, own, *x.shape[2:]).movedim(1, 0) for x in parts]
        sinks = None if sinks is None else sinks.reshape(ranks, own)[rank]
    else:
        parts = [x[None] for x in parts]
    outs, lses, *maxima = exchange(parts, ranks, group)
    merged = {"auto": "auto", "triton": "triton"}.get(backend, "torch")
    out, lse = merge_attentions(outs, lses, sinks, backend=merged)
    if return_aux is None:
        return out
    return out, AuxOutput(lse if return_aux.lse else None, maxima[0].amax(0) if maxima else None)


def bind(
    block_mask: BlockMask,
    kv_position: int | Tensor | Interleaved | Place,
    *,
    group: dist.ProcessGroup | None = None,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int | Tensor,
    q_offset: int | Tensor,
    **binding: Any,
) -> BoundMask:
    """Build the tables of this rank's keys in fixed buffers: once for each token, for all layers.

    Parameters
    ----------
    block_mask : BlockMask
        A rule over whole sequences.
    kv_position : int, Tensor [B], Interleaved or callable
        As `attention` takes it; a tensor is kept by reference.
    group : torch.distributed.ProcessGroup, default all ranks
    batch, heads, q_len : int
        Of q.
    kv_len : int or Tensor [batch], int32 or int64, tokens
        Valid keys of this rank; a tensor is kept by reference.
    q_offset : int or Tensor [batch], int32 or int64, tokens
        Position of the first row in the whole sequence; a tensor is kept by reference.
    **binding
        `kv_capacity` (required when `kv_len` is a tensor), `kv_start`, `page_table`,
        `cu_seqlens_q`, `device`, as in `BlockMask.bind`.

    Returns
    -------
    BoundMask
        For `attention` of this module, which takes `kv_position` from it for a `score_mod` too.
        Its ``update()`` works on this rank alone and communicates nothing.

    Raises
    ------
    ValueError, TypeError
        As `BlockMask.bind`, or the mask is not a rule.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from flexdecode import create_block_mask
    >>> from flexdecode.distributed import Interleaved, attention, bind
    >>> from flexdecode.masks import sliding_window
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> total, cards = torch.tensor([300, 40]), Interleaved(16)
    >>> kv_len, q_offset = cards.local_len(total), total - 1
    >>> step = bind(
    ...     create_block_mask(sliding_window(100)),
    ...     cards,
    ...     batch=2,
    ...     heads=8,
    ...     q_len=1,
    ...     kv_len=kv_len,
    ...     q_offset=q_offset,
    ...     kv_capacity=512,
    ... )
    >>> q, (k, v) = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 2, 512, 64)
    >>> attention(q, k, v, block_mask=step).shape
    torch.Size([2, 8, 1, 64])
    >>> dist.destroy_process_group()
    """
    rank, ranks = rank_of(group)
    if not isinstance(block_mask, BlockMask):
        checks.check_mask(block_mask)
        block_mask = BlockMask.from_torch(block_mask)
    check_rule(block_mask, q_offset)
    where = next((x.device for x in (kv_position, kv_len, q_offset) if isinstance(x, Tensor)), None)
    shard = _Shard(place_of(kv_position, rank, ranks, batch, where))
    mask = placed_mask(block_mask, shard.place).bind(
        batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, q_offset=q_offset, **binding
    )
    _bound[mask] = shard
    return mask


def locate(kv_len: Tensor, *, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Positions of shards that follow one another in the order of ranks. A collective operation.

    What `attention` finds out by itself in every call that does not say it:
    ``attention(..., kv_position=first, q_offset=total - Lq)`` has it from one call for all layers.

    Parameters
    ----------
    kv_len : Tensor [B], int32 or int64, tokens
        Valid keys of this rank.
    group : torch.distributed.ProcessGroup, default all ranks

    Returns
    -------
    first : Tensor [B], int64, tokens
        Position of this rank's first key.
    total : Tensor [B], int64, tokens
        Length of the whole sequences.

    Raises
    ------
    ValueError
        No process group is initialised, or this rank is not in `group`.
    """
    rank, ranks = rank_of(group)
    own = kv_len.to(torch.int64).contiguous()
    if ranks == 1:
        return torch.zeros_like(own), own
    (lengths,) = exchange([own[None]], ranks, group)
    return lengths[:rank].sum(0), lengths.sum(0)
