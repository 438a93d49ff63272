"""A traced mod as the text of a ``@triton.jit`` function of a few readable lines.

The text depends on the structure of the graph, on how wide its numbers are and how its captures are
laid out, never on their values.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flexdecode.graph import COMPARISONS, INFIX, INPUTS, Graph, Node, is_float
from flexdecode.trace import Traced

__all__ = ["POSITION_LIMIT", "Flavour", "Layout", "ModPrinter", "argument_kinds"]

Flavour = Literal["cuda", "cuda_fast", "hip", "interpret"]
"""Where hardware differs: ``cuda_fast`` takes hardware approximations, the interpreter has neither
libdevice nor inline assembly."""

# Positions and counts stay below this, so that their differences fit into 32 bits.
POSITION_LIMIT = 2**30
_INT32 = (-(2**31), 2**31 - 1)
_INT64 = (-(2**63), 2**63 - 1)
_STORED = {"bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1)}
_SPECIAL = {
    "tanh": {"cuda": "tanh", "hip": "tanh", "cuda_fast": "fast_tanh", "interpret": "portable_tanh"},
    "pow": {"interpret": "portable_pow"},
}
_HELPERS = {"round": "round_even", "trunc": "trunc", "isnan": "isnan", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class Layout:
    """What generated code is told of a captured tensor: the rest are run-time arguments."""

    dtype: str
    contiguous: bool  # the last dimension's stride is 1
    wide: bool  # offsets pass 2**31


def argument_kinds(traced: Traced) -> tuple[tuple[bool, ...], tuple[Layout, ...]]:
    """Return what the text depends on besides the graph: which numbers are wide, and layouts."""
    wide = tuple(not -POSITION_LIMIT <= p <= POSITION_LIMIT for p in traced.params)
    return wide, tuple(map(_layout, traced.captures))


def _layout(tensor: Tensor) -> Layout:
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    reach = sum((size - 1) * abs(stride) for size, stride in dims)
    contiguous = not dims or dims[-1][1] == 1
    wide = reach >= POSITION_LIMIT or any(max(dim) >= POSITION_LIMIT for dim in dims)
    return Layout(str(tensor.dtype).removeprefix("torch."), contiguous, wide)


@dataclass(frozen=True)
class _Part:
    """A printed node: its text, the type it has in the kernel, its range, what it depends on."""

    text: str
    dtype: str
    low: float = -math.inf
    high: float = math.inf
    rows: bool = False
    cols: bool = False
    const: bool = False


class ModPrinter:
    """Prints one graph."""

    def __init__(
        self, graph: Graph, wide: Sequence[bool], layouts: Sequence[Layout], flavour: Flavour
    ) -> None:
        self.graph = graph
        self.flavour = flavour
        self.layouts = layouts
        self.lines: list[str] = []
        self.count = 0
        self.next_arg = 0
        self.params = [
            self._param(slot, kind, is_wide)
            for slot, (kind, is_wide) in enumerate(zip(graph.params, wide, strict=True))
        ]
        self.captures = [self._capture(slot) for slot in range(len(graph.captures))]
        self.parts: dict[Node, _Part] = {}

    def text(self) -> str:
        """Return the source of the function."""
        for node in self.graph.nodes:
            self.parts[node] = self._node(node)
        result = self._tensor(self.parts[self.graph.output])
        if self.graph.kind == "score":
            value = result.text
            if not (result.rows and result.cols):
                value = f"tl.zeros_like(score) + {value}"
            if result.dtype != "float32":
                value = f"({value}).to(tl.float32)"
        else:
            value = result.text
        inputs = (("score",) if self.graph.kind == "score" else ()) + INPUTS
        head = ["@triton.jit", f"def {self.graph.name}({', '.join(inputs)}, lane, args):"]
        if self.graph.source:
            head.append(f"    # {textwrap.shorten(self.graph.source, 90)}")
        return "\n".join([*head, *self.lines, f"    return {value}", ""])

    # -- arguments -----------------------------------------------------------------------------

    def _take(self, count: int) -> list[str]:
        first = self.next_arg
        self.next_arg += count
        return [f"args[{i}]" for i in range(first, self.next_arg)]

    def _take_whole(self, wide: bool) -> str:
        helper, count = ("wide_whole", 4) if wide else ("whole", 2)
        return f"{helper}({', '.join(self._take(count))})"

    def _param(self, slot: int, kind: str, wide: bool) -> _Part:
        name = f"p{slot}"
        if kind == "float":
            self._line(name, f"tl.cast({self._take(1)[0]}, tl.float32)")
            return _Part(name, "float32")
        self._line(name, self._take_whole(wide))
        if wide:
            return _Part(name, "int64", *_INT64)
        return _Part(name, "int32", -POSITION_LIMIT, POSITION_LIMIT)

    def _capture(self, slot: int) -> tuple[str, list[str], list[str]]:
        spec, layout = self.graph.captures[slot], self.layouts[slot]
        own = spec.name if spec.name.isidentifier() and spec.name.isascii() else "captured"
        name = f"{own}_{slot}"
        start, back = self._take(2)
        self._line(name, f"{start} + tl.cast({back}, tl.int32)")
        sizes, strides = [], []
        for dim in range(spec.rank):
            sizes.append(f"{name}_n{dim}")
            self._line(sizes[-1], self._take_whole(layout.wide))
            if dim == spec.rank - 1 and layout.contiguous:
                strides.append("1")
            else:
                strides.append(f"{name}_s{dim}")
                self._line(strides[-1], self._take_whole(layout.wide))
        return name, sizes, strides

    # -- nodes ---------------------------------------------------------------------------------

    def _line(self, name: str, text: str) -> str:
        self.lines.append(f"    {name} = {text}")
        return name

    def _temp(self, text: str) -> str:
        self.count += 1
        return self._line(f"t{self.count - 1}", text)

    def _tensor(self, part: _Part) -> _Part:
        """`part` as a tensor: Triton folds operations on literals by Python's rules."""
        if not part.const:
            return part
        dtype = "int1" if part.dtype == "bool" else part.dtype
        text = f"tl.full((1, 1), {part.text}, tl.{dtype})"
        return _Part(self._temp(text), part.dtype, part.low, part.high)

    def _node(self, node: Node) -> _Part:
        if node.op == "input":
            return self._input(node)
        if node.op == "const":
            return self._const(node)
        if node.op == "param":
            return self.params[int(node.attr)]
        if node.op == "size":
            slot, dim = node.attr
            wide = self.layouts[slot].wide
            text = self.captures[slot][1][dim]
            return _Part(text, "int64" if wide else "int32", 0, _INT64[1] if wide else 2**30)
        args = [self.parts[arg] for arg in node.args]
        if node.op == "load":
            return self._load(node, args)
        if all(arg.const for arg in args):
            args = [self._tensor(args[0]), *args[1:]]
        rows, cols = any(a.rows for a in args), any(a.cols for a in args)
        if node.op == "cast":
            return self._cast(node, args[0])
        if node.op in COMPARISONS or node.op == "isnan" or node.dtype == "bool":
            if any(arg.const and arg.dtype == "int64" for arg in args):
                args = self._with_int64(args)
            return _Part(self._temp(self._plain(node, args)), "bool", 0, 1, rows, cols)
        if is_float(node.dtype):
            return _Part(self._temp(self._plain(node, args)), node.dtype, rows=rows, cols=cols)
        return self._integer(node, args, rows, cols)

    def _input(self, node: Node) -> _Part:
        name: str = node.attr
        if name == "score":
            return _Part(name, "float32", rows=True, cols=True)
        low = -POSITION_LIMIT if name == "q_idx" else 0
        return _Part(name, "int32", low, POSITION_LIMIT, name in ("h", "q_idx"), name == "kv_idx")

    def _const(self, node: Node) -> _Part:
        value = node.attr
        if isinstance(value, float):
            text = repr(value) if math.isfinite(value) else f'float("{value}")'
            return _Part(f"({text})" if value < 0 else text, node.dtype, const=True)
        if isinstance(value, bool):
            return _Part(repr(value), "bool", value, value, const=True)
        text = f"({value})" if value < 0 else str(value)
        dtype = node.dtype
        if dtype == "int64" and _INT32[0] <= value <= _INT32[1]:
            dtype = "int32"
        return _Part(text, dtype, value, value, const=True)

    def _cast(self, node: Node, arg: _Part) -> _Part:
        dtype = node.dtype
        if dtype == "bool":
            return _Part(self._temp(f"{arg.text} != 0"), "bool", 0, 1, arg.rows, arg.cols)
        low, high = arg.low, arg.high
        if dtype == "int64":
            if not is_float(arg.dtype) and _fits(low, high, _INT32):
                if arg.dtype == "int32":
                    return arg
                dtype = "int32"
            elif is_float(arg.dtype):
                low, high = _INT64
        elif not is_float(dtype):
            bounds = _STORED.get(dtype, _INT32)
            if is_float(arg.dtype) or not _fits(low, high, bounds):
                low, high = bounds
        text = self._temp(f"{arg.text}.to(tl.{dtype})")
        if is_float(dtype):
            return _Part(text, dtype, rows=arg.rows, cols=arg.cols)
        return _Part(text, dtype, low, high, arg.rows, arg.cols)

    def _integer(self, node: Node, args: list[_Part], rows: bool, cols: bool) -> _Part:
        if node.dtype != "int64":  # a narrow dtype wraps around, as in torch
            text = f"({self._plain(node, args)}).to(tl.{node.dtype})"
            bounds = _STORED.get(node.dtype, _INT32)
            return _Part(self._temp(text), node.dtype, *bounds, rows, cols)
        low, high = _range(node.op, args)
        narrow = _fits(low, high, _INT32) and all(_fits(a.low, a.high, _INT32) for a in args)
        first = 1 if node.op == "where" else 0
        if not narrow:
            args[first:] = self._with_int64(args[first:])
        text = self._temp(self._plain(node, args))
        if narrow:
            return _Part(text, "int32", low, high, rows, cols)
        return _Part(text, "int64", max(low, _INT64[0]), min(high, _INT64[1]), rows, cols)

    def _with_int64(self, args: list[_Part]) -> list[_Part]:
        """`args` with one 64-bit tensor among them, which makes the operation a 64-bit one."""
        if any(arg.dtype == "int64" and not arg.const for arg in args):
            return args
        at = next((i for i, arg in enumerate(args) if not arg.const), 0)
        wide = self._tensor(args[at])
        part = _Part(
            f"{wide.text}.to(tl.int64)", "int64", wide.low, wide.high, wide.rows, wide.cols
        )
        return [*args[:at], part, *args[at + 1 :]]

    def _plain(self, node: Node, args: list[_Part]) -> str:
        """The operation on arguments whose types already fit."""
        op, texts = node.op, [arg.text for arg in args]
        floating = is_float(node.args[0].dtype)
        if op in ("floordiv", "mod"):
            if floating:
                helper = "float_floor_div" if op == "floordiv" else "float_floor_mod"
                return f"{helper}({', '.join(texts)})"
            if args[0].low >= 0 and args[1].low > 0:
                return f"{texts[0]} {INFIX[op]} {texts[1]}"
            helper = "floor_div" if op == "floordiv" else "floor_mod"
            return f"{helper}({texts[0]}, {self._tensor(args[1]).text})"
        if op == "pow":
            base, exponent = (self._tensor(arg).text for arg in args)
            helper = _SPECIAL["pow"].get(self.flavour, "pow") if floating else "int_pow"
            if helper == "portable_pow":  # it selects lane by lane, from blocks
                base = f"tl.zeros((1, 1), tl.{node.dtype}) + {base}"
                exponent = f"tl.zeros((1, 1), tl.{node.dtype}) + {exponent}"
            return f"{helper}({base}, {exponent})"
        if op in INFIX:
            return f"{texts[0]} {INFIX[op]} {texts[1]}"
        if op == "neg":
            return f"-{texts[0]}"
        if op == "not":
            return f"{texts[0]} ^ True" if node.dtype == "bool" else f"~{texts[0]}"
        if op == "where":
            if args[1].const and args[2].const:
                texts[1] = self._tensor(args[1]).text
            return f"tl.where({', '.join(texts)})"
        if op == "tanh":
            exact = node.dtype == "float64"
            flavour = "cuda" if exact and self.flavour == "cuda_fast" else self.flavour
            return f"{_SPECIAL['tanh'][flavour]}({texts[0]})"
        if op in ("minimum", "maximum"):
            if not floating:
                return f"tl.{op}({', '.join(texts)})"
            return f"{op}({', '.join(texts)})"
        if op in _HELPERS:
            return f"{_HELPERS[op]}({texts[0]})"
        return f"tl.{op}({texts[0]})"

    def _load(self, node: Node, args: list[_Part]) -> _Part:
        slot = node.attr
        pointer, sizes, strides = self.captures[slot]
        stored = self.graph.captures[slot].dtype
        wide = self.layouts[slot].wide
        rows, cols = any(a.rows for a in args), any(a.cols for a in args)
        inside, offsets = [], []
        for arg, size, stride in zip(args, sizes, strides, strict=True):
            index = arg.text
            if arg.const:
                number = int(arg.low)
                index = f"{size} - {-number}" if number < 0 else f"{size} * 0 + {number}"
                index = self._temp(index)
            elif arg.low < 0:
                index = self._temp(f"tl.where({index} < 0, {index} + {size}, {index})")
            below = f"({index} < {size})"
            inside.append(f"({index} >= 0) & {below}" if arg.low < 0 else below)
            kind = "int64" if wide else "int32"
            if arg.dtype != kind:
                index = f"{index}.to(tl.{kind})"
            offsets.append(index if stride == "1" else f"{index} * {stride}")
        address = " + ".join([pointer, *offsets])
        if not args:
            text = f"tl.load({address})"
        else:
            if rows and cols:
                inside.append("lane")
            text = f"tl.load({address}, mask={' & '.join(inside)}, other=0)"
        if stored in ("float16", "bfloat16"):
            text += ".to(tl.float32)"
        name = self._temp(text)
        if is_float(node.dtype):
            return _Part(name, node.dtype, rows=rows, cols=cols)
        bounds = _STORED.get(stored, _INT32 if stored == "int32" else _INT64)
        return _Part(name, stored, *bounds, rows, cols)


