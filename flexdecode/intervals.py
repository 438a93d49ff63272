"""Interval evaluation of a mask over boxes of positions: empty, full, mixed or unknown.

A box is a rectangle of query and key positions of one head of one sequence. Each node of the
graph gets the range of its values over the box; the mask's own range says whether every element
of the box is allowed, or none. Nothing but the box's corners is touched, and captured tensors
enter by the least and greatest element that the box can reach.

Ranges are always sound and may be too wide; an operation without a rule has the range of its
dtype. Two refinements keep what is decidable decided:

- integers that are linear in the positions stay so (`Linear`), so that ``q_idx - kv_idx < w`` is
  compared exactly and repeated positions cancel;
- a comparison of independent, *attained* ranges knows witnesses: elements that are certainly True
  or certainly False. A box with both is mixed, and needs no look at its elements either.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flexdecode.evaluate import FUNCTIONS, load_elements
from flexdecode.graph import COMPARISONS, Node, is_float
from flexdecode.interval_rules import (
    FLOAT_RULES,
    INT_RULES,
    LINEAR_RULES,
    TRUTH_RULES,
    all_of,
    any_of,
    combine,
    linear_range,
    negated,
    rounded,
)
from flexdecode.interval_values import (
    LIMIT,
    LIMITS,
    NOTHING,
    POSITIONS,
    Boxes,
    Linear,
    Range,
    Truth,
    Value,
    bounds,
    plain,
    spread,
)
from flexdecode.proxies import TORCH_DTYPE
from flexdecode.range_tables import RangeTable
from flexdecode.trace import Traced

__all__ = ["BlockAnalysis"]


class BlockAnalysis:
    """Interval evaluation of one mask; summaries of its captured tensors are made once.

    Parameters
    ----------
    mask : Traced
    device : torch.device
    """

    def __init__(self, mask: Traced, device: torch.device) -> None:
        self.mask = mask
        self.device = device
        self._tables: dict[tuple[int, int], RangeTable] = {}
        self._ends: dict[int, tuple[float, float, bool]] = {}
        self._yes = torch.ones((), dtype=torch.bool, device=device)
        self._no = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, boxes: Boxes) -> Truth:
        """Evaluate the mask over boxes."""
        result = self.values(boxes)[self.mask.graph.output]
        assert isinstance(result, Truth)
        return result

    def values(self, boxes: Boxes) -> dict[Node, Value]:
        """Evaluate every node over boxes."""
        values: dict[Node, Value] = {}
        for node in self.mask.graph.nodes:
            args = [values[arg] for arg in node.args]
            values[node] = self._value(node, args, boxes)
        return values

    def _value(self, node: Node, args: list[Value], boxes: Boxes) -> Value:
        if node.op == "input":
            return self._input(node.attr, boxes)
        if node.op in ("const", "param", "size"):
            return self._known(node, self._number(node))
        if node.op == "load":
            return self._load(node, [self._as_range(arg) for arg in args], boxes)
        if all(arg.exact for arg in args):
            dtypes = [TORCH_DTYPE[arg.dtype] for arg in node.args]
            if node.op == "cast":
                return self._known(node, plain(args[0]).to(TORCH_DTYPE[node.dtype]))
            exact = [plain(arg).to(dtype) for arg, dtype in zip(args, dtypes, strict=True)]
            return self._known(node, FUNCTIONS[node.op](*exact))
        if node.op in TRUTH_RULES and all(isinstance(arg, Truth) for arg in args):
            return TRUTH_RULES[node.op](*args)
        if node.op == "where":
            return self._where(node, args)
        ranges = [self._as_range(arg) for arg in args]
        if node.op in COMPARISONS:
            if node.args[0].dtype != node.args[1].dtype:
                return self._unknown(node)
            return self._compare(node.op, ranges[0], ranges[1], boxes)
        if node.op == "cast":
            return self._cast(node, args[0], ranges[0])
        rule = (FLOAT_RULES if is_float(node.dtype) else INT_RULES).get(node.op)
        found = None if rule is None else rule(*ranges)
        if node.op == "isnan":
            return Truth(self._no, self._flag(ranges[0].nan), self._no, self._no)
        if found is None:
            return self._unknown(node)
        if is_float(node.dtype):
            return rounded(node, found, ranges)
        checked = self._checked(node, found)
        return self._with_linear(node, found, ranges, boxes) if checked is found else checked

    # Leaves.

    def _number(self, node: Node) -> Tensor:
        if node.op == "const":
            number = node.attr
        elif node.op == "param":
            number = self.mask.params[node.attr]
        else:
            slot, dim = node.attr
            number = self.mask.captures[slot].shape[dim]
        return torch.tensor(number, dtype=TORCH_DTYPE[node.dtype], device=self.device)

    def _known(self, node: Node, value: Tensor) -> Value:
        """One value a box, of the node's dtype."""
        value = value.to(self.device)
        if value.dtype == torch.bool:
            return Truth(value, value, value, ~value)
        if value.is_floating_point():
            value = value.double()
            nan = value.isnan()
            if bool(nan.any()):
                # No number at all is the range from inf to -inf, and nothing attains its ends.
                lo, hi = value.masked_fill(nan, torch.inf), value.masked_fill(nan, -torch.inf)
                return Range(lo, hi, *bounds(lo, hi), NOTHING, ~nan, nan=True)
            return Range(value, value, *bounds(value, value), NOTHING, True)
        value = value.long()
        low, high = bounds(value, value)
        linear = None
        if node.dtype == "int64" and -LIMIT < low and high < LIMIT:
            linear = Linear(0, 0, value)
        return Range(value, value, low, high, NOTHING, True, True, linear)

    def _input(self, name: str, boxes: Boxes) -> Range:
        if name in ("b", "h"):
            value = boxes.b if name == "b" else boxes.h
            low, high = bounds(value, value)
            return Range(value, value, low, high, NOTHING, True, True, Linear(0, 0, value))
        lo, hi = (boxes.q_lo, boxes.q_hi) if name == "q_idx" else (boxes.kv_lo, boxes.kv_hi)
        low, high = bounds(lo, hi)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        linear = Linear(1, 0, zero) if name == "q_idx" else Linear(0, 1, zero)
        depends = NOTHING if lo is hi else frozenset({name})
        return Range(lo, hi, low, high, depends, True, True, linear)

    def _flag(self, value: bool) -> Tensor:
        return self._yes if value else self._no

    def _unknown(self, node: Node) -> Value:
        if node.dtype == "bool":
            return Truth(self._no, self._yes, self._no, self._no)
        if is_float(node.dtype):
            inf = torch.full((), torch.inf, dtype=torch.float64, device=self.device)
            return Range(-inf, inf, -math.inf, math.inf, POSITIONS, nan=True)
        low, high = LIMITS[node.dtype]
        lo, hi = (torch.tensor(end, device=self.device) for end in (low, high))
        return Range(lo, hi, low, high, POSITIONS)

    def _as_range(self, value: Value) -> Range:
        if isinstance(value, Range):
            return value
        lo = value.must.long()
        hi = lo if value.exact else value.may.long()
        decided = value.must | ~value.may
        attained = value.exact or ((value.seen & value.unseen) | decided)
        depends = NOTHING if value.exact else POSITIONS
        return Range(lo, hi, 0, 1, depends, attained)

    # Captured tensors.

    def _load(self, node: Node, indices: list[Range], boxes: Boxes) -> Value:
        capture = self.mask.captures[node.attr].detach().to(self.device)
        if capture.dtype in (torch.float16, torch.bfloat16):
            capture = capture.float()
        if 0 in capture.shape:
            return self._known(node, torch.zeros((), dtype=TORCH_DTYPE[node.dtype]))
        ranged = [dim for dim, index in enumerate(indices) if not index.exact]
        if not ranged:
            return self._known(node, load_elements(capture, [index.lo for index in indices]))
        if len(ranged) > 1:
            return self._load_many(node, capture, indices)
        dim = ranged[0]
        index = indices[dim]
        table = self._table(node.attr, capture, dim)
        row, inside = self._row(capture, indices, dim)
        size = capture.shape[dim]
        lo, hi = self._span(table, row, index, size)
        if inside is not None:
            lo, hi = torch.where(inside, lo, 0), torch.where(inside, hi, 0)
        attained = index.attained if index.covers and table.exact else False
        ends = min(table.low, 0), max(table.high, 0), table.has_nan
        return self._loaded(node, lo, hi, ends, index.depends, attained)

    def _table(self, slot: int, capture: Tensor, dim: int) -> RangeTable:
        key = (slot, dim)
        if key not in self._tables:
            if capture.dtype == torch.bool:
                capture = capture.to(torch.uint8)
            rows = capture.movedim(dim, -1).reshape(-1, capture.shape[dim])
            self._tables[key] = RangeTable(rows.contiguous())
        return self._tables[key]

    def _row(
        self, capture: Tensor, indices: list[Range], dim: int
    ) -> tuple[Tensor | int, Tensor | None]:
        """Row of the table that the other indices name, and where they are inside the tensor."""
        row: Tensor | int = 0
        inside: Tensor | None = None
        for other, (index, size) in enumerate(zip(indices, capture.shape, strict=True)):
            if other == dim:
                continue
            wrapped = torch.where(index.lo < 0, index.lo + size, index.lo)
            clamped = wrapped.clamp(0, size - 1)
            if index.low < -size or index.high >= size:
                fits = wrapped == clamped
                inside = fits if inside is None else inside & fits
            row = row * size + clamped
        return row, inside

    def _span(
        self, table: RangeTable, row: Tensor | int, index: Range, size: int
    ) -> tuple[Tensor, Tensor]:
        """Range over the elements that an index reaches."""
        if index.low >= 0 and index.high < size:
            return table.bounds(row, index.lo, index.hi)
        zero = torch.zeros((), dtype=table.dtype, device=self.device)
        parts = []
        # Negative indices count from the end; what is outside reads as zero.
        for first, last, shift in ((0, size - 1, 0), (-size, -1, size)):
            lo, hi = index.lo.clamp(min=first), index.hi.clamp(max=last)
            there = lo <= hi
            lo, hi = torch.where(there, lo + shift, 0), torch.where(there, hi + shift, 0)
            parts.append((there, *table.bounds(row, lo, hi)))
        parts.append(((index.lo < -size) | (index.hi >= size), zero, zero))
        least = zero.new_full((), LIMITS["int64"][1] if table.dtype == torch.int64 else math.inf)
        greatest = zero.new_full(
            (), LIMITS["int64"][0] if table.dtype == torch.int64 else -math.inf
        )
        for there, lo, hi in parts:
            least = torch.where(there, torch.minimum(least, lo), least)
            greatest = torch.where(there, torch.maximum(greatest, hi), greatest)
        return least, greatest

    def _load_many(self, node: Node, capture: Tensor, indices: list[Range]) -> Value:
        """Several indices vary: exact where each has one value in a box, else all of the tensor."""
        low, high, has_nan = self._extremes(node.attr, capture)
        single = None
        for index in indices:
            one = index.lo == index.hi
            single = one if single is None else single & one
        assert single is not None
        value = load_elements(capture, [index.lo for index in indices])
        value = value.double() if value.is_floating_point() else value.long()
        if has_nan:
            single = single & ~value.isnan()
        lo, hi = torch.where(single, value, low), torch.where(single, value, high)
        return self._loaded(node, lo, hi, (low, high, has_nan), POSITIONS, single)

    def _extremes(self, slot: int, capture: Tensor) -> tuple[float, float, bool]:
        """Bounds of all elements and of zero, and whether NaN is among them."""
        if slot not in self._ends:
            nan = capture.isnan()
            has_nan = bool(nan.any())
            if has_nan:
                capture = capture.masked_fill(nan, 0)
            if capture.dtype == torch.bool:
                capture = capture.to(torch.uint8)
            low, high = (end.item() for end in torch.aminmax(capture))
            self._ends[slot] = min(low, 0), max(high, 0), has_nan
        return self._ends[slot]

    def _loaded(
        self,
        node: Node,
        lo: Tensor,
        hi: Tensor,
        ends: tuple[float, float, bool],
        depends: frozenset[str],
        attained: bool | Tensor,
    ) -> Value:
        if node.dtype == "bool":
            sure = self._flag(attained) if isinstance(attained, bool) else attained
            must, may = lo > 0, hi > 0
            return Truth(must, may, may & sure, ~must & sure)
        low, high, nan = ends
        if nan:
            attained = spread(attained, lo) & (lo <= hi)
        return Range(lo, hi, low, high, depends, attained, nan=nan)

    # Operations.

    def _with_linear(self, node: Node, found: Range, args: list[Range], boxes: Boxes) -> Range:
        """Replace a range by that of its linear form, which is exact, where it has one."""
        linear = LINEAR_RULES[node.op](*args) if node.op in LINEAR_RULES else None
        if node.dtype != "int64" or linear is None:
            return found
        return linear_range(linear, boxes)

    def _checked(self, node: Node, found: Range) -> Value:
        """Give up where the integer might have wrapped."""
        least, most = LIMITS[node.dtype]
        if node.dtype == "int64":
            least, most = -LIMIT, LIMIT
        return found if least <= found.low and found.high <= most else self._unknown(node)

    def _cast(self, node: Node, value: Value, x: Range) -> Value:
        target = node.dtype
        if target == "bool":
            if isinstance(value, Truth):
                return value
            zero, sure = (x.lo == 0) & (x.hi == 0), spread(x.attained, x.lo)
            must = (x.lo > 0) | (x.hi < 0)
            seen = sure & ~zero
            if x.nan:  # NaN is not zero
                return Truth(must, self._yes, seen, self._no)
            return Truth(must, ~zero, seen, zero)
        if is_float(target):
            lo, hi = (end.to(TORCH_DTYPE[target]).double() for end in (x.lo, x.hi))
            low, high = bounds(lo, hi)
            return Range(lo, hi, low, high, x.depends, x.attained, nan=x.nan)
        if x.lo.is_floating_point():
            if not x.finite or x.low < -LIMIT or x.high > LIMIT:
                return self._unknown(node)
            lo, hi = x.lo.trunc().long(), x.hi.trunc().long()
            found = Range(lo, hi, *bounds(lo, hi), x.depends, x.attained)
            return self._checked(node, found)
        return self._checked(node, x)

    def _where(self, node: Node, args: list[Value]) -> Value:
        condition = args[0]
        if isinstance(condition, Range):
            return self._unknown(node)
        if node.dtype == "bool":
            x, y = args[1], args[2]
            if not (isinstance(x, Truth) and isinstance(y, Truth)):
                return self._unknown(node)
            chosen = any_of(all_of(condition, x), all_of(negated(condition), y))
            both = x.must & y.must, x.may | y.may
            return replace(chosen, must=chosen.must | both[0], may=chosen.may & both[1])
        x, y = self._as_range(args[1]), self._as_range(args[2])
        if x.lo.dtype != y.lo.dtype:
            return self._unknown(node)
        always, never = condition.must, ~condition.may
        lo = torch.where(always, x.lo, torch.where(never, y.lo, torch.minimum(x.lo, y.lo)))
        hi = torch.where(always, x.hi, torch.where(never, y.hi, torch.maximum(x.hi, y.hi)))
        attained = (always & spread(x.attained, lo)) | (never & spread(y.attained, lo))
        low, high = min(x.low, y.low), max(x.high, y.high)
        return Range(lo, hi, low, high, POSITIONS, attained, nan=x.nan or y.nan)

    def _compare(self, op: str, x: Range, y: Range, boxes: Boxes) -> Truth:
        if op in ("gt", "ge"):
            return self._compare({"gt": "lt", "ge": "le"}[op], y, x, boxes)
        if x.linear is not None and y.linear is not None:
            difference = linear_range(combine(x.linear, y.linear, -1), boxes)
            x, y = difference, self._zero
        independent = not x.depends & y.depends
        sure = spread(x.attained, x.lo) & spread(y.attained, y.lo) & self._flag(independent)
        if op in ("eq", "ne"):
            must = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
            may = (x.lo <= y.hi) & (y.lo <= x.hi)
            if x.covers and y.covers:
                meet = may
            else:
                meet = (x.lo == y.lo) | (x.lo == y.hi) | (x.hi == y.lo) | (x.hi == y.hi)
            found = Truth(must, may, meet & sure & may, ~must & sure)
        elif op == "lt":
            must, may = x.hi < y.lo, x.lo < y.hi
            found = Truth(must, may, may & sure, ~must & sure)
        else:
            must, may = x.hi <= y.lo, x.lo <= y.hi
            found = Truth(must, may, may & sure, ~must & sure)
        if x.nan or y.nan:  # compared with NaN, everything is False
            found = replace(found, must=self._no)
        return negated(found) if op == "ne" else found

    @property
    def _zero(self) -> Range:
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        return Range(zero, zero, 0, 0, NOTHING, True, True)
