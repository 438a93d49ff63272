"""What may be done to a stand-in: torch's functions and methods, as nodes of the graph."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexdecode.graph import BITWISE, COMPARISONS, FUNCTIONS, Node, is_float
from flexdecode.proxies import (
    STORAGE,
    WIDENED,
    Array,
    Number,
    Tracer,
    Value,
    as_value,
    common_dtype,
    fail,
    is_proxy,
)

__all__ = ["METHODS", "OPERATIONS", "ModuleFacade", "binary", "call", "dispatch", "unary", "where"]

_PYTHON = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "minimum": min,
    "maximum": max,
    **{name: getattr(operator, name) for name in COMPARISONS},
}
_MAX_UNROLLED_POWER = 16


def _tracer(*operands: Any) -> Tracer:
    for operand in operands:
        if is_proxy(operand):
            return operand.tracer  # type: ignore[no-any-return]
    raise TypeError("no traced operand")


def _operand(tracer: Tracer, operand: Any) -> Value | Array:
    if isinstance(operand, Tensor) and not is_proxy(operand):
        operand = tracer.capture(operand)
    if type(operand) is Array and operand.ndim:
        return operand
    value = as_value(tracer, operand)
    if value is not None:
        return value
    raise fail(TypeError, f"a mod cannot compute with a {type(operand).__name__}")


def binary(op: str, first: Any, second: Any) -> Any:
    """Apply a two-operand op, with torch's promotion; tensors are combined element by element."""
    tracer = _tracer(first, second)
    x, y = _operand(tracer, first), _operand(tracer, second)
    if type(x) is Array or type(y) is Array:
        return _elementwise(tracer, functools.partial(binary, op), x, y)
    node = _binary_node(tracer, op, x, y)  # type: ignore[arg-type]
    if type(x) is Number and type(y) is Number:
        return Number(tracer, node, _PYTHON[op](x.value, y.value))
    return Value(tracer, node)


def _binary_node(tracer: Tracer, op: str, x: Value, y: Value) -> Node:
    build = tracer.builder
    dtype = common_dtype(x, y)
    if op in COMPARISONS:
        if not is_float(dtype) and dtype != "bool" and (type(x) is Number or type(y) is Number):
            dtype = "int64"  # a number beyond a narrow dtype must not wrap into it
        args = build.cast(x.node, dtype), build.cast(y.node, dtype)
        return build.node(op, "bool", args)
    if op in BITWISE:
        if is_float(dtype):
            raise fail(TypeError, f"{op} takes booleans or integers, got {dtype}")
        if op in ("shl", "shr") and dtype == "bool":
            dtype = "int64"
        return build.node(op, dtype, (build.cast(x.node, dtype), build.cast(y.node, dtype)))
    if dtype == "bool":
        if op == "sub":
            raise fail(TypeError, "booleans cannot be subtracted: use ^ or ~")
        if op in ("add", "mul", "minimum", "maximum"):
            return build.node("or" if op in ("add", "maximum") else "and", "bool", (x.node, y.node))
        dtype = "int64"
    if op == "div" and not is_float(dtype):
        dtype = "float32"
    if op == "pow":
        return _power(tracer, x, y, dtype)
    return build.node(op, dtype, (build.cast(x.node, dtype), build.cast(y.node, dtype)))


def _power(tracer: Tracer, x: Value, y: Value, dtype: str) -> Node:
    """Small whole powers as products: exact, and without a special function."""
    build = tracer.builder
    exponent = y.node.attr if y.node.op == "const" else None
    if type(y) is Number and y.node.op == "param" and y.node.dtype == "int64":
        if tracer.lift_constants:
            exponent = y.value
            tracer.guard(y.node)
    if exponent is not None and float(exponent).is_integer():
        count = int(exponent)
        if 1 <= count <= _MAX_UNROLLED_POWER:
            base = result = build.cast(x.node, dtype)
            for bit in bin(count)[3:]:
                result = build.node("mul", dtype, (result, result))
                if bit == "1":
                    result = build.node("mul", dtype, (result, base))
            return result
    if not is_float(dtype) and type(x) is Number and type(y) is Number:
        tracer.guard(y.node)
        if y.value < 0:
            dtype = "float32"  # Python's rule for numbers: 2 ** -1 is 0.5
    return build.node("pow", dtype, (build.cast(x.node, dtype), build.cast(y.node, dtype)))