def _fits(low: float, high: float, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= low and high <= bounds[1]


def _range(op: str, args: list[_Part]) -> tuple[float, float]:
    """Interval of an integer operation, infinite where nothing is known."""
    x = args[0]
    y = args[1] if len(args) > 1 else x
    if op == "add":
        return x.low + y.low, x.high + y.high
    if op == "sub":
        return x.low - y.high, x.high - y.low
    if op == "mul":
        corners = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
        return min(corners), max(corners)
    if op == "neg":
        return -x.high, -x.low
    if op == "abs":
        return 0, max(abs(x.low), abs(x.high))
    if op == "minimum":
        return min(x.low, y.low), min(x.high, y.high)
    if op == "maximum":
        return max(x.low, y.low), max(x.high, y.high)
    if op == "floordiv":
        return -max(abs(x.low), abs(x.high)) - 1, max(abs(x.low), abs(x.high)) + 1
    if op == "mod":
        return min(y.low, 0), max(y.high, 0)
    if op == "where":
        return min(y.low, args[2].low), max(y.high, args[2].high)
    if op in ("and", "or", "xor", "not") and all(_fits(a.low, a.high, _INT32) for a in args):
        return _INT32
    if op == "shr" and y.low >= 0 and y.high < 32:
        return min(x.low, 0), max(x.high, 0)
    return -math.inf, math.inf
