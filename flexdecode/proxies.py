"""Stand-ins for indices, numbers and tensors while a mod is traced.

`Value` is one traced scalar, `Number` a Python number that the mod closes over, `Array` a captured
tensor or an elementwise function of some. Each records what is done to it as nodes of the graph.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexdecode.graph import CaptureSpec, GraphBuilder, Node, is_float, promote

__all__ = ["Array", "Number", "Tracer", "Value", "is_proxy", "user_line"]

_PACKAGE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)

STORAGE = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_NARROW = {"uint8": 2**8, "int8": 2**7, "int16": 2**15, "int32": 2**31}
WIDENED = {"float16": "float32", "bfloat16": "float32"}
TORCH_DTYPE = {name: dtype for dtype, name in STORAGE.items()}


def user_line() -> str:
    """``file:line: text`` of the innermost frame that is the user's, for error messages."""
    import linecache

    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, _TORCH)) or name.startswith(_PACKAGE + "/masks"):
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{name}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"


def fail(kind: type[Exception], message: str) -> Exception:
    """Return an error of `kind` that carries the user's line."""
    return kind(f"{message}\n  at {user_line()}")


class Tracer:
    """What one trace collects: nodes, run-time numbers, captured tensors, guards."""

    def __init__(self, lift_constants: bool = False) -> None:
        self.builder = GraphBuilder()
        self.params: list[int | float] = []
        self.param_kinds: list[str] = []
        self.captures: list[Tensor] = []
        self.capture_specs: list[CaptureSpec] = []
        self.guards: dict[int, int | float] = {}
        self.size_guards: dict[tuple[int, int], int] = {}
        # Numbers that cannot be keyed (attributes, containers) become parameters all the same.
        self.lift_constants = lift_constants
        self._capture_slots: dict[int, int] = {}

    def param(self, value: int | float) -> Number:
        """Return a run-time number."""
        kind = "float" if isinstance(value, float) else "int"
        self.params.append(value)
        self.param_kinds.append(kind)
        dtype = "float32" if kind == "float" else "int64"
        node = self.builder.node("param", dtype, (), len(self.params) - 1)
        return Number(self, node, value)

    def capture(self, tensor: Tensor, name: str = "captured") -> Array:
        """Return the stand-in of a live tensor; one slot a tensor."""
        slot = self._capture_slots.get(id(tensor))
        if slot is None:
            storage = STORAGE.get(tensor.dtype)
            if tensor.layout != torch.strided:
                raise fail(TypeError, f"captured tensor {name}: {tensor.layout} cannot be read")
            if storage is None:
                raise fail(
                    TypeError, f"captured tensor {name}: dtype {tensor.dtype} cannot be read"
                )
            slot = self._capture_slots[id(tensor)] = len(self.captures)
            self.captures.append(tensor)
            self.capture_specs.append(CaptureSpec(storage, tensor.dim(), name))
        return self._array(slot)

    def _array(self, slot: int) -> Array:
        tensor, storage = self.captures[slot], self.capture_specs[slot].dtype
        dtype = WIDENED.get(storage, storage)
        sizes = tuple(
            Number(self, self.builder.node("size", "int64", (), (slot, dim)), size)
            for dim, size in enumerate(tensor.shape)
        )

        def element(indices: tuple[Node, ...]) -> Node:
            return self.builder.node("load", dtype, indices, slot)

        return Array(self, sizes, dtype, element)

    def const(self, value: bool | int | float) -> Value:
        """Return a literal."""
        if isinstance(value, bool):
            return Number(self, self.builder.node("const", "bool", (), value), value)
        value = float(value) if isinstance(value, float) else int(value)  # an enum's member, too
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise fail(ValueError, f"the number {value} does not fit into 64 bits")
        if self.lift_constants:
            return self.param(value)
        dtype = "float32" if isinstance(value, float) else "int64"
        return Number(self, self.builder.node("const", dtype, (), value), value)

    def guard(self, node: Node) -> None:
        """Fix every number that `node` depends on: its value decided what was traced."""
        if node.op == "param":
            self.guards[node.attr] = self.params[node.attr]
        elif node.op == "size":
            slot, dim = node.attr
            self.size_guards[node.attr] = int(self.captures[slot].shape[dim])
        for arg in node.args:
            self.guard(arg)


