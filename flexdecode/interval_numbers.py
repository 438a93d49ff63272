"""What each operation on numbers does to their ranges, as text: `interval_rules` in programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flexdecode.interval_text import ASSUMED, ZERO, IntervalText, PrintedLinear, PrintedNumber
from flexdecode.interval_values import LIMIT, LIMITS

__all__ = ["NumberRules"]


class NumberRules(IntervalText):
    """Methods ``_int_OP`` and ``_float_OP``: the range of a result, or None if nothing is known."""

    # -- integers ------------------------------------------------------------------------------

    def _int_add(self, x: PrintedNumber, y: PrintedNumber, sign: int = 1) -> PrintedNumber:
        if x.linear is not None and y.linear is not None:
            linear = self._combined(x.linear, y.linear, sign)
            if linear is not None:
                return self._linear_range(linear)
        return self._sum(x, y, sign)

    def _int_sub(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._int_add(x, y, -1)

    def _int_neg(self, x: PrintedNumber) -> PrintedNumber:
        zero = self._temp(ZERO)
        return self._int_sub(self._exact(zero, 0, 0), x)

    def _corners(self, x: PrintedNumber, y: PrintedNumber, form: str) -> tuple[str, str]:
        """Ends of a function that is monotone in each argument."""
        ends = [
            self._temp(form.format(a, b))
            for a in dict.fromkeys((x.lo, x.hi))
            for b in dict.fromkeys((y.lo, y.hi))
        ]
        return self._least(*ends), self._most(*ends)

    def _int_mul(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        products = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
        if not max(map(abs, products)) < LIMIT:
            x, y = self._small(x, y, most=1 << 30)
            products = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
        if not y.constant:
            x, y = y, x
        if y.constant and x.linear is not None:
            form, factor = x.linear, int(y.low)
            ends = sorted((form.low * factor, form.high * factor))
            coefficients = max(abs(form.q), abs(form.kv)) * abs(factor)
            if coefficients < 1 << 30 and -LIMIT < ends[0] and ends[1] < LIMIT:
                base = self._temp(f"{form.base} * {y.lo}")
                linear = PrintedLinear(form.q * factor, form.kv * factor, base, *ends)
                return self._linear_range(linear)
        lo, hi = self._corners(x, y, "{} * {}")
        return PrintedNumber(
            lo, hi, min(products), max(products), x.depends | y.depends, self._apart(x, y)
        )

    def _int_floordiv(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        (x,) = self._small(x, most=LIMIT)
        if y.high >= 0:
            y = self._positive(y)
        lo, hi = self._corners(x, y, "floor_div({}, {})")
        if y.low > 0 and y.exact:
            lo, hi = (self._temp(f"floor_div({end}, {y.lo})") for end in (x.lo, x.hi))
        reach = max(abs(x.low), abs(x.high)) + 1
        covers = x.covers and y.exact and y.low > 0
        return PrintedNumber(
            lo, hi, -reach, reach, x.depends | y.depends, self._apart(x, y), covers
        )

    def _int_mod(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber | None:
        if y.high < 0:
            return None
        (x,), y = self._small(x, most=LIMIT), self._positive(y)
        (y,) = self._small(y, most=LIMIT)
        if x.exact and y.exact:
            return self._exact(self._temp(f"floor_mod({x.lo}, {y.lo})"), 0, y.high - 1)
        zero = self._temp(ZERO)
        if not y.exact:
            hi = self._temp(f"{y.hi} - 1")
            return PrintedNumber(zero, hi, 0, y.high - 1, x.depends | y.depends)
        # Within one period the remainder grows with x; a whole period reaches both ends.
        first, last = (self._temp(f"floor_div({end}, {y.lo})") for end in (x.lo, x.hi))
        same = self._temp(f"{first} == {last}")
        lo = self._temp(f"tl.where({same}, {x.lo} - {first} * {y.lo}, 0)")
        hi = self._temp(f"tl.where({same}, {x.hi} - {first} * {y.lo}, {y.lo} - 1)")
        attained = same
        if x.covers:
            attained = self._or(same, self._temp(f"{x.hi} - {x.lo} >= {y.lo}"))
        return PrintedNumber(lo, hi, 0, y.high - 1, x.depends, self._and(x.attained, attained))

    def _int_abs(self, x: PrintedNumber) -> PrintedNumber:
        (x,) = self._small(x, most=LIMIT)
        if x.exact:
            return self._exact(self._temp(f"tl.abs({x.lo})"), 0, _magnitude(x))
        return self._absolute(x)

    def _absolute(self, x: PrintedNumber) -> PrintedNumber:
        across = self._and(self._temp(f"{x.lo} < 0"), self._temp(f"{x.hi} > 0"))
        ends = [self._temp(f"tl.abs({end})") for end in (x.lo, x.hi)]
        lo = self._temp(f"tl.where({across}, {ends[0]} * 0, {self._least(*ends)})")
        attained = x.attained if x.covers else self._and(x.attained, self._not(across))
        return PrintedNumber(lo, self._most(*ends), 0, _magnitude(x), x.depends, attained, x.covers)

    def _int_minimum(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._extreme(self._least, min, x, y)

    def _int_maximum(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._extreme(self._most, max, x, y)

    def _extreme(
        self,
        print_: Callable[..., str],
        pick: Callable[..., Any],
        x: PrintedNumber,
        y: PrintedNumber,
    ) -> PrintedNumber:
        covers = (x.covers and y.exact) or (y.covers and x.exact)
        return PrintedNumber(
            print_(x.lo, y.lo),
            print_(x.hi, y.hi),
            pick(x.low, y.low),
            pick(x.high, y.high),
            x.depends | y.depends,
            self._apart(x, y),
            covers,
        )

    def _int_not(self, x: PrintedNumber) -> PrintedNumber:
        lo, hi = self._temp(f"-1 - {x.hi}"), self._temp(f"-1 - {x.lo}")
        return PrintedNumber(lo, hi, -x.high - 1, -x.low - 1, x.depends, x.attained, x.covers)

    def _int_and(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber | None:
        if y.low < 0:
            x, y = y, x
        if x.exact and y.exact:
            return self._bits(x, y, "&")
        if y.constant and y.low >= 0 and (int(y.low) + 1) & int(y.low) == 0:
            size = int(y.low) + 1  # ``x & (2 ** n - 1)`` is a remainder
            return self._int_mod(x, self._exact(self._temp(f"{y.lo} + 1"), size, size))
        y = self._within(y, 0, LIMIT)
        hi = y.hi if x.low < 0 else self._least(x.hi, y.hi)
        zero = self._temp(ZERO)
        return PrintedNumber(zero, hi, 0, y.high, x.depends | y.depends)

    def _int_or(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._bits(x, y, "|")

    def _int_xor(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._bits(x, y, "^")

    def _bits(self, x: PrintedNumber, y: PrintedNumber, sign: str) -> PrintedNumber:
        if x.exact and y.exact:
            name = self._temp(f"{x.lo} {sign} {y.lo}")
            return self._exact(name, *LIMITS["int64"])
        # Neither carries: the result is below the sum.
        x, y = self._within(x, 0, ASSUMED), self._within(y, 0, ASSUMED)
        zero = self._temp(ZERO)
        lo = self._most(x.lo, y.lo) if sign == "|" else zero
        hi = self._temp(f"{x.hi} + {y.hi}")
        return PrintedNumber(lo, hi, 0, x.high + y.high, x.depends | y.depends)

    def _shift(self, x: PrintedNumber, y: PrintedNumber, up: bool) -> PrintedNumber | None:
        if not (y.constant and 0 <= y.low < 62):
            return None
        factor = 1 << int(y.low)
        other = self._exact(self._temp(f"tl.full((1,), {factor}, tl.int64)"), factor, factor)
        return self._int_mul(x, other) if up else self._int_floordiv(x, other)

    def _int_shl(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber | None:
        return self._shift(x, y, True)

    def _int_shr(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber | None:
        return self._shift(x, y, False)

    # -- floats --------------------------------------------------------------------------------

    def _float_add(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        lo, hi = self._temp(f"{x.lo} + {y.lo}"), self._temp(f"{x.hi} + {y.hi}")
        return self._real(lo, hi, x, y)

    def _float_sub(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        lo, hi = self._temp(f"{x.lo} - {y.hi}"), self._temp(f"{x.hi} - {y.lo}")
        return self._real(lo, hi, x, y)

    def _float_mul(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._real(*self._corners(x, y, "{} * {}"), x, y)

    def _float_div(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        self._guard(f"({y.lo} > 1e-30) | ({y.hi} < -1e-30)")
        return self._real(*self._corners(x, y, "{} / {}"), x, y)

    def _real(self, lo: str, hi: str, *args: PrintedNumber) -> PrintedNumber:
        for arg in args:
            self._finite(arg)
        depends = frozenset().union(*(arg.depends for arg in args))
        return PrintedNumber(lo, hi, -math.inf, math.inf, depends)

    def _float_neg(self, x: PrintedNumber) -> PrintedNumber:
        lo, hi = self._temp(f"-{x.hi}"), self._temp(f"-{x.lo}")
        return replace(self._real(lo, hi, x), attained=x.attained)

    def _float_abs(self, x: PrintedNumber) -> PrintedNumber:
        return self._absolute(self._finite(x))

    def _float_minimum(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._int_minimum(self._finite(x), self._finite(y))

    def _float_maximum(self, x: PrintedNumber, y: PrintedNumber) -> PrintedNumber:
        return self._int_maximum(self._finite(x), self._finite(y))

    def _float_floor(self, x: PrintedNumber) -> PrintedNumber:
        lo, hi = self._temp(f"tl.floor({x.lo})"), self._temp(f"tl.floor({x.hi})")
        return replace(self._real(lo, hi, x), attained=x.attained)

    def _float_ceil(self, x: PrintedNumber) -> PrintedNumber:
        lo, hi = self._temp(f"tl.ceil({x.lo})"), self._temp(f"tl.ceil({x.hi})")
        return replace(self._real(lo, hi, x), attained=x.attained)


def _magnitude(x: PrintedNumber) -> float:
    return max(abs(x.low), abs(x.high))
