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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexdecode.evaluate import _FUNCTIONS as EXACT
from flexdecode.evaluate import _load as EXACT_LOAD
from flexdecode.graph import Node, is_float
from flexdecode.proxies import TORCH_DTYPE
from flexdecode.range_tables import RangeTable
from flexdecode.trace import Traced

__all__ = ["BlockAnalysis", "Boxes", "Range", "Truth"]

_LIMIT = 1 << 62  # bounds beyond it might overflow int64 on the way
_FLOAT32_MAX = 3.4028234663852886e38
_LIMITS = {
    "uint8": (0, 255),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Boxes:
    """N boxes; all fields are Tensor [N], int64; ends are inclusive.

    Where every box has one query position, `q_hi` is the same object as `q_lo`, which the analysis
    takes as a promise; likewise for keys.
    """

    b: Tensor
    h: Tensor
    q_lo: Tensor
    q_hi: Tensor
    kv_lo: Tensor
    kv_hi: Tensor


@dataclass(frozen=True, eq=False)
class Truth:
    """What is known of a boolean over each box: Tensors that broadcast to [N], bool.

    Attributes
    ----------
    must : Tensor
        Every element is True.
    may : Tensor
        An element can be True; False proves that none is.
    seen, unseen : Tensor
        Some element is proven True, proven False.
    """

    must: Tensor
    may: Tensor
    seen: Tensor
    unseen: Tensor

    @property
    def exact(self) -> bool:
        """True where each box holds one value only."""
        return self.must is self.may


@dataclass(frozen=True, eq=False)
class Linear:
    """``q * q_idx + kv * kv_idx + base``, in int64; `base` has one value a box."""

    q: int
    kv: int
    base: Tensor


@dataclass(frozen=True, eq=False)
class Range:
    """Range of a number over each box.

    Attributes
    ----------
    lo, hi : Tensor, broadcast to [N], int64 or float64
        One object where each box holds one value only.
    low, high : int or float
        Bounds over all boxes.
    depends : frozenset of str
        Positions that the value varies with inside a box.
    attained : bool or Tensor [N]
        Some element has the value `lo`, and some `hi`.
    covers : bool
        Every integer from `lo` to `hi` is some element's value.
    linear : Linear, optional
    nan : bool
        Some element may be NaN; `lo` and `hi` are of the others.
    """

    lo: Tensor
    hi: Tensor
    low: float
    high: float
    depends: frozenset[str] = _NOTHING
    attained: bool | Tensor = False
    covers: bool = False
    linear: Linear | None = None
    nan: bool = False

    @property
    def exact(self) -> bool:
        """True where each box holds one value only."""
        return self.lo is self.hi

    @property
    def finite(self) -> bool:
        """True where no element can be infinite or NaN."""
        return not self.nan and -_FLOAT32_MAX < self.low and self.high < _FLOAT32_MAX


Value = Range | Truth


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
                return self._known(node, _plain(args[0]).to(TORCH_DTYPE[node.dtype]))
            exact = [_plain(arg).to(dtype) for arg, dtype in zip(args, dtypes, strict=True)]
            return self._known(node, EXACT[node.op](*exact))
        if node.op in _TRUTH_RULES and all(isinstance(arg, Truth) for arg in args):
            return _TRUTH_RULES[node.op](*args)
        if node.op == "where":
            return self._where(node, args)
        ranges = [self._as_range(arg) for arg in args]
        if node.op in _COMPARISONS:
            if node.args[0].dtype != node.args[1].dtype:
                return self._unknown(node)
            return self._compare(node.op, ranges[0], ranges[1], boxes)
        if node.op == "cast":
            return self._cast(node, args[0], ranges[0])
        rule = (_FLOAT_RULES if is_float(node.dtype) else _INT_RULES).get(node.op)
        found = None if rule is None else rule(*ranges)
        if node.op == "isnan":
            return Truth(self._no, self._flag(ranges[0].nan), self._no, self._no)
        if found is None:
            return self._unknown(node)
        if is_float(node.dtype):
            return _rounded(node, found, ranges)
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
                return Range(lo, hi, *_bounds(lo, hi), _NOTHING, ~nan, nan=True)
            return Range(value, value, *_bounds(value, value), _NOTHING, True)
        value = value.long()
        low, high = _bounds(value, value)
        linear = None
        if node.dtype == "int64" and -_LIMIT < low and high < _LIMIT:
            linear = Linear(0, 0, value)
        return Range(value, value, low, high, _NOTHING, True, True, linear)

    def _input(self, name: str, boxes: Boxes) -> Range:
        if name in ("b", "h"):
            value = boxes.b if name == "b" else boxes.h
            low, high = _bounds(value, value)
            return Range(value, value, low, high, _NOTHING, True, True, Linear(0, 0, value))
        lo, hi = (boxes.q_lo, boxes.q_hi) if name == "q_idx" else (boxes.kv_lo, boxes.kv_hi)
        low, high = _bounds(lo, hi)
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        linear = Linear(1, 0, zero) if name == "q_idx" else Linear(0, 1, zero)
        depends = _NOTHING if lo is hi else frozenset({name})
        return Range(lo, hi, low, high, depends, True, True, linear)

    def _flag(self, value: bool) -> Tensor:
        return self._yes if value else self._no

    def _unknown(self, node: Node) -> Value:
        if node.dtype == "bool":
            return Truth(self._no, self._yes, self._no, self._no)
        if is_float(node.dtype):
            inf = torch.full((), torch.inf, dtype=torch.float64, device=self.device)
            return Range(-inf, inf, -math.inf, math.inf, _POSITIONS, nan=True)
        low, high = _LIMITS[node.dtype]
        lo, hi = (torch.tensor(end, device=self.device) for end in (low, high))
        return Range(lo, hi, low, high, _POSITIONS)

    def _as_range(self, value: Value) -> Range:
        if isinstance(value, Range):
            return value
        lo = value.must.long()
        hi = lo if value.exact else value.may.long()
        decided = value.must | ~value.may
        attained = value.exact or ((value.seen & value.unseen) | decided)
        depends = _NOTHING if value.exact else _POSITIONS
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
            return self._known(node, EXACT_LOAD(capture, [index.lo for index in indices]))
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
        least = zero.new_full((), _LIMITS["int64"][1] if table.dtype == torch.int64 else math.inf)
        greatest = zero.new_full(
            (), _LIMITS["int64"][0] if table.dtype == torch.int64 else -math.inf
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
        value = EXACT_LOAD(capture, [index.lo for index in indices])
        value = value.double() if value.is_floating_point() else value.long()
        lo, hi = torch.where(single, value, low), torch.where(single, value, high)
        return self._loaded(node, lo, hi, (low, high, has_nan), _POSITIONS, single)

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
            attained = _all(attained, lo) & (lo <= hi)
        return Range(lo, hi, low, high, depends, attained, nan=nan)

    # Operations.

    def _with_linear(self, node: Node, found: Range, args: list[Range], boxes: Boxes) -> Range:
        """Replace a range by that of its linear form, which is exact, where it has one."""
        linear = _LINEAR_RULES[node.op](*args) if node.op in _LINEAR_RULES else None
        if node.dtype != "int64" or linear is None:
            return found
        return _linear_range(linear, boxes)

    def _checked(self, node: Node, found: Range) -> Value:
        """Give up where the integer might have wrapped."""
        least, most = _LIMITS[node.dtype]
        if node.dtype == "int64":
            least, most = -_LIMIT, _LIMIT
        return found if least <= found.low and found.high <= most else self._unknown(node)

    def _cast(self, node: Node, value: Value, x: Range) -> Value:
        target = node.dtype
        if target == "bool":
            if isinstance(value, Truth):
                return value
            zero, sure = (x.lo == 0) & (x.hi == 0), _all(x.attained, x.lo)
            must = (x.lo > 0) | (x.hi < 0)
            seen = sure & ~zero
            if x.nan:  # NaN is not zero
                return Truth(must, self._yes, seen, self._no)
            return Truth(must, ~zero, seen, zero)
        if is_float(target):
            lo, hi = (end.to(TORCH_DTYPE[target]).double() for end in (x.lo, x.hi))
            low, high = _bounds(lo, hi)
            return Range(lo, hi, low, high, x.depends, x.attained, nan=x.nan)
        if x.lo.is_floating_point():
            if not x.finite or x.low < -_LIMIT or x.high > _LIMIT:
                return self._unknown(node)
            lo, hi = x.lo.trunc().long(), x.hi.trunc().long()
            found = Range(lo, hi, *_bounds(lo, hi), x.depends, x.attained)
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
            chosen = _or(_and(condition, x), _and(_not(condition), y))
            both = x.must & y.must, x.may | y.may
            return replace(chosen, must=chosen.must | both[0], may=chosen.may & both[1])
        x, y = self._as_range(args[1]), self._as_range(args[2])
        if x.lo.dtype != y.lo.dtype:
            return self._unknown(node)
        always, never = condition.must, ~condition.may
        lo = torch.where(always, x.lo, torch.where(never, y.lo, torch.minimum(x.lo, y.lo)))
        hi = torch.where(always, x.hi, torch.where(never, y.hi, torch.maximum(x.hi, y.hi)))
        attained = (always & _all(x.attained, lo)) | (never & _all(y.attained, lo))
        low, high = min(x.low, y.low), max(x.high, y.high)
        return Range(lo, hi, low, high, _POSITIONS, attained, nan=x.nan or y.nan)

    def _compare(self, op: str, x: Range, y: Range, boxes: Boxes) -> Truth:
        if op in ("gt", "ge"):
            return self._compare({"gt": "lt", "ge": "le"}[op], y, x, boxes)
        if x.linear is not None and y.linear is not None:
            difference = _linear_range(_combine(x.linear, y.linear, -1), boxes)
            x, y = difference, self._zero
        independent = not x.depends & y.depends
        sure = _all(x.attained, x.lo) & _all(y.attained, y.lo) & self._flag(independent)
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
        return _not(found) if op == "ne" else found

    @property
    def _zero(self) -> Range:
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        return Range(zero, zero, 0, 0, _NOTHING, True, True)


_POSITIONS = frozenset({"q_idx", "kv_idx"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def _plain(value: Value) -> Tensor:
    return value.must if isinstance(value, Truth) else value.lo


def _bounds(lo: Tensor, hi: Tensor) -> tuple[float, float]:
    return lo.min().item(), hi.max().item()


def _all(flag: bool | Tensor, like: Tensor) -> Tensor:
    if isinstance(flag, Tensor):
        return flag
    return torch.full((), flag, dtype=torch.bool, device=like.device)


def _both(first: bool | Tensor, second: bool | Tensor) -> bool | Tensor:
    if isinstance(first, bool):
        return second if first else False
    return first & second if isinstance(second, Tensor) else (first if second else False)


# Booleans.


def _and(x: Truth, y: Truth) -> Truth:
    return Truth(
        x.must & y.must,
        x.may & y.may,
        (x.seen & y.must) | (y.seen & x.must),
        x.unseen | y.unseen,
    )


def _not(x: Truth) -> Truth:
    must = ~x.may
    return Truth(must, must if x.exact else ~x.must, x.unseen, x.seen)


def _or(x: Truth, y: Truth) -> Truth:
    return _not(_and(_not(x), _not(y)))


def _xor(x: Truth, y: Truth) -> Truth:
    return _or(_and(x, _not(y)), _and(_not(x), y))


_TRUTH_RULES: dict[str, Callable[..., Truth]] = {
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "eq": lambda x, y: _not(_xor(x, y)),
    "ne": _xor,
}


# Linear forms.


def _combine(x: Linear, y: Linear, sign: int) -> Linear:
    base = x.base + y.base if sign > 0 else x.base - y.base
    return Linear(x.q + sign * y.q, x.kv + sign * y.kv, base)


def _linear_range(form: Linear, boxes: Boxes) -> Range:
    lo = hi = form.base
    depends = []
    for name, factor, first, last in (
        ("q_idx", form.q, boxes.q_lo, boxes.q_hi),
        ("kv_idx", form.kv, boxes.kv_lo, boxes.kv_hi),
    ):
        if factor:
            ends = (first, last) if factor > 0 else (last, first)
            same = lo is hi and first is last
            lo = lo + factor * ends[0]
            hi = lo if same else hi + factor * ends[1]
            if first is not last:
                depends.append(name)
    covers = all(abs(factor) <= 1 for factor in (form.q, form.kv))
    low, high = _bounds(lo, hi)
    return Range(lo, hi, low, high, frozenset(depends), True, covers, form)


def _linear_sum(sign: int) -> Callable[[Range, Range], Linear | None]:
    def rule(x: Range, y: Range) -> Linear | None:
        if x.linear is None or y.linear is None:
            return None
        return _combine(x.linear, y.linear, sign)

    return rule


def _linear_product(x: Range, y: Range) -> Linear | None:
    if y.linear is None or x.linear is None:
        return None
    if not (y.exact and y.low == y.high):
        x, y = y, x
    if not (y.exact and y.low == y.high) or x.linear is None:
        return None
    factor = int(y.low)
    return Linear(x.linear.q * factor, x.linear.kv * factor, x.linear.base * factor)


def _linear_negative(x: Range) -> Linear | None:
    if x.linear is None:
        return None
    return Linear(-x.linear.q, -x.linear.kv, -x.linear.base)


_LINEAR_RULES: dict[str, Callable[..., Linear | None]] = {
    "add": _linear_sum(1),
    "sub": _linear_sum(-1),
    "mul": _linear_product,
    "neg": _linear_negative,
}


# Numbers. A rule returns None where it has nothing to say. Integer rules may assume that bounds
# stay below 2 ** 62 only after checking ``low`` and ``high``, in Python's unbounded integers.


def _small(*ranges: Range) -> bool:
    return all(-_LIMIT < x.low and x.high < _LIMIT for x in ranges)


def _apart(x: Range, y: Range) -> bool | Tensor:
    """Ends of a monotone function of two numbers are attained."""
    return False if x.depends & y.depends else _both(x.attained, y.attained)


def _add(x: Range, y: Range) -> Range | None:
    if not _small(x, y):
        return None
    ends = x.low + y.low, x.high + y.high
    return Range(x.lo + y.lo, x.hi + y.hi, *ends, x.depends | y.depends, _apart(x, y))


def _sub(x: Range, y: Range) -> Range | None:
    if not _small(x, y):
        return None
    ends = x.low - y.high, x.high - y.low
    return Range(x.lo - y.hi, x.hi - y.lo, *ends, x.depends | y.depends, _apart(x, y))


def _neg(x: Range) -> Range | None:
    if not _small(x):
        return None
    return Range(-x.hi, -x.lo, -x.high, -x.low, x.depends, x.attained, x.covers, nan=x.nan)


def _corners(x: Range, y: Range, function: Callable[[Any, Any], Any]) -> tuple[Tensor, Tensor]:
    """Ends of a function that is monotone in each argument."""
    ends = [function(x.lo, y.lo)]
    if not x.exact:
        ends.append(function(x.hi, y.lo))
    if not y.exact:
        ends += [function(end, y.hi) for end in ((x.lo,) if x.exact else (x.lo, x.hi))]
    lo = hi = ends[0]
    for end in ends[1:]:
        lo, hi = torch.minimum(lo, end), torch.maximum(hi, end)
    return lo, hi


def _mul(x: Range, y: Range) -> Range | None:
    products = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    if not (_small(x, y) and max(map(abs, products)) < _LIMIT):
        return None
    lo, hi = _corners(x, y, torch.mul)
    depends = x.depends | y.depends
    return Range(lo, hi, min(products), max(products), depends, _apart(x, y))


def _floordiv(x: Range, y: Range) -> Range | None:
    if not _small(x, y) or y.low <= 0 <= y.high:
        return None
    lo, hi = _corners(x, y, lambda a, b: torch.div(a, b, rounding_mode="floor"))
    covers = x.covers and y.exact and y.low > 0
    depends = x.depends | y.depends
    return Range(lo, hi, *_bounds(lo, hi), depends, _apart(x, y), covers)


def _mod(x: Range, y: Range) -> Range | None:
    if not _small(x, y) or y.low <= 0:
        return None
    lo, hi = torch.zeros_like(x.lo), y.hi - 1
    attained: bool | Tensor = False
    if y.exact:
        # Within one period the remainder grows with x.
        first = torch.div(x.lo, y.lo, rounding_mode="floor")
        same = first == torch.div(x.hi, y.lo, rounding_mode="floor")
        start = first * y.lo
        lo, hi = torch.where(same, x.lo - start, lo), torch.where(same, x.hi - start, hi)
        attained = same & _all(x.attained, lo)
        if x.covers:
            # A whole period reaches both ends.
            attained = attained | (_all(x.attained, lo) & (x.hi - x.lo >= y.lo))
    return Range(lo, hi, 0, y.high - 1, x.depends | y.depends, attained)


def _abs(x: Range) -> Range | None:
    if not _small(x):
        return None
    across = (x.lo < 0) & (x.hi > 0)
    ends = x.lo.abs(), x.hi.abs()
    lo = torch.where(across, 0, torch.minimum(*ends))
    attained = _all(x.attained, lo)
    if not x.covers:
        attained = attained & ~across
    high = max(abs(x.low), abs(x.high))
    return Range(lo, torch.maximum(*ends), 0, high, x.depends, attained, x.covers, nan=x.nan)


def _minimum(x: Range, y: Range) -> Range | None:
    lo, hi = torch.minimum(x.lo, y.lo), torch.minimum(x.hi, y.hi)
    low, high = min(x.low, y.low), min(x.high, y.high)
    depends, nan = x.depends | y.depends, x.nan or y.nan
    return Range(lo, hi, low, high, depends, _apart(x, y), _one_covers(x, y), nan=nan)


def _maximum(x: Range, y: Range) -> Range | None:
    lo, hi = torch.maximum(x.lo, y.lo), torch.maximum(x.hi, y.hi)
    low, high = max(x.low, y.low), max(x.high, y.high)
    depends, nan = x.depends | y.depends, x.nan or y.nan
    return Range(lo, hi, low, high, depends, _apart(x, y), _one_covers(x, y), nan=nan)


def _one_covers(x: Range, y: Range) -> bool:
    return (x.covers and y.exact) or (y.covers and x.exact)


def _invert(x: Range) -> Range | None:
    if not _small(x):
        return None
    return Range(~x.hi, ~x.lo, -x.high - 1, -x.low - 1, x.depends, x.attained, x.covers)


def _bit_and(x: Range, y: Range) -> Range | None:
    if y.low < 0:
        x, y = y, x
    if y.low < 0 or not _small(x, y):
        return None
    if y.exact and y.low == y.high and (int(y.low) + 1) & int(y.low) == 0:
        period = y.lo + 1  # ``x & (2 ** n - 1)`` is a remainder
        size = y.low + 1
        return _mod(x, Range(period, period, size, size, _NOTHING, True, True))
    hi = torch.minimum(x.hi, y.hi) if x.low >= 0 else y.hi
    lo = torch.zeros_like(hi)
    return Range(lo, hi, 0, y.high, x.depends | y.depends)


def _bit_or(x: Range, y: Range) -> Range | None:
    if x.low < 0 or y.low < 0 or not _small(x, y):
        return None
    top = (1 << int(max(x.high, y.high)).bit_length()) - 1
    lo = torch.maximum(x.lo, y.lo)
    return Range(lo, torch.full_like(lo, top), 0, top, x.depends | y.depends)


def _bit_xor(x: Range, y: Range) -> Range | None:
    found = _bit_or(x, y)
    return None if found is None else replace(found, lo=torch.zeros_like(found.lo))


def _shift(up: bool) -> Callable[[Range, Range], Range | None]:
    def rule(x: Range, y: Range) -> Range | None:
        if not (y.exact and y.low == y.high and 0 <= y.low < 62):
            return None
        factor = torch.tensor(1 << int(y.low), device=x.lo.device)
        size = 1 << int(y.low)
        other = Range(factor, factor, size, size, _NOTHING, True, True)
        return _mul(x, other) if up else _floordiv(x, other)

    return rule


def _power(x: Range, y: Range) -> Range | None:
    if not (y.exact and y.low == y.high and 0 <= y.low <= 62) or not _small(x):
        return None
    exponent = int(y.low)
    if max(abs(x.low), abs(x.high)) ** exponent >= _LIMIT:
        return None
    if exponent % 2 == 0:
        base = _abs(x)
        assert base is not None
        x = base
    lo, hi = x.lo**exponent, x.hi**exponent
    return Range(lo, hi, *_bounds(lo, hi), x.depends, x.attained)


_INT_RULES: dict[str, Callable[..., Range | None]] = {
    "add": _add,
    "sub": _sub,
    "neg": _neg,
    "mul": _mul,
    "floordiv": _floordiv,
    "mod": _mod,
    "abs": _abs,
    "minimum": _minimum,
    "maximum": _maximum,
    "not": _invert,
    "and": _bit_and,
    "or": _bit_or,
    "xor": _bit_xor,
    "shl": _shift(True),
    "shr": _shift(False),
    "pow": _power,
}


# Floats: ends are computed in float64 and widened by more than the arithmetic can be off.


def _rounded(node: Node, found: Range, args: list[Range]) -> Range:
    """Widen a float result, and say whether it may be NaN."""
    nan = found.nan or any(arg.nan for arg in args)
    lo, hi = found.lo, found.hi
    if node.op not in _ROUNDING_FREE:
        share, least = (2.0**-20, 1e-37) if node.dtype == "float32" else (2.0**-48, 1e-300)
        lo, hi = lo - (lo.abs() * share + least), hi + (hi.abs() * share + least)
    lo = torch.where(lo.isnan(), -torch.inf, lo)
    hi = torch.where(hi.isnan(), torch.inf, hi)
    if node.dtype == "float32":
        lo = torch.where(lo < -_FLOAT32_MAX, -torch.inf, lo)
        hi = torch.where(hi > _FLOAT32_MAX, torch.inf, hi)
    attained = found.attained if node.op in _ROUNDING_FREE else False
    return Range(lo, hi, *_bounds(lo, hi), found.depends, attained, nan=nan)


_ROUNDING_FREE = frozenset({"neg", "abs", "minimum", "maximum", "floor", "ceil", "trunc", "round"})


def _float_rule(function: Callable[..., Any], *, finite: bool) -> Callable[..., Range]:
    """A function that is monotone in each argument; NaN only from infinities, if `finite`."""

    def rule(x: Range, y: Range | None = None) -> Range:
        if y is None:
            ends = (function(x.lo), function(x.hi))
            lo, hi = torch.minimum(*ends), torch.maximum(*ends)
            nan, depends = finite and not x.finite, x.depends
            return Range(lo, hi, 0, 0, depends, x.attained, nan=nan)
        lo, hi = _corners(x, y, function)
        # minimum and maximum hand NaN on (inf - inf, 0 * inf); `_rounded` widens it to infinity.
        nan = finite and not (x.finite and y.finite)
        return Range(lo, hi, 0, 0, x.depends | y.depends, False, nan=nan)

    return rule


def _float_div(x: Range, y: Range) -> Range | None:
    if y.low <= 0 <= y.high or not (x.finite and y.finite):
        return None
    return _float_rule(torch.div, finite=True)(x, y)


def _from_zero(function: Callable[[Tensor], Tensor]) -> Callable[[Range], Range | None]:
    """A monotone function of numbers above zero."""

    def rule(x: Range) -> Range | None:
        return _float_rule(function, finite=False)(x) if x.low > 0 and x.finite else None

    return rule


def _wave(x: Range) -> Range | None:
    if not x.finite:
        return None
    one = torch.ones_like(x.lo)
    return Range(-one, one, -1, 1, x.depends)


_FLOAT_RULES: dict[str, Callable[..., Range | None]] = {
    "add": _float_rule(torch.add, finite=True),
    "sub": _float_rule(torch.sub, finite=True),
    "mul": _float_rule(torch.mul, finite=True),
    "div": _float_div,
    "neg": _float_rule(torch.neg, finite=False),
    "abs": _abs,
    "minimum": _minimum,
    "maximum": _maximum,
    "sin": _wave,
    "cos": _wave,
    **{
        name: _float_rule(getattr(torch, name), finite=False)
        for name in ("exp", "exp2", "tanh", "sigmoid", "erf", "floor", "ceil", "trunc", "round")
    },
    **{name: _from_zero(getattr(torch, name)) for name in ("log", "log2", "sqrt", "rsqrt")},
}