def is_proxy(value: Any) -> bool:
    """True for `Value`, `Number` and `Array`.

    None of them pretends to be a tensor: torch's C++ reads the memory of whatever ``isinstance``
    calls one. `operations.TensorFacade` answers that question inside a mod.
    """
    return issubclass(type(value), _Operand)


class _Operand:
    """Operators shared by scalars and arrays; the work is done by ``operations``."""

    __slots__ = ("tracer",)
    tracer: Tracer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        from flexdecode.operations import dispatch

        return dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        from flexdecode.operations import METHODS, call

        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        method = METHODS.get(name)
        if method is None:
            raise fail(TypeError, f"Tensor.{name} is not supported in a mod")
        return lambda *args, **kwargs: call(f"Tensor.{name}", method, (self, *args), kwargs)

    def __iter__(self) -> Any:
        raise fail(TypeError, "a mod cannot iterate over a tensor: index it")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise fail(TypeError, "a mod cannot write to a tensor: it says what to attend to")

    def __contains__(self, value: Any) -> bool:
        raise fail(TypeError, "a mod cannot search in a tensor: compare with its elements")

    def _no_operator(self, *args: Any) -> Any:
        raise fail(TypeError, "@, divmod() and round() are not supported in a mod")

    __matmul__ = __rmatmul__ = __divmod__ = __rdivmod__ = __round__ = _no_operator

    def __hash__(self) -> int:
        return id(self)


def _install_operators() -> None:
    def binary(name: str, swapped: bool) -> Callable[[Any, Any], Any]:
        def method(self: Any, other: Any) -> Any:
            from flexdecode.operations import binary

            return binary(name, other, self) if swapped else binary(name, self, other)

        return method

    names = {
        "add": "add",
        "sub": "sub",
        "mul": "mul",
        "truediv": "div",
        "floordiv": "floordiv",
        "mod": "mod",
        "pow": "pow",
        "and": "and",
        "or": "or",
        "xor": "xor",
        "lshift": "shl",
        "rshift": "shr",
    }
    for python, op in names.items():
        setattr(_Operand, f"__{python}__", binary(op, False))
        setattr(_Operand, f"__r{python}__", binary(op, True))
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_Operand, f"__{op}__", binary(op, False))

    def unary(name: str) -> Callable[[Any], Any]:
        def method(self: Any) -> Any:
            from flexdecode.operations import unary

            return unary(name, self)

        return method

    for python, op in {"neg": "neg", "abs": "abs", "invert": "not"}.items():
        setattr(_Operand, f"__{python}__", unary(op))
    setattr(_Operand, "__pos__", lambda self: self)  # noqa: B010  # as the others above


_install_operators()


