"""Query rows of several sequences packed into rows of the nodes they share, and rules for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Packing",
    "at_sequence",
    "pack_by_lengths",
    "pack_by_nodes",
    "packed_mask",
    "packed_score",
]

# (b of the call, its q_idx counted from 0) -> (sequence, row of that sequence)
Find = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Packing:
    """How the rows of one call belong to sequences.

    Attributes
    ----------
    pack : callable
        ``q`` of the sequences -> ``q`` of the call.
    unpack : callable
        A result of the call, [batch, Hq, rows, ...] -> the same of the sequences.
    find : callable (b, q_idx) -> (sequence, row)
        What the call's indices mean, for rules.
    of_sequences : callable
        A tensor with a value for each node -> one with a value for each sequence.
    cu_seqlens_q : Tensor or None
        Where each node's queries begin, if the call is packed.
    """

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Any], Any]
    find: Find
    of_sequences: Callable[[Tensor], Tensor]
    cu_seqlens_q: Tensor | None = None


def pack_by_lengths(q: Tensor, cu_seqlens_q: Tensor | None) -> Packing:
    """The packing of a call that leaves the queries where they are."""
    return Packing(_same, _same, _find_same, _same, cu_seqlens_q)


def pack_by_nodes(
    q: Tensor, nodes: tuple[int, ...], count: int, cu_seqlens_q: Tensor | None
) -> Packing:
    """Pack the queries of all sequences of a node into its rows.

    Parameters
    ----------
    q : Tensor, [B, Hq, Lq, D], or [1, Hq, total_q, D] with `cu_seqlens_q`
    nodes : tuple of B ints
        The node of each sequence.
    count : int
        Nodes, some of which may have no sequence.
    cu_seqlens_q : Tensor, [B + 1], int32, optional
        With it, sequences of a node must follow one another, in the order of nodes.
    """
    if cu_seqlens_q is not None:
        return _pack_ragged(q, nodes, count, cu_seqlens_q)
    B, Lq = len(nodes), q.shape[2]
    if count == 1:
        return Packing(
            lambda x: x.transpose(0, 1).reshape(1, x.shape[1], B * Lq, x.shape[3]),
            lambda x: x.reshape(x.shape[1], B, Lq, *x.shape[3:]).transpose(0, 1),
            _find_in_one(Lq),
            lambda lengths: lengths,
        )
    groups = _groups(nodes, count, q.device)
    if not groups.equal:
        return _pack_unequal(groups, count, B, Lq)
    each = B // count

    def pack(x: Tensor) -> Tensor:
        x = x if groups.in_order else x.index_select(0, groups.order)
        x = x.reshape(count, each, *x.shape[1:]).transpose(1, 2)
        return x.reshape(count, x.shape[1], each * Lq, x.shape[4])

    def unpack(x: Tensor) -> Tensor:
        x = x.reshape(count, x.shape[1], each, Lq, *x.shape[3:]).transpose(1, 2).flatten(0, 1)
        return x if groups.in_order else x.index_select(0, groups.places)

    return Packing(
        pack,
        unpack,
        _find_member(groups.order.view(count, each), Lq),
        lambda lengths: lengths.expand(count).index_select(0, groups.nodes),
    )


def _pack_unequal(groups: _Groups, count: int, B: int, Lq: int) -> Packing:
    """Nodes with more and fewer sequences: their rows follow one another, none is filled up."""
    cu_nodes = groups.firsts * Lq

    def pack(x: Tensor) -> Tensor:
        x = x if groups.in_order else x.index_select(0, groups.order)
        return x.transpose(0, 1).reshape(1, x.shape[1], B * Lq, x.shape[3])

    def unpack(x: Tensor) -> Tensor:
        x = x.reshape(x.shape[1], B, Lq, *x.shape[3:]).transpose(0, 1)
        return x if groups.in_order else x.index_select(0, groups.places)

    return Packing(
        pack,
        unpack,
        _find_in_row(groups.order, cu_nodes, Lq),
        lambda lengths: lengths.expand(count).index_select(0, groups.nodes),
        cu_nodes.to(torch.int32),
    )


def _pack_ragged(q: Tensor, nodes: tuple[int, ...], count: int, cu_seqlens_q: Tensor) -> Packing:
    if list(nodes) != sorted(nodes):
        raise ValueError(
            "prefixes: expected sequences in the order of their nodes beside cu_seqlens_q, got "
            f"node {list(nodes)}"
        )
    total = q.shape[2]
    rows = torch.arange(total, device=q.device)
    owner = torch.searchsorted(
        cu_seqlens_q[1:].contiguous(), rows.to(cu_seqlens_q.dtype), right=True
    )
    owner = owner.clamp(max=max(len(nodes) - 1, 0))  # rows past the last sequence belong to nobody
    groups = _groups(nodes, count, q.device)
    if count == 1:
        return Packing(_same, _same, _find_owner(owner, cu_seqlens_q), lambda lengths: lengths)
    cu_nodes = cu_seqlens_q.index_select(0, groups.firsts)
    return Packing(
        _same,
        _same,
        _find_owner_in_node(owner, cu_seqlens_q, cu_nodes),
        lambda lengths: lengths.expand(count).index_select(0, groups.nodes),
        cu_nodes,
    )


@dataclass(frozen=True, eq=False)
class _Groups:
    """The sequences of each node, on the device.

    Attributes
    ----------
    order : Tensor, [B], int64
        Sequences, sorted by node.
    places : Tensor, [B], int64
        Where each sequence stands in `order`.
    nodes : Tensor, [B], int64
        Node of each sequence.
    firsts : Tensor, [nodes + 1], int64
        Where each node begins in `order`.
    in_order : bool
        `order` counts 0, 1, 2, ...
    equal : bool
        All nodes have as many sequences.
    """

    order: Tensor
    places: Tensor
    nodes: Tensor
    firsts: Tensor
    in_order: bool
    equal: bool


@functools.lru_cache(maxsize=256)
def _groups(nodes: tuple[int, ...], count: int, device: torch.device) -> _Groups:
    """Sort the sequences by node. Cached, so that a captured graph copies nothing from the host."""
    order = sorted(range(len(nodes)), key=nodes.__getitem__)
    sizes = [nodes.count(node) for node in range(count)]
    firsts = [sum(sizes[:node]) for node in range(count + 1)]

    def tensor(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return _Groups(
        tensor(order),
        tensor(sorted(range(len(nodes)), key=order.__getitem__)),
        tensor(nodes),
        tensor(firsts),
        order == list(range(len(nodes))),
        len(set(sizes)) == 1,
    )


# -- rules: closures over numbers, tensors and functions only, so that their traces are found again


def at_sequence(value: int | Tensor, B: int) -> Callable[[Any], Any]:
    """A number for each sequence, or one for all, as a function of the sequence."""
    if not isinstance(value, Tensor):
        return lambda b: value
    column = value.reshape(-1).expand(B)
    return lambda b: column[b]


def packed_mask(
    mask: Callable[..., Any], find: Find, first: Callable[[Any], Any], begin: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Make of a rule over sequences one over the call's rows and keys.

    Parameters
    ----------
    mask : callable (b, h, q_idx, kv_idx) -> bool
    find : callable (b, q_idx) -> (sequence, row)
    first, begin : callable (sequence) -> position
        Of the sequence's first query, and of the call's first key.
    """

    def packed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        sequence, row = find(b, q_idx)
        return mask(sequence, h, first(sequence) + row, begin(sequence) + kv_idx)

    return packed


