"""Masks made of masks: combinations by ``& | ~``, and slices in units of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexdecode.block_predicates import MaskRule, Pick, membership, picked, with_rows
from flexdecode.mask_arguments import is_same, shown
from flexdecode.mask_resolution import offset_in

if TYPE_CHECKING:
    from flexdecode.block_mask import BlockMask
    from flexdecode.problem import Problem

__all__ = ["combine", "cut"]

_AUTHORITY = {"lazy": 0, "sized": 1, "fixed": 2}  # the kind of a combination is the highest one's


def combine(join: Callable[..., MaskRule], *operands: Any) -> BlockMask:
    """Combine masks and functions; the most definite operand gives the result its kind."""
    masks: list[BlockMask] = [x for x in operands if _is_mask(x)]
    for mask in masks:
        if mask.kind == "bound":
            raise ValueError("block_mask: expected masks that are not bound; combine before bind()")
        if mask.scattered_rows:
            raise ValueError(
                "block_mask: expected consecutive rows, got a slice that picked them one by one; "
                "combine before slicing"
            )
    host = max(masks, key=lambda mask: _AUTHORITY[mask.kind])

    def rule_of_call(problem: Problem | None) -> MaskRule:
        return join(*(_rule_of(x, problem) if _is_mask(x) else x for x in operands))

    offsets = [mask.q_offset for mask in masks if mask.q_offset is not None]
    for offset in offsets[1:]:
        if not is_same(offsets[0], offset):
            raise ValueError(
                f"block_mask: expected masks of equal q_offset, got {shown(offsets[0])} "
                f"and {shown(offset)}"
            )
    result = replace(
        host,
        B=_common("B", masks),
        H=_common("H", masks),
        kind="fixed" if offsets and host.kind == "sized" else host.kind,
        q_offset=offsets[0] if offsets else None,
        tables=None,
        source="rule",
    )
    if host.kind == "lazy":
        return replace(result, mask_mod=rule_of_call(None))
    sizes = {(m.q_len, m.kv_capacity) for m in masks if m.kind != "lazy"}
    if len(sizes) > 1:
        raise ValueError(
            f"block_mask: expected masks of equal lengths, got {sorted(sizes, key=str)}"
        )
    if any(mask.source != "rule" or mask.rule_of_call is not None for mask in masks):
        # Its rows and lists may mean something only a call knows.
        result = replace(result, rule_of_call=rule_of_call)
    result = replace(result, mask_mod=rule_of_call(None))
    if host.kv_capacity is None:
        return result
    return result._with_tables(host._tables("combine").kv_indices.device)


def _rule_of(mask: BlockMask, problem: Problem | None) -> MaskRule:
    """All that `mask` says, as a predicate; without a call, for its own lengths."""
    if mask.rule_of_call is not None and problem is not None:
        return mask.rule_of_call(problem)
    if mask.source == "rule":
        assert mask.mask_mod is not None
        return mask.mask_mod
    tables = mask._sized_tables("combine")
    offset = mask._static_offset() if mask.q_offset is None else mask.q_offset
    sharing = 1
    if problem is not None:
        offset = offset_in(mask, problem)
        sharing = problem.Hq // max(tables.kv_num_blocks.shape[1], 1)
    return membership(tables, mask.mask_mod, offset, sharing)


def _is_mask(value: Any) -> bool:
    return hasattr(value, "kv_num_blocks")


def _common(name: str, masks: list[BlockMask]) -> int | None:
    """The common batch or number of heads; size 1 goes with any."""
    sizes = {size for mask in masks if (size := getattr(mask, name)) is not None}
    wide = sorted(sizes - {1})
    if len(wide) > 1:
        raise ValueError(f"block_mask: expected masks of equal {name}, got {wide}")
    return wide[0] if wide else 1 if sizes else None


def cut(mask: BlockMask, index: Any) -> BlockMask:
    """Return the fixed mask ``mask[index]``; see `BlockMask.__getitem__`."""
    tables = mask._tables("slice")
    if mask.kind == "bound":
        raise ValueError("slice: expected a mask that is not bound; slice before bind()")
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
        if index[-1] is not Ellipsis:
            raise IndexError("slice: ... may only stand last")
        index = index[:-1]
    if len(index) > 3:
        raise IndexError(f"slice: expected at most 3 indices (b, h, q_block), got {len(index)}")
    assert mask.B is not None and mask.H is not None and mask.q_len is not None
    sizes = (mask.B, mask.H, tables.kv_num_blocks.shape[2])
    index = (*index, *(slice(None),) * (3 - len(index)))
    b, h, rows = (
        Pick.of(i, size, axis) for axis, (i, size) in enumerate(zip(index, sizes, strict=True))
    )

    offset = mask.q_offset
    if offset is None and not (mask.source == "blocks" and rows.is_everything):
        offset = mask._static_offset()
    if isinstance(offset, Tensor):
        offset = b.take(offset, 0)
    kv_len = mask.kv_len
    if isinstance(kv_len, Tensor):
        kv_len = b.take(kv_len, 0)
    if offset is not None:
        offset = offset + rows.first * mask.BLOCK_SIZE[0]
    last = rows.numbers[-1] if rows.numbers else -1
    short = mask.q_len - last * mask.BLOCK_SIZE[0] if last == sizes[2] - 1 else None
    q_len = len(rows.numbers) * mask.BLOCK_SIZE[0]
    if short is not None and rows.numbers:
        q_len += short - mask.BLOCK_SIZE[0]  # the last block may have fewer rows

    rule = mask.mask_mod
    device = tables.kv_indices.device
    scattered = mask.scattered_rows
    if rule is not None:
        # Where a list is shared, its predicate is too: index 0 then stands for all of them.
        rule = picked(rule, b, h, device)
        if not rows.is_run:
            assert offset is not None
            rule = with_rows(rule, rows, offset, mask.BLOCK_SIZE[0])
    return replace(
        mask,
        mask_mod=rule,
        kind="fixed",
        B=len(b.numbers),
        H=len(h.numbers),
        q_len=q_len,
        kv_len=kv_len,
        q_offset=offset,
        tables=replace(
            tables.map(lambda table: rows.take(h.take(b.take(table, 0), 1), 2)), exact=False
        ),
        scattered_rows=scattered or not rows.is_run,
        rule_of_call=None,
    )
