"""A mask made ready for one call: sizes, positions and tables that fit it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from flexdecode.mask_arguments import cdiv, check_captures, is_same, shown
from flexdecode.tables import Extent, Tables, cached_tables
from flexdecode.trace import Traced, trace

if TYPE_CHECKING:
    from flexdecode.block_mask import BlockMask
    from flexdecode.problem import Problem

__all__ = ["ResolvedMask", "check_sharing", "offset_in", "resolve_mask"]


@dataclass(frozen=True, eq=False)
class ResolvedMask:
    """A mask made ready for one call: what a backend gets.

    Attributes
    ----------
    mask : Traced or None
        The predicate of partial blocks, in the positions of this call; None when trivially true.
    tables : Tables
        Active blocks; a key counts only if its block is listed.
    q_offset : int, Tensor [B] or None
        Position of each sequence's first row; None stands for ``kv_len - Lq``.
    scattered_rows : bool
        The rows are not consecutive (a slice picked them one by one): ``q_offset + i`` is right
        for the mask, whose predicate allows for it, but for nothing else.
    """

    mask: Traced | None
    tables: Tables
    q_offset: int | Tensor | None
    scattered_rows: bool = False


def resolve_mask(mask: BlockMask, problem: Problem, q_offset_given: bool) -> ResolvedMask:
    """Resolve a mask that is not bound; see `BlockMask.resolve`."""
    offset = _checked_offset(mask, problem, q_offset_given)
    _check_sizes(mask, problem)
    if mask.rule_of_call is not None and (
        mask.q_offset is None or mask.tables is None or mask.H not in (1, problem.Hq)
    ):
        return _built(mask, trace(mask.rule_of_call(problem), "mask"), problem, offset)
    traced = None if mask.mask_mod is None else trace(mask.mask_mod, "mask")
    if traced is not None:
        check_sharing(mask, traced, problem.B, problem.Hq)
    if mask.kind == "fixed":
        if traced is not None:
            check_captures(traced, problem.device)
        return ResolvedMask(traced, _clipped(mask, problem), offset, mask.scattered_rows)
    assert traced is not None
    if mask.kind == "sized" and _was_built_for(mask, problem, offset):
        return ResolvedMask(traced, mask._tables("call"), offset)
    return _built(mask, traced, problem, offset)


def _built(
    mask: BlockMask, traced: Traced, problem: Problem, offset: int | Tensor | None
) -> ResolvedMask:
    check_captures(traced, problem.device)
    extent = Extent(
        problem.B,
        problem.Hq,
        problem.Lq,
        problem.Lkv,
        problem.kv_len,
        offset,
        mask.BLOCK_SIZE,
        problem.device,
        kv_start=problem.kv_start,
        packed=problem.packed,
    )
    if problem.packed is not None:
        block = (problem.packed.BLOCK_Q, mask.BLOCK_SIZE[1])
        extent = replace(extent, BLOCK_SIZE=block)
    return ResolvedMask(traced, cached_tables(traced, extent), offset)


def _was_built_for(mask: BlockMask, problem: Problem, offset: int | Tensor | None) -> bool:
    if isinstance(problem.kv_len, Tensor) or isinstance(offset, Tensor):
        return False
    kv_len = mask.kv_capacity if mask.kv_len is None else mask.kv_len
    if isinstance(kv_len, Tensor) or kv_len is None or mask.q_len is None:
        return False
    return (
        problem.Lq == mask.q_len
        and problem.kv_len == kv_len
        and offset == kv_len - mask.q_len
        and mask._tables("call").kv_indices.device == problem.device
    )


def _clipped(mask: BlockMask, problem: Problem) -> Tables:
    """Fixed tables for the rows of a call; backends clip the keys."""
    tables = mask._tables("call")
    device = tables.kv_indices.device
    if device != problem.device:
        raise ValueError(
            f"block_mask: expected tables on {problem.device} to match q, got {device}; "
            "use block_mask.to(device)"
        )
    rows = cdiv(problem.Lq, mask.BLOCK_SIZE[0])
    if rows < tables.kv_num_blocks.shape[2]:
        tables = tables.map(lambda table: table.narrow(2, 0, rows))
    columns = tables.num_kv_blocks
    if columns < 0:
        columns = cdiv(problem.Lkv, mask.BLOCK_SIZE[1])
    own = mask.kv_capacity if mask.kv_len is None else mask.kv_len
    same = isinstance(own, int) and isinstance(problem.kv_len, int) and own == problem.kv_len
    return replace(tables, num_kv_blocks=columns, exact=tables.exact and same)


def offset_in(mask: BlockMask, problem: Problem) -> int | Tensor:
    """Position of the first row in a call that does not say."""
    if mask.q_offset is not None:
        if isinstance(mask.q_offset, Tensor):
            return mask.q_offset.expand(problem.B)
        return mask.q_offset
    cut = mask.kv_capacity is not None and problem.Lq != mask.q_len
    if mask.kind == "fixed" and cut:
        return mask._static_offset()
    if isinstance(problem.kv_len, Tensor):
        return problem.kv_len_rows() - problem.Lq
    return problem.kv_len - problem.Lq


def _checked_offset(mask: BlockMask, problem: Problem, given: bool) -> int | Tensor | None:
    if mask.kind != "fixed" and mask.q_offset is None:
        return problem.offset
    own = offset_in(mask, problem)
    if given and not is_same(own, problem.q_offset):
        raise ValueError(
            f"q_offset: expected the block_mask's own {shown(own)}, got "
            f"{shown(problem.q_offset)}; leave it out, the positions belong to the mask"
        )
    return own


def _check_sizes(mask: BlockMask, problem: Problem) -> None:
    batches, heads = (1, problem.B), (1, problem.Hkv, problem.Hq)
    if (mask.B is not None and mask.B not in batches) or (
        mask.H is not None and mask.H not in heads
    ):
        raise ValueError(
            f"block_mask: expected batch and heads to match q (batch {problem.B}, "
            f"{problem.Hq} query heads over {problem.Hkv} key heads) or to be 1, "
            f"got (B, H) = ({mask.B}, {mask.H})"
        )
    if mask.kind != "fixed":
        return
    assert mask.q_len is not None
    if problem.Lq > mask.q_len:
        raise ValueError(
            f"block_mask: expected at least {problem.Lq} query rows to match q, "
            f"got a mask with Q_LEN = {mask.q_len}"
        )
    capacity = mask.kv_capacity
    if isinstance(problem.kv_len, int) and capacity is not None and problem.kv_len > capacity:
        raise ValueError(
            f"block_mask: expected at least kv_len = {problem.kv_len} keys, "
            f"got a mask with KV_LEN = {capacity}"
        )


def check_sharing(mask: BlockMask, traced: Traced, batch: int, heads: int) -> None:
    """Raise where one list would serve rows between which the predicate differs."""
    if mask.source == "blocks":
        return  # the caller made the lists, and knows what they hold
    for name, letter, own, wanted in (
        ("batch", "b", mask.B, batch),
        ("heads", "h", mask.H, heads),
    ):
        if letter in traced.graph.uses and own is not None and own != wanted:
            raise ValueError(
                f"block_mask: its mask_mod depends on {letter}, so expected "
                f"{letter.upper()} = {wanted} to match the {name} of q, got "
                f"(B, H) = ({mask.B}, {mask.H}) against ({batch}, {heads})"
            )
