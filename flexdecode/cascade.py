"""Cascade attention: keys that several sequences share are read once for all of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode import checks
from flexdecode.api import AuxOutput, AuxRequest, attention
from flexdecode.cascade_calls import Arguments, SharedPrefix, decide, make_calls
from flexdecode.explanation import Explanation, explain
from flexdecode.merging import merge_attentions

if TYPE_CHECKING:
    from flexdecode.block_mask import BlockMask
    from flexdecode.mods import ScoreMod

__all__ = ["CascadeExplanation", "SharedPrefix", "cascade_attention", "explain_cascade"]


@dataclass(frozen=True, eq=False)
class CascadeExplanation:
    """What `cascade_attention` does with some arguments; made by `explain_cascade`.

    Attributes
    ----------
    cascades : bool
        False where one plain call does the work.
    reason : str
    saved, cost : int, bytes
        What is not read a second time, and what partial results and further launches cost, a
        launch counted as the bytes that could move meanwhile.
    calls : tuple of (str, Explanation)
        Every call of `attention`: its name and what it does.
    """

    cascades: bool
    reason: str
    saved: int
    cost: int
    calls: tuple[tuple[str, Explanation], ...]

    def __str__(self) -> str:
        lines = [f"cascade    {'yes' if self.cascades else 'no'}: {self.reason}"]
        for name, report in self.calls:
            lines += ["", f"-- {name} --", str(report)]
        return "\n".join(lines)


def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prefixes: Sequence[SharedPrefix] | None = None,
    prefix_len: int | None = None,
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
    cascade: bool | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attend as `attention` does, but read the keys that sequences share once for all of them.

    The queries of all sequences of a node become rows of one taller query tile, so that the node's
    keys and values are read once and not once for each sequence; the results over prefixes and
    over the sequences' own keys meet in one merge, with the sinks [1]_. Rules see what they would
    see in a plain call: the sequence ``b``, the query head, and positions in the whole sequence,
    prefixes first.

    Say what is shared in one of two ways:

    - `prefix_len`: the first `prefix_len` keys of `k` and `v` are the same for all sequences.
      ``kv_len``, ``q_offset``, ``page_table`` and ``bias`` are those of the plain call, which is
      made where the cascade would not pay (`cascade`).
    - `prefixes`: the levels of a prefix tree, root first, with keys of their own. A sequence is
      its node of each level, then its keys in `k` and `v`, of which ``kv_len`` counts the valid
      ones; ``q_offset`` and ``bias`` count the prefixes too.

    Parameters
    ----------
    q : Tensor, [B, Hq, Lq, D], or [1, Hq, total_q, D] with `cu_seqlens_q`
    k, v : Tensor
        As in `attention`: whole sequences with `prefix_len`, else what follows the prefixes.
    prefixes : sequence of SharedPrefix, optional
    prefix_len : int, tokens, optional
        At most the shortest ``kv_len``: a sequence that is shorter would see keys beyond its end.
    block_mask : BlockMask, optional
        A rule over whole sequences: `create_block_mask` with or without sizes.
    bias : Tensor, [B or 1, Hq or 1, Lq, L], optional
        ``L`` covers the whole sequence, prefixes included. Not with `cu_seqlens_q`.
    cascade : bool, optional
        True or False decides between cascade and plain call, which only `prefix_len` offers.
        Default: what fewer bytes and launches suggest; `explain_cascade` prints the sum.
    score_mod, scale, kv_len, kv_start, q_offset, page_table, cu_seqlens_q, sinks, return_aux,\
    backend, kernel_options
        As in `attention`.

    Returns
    -------
    out : Tensor, [B, Hq, Lq, Dv], dtype of q
    aux : AuxOutput
        Only with `return_aux`.

    Raises
    ------
    ValueError, TypeError
        As `attention`, or: neither or both of `prefixes` and `prefix_len` are given, a node does
        not exist, or the mask is not a rule (fixed, bound).

    See Also
    --------
    explain_cascade : What this would do and why.
    merge_attentions : The merge alone.

    Notes
    -----
    Lengths are data, as everywhere; the shape of the tree (`node`) is not.

    References
    ----------
    .. [1] Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch
       Decoding", 2024; J. Juravsky et al., "Hydragen", arXiv:2402.05099, 2024.

    Examples
    --------
    Four sequences that go on after 300 common keys, with 20 keys of their own:

    >>> import torch
    >>> from flexdecode import SharedPrefix, attention, cascade_attention
    >>> q = torch.randn(4, 8, 1, 64)
    >>> system_k, system_v = torch.randn(2, 1, 2, 300, 64)
    >>> k, v = torch.randn(2, 4, 2, 20, 64)
    >>> out = cascade_attention(q, k, v, prefixes=[SharedPrefix(system_k, system_v)])
    >>> whole_k = torch.cat([system_k.expand(4, -1, -1, -1), k], 2)
    >>> whole_v = torch.cat([system_v.expand(4, -1, -1, -1), v], 2)
    >>> torch.allclose(out, attention(q, whole_k, whole_v), atol=1e-6)
    True

    The same where every cache holds the common keys:

    >>> out = cascade_attention(q, whole_k, whole_v, prefix_len=300)
    >>> torch.allclose(out, attention(q, whole_k, whole_v), atol=1e-6)
    True
    """
    arguments = Arguments(
        q,
        k,
        v,
        score_mod,
        block_mask,
        scale,
        kv_len,
        kv_start,
        q_offset,
        page_table,
        cu_seqlens_q,
        bias,
        backend,
        kernel_options,
    )
    decision = decide(arguments, prefixes, prefix_len, cascade)
    want_max = return_aux is not None and return_aux.max_scores
    if not decision.cascades:
        return attention(q, k, v, **arguments.plain(), sinks=sinks, return_aux=return_aux)
    if sinks is not None:
        sinks = checks.check_sinks(sinks, q.shape[1], q.device)
    aux = AuxRequest(lse=True, max_scores=want_max)
    outs, lses, greatest = [], [], None
    for call in make_calls(arguments, prefixes, prefix_len):
        out, found = attention(call.q, call.k, call.v, **call.options, return_aux=aux)
        outs.append(call.packing.unpack(out))
        lses.append(call.packing.unpack(found.lse))
        if want_max:
            here = call.packing.unpack(found.max_scores)
            greatest = here if greatest is None else torch.maximum(greatest, here)
    merged = {"auto": "auto", "triton": "triton"}.get(backend, "torch")
    out, lse = merge_attentions(outs, lses, sinks, backend=merged)
    if return_aux is None:
        return out
    return out, AuxOutput(lse if return_aux.lse else None, greatest)