def unary(op: str, operand: Any) -> Any:
    """Apply a one-operand op; integers given to a float function become float32."""
    tracer = _tracer(operand)
    x = _operand(tracer, operand)
    if type(x) is Array:
        return _elementwise(tracer, functools.partial(unary, op), x)
    assert not isinstance(x, Array)
    build, node = tracer.builder, x.node
    if op == "not":
        if is_float(node.dtype):
            raise fail(TypeError, f"~ takes booleans or integers, got {node.dtype}")
        result = build.node("not", node.dtype, (node,))
    elif op in ("neg", "abs"):
        if node.dtype == "bool":
            raise fail(TypeError, f"{op} does not take booleans")
        result = build.node(op, node.dtype, (node,))
    elif op == "isnan":
        result = build.node("isnan", "bool", (build.cast(node, _floating(node.dtype)),))
    elif op in ("floor", "ceil", "trunc", "round") and not is_float(node.dtype):
        result = node
    else:
        dtype = _floating(node.dtype)
        result = build.node(op, dtype, (build.cast(node, dtype),))
    if type(x) is Number and op in ("not", "neg", "abs"):
        python: Any = {"not": operator.invert, "neg": operator.neg, "abs": abs}[op]
        value = (not x.value) if op == "not" and isinstance(x.value, bool) else python(x.value)
        return Number(tracer, result, value)
    return Value(tracer, result)


def _floating(dtype: str) -> str:
    return dtype if is_float(dtype) else "float32"


def where(condition: Any, first: Any, second: Any) -> Any:
    """``torch.where(condition, x, y)``."""
    tracer = _tracer(condition, first, second)
    operands: list[Any] = [_operand(tracer, each) for each in (condition, first, second)]
    if any(type(each) is Array for each in operands):
        return _elementwise(tracer, where, *operands)
    choose, x, y = operands
    if choose.node.dtype != "bool":
        message = f"torch.where: expected a boolean condition, got {choose.node.dtype}"
        raise fail(TypeError, message)
    build, dtype = tracer.builder, common_dtype(x, y)
    args = (choose.node, build.cast(x.node, dtype), build.cast(y.node, dtype))
    return Value(tracer, build.node("where", dtype, args))


def _elementwise(tracer: Tracer, function: Callable[..., Any], *operands: Value | Array) -> Array:
    """The array whose elements are ``function`` of the operands' elements, broadcast."""
    arrays = [each for each in operands if type(each) is Array]
    rank = max(array.ndim for array in arrays)
    sizes: list[Number] = []
    for dim in range(-rank, 0):
        candidates = [array.sizes[dim] for array in arrays if array.ndim >= -dim]
        wide = [size for size in candidates if size.value != 1]
        if len(candidates) > 1:
            for size in candidates:  # which of them broadcasts, and that they fit
                tracer.guard(size.node)
        if len({size.value for size in wide}) > 1:
            shapes = " and ".join(str([s.value for s in array.sizes]) for array in arrays)
            raise fail(ValueError, f"shapes {shapes} do not broadcast")
        sizes.append((wide or candidates)[0])
    zero = tracer.builder.node("const", "int64", (), 0)

    def element_of(operand: Value | Array, indices: tuple[Node, ...]) -> Value:
        if type(operand) is not Array:
            return operand  # type: ignore[return-value]
        own = indices[rank - operand.ndim :] if operand.ndim else ()
        own = tuple(
            zero if size.value == 1 and len(arrays) > 1 else index
            for size, index in zip(operand.sizes, own, strict=True)
        )
        return Value(tracer, operand.element(own))

    def element(indices: tuple[Node, ...]) -> Node:
        node: Node = function(*(element_of(operand, indices) for operand in operands)).node
        return node

    probe = element((zero,) * rank)  # tells the dtype, and errors at the user's line
    return Array(tracer, tuple(sizes), probe.dtype, element)


# -- torch's names -------------------------------------------------------------------------


