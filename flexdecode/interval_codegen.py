"""A traced mask printed as an interval program: what is known of a whole box of positions.

The rules are those of `interval_rules` and `intervals`, in text. Where those look at the numbers of
a call to see that nothing overflows, the program does: integers and floats here are 64 bits wide,
and a box whose numbers leave a range that the next operation needs is undecided.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flexdecode.codegen import Keyed, compiled
from flexdecode.graph import COMPARISONS, Graph, Node, is_float
from flexdecode.interval_numbers import NumberRules
from flexdecode.interval_rules import TRUTH_RULES
from flexdecode.interval_text import (
    UNKNOWN,
    ZERO,
    PrintedLinear,
    PrintedNumber,
    PrintedTruth,
    PrintedValue,
)
from flexdecode.interval_values import LIMIT, LIMITS, NOTHING, POSITIONS
from flexdecode.mod_text import POSITION_LIMIT, Layout, argument_kinds
from flexdecode.trace import Traced

__all__ = ["lower_intervals", "print_intervals"]

_FLOAT_LIMITS = {"float32": "3.4028234e38", "float64": "1e300"}
_ARGUMENTS = "b, h, q_lo, q_hi, kv_lo, kv_hi, reach, args"
_MIRRORED = {"gt": "lt", "ge": "le"}


def lower_intervals(traced: Traced) -> Any:
    """Return the interval program of a mask, a ``triton.JITFunction``.

    It takes the arguments that `codegen.lower` makes for the mask itself, and is the same object
    for every mask of this structure.
    """
    wide, layouts = argument_kinds(traced)
    return _function(traced.graph.key, wide, layouts, Keyed(traced.graph))


def print_intervals(traced: Traced) -> str:
    """Return the text that `lower_intervals` compiles."""
    return _IntervalPrinter(traced.graph, *argument_kinds(traced)).text()


@functools.lru_cache(maxsize=4096)
def _function(key: str, wide: tuple[bool, ...], layouts: tuple[Layout, ...], keyed: Keyed) -> Any:
    printer = _IntervalPrinter(keyed.graph, wide, layouts)
    return compiled(printer.name, printer.text())


class _IntervalPrinter(NumberRules):
    """Prints the interval program of one graph."""

    def __init__(self, graph: Graph, wide: Sequence[bool], layouts: Sequence[Layout]) -> None:
        super().__init__(graph, wide, layouts)
        self.values: dict[Node, PrintedValue] = {}
        self.name = f"{graph.name}_intervals"

    def text(self) -> str:
        for node in self.graph.nodes:
            self.values[node] = self._value(node)
        truth = self.values[self.graph.output]
        assert isinstance(truth, PrintedTruth)
        fits = self._and(*self.guards)
        results = [
            self._and(truth.must, fits),
            self._or(truth.may, self._not(fits)),
            self._and(truth.seen, truth.unseen, fits),
        ]
        head = ["@triton.jit", f"def {self.name}({_ARGUMENTS}):"]
        if self.graph.source:
            head.append(f"    # {textwrap.shorten(self.graph.source, 90)}")
        head.append("    # every element is allowed, one may be, one is and one is not")
        result = ", ".join(map(self._flags, results))
        return "\n".join([*head, *self.lines, f"    return {result}", ""])

    # -- nodes ---------------------------------------------------------------------------------

    def _value(self, node: Node) -> PrintedValue:
        if node.op == "input":
            return self._place(node.attr)
        if node.op == "const":
            return self._constant(node)
        if node.op == "param":
            part = self.params[int(node.attr)]
            return self._whole_or_float(node, part.text, part.low, part.high)
        if node.op == "size":
            slot, dim = node.attr
            high = 1 << (61 if self.layouts[slot].wide else 30)
            return self._whole_or_float(node, self.captures[slot][1][dim], 0, high)
        args = [self.values[arg] for arg in node.args]
        if node.op == "load":
            return self._loaded(node, args)
        if node.op in TRUTH_RULES and all(isinstance(arg, PrintedTruth) for arg in args):
            return self._logic(node.op, args)
        if node.op == "where":
            return self._where(node, args)
        if node.op == "cast" and node.dtype == "bool":
            return self._cast_bool(args[0])
        if node.op == "isnan":
            return UNKNOWN
        numbers = [self._number(arg) for arg in args]
        known = [x for x in numbers if x is not None]
        if node.op in COMPARISONS:
            alike = node.args[0].dtype == node.args[1].dtype
            if not alike or len(known) < 2:
                return UNKNOWN
            return self._compare(node.op, *known)
        found = None
        if len(known) == len(numbers):
            if node.op == "cast":
                return self._cast_number(node, known[0])
            kind = "float" if is_float(node.dtype) else "int"
            rule: Callable[..., PrintedNumber | None] | None
            rule = getattr(self, f"_{kind}_{node.op}", None)
            found = None if rule is None else rule(*known)
        if found is None:
            return UNKNOWN if node.dtype == "bool" else None
        return self._rounded(node, found) if is_float(node.dtype) else self._checked(node, found)

    def _place(self, name: str) -> PrintedNumber:
        if name in ("b", "h"):
            linear = PrintedLinear(0, 0, name, 0, POSITION_LIMIT)
            return PrintedNumber(name, name, 0, POSITION_LIMIT, NOTHING, "True", True, linear)
        zero = self._temp(ZERO)
        linear = PrintedLinear(int(name == "q_idx"), int(name == "kv_idx"), zero, 0, 0)
        return self._linear_range(linear)

    def _constant(self, node: Node) -> PrintedValue:
        value = node.attr
        if isinstance(value, bool):
            return PrintedTruth(str(value), str(value), str(value), str(not value))
        if is_float(node.dtype):
            if node.dtype == "float32":
                value = torch.tensor(value, dtype=torch.float32, device="cpu").item()
            if not math.isfinite(value):
                return None
            text = self._temp(f"tl.full((1,), {value!r}, tl.float64)")
            return PrintedNumber(text, text, value, value, NOTHING, "True")
        text = self._temp(f"tl.full((1,), {value}, tl.int64)")
        return PrintedNumber(
            text, text, value, value, NOTHING, "True", True, PrintedLinear(0, 0, text, value, value)
        )

    def _whole_or_float(self, node: Node, text: str, low: float, high: float) -> PrintedNumber:
        """One value of the call."""
        if is_float(node.dtype):
            name = self._temp(f"tl.full((1,), 0, tl.float64) + {text}")
            return PrintedNumber(name, name, -math.inf, math.inf, NOTHING, "True")
        name = self._temp(f"tl.full((1,), 0, tl.int64) + {text}")
        return self._exact(name, low, high)

    def _checked(self, node: Node, found: PrintedNumber) -> PrintedNumber:
        """`found`, unless the integer might have wrapped."""
        least, most = LIMITS[node.dtype]
        if node.dtype == "int64":
            return found
        return replace(self._within(found, least, most), linear=None)

    def _rounded(self, node: Node, found: PrintedNumber) -> PrintedNumber:
        """`found`, wider by more than the arithmetic can be off, and finite."""
        lo, hi, attained = found.lo, found.hi, found.attained
        if node.op not in ("neg", "abs", "minimum", "maximum", "floor", "ceil"):
            share, least = ("9.5e-7", "1e-37") if node.dtype == "float32" else ("4e-15", "1e-300")
            lo = self._temp(f"{lo} - (tl.abs({lo}) * {share} + {least})")
            hi = self._temp(f"{hi} + (tl.abs({hi}) * {share} + {least})")
            attained = "False"
        self._guard(f"{lo} > -{_FLOAT_LIMITS[node.dtype]}")
        self._guard(f"{hi} < {_FLOAT_LIMITS[node.dtype]}")
        return PrintedNumber(lo, hi, -math.inf, math.inf, found.depends, attained)

    # -- captured tensors ----------------------------------------------------------------------

    def _loaded(self, node: Node, args: list[PrintedValue]) -> PrintedValue:
        indices = [self._number(arg) for arg in args]
        known = [index for index in indices if index is not None]
        unknown = UNKNOWN if node.dtype == "bool" else None
        if len(known) < len(indices):
            return unknown
        slot = int(node.attr)
        stored = self.graph.captures[slot].dtype
        floating = is_float(node.dtype)
        ranged = [dim for dim, index in enumerate(known) if not index.exact]
        low, high = (-math.inf, math.inf) if floating else _stored_limits(stored)
        if not ranged:
            name, _ = self._element(slot, known, floating)
            number = self._exact(name, low, high)
            return self._as_loaded(node, replace(number, linear=None) if floating else number)
        if len(ranged) > 1:
            # Exact where each index has one value in a box, as in a table of blocks.
            single = self._and(*(self._temp(f"{x.lo} == {x.hi}") for x in known if not x.exact))
            name, _ = self._element(slot, known, floating)
            ends = ('float("-inf")', 'float("inf")') if floating else (int(low), int(high))
            sure = self._and(single, self._temp(f"{name} == {name}")) if floating else single
            lo, hi = (self._temp(f"tl.where({sure}, {name}, {end})") for end in ends)
            return self._as_loaded(node, PrintedNumber(lo, hi, low, high, POSITIONS, sure))
        dim = ranged[0]
        index = known[dim]
        others, inside = self._address(slot, known, dim)
        pointer, sizes, strides = self.captures[slot]
        count = self.count = self.count + 1
        names = [f"lo{count}", f"hi{count}", f"known{count}"]
        call = f"{pointer}, {others}, {strides[dim]}, {index.lo}, {index.hi}, {sizes[dim]}"
        reach = self._temp(f"tl.where({inside}, reach, 0)") if inside != "True" else "reach"
        if floating:
            self._line(", ".join(names), f"float_slice_bounds({call}, {reach})")
        else:
            ends_text = f"{int(low)}, {int(high)}"
            self._line(", ".join(names), f"slice_bounds({call}, {reach}, {ends_text})")
        attained = self._and(index.attained, names[2]) if index.covers else "False"
        return self._as_loaded(
            node, PrintedNumber(names[0], names[1], low, high, index.depends, attained)
        )

    def _address(
        self, slot: int, indices: list[PrintedNumber], skipped: int | None
    ) -> tuple[str, str]:
        """Offset that indices give, and where they are all inside; all but `skipped`."""
        _, sizes, strides = self.captures[slot]
        offset, inside = self._temp(ZERO), "True"
        for dim, (index, size, stride) in enumerate(zip(indices, sizes, strides, strict=True)):
            if dim == skipped:
                continue
            wrapped = index.lo
            if index.low < 0:
                wrapped = self._temp(f"tl.where({wrapped} < 0, {wrapped} + {size}, {wrapped})")
                inside = self._and(inside, self._temp(f"{wrapped} >= 0"))
            inside = self._and(inside, self._temp(f"{wrapped} < {size}"))
            step = wrapped if stride == "1" else f"{wrapped} * {stride}"
            offset = self._temp(f"{offset} + {step}")
        return offset, inside

    def _element(self, slot: int, indices: list[PrintedNumber], floating: bool) -> tuple[str, str]:
        """One element a box, zero where it is outside, as 64 bits; and where it is inside."""
        offset, inside = self._address(slot, indices, None)
        pointer = self.captures[slot][0]
        guard = "" if inside == "True" else f", mask={inside}, other=0"
        kind = "float64" if floating else "int64"
        return self._temp(f"tl.load({pointer} + {offset}{guard}).to(tl.{kind})"), inside

    def _as_loaded(self, node: Node, x: PrintedNumber) -> PrintedValue:
        if node.dtype != "bool":
            return x
        if x.exact:
            flag = self._temp(f"{x.lo} != 0")
            return PrintedTruth(flag, flag, flag, self._not(flag))
        must, may = self._temp(f"{x.lo} > 0"), self._temp(f"{x.hi} > 0")
        return PrintedTruth(
            must, may, self._and(may, x.attained), self._and(self._not(must), x.attained)
        )

    # -- booleans ------------------------------------------------------------------------------

    def _all(self, x: PrintedTruth, y: PrintedTruth) -> PrintedTruth:
        return PrintedTruth(
            self._and(x.must, y.must),
            self._and(x.may, y.may),
            self._or(self._and(x.seen, y.must), self._and(y.seen, x.must)),
            self._or(x.unseen, y.unseen),
        )

    def _negated(self, x: PrintedTruth) -> PrintedTruth:
        return PrintedTruth(self._not(x.may), self._not(x.must), x.unseen, x.seen)

    def _any(self, x: PrintedTruth, y: PrintedTruth) -> PrintedTruth:
        return PrintedTruth(
            self._or(x.must, y.must),
            self._or(x.may, y.may),
            self._or(x.seen, y.seen),
            self._or(self._and(x.unseen, self._not(y.may)), self._and(y.unseen, self._not(x.may))),
        )

    def _logic(self, op: str, args: list[Any]) -> PrintedTruth:
        if op == "not":
            return self._negated(args[0])
        x, y = args
        if op == "and":
            return self._all(x, y)
        if op == "or":
            return self._any(x, y)
        differ = self._any(self._all(x, self._negated(y)), self._all(self._negated(x), y))
        return self._negated(differ) if op == "eq" else differ

    def _where(self, node: Node, args: list[PrintedValue]) -> PrintedValue:
        condition, first, second = args
        unknown = UNKNOWN if node.dtype == "bool" else None
        if not isinstance(condition, PrintedTruth):
            return unknown
        if node.dtype == "bool":
            if not (isinstance(first, PrintedTruth) and isinstance(second, PrintedTruth)):
                return unknown
            found = self._any(
                self._all(condition, first), self._all(self._negated(condition), second)
            )
            return replace(
                found,
                must=self._or(found.must, self._and(first.must, second.must)),
                may=self._and(found.may, self._or(first.may, second.may)),
            )
        x, y = self._number(first), self._number(second)
        if x is None or y is None or is_float(node.args[1].dtype) != is_float(node.args[2].dtype):
            return None
        if is_float(node.dtype):
            x, y = self._finite(x), self._finite(y)
        always, never = self._flags(condition.must), self._flags(self._not(condition.may))

        def pick(of_x: str, of_y: str, either: str) -> str:
            inner = self._temp(f"tl.where({never}, {of_y}, {either})")
            return self._temp(f"tl.where({always}, {of_x}, {inner})")

        lo = pick(x.lo, y.lo, self._least(x.lo, y.lo))
        hi = lo
        if not (x.exact and y.exact and condition.must == condition.may):
            hi = pick(x.hi, y.hi, self._most(x.hi, y.hi))
        attained = self._or(
            self._and(condition.must, x.attained),
            self._and(self._not(condition.may), y.attained),
        )
        low, high = min(x.low, y.low), max(x.high, y.high)
        return PrintedNumber(lo, hi, low, high, NOTHING if lo == hi else POSITIONS, attained)

    # -- comparisons ---------------------------------------------------------------------------

    def _compare(self, op: str, x: PrintedNumber, y: PrintedNumber) -> PrintedTruth:
        if op in _MIRRORED:
            return self._compare(_MIRRORED[op], y, x)
        # Numbers that vary with different positions are compared exactly as they are.
        if x.linear is not None and y.linear is not None and x.depends & y.depends:
            difference = self._combined(x.linear, y.linear, -1)
            if difference is not None:
                zero = self._temp(ZERO)
                x, y = self._linear_range(difference), self._exact(zero, 0, 0)
        sure = "False" if x.depends & y.depends else self._and(x.attained, y.attained)
        if op in ("eq", "ne"):
            equal = [
                self._temp(f"{first} == {second}")
                for first, second in dict.fromkeys(((x.lo, y.lo), (x.lo, x.hi), (y.lo, y.hi)))
                if first != second
            ]
            must = self._and(*equal)
            may = self._and(self._temp(f"{x.lo} <= {y.hi}"), self._temp(f"{y.lo} <= {x.hi}"))
            meet = may
            if not (x.covers and y.covers):
                pairs = [(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
                meet = self._or(*(self._temp(f"{a} == {b}") for a, b in pairs))
            found = PrintedTruth(
                must, may, self._and(meet, sure, may), self._and(self._not(must), sure)
            )
            return self._negated(found) if op == "ne" else found
        sign = "<" if op == "lt" else "<="
        must, may = self._temp(f"{x.hi} {sign} {y.lo}"), self._temp(f"{x.lo} {sign} {y.hi}")
        return PrintedTruth(must, may, self._and(may, sure), self._and(self._not(must), sure))

    # -- casts ---------------------------------------------------------------------------------

    def _cast_bool(self, value: PrintedValue) -> PrintedTruth:
        if isinstance(value, PrintedTruth):
            return value
        if value is None:
            return UNKNOWN
        zero = self._and(self._temp(f"{value.lo} == 0"), self._temp(f"{value.hi} == 0"))
        if value.exact:
            return PrintedTruth(self._not(zero), self._not(zero), self._not(zero), zero)
        must = self._or(self._temp(f"{value.lo} > 0"), self._temp(f"{value.hi} < 0"))
        return PrintedTruth(must, self._not(zero), self._and(value.attained, self._not(zero)), zero)

    def _cast_number(self, node: Node, x: PrintedNumber) -> PrintedNumber | None:
        source, target = node.args[0].dtype, node.dtype
        if is_float(target):
            lo, hi = (self._temp(f"{end}.to(tl.{target}).to(tl.float64)") for end in (x.lo, x.hi))
            return PrintedNumber(lo, hi, -math.inf, math.inf, x.depends, x.attained)
        if is_float(source):
            for text in (f"{x.lo} > -1e18", f"{x.hi} < 1e18"):
                self._guard(text)
            lo, hi = (self._temp(f"{end}.to(tl.int64)") for end in (x.lo, x.hi))
            return self._checked(node, PrintedNumber(lo, hi, -LIMIT, LIMIT, x.depends, x.attained))
        return self._checked(node, x)


def _stored_limits(dtype: str) -> tuple[int, int]:
    return (0, 1) if dtype == "bool" else LIMITS[dtype]