class Value(_Operand):
    """One traced scalar, in torch's eyes a 0-dim tensor."""

    __slots__ = ("node",)

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self.tracer = tracer
        self.node = node

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that torch would say."""
        return TORCH_DTYPE[self.node.dtype]

    @property
    def device(self) -> torch.device:
        """Return the device of the captured tensors."""
        captures = self.tracer.captures
        return captures[0].device if captures else torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        """Return the sizes; those of captured tensors are run-time numbers."""
        return torch.Size([])

    ndim = property(lambda self: 0)

    def __getitem__(self, index: Any) -> Any:
        entries = index if type(index) is tuple else (index,)
        if all(entry is None or entry is Ellipsis for entry in entries):
            return self
        raise fail(IndexError, "too many indices: an index or a tensor's element has no dimensions")

    def __bool__(self) -> bool:
        raise fail(
            TypeError,
            "data-dependent control flow: a mod cannot branch on an index or a tensor value; "
            "use torch.where(condition, x, y), & and |, torch.minimum or torch.maximum",
        )

    def _no_number(self, *args: Any) -> Any:
        raise fail(
            TypeError,
            "a mod cannot turn an index or a tensor value into a Python number "
            "(int(), float(), .item(), range()): use it as it is, torch.where(...) to choose",
        )

    __int__ = __float__ = __index__ = item = tolist = _no_number


class Number(Value):
    """A Python number that the mod closes over: a run-time parameter until control flow reads it.

    ``value`` is the present value. Reading it as a Python number guards it: the trace then holds
    for that value alone.
    """

    __slots__ = ("value",)

    def __init__(self, tracer: Tracer, node: Node, value: Any) -> None:
        super().__init__(tracer, node)
        self.value = value

    __class__ = property(lambda self: type(self.value))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(self.value, name):
            return getattr(self._read(), name)
        raise AttributeError(f"'{type(self.value).__name__}' object has no attribute '{name}'")

    def __hash__(self) -> int:
        return hash(self._read())  # for sets and dicts: the comparison is guarded as well

    def _read(self) -> Any:
        self.tracer.guard(self.node)
        return self.value

    def __bool__(self) -> bool:
        return bool(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __index__(self) -> int:
        return operator.index(self._read())

    def __floor__(self) -> Any:
        return math.floor(self._read())

    def __ceil__(self) -> Any:
        return math.ceil(self._read())

    def __trunc__(self) -> int:
        return int(self._read())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._read(), digits)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec)

    def __repr__(self) -> str:
        return repr(self._read())


def _hide_what_only_tensors_have() -> None:
    def absent(self: Any) -> Any:
        raise AttributeError

    for name in ("shape", "ndim", "dtype", "device", "item", "tolist"):
        setattr(Number, name, property(absent))


_hide_what_only_tensors_have()


class Array(_Operand):
    """A captured tensor, or an elementwise function of captured tensors, read lazily.

    ``element`` maps one index node a dimension to the node of that element.
    """

    __slots__ = ("_dtype", "element", "sizes")

    def __init__(
        self,
        tracer: Tracer,
        sizes: tuple[Number, ...],
        dtype: str,
        element: Callable[[tuple[Node, ...]], Node],
    ) -> None:
        self.tracer = tracer
        self.sizes = sizes
        self._dtype = dtype
        self.element = element

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that torch would say."""
        return TORCH_DTYPE[self._dtype]

    @property
    def device(self) -> torch.device:
        """Return the device of the captured tensors."""
        return self.tracer.captures[0].device

    @property
    def shape(self) -> tuple[Number, ...]:
        """Return the sizes; those of captured tensors are run-time numbers."""
        return self.sizes

    @property
    def ndim(self) -> int:
        """Return the rank."""
        return len(self.sizes)

    def __len__(self) -> int:
        return int(self.sizes[0])

    def __bool__(self) -> bool:
        raise fail(TypeError, "data-dependent control flow: use torch.where(condition, x, y)")

    def __getitem__(self, index: Any) -> Any:
        entries = _full_index(self, index)
        sizes: list[Number] = []
        makers: list[Callable[[list[Node]], Node]] = []  # takes nodes of the new index from a list
        dims = iter(self.sizes)
        for entry in entries:
            if entry is None:
                sizes.append(self.tracer.const(1))  # type: ignore[arg-type]
                makers.append(lambda rest: rest.pop(0))
                continue
            size = next(dims)
            if isinstance(entry, slice):
                new_size, maker = _sliced(self.tracer, entry, size)
                sizes.append(new_size)
            else:
                maker = _fixed(_index_node(self.tracer, entry))
            makers.append(maker)
        added = [entry is None for entry in entries]

        def element(indices: tuple[Node, ...]) -> Node:
            rest = list(indices)
            old = [maker(rest) for maker in makers]
            return self.element(tuple(n for n, new in zip(old, added, strict=True) if not new))

        result = Array(self.tracer, tuple(sizes), self._dtype, element)
        return Value(self.tracer, element(())) if not sizes else result