def packed_score(
    score_mod: Callable[..., Any] | None,
    bias: Tensor | None,
    find: Find,
    first: Callable[[Any], Any],
    begin: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Make of a score rule and a bias [B, Hq, Lq, keys] one rule over the call's rows and keys."""

    def ruled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        sequence, row = find(b, q_idx)
        assert score_mod is not None
        return score_mod(score, sequence, h, first(sequence) + row, begin(sequence) + kv_idx)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        sequence, row = find(b, q_idx)
        assert bias is not None
        return score + bias[sequence, h, row, begin(sequence) + kv_idx]

    def both(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ruled(biased(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return ruled if bias is None else biased if score_mod is None else both


def _same(x: Any) -> Any:
    return x


def _find_same(b: Any, q_idx: Any) -> tuple[Any, Any]:
    return b, q_idx


def _find_in_one(Lq: int) -> Find:
    return lambda b, q_idx: (q_idx // Lq, q_idx % Lq)


def _find_member(members: Tensor, Lq: int) -> Find:
    return lambda b, q_idx: (members[b, q_idx // Lq], q_idx % Lq)


def _find_in_row(order: Tensor, cu_nodes: Tensor, Lq: int) -> Find:
    def find(b: Any, q_idx: Any) -> tuple[Any, Any]:
        row = cu_nodes[b] + q_idx
        return order[row // Lq], row % Lq

    return find


def _find_owner(owner: Tensor, cu_seqlens_q: Tensor) -> Find:
    return lambda b, q_idx: (owner[q_idx], q_idx - cu_seqlens_q[owner[q_idx]])


def _find_owner_in_node(owner: Tensor, cu_seqlens_q: Tensor, cu_nodes: Tensor) -> Find:
    def find(b: Any, q_idx: Any) -> tuple[Any, Any]:
        row = cu_nodes[b] + q_idx
        return owner[row], row - cu_seqlens_q[owner[row]]

    return find
