"""Whether a cascade pays, and the calls of `attention` that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode.block_mask import BlockMask
from flexdecode.cascade_packing import (
    Packing,
    at_sequence,
    pack_by_lengths,
    pack_by_nodes,
    packed_mask,
    packed_score,
)
from flexdecode.mask_creation import create_block_mask

if TYPE_CHECKING:
    from flexdecode.mods import ScoreMod

__all__ = ["Arguments", "Call", "Decision", "SharedPrefix", "decide", "make_calls"]

# What a GPU of 4 TB/s could read during the launches that a cascade adds: the prefix's kernel, its
# reduction and the merge, about 10 us.
LAUNCH_BYTES = 40_000_000
_TILE_ROWS = 128  # query rows, times heads of a group, that read a key together


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """One level of a prefix tree: the keys and values of its nodes, and who passes through which.

    Attributes
    ----------
    k : Tensor or QuantizedTensor, [N, Hkv, P, D]
        Keys of each of N nodes. With `page_table`: ``[num_pages, Hkv, page_size, D]``.
    v : Tensor or QuantizedTensor, [N, Hkv, P, Dv]
        Values, laid out like `k`.
    node : sequence of B ints, or CPU tensor [B], optional
        The node of each sequence. Not needed where there is one node.
    kv_len : int or Tensor [N], tokens; default P
        Valid keys of each node; 0 for sequences that have nothing on this level. Required with
        `page_table`.
    page_table : Tensor, [N, max_pages], int32, optional
        Physical page of each logical page of a node.
    """

    k: Tensor
    v: Tensor
    node: Sequence[int] | Tensor | None = None
    kv_len: int | Tensor | None = None
    page_table: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Arguments:
    """The call as the user made it, but for sinks and statistics."""

    q: Tensor
    k: Tensor
    v: Tensor
    score_mod: ScoreMod | None
    block_mask: BlockMask | None
    scale: float | None
    kv_len: int | Tensor | None
    kv_start: Tensor | None
    q_offset: int | Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    bias: Tensor | None
    backend: str
    kernel_options: dict[str, Any] | None

    def plain(self) -> dict[str, Any]:
        """What a plain call takes beside q, k and v."""
        names = (
            "score_mod block_mask scale kv_len kv_start q_offset page_table cu_seqlens_q bias "
            "backend kernel_options"
        )
        return {name: getattr(self, name) for name in names.split()}

    @property
    def B(self) -> int:
        """Sequences."""
        return len(self.q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `attention`, and how its rows belong to the sequences."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    packing: Packing


@dataclass(frozen=True)
class Decision:
    """Whether to cascade, why, and the bytes on both sides of the scales."""

    cascades: bool
    reason: str
    saved: int
    cost: int


def decide(
    a: Arguments,
    prefixes: Sequence[SharedPrefix] | None,
    prefix_len: int | None,
    cascade: bool | None,
) -> Decision:
    """Compare bytes: those of the shared keys, read again and again, with those of more work."""
    if (prefixes is None) == (prefix_len is None):
        both = "neither" if prefixes is None else "both"
        raise ValueError(f"prefixes: expected either prefixes or prefix_len, got {both}")
    if prefixes is not None and not isinstance(prefixes, (list, tuple)):
        raise TypeError(f"prefixes: expected a list of SharedPrefix, got {type(prefixes).__name__}")
    if cascade is not None and not isinstance(cascade, bool):
        raise TypeError(f"cascade: expected a bool or None, got {type(cascade).__name__}")
    for name, x in (("q", a.q), ("k", a.k), ("v", a.v)):
        if not hasattr(x, "dim") or x.dim() != 4:
            got = list(x.shape) if hasattr(x, "dim") else type(x).__name__
            raise ValueError(f"{name}: expected [batch, heads, length, head dim], got {got}")
    for n, level in enumerate(prefixes or ()):
        if not isinstance(level, SharedPrefix):
            raise TypeError(f"prefixes[{n}]: expected a SharedPrefix, got {type(level).__name__}")
        _check_level(n, level)
    rule = a.block_mask is None or (
        isinstance(a.block_mask, BlockMask)
        and a.block_mask.source == "rule"
        and a.block_mask.kind in ("lazy", "sized")
    )
    if not rule and (prefixes is not None or cascade):
        raise ValueError(
            "block_mask: expected a rule for a cascade, create_block_mask(mask_mod), got "
            f"{a.block_mask!r}, whose tables are of another call"
        )
    rows = a.q.shape[0] * a.q.shape[2]
    Hq, group = a.q.shape[1], a.q.shape[1] // max(a.k.shape[1], 1)
    partial = rows * Hq * (a.v.shape[3] * a.q.element_size() + 4)
    if prefixes is not None:
        saved = sum(_saved_by(level, a.B, rows // max(a.B, 1) * group) for level in prefixes)
        cost = (2 * len(prefixes) + 2) * partial + LAUNCH_BYTES * len(prefixes)
        if cascade is False:
            raise ValueError(
                "cascade: expected True with prefixes, whose keys lie apart, got False"
            )
        return Decision(
            True,
            f"the prefixes lie apart, so no plain call exists: saves {saved:,} bytes, "
            f"costs {cost:,}",
            saved,
            cost,
        )
    assert prefix_len is not None
    _check_prefix_len(a, prefix_len)
    alone = a.B * -(-(rows // max(a.B, 1)) * group // _TILE_ROWS)
    together = -(-rows * group // _TILE_ROWS)
    saved = max(alone - together, 0) * prefix_len * (_bytes_per_key(a.k) + _bytes_per_key(a.v))
    cost = 4 * partial + LAUNCH_BYTES
    cascades = saved > cost if cascade is None else cascade
    if not rule:
        return Decision(False, "the mask's tables are of a whole call", saved, cost)
    often = {1: "once", 2: "twice"}.get(together, f"{together} times")
    reason = (
        f"the first {prefix_len} keys {'are' if cascades else 'would be'} read {often} instead of "
        f"{alone} times: saves {saved:,} bytes, costs {cost:,}"
    )
    if cascade is not None:
        reason = f"asked for; {reason}"
    return Decision(cascades, reason, saved, cost)


def _check_level(n: int, level: SharedPrefix) -> None:
    for name, x in (("k", level.k), ("v", level.v)):
        if not hasattr(x, "dim") or x.dim() != 4:
            got = list(x.shape) if hasattr(x, "shape") else type(x).__name__
            raise ValueError(
                f"prefixes[{n}].{name}: expected a tensor [nodes, heads, length, head dim], "
                f"got {got}"
            )
    node, kv_len = level.node, level.kv_len
    if isinstance(node, Tensor):
        fits = node.dim() == 1 and node.dtype in (torch.int32, torch.int64)
    else:
        fits = node is None or (
            isinstance(node, (list, tuple)) and all(type(each) is int for each in node)
        )
    if not fits:
        got = type(node).__name__
        raise TypeError(f"prefixes[{n}].node: expected integers, one for each sequence, got {got}")
    if isinstance(kv_len, Tensor):
        fits = kv_len.dtype in (torch.int32, torch.int64) and kv_len.dim() <= 1
    else:
        fits = kv_len is None or (type(kv_len) is int and 0 <= kv_len <= 1 << 30)
    if not fits:
        raise ValueError(
            f"prefixes[{n}].kv_len: expected a length, or an integer tensor of one for each node, "
            f"got {kv_len!r}"
        )


def _saved_by(level: SharedPrefix, B: int, rows: int) -> int:
    """Bytes that the sequences of a level's nodes need not read again; unknown lengths are full."""
    nodes = 1 if level.node is None else len(set(_nodes(level)))
    capacity = level.k.shape[2]
    if level.page_table is not None:
        capacity *= level.page_table.shape[1]
    keys = level.kv_len if isinstance(level.kv_len, int) else capacity
    alone, together = B * -(-rows // _TILE_ROWS), max(nodes, -(-B * rows // _TILE_ROWS))
    bytes_per_key = _bytes_per_key(level.k) + _bytes_per_key(level.v)
    return max(alone - together, 0) * keys * bytes_per_key


def _bytes_per_key(x: Tensor) -> int:
    """Of one token, all heads."""
    tokens = x.shape[0] * x.shape[2]
    return x.nbytes // tokens if tokens else 0


def _nodes(level: SharedPrefix) -> tuple[int, ...]:
    node = level.node
    if isinstance(node, Tensor):
        if node.device.type != "cpu":
            raise ValueError(
                f"prefixes.node: expected a CPU tensor (it decides shapes), got {node.device}; "
                "keep node.tolist() for as long as the tree stays"
            )
        node = node.tolist()
    return tuple(int(n) for n in node or ())


def _check_prefix_len(a: Arguments, prefix_len: int) -> None:
    capacity = a.k.shape[2] * (1 if a.page_table is None else a.page_table.shape[1])
    most = min(capacity, a.kv_len) if isinstance(a.kv_len, int) else capacity
    if isinstance(prefix_len, bool) or not isinstance(prefix_len, int):
        raise TypeError(f"prefix_len: expected an int, got {type(prefix_len).__name__}")
    if not 0 <= prefix_len <= most:
        raise ValueError(f"prefix_len: expected a value in [0, {most}], got {prefix_len}")


# -- the calls ----


def make_calls(
    a: Arguments, prefixes: Sequence[SharedPrefix] | None, prefix_len: int | None
) -> Iterator[Call]:
    """Yield one call for each level, then one for what follows."""
    if prefixes is None:
        assert prefix_len is not None
        prefixes, a = _cut(a, prefix_len)
    lengths: list[int | Tensor] = []
    total: int | Tensor = 0
    packings = [_packing(a, n, level) for n, level in enumerate(prefixes)]
    starts: list[int | Tensor] = []
    for level, packing in zip(prefixes, packings, strict=True):
        starts.append(total)
        length = _level_len(level)
        lengths.append(length)
        total = total + (packing.of_sequences(length) if isinstance(length, Tensor) else length)
    rules = a.block_mask is not None or a.score_mod is not None or a.bias is not None
    offset = _offset(a, total) if rules else 0
    for n, level in enumerate(prefixes):
        packing = packings[n]
        options = _options(a, packing, offset, starts[n], level.k.shape[1]) | {
            "kv_len": lengths[n],
            "page_table": level.page_table,
            "cu_seqlens_q": packing.cu_seqlens_q,
        }
        if prefix_len is not None and a.kv_start is not None:
            options["kv_start"] = a.kv_start[:1] - prefix_len
        yield Call(f"prefix {n}", packing.pack(a.q), level.k, level.v, options, packing)
    own = pack_by_lengths(a.q, a.cu_seqlens_q)
    options = _options(a, own, offset, total, a.k.shape[1]) | {
        "kv_len": a.kv_len,
        "kv_start": a.kv_start,
        "page_table": a.page_table,
        "cu_seqlens_q": a.cu_seqlens_q,
    }
    yield Call("own keys", a.q, a.k, a.v, options, own)


def _cut(a: Arguments, prefix_len: int) -> tuple[list[SharedPrefix], Arguments]:
    """The common prefix as the first sequence has it, and the call for the keys after it."""
    kv_len = a.kv_len
    if a.page_table is None and a.kv_start is None:
        prefix = SharedPrefix(a.k[:1, :, :prefix_len], a.v[:1, :, :prefix_len])
        rest = replace(a, k=a.k[:, :, prefix_len:], v=a.v[:, :, prefix_len:])
    elif a.page_table is not None and a.kv_start is None and prefix_len % a.k.shape[2] == 0:
        pages = prefix_len // a.k.shape[2]
        prefix = SharedPrefix(a.k, a.v, None, prefix_len, a.page_table[:1, :pages])
        rest = replace(a, page_table=a.page_table[:, pages:])
    else:
        table = None if a.page_table is None else a.page_table[:1]
        k, v = (a.k, a.v) if table is not None else (a.k[:1], a.v[:1])
        prefix = SharedPrefix(k, v, None, prefix_len, table)
        start = a.kv_start
        if start is None:
            start = torch.zeros(a.B, dtype=torch.int32, device=a.q.device)
        if kv_len is None:
            kv_len = (a.k.shape[2] - start).clamp(min=prefix_len)
        rest = replace(a, kv_start=start + prefix_len)
    return [prefix], replace(rest, kv_len=None if kv_len is None else kv_len - prefix_len)


def _packing(a: Arguments, n: int, level: SharedPrefix) -> Packing:
    """How the queries of the sequences become rows of a level's nodes."""
    table = level.page_table
    count = level.k.shape[0] if table is None else table.shape[0]
    if table is not None and level.kv_len is None:
        raise ValueError(f"prefixes[{n}].kv_len: expected lengths beside a page_table, got None")
    if level.node is None:
        if count != 1:
            raise ValueError(
                f"prefixes[{n}].node: expected the node of each sequence, one of {count}, got None"
            )
        nodes = (0,) * a.B
    else:
        nodes = _nodes(level)
        if len(nodes) != a.B or not all(0 <= node < count for node in nodes):
            raise ValueError(
                f"prefixes[{n}].node: expected {a.B} numbers in [0, {count}), got {list(nodes)}"
            )
    return pack_by_nodes(a.q, nodes, count, a.cu_seqlens_q)


def _level_len(level: SharedPrefix) -> int | Tensor:
    if level.kv_len is None:
        return level.k.shape[2]
    if isinstance(level.kv_len, int):
        return level.kv_len
    capacity = level.k.shape[2]
    if level.page_table is not None:
        capacity *= level.page_table.shape[1]
    return level.kv_len.reshape(-1).clamp(0, capacity)


def _offset(a: Arguments, total: int | Tensor) -> int | Tensor:
    """Position of each sequence's first query in the whole sequence."""
    if a.q_offset is not None:
        return a.q_offset
    length: int | Tensor | None = a.kv_len
    capacity = a.k.shape[2] * (1 if a.page_table is None else a.page_table.shape[1])
    if length is None:
        length = capacity if a.kv_start is None else capacity - a.kv_start
    if isinstance(length, Tensor):
        length = length.to(torch.int64).clamp(0, capacity)
    if a.cu_seqlens_q is None:
        return total + length - a.q.shape[2]
    return total + length - a.cu_seqlens_q.diff()


def _options(
    a: Arguments, packing: Packing, offset: int | Tensor, start: int | Tensor, heads: int
) -> dict[str, Any]:
    """What a call takes: rules that turn its rows and slots into sequences and positions."""
    if a.k.shape[1] != heads:
        raise ValueError(f"prefixes: expected {a.k.shape[1]} key heads to match k, got {heads}")
    options: dict[str, Any] = {
        "scale": a.scale,
        "backend": a.backend,
        "kernel_options": a.kernel_options,
        "q_offset": 0,
    }
    first, begin = at_sequence(offset, a.B), at_sequence(start, a.B)
    if a.block_mask is not None and a.block_mask.mask_mod is not None:
        rule: Callable[..., Any] = a.block_mask.mask_mod
        rule = packed_mask(getattr(rule, "fn", rule), packing.find, first, begin)
        options["block_mask"] = create_block_mask(rule, BLOCK_SIZE=a.block_mask.BLOCK_SIZE)
    bias = a.bias
    if bias is not None:
        if a.cu_seqlens_q is not None:
            raise ValueError(
                "bias: expected None beside cu_seqlens_q; let a score_mod read the tensor"
            )
        bias = bias.expand(a.B, a.q.shape[1], -1, -1)
    if a.score_mod is not None or bias is not None:
        options["score_mod"] = packed_score(a.score_mod, bias, packing.find, first, begin)
    return options