def _full_index(array: Array, index: Any) -> list[Any]:
    entries = list(index) if type(index) is tuple else [index]
    consumed = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if consumed > array.ndim:
        raise fail(IndexError, f"too many indices: {consumed} for a tensor of rank {array.ndim}")
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    return entries[:at] + [slice(None)] * (array.ndim - consumed) + entries[at + 1 :]


def _fixed(node: Node) -> Callable[[list[Node]], Node]:
    return lambda rest: node


def _sliced(
    tracer: Tracer, entry: slice, size: Number
) -> tuple[Number, Callable[[list[Node]], Node]]:
    if entry.start is None and entry.stop is None and entry.step is None:
        return size, lambda rest: rest.pop(0)
    start: Any
    count: Any
    step = 1 if entry.step is None else operator.index(entry.step)
    if step == 1:
        start, count = _run(tracer, entry, size)
    else:
        start, stop, step = entry.indices(int(size))
        count = tracer.const(len(range(start, stop, step)))

    def maker(rest: list[Node]) -> Node:
        from flexdecode.operations import binary, where

        index = Value(tracer, rest.pop(0))
        index = where(binary("lt", index, 0), binary("add", index, count), index)
        return binary("add", binary("mul", index, step), start).node  # type: ignore[no-any-return]

    return count, maker


def _run(tracer: Tracer, entry: slice, size: Number) -> tuple[Any, Any]:
    """First index and length of a slice with a step of 1, whatever `size` is."""
    from flexdecode.operations import binary, where

    def bound(end: Any) -> Any:
        if type(end) is not Number:
            end = tracer.const(operator.index(end))
        if end.node.op == "const":
            end = end.value
        if type(end) is not Number and end >= 0:
            return binary("minimum", size, end)
        wrapped = binary("maximum", binary("add", size, end), 0)
        if type(end) is not Number:
            return wrapped
        if end.node.dtype != "int64":
            raise fail(TypeError, "slices in a mod take integers")
        kept = binary("minimum", size, end)
        node = where(binary("lt", end, 0), wrapped, kept).node
        return Number(tracer, node, wrapped.value if end.value < 0 else kept.value)

    stop = size if entry.stop is None else bound(entry.stop)
    if entry.start is None:
        return 0, stop
    start = bound(entry.start)
    return start, binary("maximum", binary("sub", stop, start), 0)


def _index_node(tracer: Tracer, entry: Any) -> Node:
    if isinstance(entry, Tensor) and not is_proxy(entry):
        entry = tracer.capture(entry)
    value = as_value(tracer, entry)
    if value is None or value.node.dtype == "bool" or is_float(value.node.dtype):
        raise fail(
            TypeError,
            "indexing in a mod takes one integer a dimension (an index, a number, a tensor "
            "element) or a slice",
        )
    return tracer.builder.cast(value.node, "int64")


def as_value(tracer: Tracer, operand: Any) -> Value | None:
    """`operand` as one scalar, or None where it is a tensor of more elements or no operand."""
    if issubclass(type(operand), Value):
        return operand  # type: ignore[no-any-return]
    if isinstance(operand, (bool, int, float)):
        return tracer.const(operand)
    if type(operand) is Array and all(size.value == 1 for size in operand.sizes):
        for size in operand.sizes:
            tracer.guard(size.node)
        zero = tracer.builder.node("const", "int64", (), 0)
        return Value(tracer, operand.element((zero,) * operand.ndim))
    return None


def common_dtype(first: Value, second: Value) -> str:
    """Dtype in which two operands meet; Python numbers are weak, as in torch."""
    one, two = first.node.dtype, second.node.dtype
    weak = (type(first) is Number, type(second) is Number)
    if weak[0] == weak[1]:
        return promote(one, two)
    number, tensor = (one, two) if weak[0] else (two, one)
    value = (first if weak[0] else second).node
    if _category(number) > _category(tensor):
        return number
    if value.op == "const" and tensor in _NARROW and not abs(value.attr) < _NARROW[tensor]:
        return "int64"  # where torch raises an overflow error
    return tensor


def _category(dtype: str) -> int:
    return 0 if dtype == "bool" else 2 if is_float(dtype) else 1
