"""The words of an interval program: what it knows of a value, and how it writes that down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexdecode.graph import Graph
from flexdecode.interval_values import LIMIT, NOTHING, POSITIONS
from flexdecode.mod_text import POSITION_LIMIT, Layout, ModPrinter

__all__ = [
    "ASSUMED",
    "UNKNOWN",
    "ZERO",
    "IntervalText",
    "PrintedLinear",
    "PrintedNumber",
    "PrintedTruth",
    "PrintedValue",
]

ASSUMED = 1 << 40  # numbers without proven bounds are taken to be smaller, and looked at
ZERO = "tl.full((1,), 0, tl.int64)"


@dataclass(frozen=True)
class PrintedLinear:
    """``q * q_idx + kv * kv_idx + base``; `base` is one value a box, between `low` and `high`."""

    q: int
    kv: int
    base: str
    low: float
    high: float


@dataclass(frozen=True)
class PrintedNumber:
    """A printed `interval_values.Range`: names of tensors [1] or [N], int64 or float64.

    `low` and `high` hold whatever the numbers of a call are; `attained` is the name of a boolean,
    or ``"True"`` or ``"False"``.
    """

    lo: str
    hi: str
    low: float
    high: float
    depends: frozenset[str] = NOTHING
    attained: str = "False"
    covers: bool = False
    linear: PrintedLinear | None = None

    @property
    def exact(self) -> bool:
        """True where each box holds one value only."""
        return self.lo == self.hi

    @property
    def constant(self) -> bool:
        """True for a number that the program holds itself."""
        return self.exact and self.low == self.high


@dataclass(frozen=True)
class PrintedTruth:
    """A printed `interval_values.Truth`: names of booleans, ``"True"`` or ``"False"``."""

    must: str
    may: str
    seen: str
    unseen: str


PrintedValue = PrintedNumber | PrintedTruth | None  # None: nothing is known
UNKNOWN = PrintedTruth("False", "True", "False", "False")


class IntervalText(ModPrinter):
    """Prints expressions, equal ones once, and collects what has to hold for them to be right."""

    def __init__(self, graph: Graph, wide: Sequence[bool], layouts: Sequence[Layout]) -> None:
        self.names: dict[str, str] = {}
        self.guards: dict[str, None] = {}
        super().__init__(graph, wide, layouts, "interpret")

    # -- text ----------------------------------------------------------------------------------

    def _temp(self, text: str) -> str:
        if text not in self.names:
            self.names[text] = super()._temp(text)
        return self.names[text]

    def _flags(self, flag: str) -> str:
        """`flag` as a tensor."""
        if flag in ("True", "False"):
            return self._temp(f"tl.full((1,), {int(flag == 'True')}, tl.int1)")
        return flag

    def _and(self, *flags: str) -> str:
        parts = [flag for flag in dict.fromkeys(flags) if flag != "True"]
        if "False" in parts:
            return "False"
        if len(parts) < 2:
            return parts[0] if parts else "True"
        return self._temp(" & ".join(parts))

    def _or(self, *flags: str) -> str:
        parts = [flag for flag in dict.fromkeys(flags) if flag != "False"]
        if "True" in parts:
            return "True"
        if len(parts) < 2:
            return parts[0] if parts else "False"
        return self._temp(" | ".join(parts))

    def _not(self, flag: str) -> str:
        if flag in ("True", "False"):
            return str(flag == "False")
        return self._temp(f"{flag} == 0")

    def _least(self, *texts: str) -> str:
        return self._fold("minimum", texts)

    def _most(self, *texts: str) -> str:
        return self._fold("maximum", texts)

    def _fold(self, function: str, texts: Sequence[str]) -> str:
        first, *rest = dict.fromkeys(texts)
        for text in rest:
            first = self._temp(f"tl.{function}({first}, {text})")
        return first

    # -- what an operation needs of its numbers ------------------------------------------------

    def _guard(self, condition: str) -> None:
        self.guards[self._temp(condition)] = None

    def _within(self, x: PrintedNumber, low: float, high: float) -> PrintedNumber:
        """`x` with bounds that are proven, or else looked at in every box."""
        if x.low < low:
            self._guard(f"{x.lo} >= {int(low)}")
        if x.high > high:
            self._guard(f"{x.hi} <= {int(high)}")
        return replace(x, low=max(x.low, low), high=min(x.high, high))

    def _small(self, *numbers: PrintedNumber, most: int = ASSUMED) -> list[PrintedNumber]:
        return [self._within(x, -most, most) for x in numbers]

    def _positive(self, x: PrintedNumber) -> PrintedNumber:
        return self._within(x, 1, x.high)

    def _finite(self, x: PrintedNumber) -> PrintedNumber:
        self._guard(f"{x.lo} > -1e300")
        self._guard(f"{x.hi} < 1e300")
        return x

    # -- numbers -------------------------------------------------------------------------------

    def _exact(self, name: str, low: float, high: float) -> PrintedNumber:
        linear = PrintedLinear(0, 0, name, low, high)
        return PrintedNumber(name, name, low, high, NOTHING, "True", True, linear)

    def _number(self, value: PrintedValue) -> PrintedNumber | None:
        if not isinstance(value, PrintedTruth):
            return value
        lo = self._temp(f"{self._flags(value.must)}.to(tl.int64)")
        if value.must == value.may:
            return self._exact(lo, 0, 1)
        hi = self._temp(f"{self._flags(value.may)}.to(tl.int64)")
        both = self._and(value.seen, value.unseen)
        attained = self._or(both, value.must, self._not(value.may))
        return PrintedNumber(lo, hi, 0, 1, POSITIONS, attained)

    def _apart(self, x: PrintedNumber, y: PrintedNumber) -> str:
        """Whether the ends of a function that is monotone in each of two numbers are attained."""
        return "False" if x.depends & y.depends else self._and(x.attained, y.attained)

    def _sum(self, x: PrintedNumber, y: PrintedNumber, sign: int) -> PrintedNumber:
        if self.names.get(ZERO) == y.lo == y.hi:
            return x
        ends = (y.low, y.high) if sign > 0 else (-y.high, -y.low)
        if not (-LIMIT < x.low + ends[0] and x.high + ends[1] < LIMIT):
            x, y = self._small(x, y)
            ends = (y.low, y.high) if sign > 0 else (-y.high, -y.low)
        if sign > 0:
            lo, hi = self._temp(f"{x.lo} + {y.lo}"), self._temp(f"{x.hi} + {y.hi}")
        else:
            lo, hi = self._temp(f"{x.lo} - {y.hi}"), self._temp(f"{x.hi} - {y.lo}")
        return PrintedNumber(
            lo, hi, x.low + ends[0], x.high + ends[1], x.depends | y.depends, self._apart(x, y)
        )

    # -- linear forms --------------------------------------------------------------------------

    def _combined(self, x: PrintedLinear, y: PrintedLinear, sign: int) -> PrintedLinear | None:
        if (x.q, x.kv, x.base) == (y.q, y.kv, y.base) and sign < 0:
            return PrintedLinear(0, 0, self._temp(ZERO), 0, 0)
        q, kv = x.q + sign * y.q, x.kv + sign * y.kv
        if max(abs(q), abs(kv)) >= 1 << 30:
            return None
        first, second = (
            PrintedNumber(form.base, form.base, form.low, form.high, linear=form) for form in (x, y)
        )
        sum_ = self._sum(first, second, sign)
        return PrintedLinear(q, kv, sum_.lo, sum_.low, sum_.high)

    def _linear_range(self, form: PrintedLinear) -> PrintedNumber:
        lo = hi = form.base
        low, high = form.low, form.high
        depends = []
        for name, factor, ends in (
            ("q_idx", form.q, ("q_lo", "q_hi")),
            ("kv_idx", form.kv, ("kv_lo", "kv_hi")),
        ):
            if factor:
                first, last = ends if factor > 0 else ends[::-1]
                lo, hi = self._plus(lo, first, factor), self._plus(hi, last, factor)
                low, high = low - abs(factor) * POSITION_LIMIT, high + abs(factor) * POSITION_LIMIT
                depends.append(name)
        covers = all(abs(factor) <= 1 for factor in (form.q, form.kv))
        return PrintedNumber(lo, hi, low, high, frozenset(depends), "True", covers, form)

    def _plus(self, base: str, position: str, factor: int) -> str:
        if self.names.get(ZERO) == base and factor == 1:
            return position
        sign = "+" if factor > 0 else "-"
        step = position if abs(factor) == 1 else f"{position} * {abs(factor)}"
        return self._temp(f"{base} {sign} {step}")