def _to(operand: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif is_proxy(arg):
            dtype = arg.dtype
    return operand if dtype is None else _cast(operand, dtype)


def _type(operand: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        raise fail(TypeError, f"Tensor.type in a mod takes a torch.dtype, got {dtype!r}")
    return _cast(operand, dtype)


def _cast(operand: Any, dtype: torch.dtype) -> Any:
    storage = STORAGE.get(dtype)
    if storage is None:
        raise fail(TypeError, f"a mod cannot convert to {dtype}")
    tracer = _tracer(operand)
    name = WIDENED.get(storage, storage)
    if type(operand) is Array:
        return _elementwise(tracer, lambda each: _cast(each, dtype), operand)
    if name == "bool" and operand.node.dtype != "bool" and operand.node.op != "const":
        return binary("ne", operand, 0)
    return Value(tracer, tracer.builder.cast(operand.node, name))


def _clamp(operand: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        operand = binary("maximum", operand, min)
    return operand if max is None else binary("minimum", operand, max)


def _divide(first: Any, second: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return binary("floordiv", first, second)
    quotient = binary("div", first, second)
    if rounding_mode is None:
        return quotient
    raise fail(TypeError, "torch.div(rounding_mode='trunc') is not supported: use //")


def _filled(value: Any) -> Callable[..., Any]:
    def create(operand: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        result = _tracer(operand).const(value)
        return _cast(Value(result.tracer, result.node), dtype or operand.dtype)

    return create


def _new_full(operand: Any, size: Any, value: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
    return _new_tensor(operand, value, dtype=dtype or operand.dtype)


def _new_tensor(operand: Any, value: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
    result = as_value(_tracer(operand), value)
    if result is None:
        raise fail(TypeError, "new_tensor in a mod takes one number")
    result = Value(result.tracer, result.node)
    return _cast(result, dtype or result.dtype)


def _logical(op: str) -> Callable[[Any, Any], Any]:
    return lambda first, second: binary(op, _truth(first), _truth(second))


def _truth(operand: Any) -> Any:
    if is_proxy(operand):
        return _cast(operand, torch.bool)
    return bool(operand) if isinstance(operand, (int, float)) else operand


def _binary(op: str) -> Callable[..., Any]:
    def apply(first: Any, second: Any, *, alpha: Any = None) -> Any:
        return binary(op, first, second if alpha is None else second * alpha)

    return apply


def _unary(op: str) -> Callable[..., Any]:
    return lambda operand: unary(op, operand)


def _sign(operand: Any) -> Any:
    up, down = binary("gt", operand, 0), binary("lt", operand, 0)
    return binary("sub", _cast(up, operand.dtype), _cast(down, operand.dtype))


def _same(operand: Any, *args: Any, **kwargs: Any) -> Any:
    return operand


def _unsqueeze(operand: Any, dim: int) -> Any:
    rank = operand.ndim + 1
    index: list[Any] = [slice(None)] * operand.ndim
    index.insert(dim % rank, None)
    return operand[tuple(index)] if operand.ndim else operand


def _squeeze(operand: Any, dim: int | None = None) -> Any:
    dims = range(operand.ndim) if dim is None else [dim % max(operand.ndim, 1)]
    index: list[Any] = [slice(None)] * operand.ndim
    for each in dims:
        if operand.ndim and int(operand.sizes[each]) == 1:
            index[each] = 0
    return operand[tuple(index)] if operand.ndim else operand


def _permute(operand: Any, *dims: Any) -> Any:
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order = [int(dim) % operand.ndim for dim in order]

    def element(indices: tuple[Node, ...]) -> Node:
        own = [indices[order.index(dim)] for dim in range(len(order))]
        return operand.element(tuple(own))  # type: ignore[no-any-return]

    sizes = tuple(operand.sizes[dim] for dim in order)
    return Array(operand.tracer, sizes, operand._dtype, element)


def _transpose(operand: Any, first: int, second: int) -> Any:
    order = list(range(operand.ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(operand, order)


def _size(operand: Any, dim: int | None = None) -> Any:
    return operand.shape if dim is None else operand.shape[dim]


def _no_item(operand: Any, *args: Any, **kwargs: Any) -> Any:
    raise fail(
        TypeError,
        ".item() and .tolist() read a tensor while tracing: use the tensor itself, its live value "
        "is read at every call",
    )


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in FUNCTIONS},
    **{name: _binary(name) for name in COMPARISONS},
    **{name: _binary(name) for name in ("add", "sub", "mul", "pow", "minimum", "maximum")},
    "subtract": _binary("sub"),
    "multiply": _binary("mul"),
    "rsub": lambda first, second: binary("sub", second, first),
    "div": _divide,
    "divide": _divide,
    "true_divide": _divide,
    "floor_divide": _binary("floordiv"),
    "remainder": _binary("mod"),
    "greater": _binary("gt"),
    "greater_equal": _binary("ge"),
    "less": _binary("lt"),
    "less_equal": _binary("le"),
    "not_equal": _binary("ne"),
    "min": _binary("minimum"),
    "max": _binary("maximum"),
    "neg": _unary("neg"),
    "negative": _unary("neg"),
    "abs": _unary("abs"),
    "absolute": _unary("abs"),
    "isnan": _unary("isnan"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": lambda operand: unary("not", _truth(operand)),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _binary("xor"),
    "bitwise_not": _unary("not"),
    "bitwise_left_shift": _binary("shl"),
    "bitwise_right_shift": _binary("shr"),
    "where": where,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda operand, min: _clamp(operand, min),
    "clamp_max": lambda operand, max: _clamp(operand, None, max),
    "square": lambda operand: binary("mul", operand, operand),
    "reciprocal": lambda operand: binary("div", 1.0, operand),
    "relu": lambda operand, inplace=False: binary("maximum", operand, 0),
    "silu": lambda operand, inplace=False: binary("mul", operand, unary("sigmoid", operand)),
    "log1p": lambda operand: unary("log", binary("add", operand, 1.0)),
    "expm1": lambda operand: binary("sub", unary("exp", operand), 1.0),
    "tan": lambda operand: binary("div", unary("sin", operand), unary("cos", operand)),
    "sign": _sign,
    "isinf": lambda operand: binary("eq", unary("abs", operand), math.inf),
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
    "full_like": lambda operand, value, **kwargs: _new_full(operand, (), value, **kwargs),
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "permute": _permute,
    "transpose": _transpose,
    "clone": _same,
    "detach": _same,
}

METHODS: dict[str, Callable[..., Any]] = {
    **OPERATIONS,
    "to": _to,
    "type": _type,
    "type_as": _to,
    **{
        name: functools.partial(_cast, dtype=dtype)
        for name, dtype in {
            "bool": torch.bool,
            "char": torch.int8,
            "short": torch.int16,
            "int": torch.int32,
            "long": torch.int64,
            "half": torch.float16,
            "bfloat16": torch.bfloat16,
            "float": torch.float32,
            "double": torch.float64,
        }.items()
    },
    "new_ones": lambda operand, *args, **kwargs: _filled(1)(operand, **kwargs),
    "new_zeros": lambda operand, *args, **kwargs: _filled(0)(operand, **kwargs),
    "new_full": _new_full,
    "new_tensor": _new_tensor,
    "contiguous": _same,
    "cpu": _same,
    "cuda": _same,
    "size": _size,
    "dim": lambda operand: operand.ndim,
    "numel": lambda operand: math.prod(int(size) for size in operand.shape),
    "t": lambda operand: _transpose(operand, 0, 1),
    "item": _no_item,
    "tolist": _no_item,
}

_DUNDER = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "invert": "bitwise_not",
}


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Carry out a torch function or method of which an argument is a stand-in."""
    name = getattr(func, "__name__", str(func))
    if name == "__getitem__":
        tensor, index = args
        entries = index if type(index) is tuple else (index,)
        array = tensor if is_proxy(tensor) else _tracer(*entries).capture(tensor)
        return array[index]
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        if bare not in METHODS and bare not in _DUNDER and bare.startswith("r"):
            args, bare = args[::-1], bare[1:]
        name = _DUNDER.get(bare, bare)
    operation = METHODS.get(name)
    if operation is None:
        module = getattr(func, "__module__", None) or "torch"
        raise fail(TypeError, f"{module}.{name} is not supported in a mod")
    return call(f"torch.{name}", operation, args, kwargs)


def call(
    name: str, operation: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return ``operation(*args, **kwargs)``; arguments that it does not take are explained."""
    try:
        return operation(*args, **kwargs)
    except TypeError as error:
        if "argument" not in str(error) or "\n  at " in str(error):
            raise
        count = len(args) + len(kwargs)
        words = "".join(f", {word}=..." for word in kwargs)
        message = (
            f"{name} with {count} argument{'s' * (count != 1)}{words} is not supported in a mod"
        )
        raise fail(TypeError, message) from None


class ModuleFacade:
    """A module of torch's, seen from inside a mod: its functions take stand-ins."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return facade(getattr(self._module, name))


class _TensorKind(type):
    """Asks and calls the real class, but for ``isinstance`` of a stand-in."""

    def __instancecheck__(cls, value: Any) -> bool:
        if is_proxy(value):
            return type(value) is not Number
        return isinstance(value, Tensor)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, Tensor)

    def __getattr__(cls, name: str) -> Any:
        return facade(getattr(Tensor, name))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return Tensor(*args, **kwargs)


class TensorFacade(metaclass=_TensorKind):
    """``torch.Tensor``, seen from inside a mod: stand-ins of indices and captures are tensors."""


def facade(value: Any) -> Any:
    """`value`, or what replaces it where it is a torch module, a function or ``Tensor``."""
    if isinstance(value, ModuleType):
        return ModuleFacade(value)
    if value is Tensor:
        return TensorFacade
    if not callable(value) or isinstance(value, type):
        return value

    @functools.wraps(value, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        flat = [*args, *kwargs.values()]
        flat += [each for part in flat if type(part) in (tuple, list) for each in part]
        if any(is_proxy(each) for each in flat):
            return dispatch(value, args, kwargs)
        return value(*args, **kwargs)

    return call
