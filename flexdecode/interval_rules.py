"""What each operation does to what interval evaluation knows of its arguments.

Every rule is sound: the range that it returns holds all values there are. A rule returns None
where it has nothing to say. Integer rules check the bounds of their arguments first, in Python's
unbounded integers, so that no end can overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexdecode.graph import Node
from flexdecode.interval_values import (
    FLOAT32_MAX,
    LIMIT,
    NOTHING,
    Boxes,
    Linear,
    Range,
    Truth,
    bounds,
    spread,
)

__all__ = [
    "FLOAT_RULES",
    "INT_RULES",
    "LINEAR_RULES",
    "TRUTH_RULES",
    "all_of",
    "any_of",
    "combine",
    "linear_range",
    "negated",
    "rounded",
]


def _both(first: bool | Tensor, second: bool | Tensor) -> bool | Tensor:
    if isinstance(first, bool):
        return second if first else False
    return first & second if isinstance(second, Tensor) else (first if second else False)


# Booleans.


def all_of(x: Truth, y: Truth) -> Truth:
    """``x & y``."""
    return Truth(
        x.must & y.must,
        x.may & y.may,
        (x.seen & y.must) | (y.seen & x.must),
        x.unseen | y.unseen,
    )


def negated(x: Truth) -> Truth:
    """``~x``; exact where `x` is."""
    must = ~x.may
    return Truth(must, must if x.exact else ~x.must, x.unseen, x.seen)


def any_of(x: Truth, y: Truth) -> Truth:
    """``x | y``."""
    return negated(all_of(negated(x), negated(y)))


def _xor(x: Truth, y: Truth) -> Truth:
    return any_of(all_of(x, negated(y)), all_of(negated(x), y))


TRUTH_RULES: dict[str, Callable[..., Truth]] = {
    "and": all_of,
    "or": any_of,
    "xor": _xor,
    "not": negated,
    "eq": lambda x, y: negated(_xor(x, y)),
    "ne": _xor,
}


# Linear forms.


def combine(x: Linear, y: Linear, sign: int) -> Linear:
    """``x + sign * y``, with a sign of 1 or -1."""
    base = x.base + y.base if sign > 0 else x.base - y.base
    return Linear(x.q + sign * y.q, x.kv + sign * y.kv, base)


def linear_range(form: Linear, boxes: Boxes) -> Range:
    """Range of a linear form; its ends are attained."""
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
    low, high = bounds(lo, hi)
    return Range(lo, hi, low, high, frozenset(depends), True, covers, form)


def _linear_sum(sign: int) -> Callable[[Range, Range], Linear | None]:
    def rule(x: Range, y: Range) -> Linear | None:
        if x.linear is None or y.linear is None:
            return None
        return combine(x.linear, y.linear, sign)

    return rule


def _linear_product(x: Range, y: Range) -> Linear | None:
    for form, number in ((x.linear, y), (y.linear, x)):
        if form is not None and number.linear is not None and number.constant:
            factor = int(number.low)
            return Linear(form.q * factor, form.kv * factor, form.base * factor)
    return None


def _linear_negative(x: Range) -> Linear | None:
    if x.linear is None:
        return None
    return Linear(-x.linear.q, -x.linear.kv, -x.linear.base)


LINEAR_RULES: dict[str, Callable[..., Linear | None]] = {
    "add": _linear_sum(1),
    "sub": _linear_sum(-1),
    "mul": _linear_product,
    "neg": _linear_negative,
}


# Integers.


def _small(*ranges: Range) -> bool:
    return all(-LIMIT < x.low and x.high < LIMIT for x in ranges)


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
    if not (_small(x, y) and max(map(abs, products)) < LIMIT):
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
    return Range(lo, hi, *bounds(lo, hi), depends, _apart(x, y), covers)


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
        attained = same & spread(x.attained, lo)
        if x.covers:
            # A whole period reaches both ends.
            attained = attained | (spread(x.attained, lo) & (x.hi - x.lo >= y.lo))
    return Range(lo, hi, 0, y.high - 1, x.depends | y.depends, attained)


def _abs(x: Range) -> Range | None:
    if not _small(x):
        return None
    across = (x.lo < 0) & (x.hi > 0)
    ends = x.lo.abs(), x.hi.abs()
    lo = torch.where(across, 0, torch.minimum(*ends))
    attained = spread(x.attained, lo)
    if not x.covers:
        attained = attained & ~across
    high = max(abs(x.low), abs(x.high))
    return Range(lo, torch.maximum(*ends), 0, high, x.depends, attained, x.covers, nan=x.nan)


def _extreme(
    of_tensors: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[[float, float], float]
) -> Callable[[Range, Range], Range]:
    def rule(x: Range, y: Range) -> Range:
        lo, hi = of_tensors(x.lo, y.lo), of_tensors(x.hi, y.hi)
        low, high = of_numbers(x.low, y.low), of_numbers(x.high, y.high)
        covers = (x.covers and y.exact) or (y.covers and x.exact)
        depends, nan = x.depends | y.depends, x.nan or y.nan
        return Range(lo, hi, low, high, depends, _apart(x, y), covers, nan=nan)

    return rule


_minimum, _maximum = _extreme(torch.minimum, min), _extreme(torch.maximum, max)


def _invert(x: Range) -> Range | None:
    if not _small(x):
        return None
    return Range(~x.hi, ~x.lo, -x.high - 1, -x.low - 1, x.depends, x.attained, x.covers)


def _bit_and(x: Range, y: Range) -> Range | None:
    if y.low < 0:
        x, y = y, x
    if y.low < 0 or not _small(x, y):
        return None
    if y.constant and (int(y.low) + 1) & int(y.low) == 0:
        period = y.lo + 1  # ``x & (2 ** n - 1)`` is a remainder
        size = y.low + 1
        return _mod(x, Range(period, period, size, size, NOTHING, True, True))
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
        if not (y.constant and 0 <= y.low < 62):
            return None
        factor = torch.tensor(1 << int(y.low), device=x.lo.device)
        size = 1 << int(y.low)
        other = Range(factor, factor, size, size, NOTHING, True, True)
        return _mul(x, other) if up else _floordiv(x, other)

    return rule


def _power(x: Range, y: Range) -> Range | None:
    if not (y.constant and 0 <= y.low <= 62) or not _small(x):
        return None
    exponent = int(y.low)
    if max(abs(x.low), abs(x.high)) ** exponent >= LIMIT:
        return None
    if exponent % 2 == 0:
        base = _abs(x)
        assert base is not None
        x = base
    lo, hi = x.lo**exponent, x.hi**exponent
    return Range(lo, hi, *bounds(lo, hi), x.depends, x.attained)


INT_RULES: dict[str, Callable[..., Range | None]] = {
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


def rounded(node: Node, found: Range, args: list[Range]) -> Range:
    """Widen a float result, and say whether it may be NaN."""
    nan = found.nan or any(arg.nan for arg in args)
    lo, hi = found.lo, found.hi
    if node.op not in _ROUNDING_FREE:
        share, least = (2.0**-20, 1e-37) if node.dtype == "float32" else (2.0**-48, 1e-300)
        lo, hi = lo - (lo.abs() * share + least), hi + (hi.abs() * share + least)
    lo = torch.where(lo.isnan(), -torch.inf, lo)
    hi = torch.where(hi.isnan(), torch.inf, hi)
    if node.dtype == "float32":
        lo = torch.where(lo < -FLOAT32_MAX, -torch.inf, lo)
        hi = torch.where(hi > FLOAT32_MAX, torch.inf, hi)
    attained = found.attained if node.op in _ROUNDING_FREE else False
    return Range(lo, hi, *bounds(lo, hi), found.depends, attained, nan=nan)


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
        # minimum and maximum hand NaN on (inf - inf, 0 * inf); `rounded` widens it to infinity.
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


FLOAT_RULES: dict[str, Callable[..., Range | None]] = {
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
