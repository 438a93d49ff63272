"""Which parts of a mask leave blocks undecided to the interval analysis."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.block_states import undecided_boxes
from flexdecode.extent import Extent
from flexdecode.graph import INFIX, Node, _text, walk
from flexdecode.interval_values import Truth
from flexdecode.intervals import BlockAnalysis
from flexdecode.trace import Traced

__all__ = ["IntervalReport", "Undecided", "report_intervals"]

_MOST_BLOCKS = 1 << 22  # bigger grids are not analysed block by block
_LOGICAL = ("and", "or", "xor", "not", "where")
_WIDEST = 72  # characters of an expression


@dataclass(frozen=True)
class Undecided:
    """A part of a mask that intervals cannot decide in some blocks.

    Attributes
    ----------
    expression : str
        The part, in the mask's own terms.
    blocks : int
        Blocks in which it is undecided, and matters.
    captures : tuple of str
        Captured tensors that it reads.
    """

    expression: str
    blocks: int
    captures: tuple[str, ...]


@dataclass(frozen=True)
class IntervalReport:
    """What interval analysis makes of the blocks of one call.

    Attributes
    ----------
    blocks : int
        Blocks with a valid key; sequences and heads between which the mask is the same count once.
    undecided : int
        Those whose elements have to be looked at.
    parts : tuple of Undecided
        Why, most blocks first; a block may count for several.
    """

    blocks: int
    undecided: int
    parts: tuple[Undecided, ...]

    @property
    def decided(self) -> int:
        """Blocks that intervals decide."""
        return self.blocks - self.undecided


def report_intervals(mask: Traced, extent: Extent) -> IntervalReport | None:
    """Count the blocks that intervals decide, and name what leaves the others undecided.

    Parameters
    ----------
    mask : Traced
    extent : Extent

    Returns
    -------
    IntervalReport or None
        None where there are too many blocks to look at one by one.
    """
    if extent.for_mask(mask).entries() > _MOST_BLOCKS:
        return None
    analysis = BlockAnalysis(mask, extent.device)
    blocks = undecided = 0
    blamed: dict[Node, int] = {}
    for count, boxes in undecided_boxes(analysis, extent):
        blocks += count
        undecided += len(boxes.b)
        if len(boxes.b):
            values = analysis.values(boxes)
            truths = {node: value for node, value in values.items() if isinstance(value, Truth)}
            everywhere = torch.ones_like(boxes.b, dtype=torch.bool)
            found: dict[Node, Tensor] = {}
            _blame(mask.graph.output, everywhere, truths, found)
            for node, where in found.items():
                blamed[node] = blamed.get(node, 0) + int(where.sum())
    parts = [
        Undecided(_expression(node, mask), count, _captures(node, mask))
        for node, count in sorted(blamed.items(), key=lambda item: -item[1])
    ]
    return IntervalReport(blocks, undecided, tuple(parts))


def _blame(node: Node, where: Tensor, truths: dict[Node, Truth], found: dict[Node, Tensor]) -> None:
    """Give the boxes of `where`, [N] bool, to the deepest parts of `node` undecided there."""
    explained = torch.zeros_like(where)
    for arg in node.args if node.op in _LOGICAL else ():
        truth = truths.get(arg)
        if truth is not None:
            open_ = where & truth.may & ~truth.must & ~(truth.seen & truth.unseen)
            if bool(open_.any()):
                _blame(arg, open_, truths, found)
            explained = explained | open_
    left = where & ~explained
    if bool(left.any()):
        found[node] = left | found[node] if node in found else left


def _expression(node: Node, mask: Traced) -> str:
    """One line of source for a node: captures by name, numbers by value, casts left out."""
    names: dict[Node, str] = {}
    joined: set[Node] = set()  # what needs brackets inside another operator
    for inner in walk(node):
        if inner.op == "param":
            names[inner] = str(mask.params[inner.attr])
        elif inner.op == "cast":
            names[inner] = names[inner.args[0]]
            joined |= {inner} if inner.args[0] in joined else set()
        else:
            given = names
            if inner.op in INFIX:
                given = {x: f"({names[x]})" if x in joined else names[x] for x in inner.args}
                joined.add(inner)
            names[inner] = re.sub(r"#\d+", "", _text(inner, given, mask.graph.captures))
    text = names[node]
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."


def _captures(node: Node, mask: Traced) -> tuple[str, ...]:
    loads = [inner.attr for inner in walk(node) if inner.op == "load"]
    return tuple(mask.graph.captures[slot].name for slot in dict.fromkeys(loads))