def explain_cascade(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prefixes: Sequence[SharedPrefix] | None = None,
    prefix_len: int | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    kv_len: int | Tensor | None = None,
    kv_start: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
    cascade: bool | None = None,
    device_name: str | None = None,
) -> CascadeExplanation:
    """Say whether `cascade_attention` would cascade, why, and what each of its calls would do.

    Parameters
    ----------
    q, k, v, prefixes, prefix_len, score_mod, block_mask, scale, kv_len, kv_start, q_offset,\
    page_table, cu_seqlens_q, bias, backend, kernel_options, cascade
        As `cascade_attention` takes them.
    device_name : str, optional
        As in `explain`.

    Returns
    -------
    CascadeExplanation

    Examples
    --------
    >>> import torch
    >>> from flexdecode import explain_cascade
    >>> q, (k, v) = torch.randn(4, 8, 1, 64), torch.randn(2, 4, 2, 320, 64)
    >>> print(explain_cascade(q, k, v, prefix_len=300, device_name="H200").reason)
    the first 300 keys would be read once instead of 4 times: saves 921,600 bytes, costs 40,033,280
    """
    arguments = Arguments(
        q,
        k,
        v,
        score_mod,
        block_mask,
        scale,
        kv_len,
        kv_start,
        q_offset,
        page_table,
        cu_seqlens_q,
        bias,
        backend,
        kernel_options,
    )
    decision = decide(arguments, prefixes, prefix_len, cascade)
    report = functools.partial(explain, device_name=device_name)
    if decision.cascades:
        calls = tuple(
            (call.name, report(call.q, call.k, call.v, **call.options))
            for call in make_calls(arguments, prefixes, prefix_len)
        )
    else:
        calls = (("plain call", report(q, k, v, **arguments.plain())),)
    return CascadeExplanation(
        decision.cascades, decision.reason, decision.saved, decision.cost, calls
    )
