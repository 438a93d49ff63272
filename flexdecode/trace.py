"""Tracing: from a mask or score rule, an ordinary Python function, to its expression graph."""

from __future__ import annotations

import inspect
import keyword
import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexdecode.closures import Binding, Snapshot
from flexdecode.graph import INPUTS, Graph, Node, finish, is_float
from flexdecode.mods import MaskMod
from flexdecode.operations import dispatch
from flexdecode.proxies import Array, Tracer, Value, as_value, is_proxy

__all__ = ["Sources", "Traced", "TracedRule", "find_sources", "trace"]

Kind = Literal["mask", "score"]
SIGNATURES = {
    "mask": "mask_mod(b, h, q_idx, kv_idx) -> bool",
    "score": "score_mod(score, b, h, q_idx, kv_idx) -> score",
}
_MAX_KEYS = 1024
_MAX_GUARDED = 64


@dataclass(frozen=True, eq=False)
class Traced:
    """A mod's graph with the live values that it closes over now.

    Attributes
    ----------
    graph : Graph
    params : tuple of int or float
        Values of the run-time numbers, in the order of ``graph.params``.
    captures : tuple of Tensor
        Captured tensors themselves, in the order of ``graph.captures``: read at every call.
    """

    graph: Graph
    params: tuple[int | float, ...]
    captures: tuple[Tensor, ...]
    # What the code generator made of this very object, by flavour.
    lowered: dict[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return str(self.graph)


@dataclass(frozen=True, eq=False)
class TracedRule:
    """A rule whose trace is known: stands for a function where only its graph is at hand."""

    traced: Traced

    def __call__(self, *inputs: Any) -> Any:
        """Raise: rules are callable, and this one is called by nobody."""
        raise TypeError(f"{self.traced.graph.name}: only its trace is left, it cannot be called")


@dataclass(frozen=True)
class Sources:
    """Where the numbers and tensors of a trace come from, as places in the walk of a `Binding`.

    Attributes
    ----------
    graph : Graph
    numbers, tensors : tuple of int
        The place of each of ``graph.params`` and of ``graph.captures``.
    guards : tuple of (place, value)
        Numbers that the trace holds for.
    size_guards : tuple of (place, dim, size)
        Sizes of tensors that the trace holds for.
    """

    graph: Graph
    numbers: tuple[int, ...]
    tensors: tuple[int, ...]
    guards: tuple[tuple[int, int | float], ...]
    size_guards: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Entry:
    """A cached trace: where its numbers and tensors stand in the walk, and when it holds."""

    graph: Graph
    param_slots: tuple[int, ...]
    capture_slots: tuple[int | Tensor, ...]  # a tensor made while tracing is its own slot
    guards: tuple[tuple[int, int | float], ...]
    size_guards: tuple[tuple[int, int, int], ...]

    def holds(self, binding: Binding) -> bool:
        numbers, tensors = binding.numbers, binding.tensors
        # 1 == 1.0, but the kinds are part of the key already.
        return all(numbers[slot] == value for slot, value in self.guards) and all(
            tensors[slot].shape[dim] == size for slot, dim, size in self.size_guards
        )

    def bind(self, binding: Binding) -> Traced:
        tensors = binding.tensors
        params = tuple([binding.numbers[slot] for slot in self.param_slots])
        for number in params:
            if type(number) is int and not -(1 << 63) <= number < 1 << 63:
                graph = self.graph
                raise ValueError(
                    f"{graph.kind}_mod {graph.name}: expected numbers of 64 bits, got one of "
                    f"{number.bit_length()}\n  at {graph.where}: {graph.source}"
                )
        return Traced(
            self.graph,
            params,
            tuple([tensors[s] if isinstance(s, int) else s for s in self.capture_slots]),
        )


_cache: dict[Any, list[_Entry]] = {}
# The last trace of a function object, for as long as that lives and closes over the same objects.
_recent: WeakKeyDictionary[Any, tuple[Snapshot, Traced]] = WeakKeyDictionary()


def trace(mod: Callable[..., Any], kind: Kind) -> Traced:
    """Trace `mod` into a graph, or find the trace of a mod like it.

    A trace is cached by the mod's code and by what it closes over: numbers by kind, tensors by
    dtype and rank, functions recursively. Numbers are run-time parameters, unless the mod uses one
    as a Python number (``if``, ``range``, ``math``): the trace then holds for that value. A mod
    that closes over objects with attributes or over lists and dicts is traced anew at every call.

    Parameters
    ----------
    mod : callable
        ``mask_mod(b, h, q_idx, kv_idx) -> bool`` or
        ``score_mod(score, b, h, q_idx, kv_idx) -> score``.
    kind : "mask" or "score"

    Returns
    -------
    Traced

    Raises
    ------
    TypeError
        `mod` takes other arguments, returns the wrong kind of thing, branches on an index or calls
        what cannot be traced; the message names the user's line.
    """
    if type(mod) is TracedRule:
        return mod.traced
    fn = mod.fn if type(mod) is MaskMod else mod
    recent = _recent.get(fn) if type(fn) is FunctionType else None
    if recent is not None and recent[1].graph.kind == kind and recent[0].holds(fn):
        return recent[1]
    traced, stable = _trace_walked(mod, kind)
    if stable and type(fn) is FunctionType:
        snapshot = Snapshot.of(fn)
        if snapshot is not None:
            _recent[fn] = (snapshot, traced)
    return traced


def _trace_walked(mod: Callable[..., Any], kind: Kind) -> tuple[Traced, bool]:
    """`trace` by a walk over all that `mod` closes over.

    Returns
    -------
    traced : Traced
    stable : bool
        The same objects closed over mean the same trace.
    """
    if not callable(mod) or isinstance(mod, type):
        got = f"the class {mod.__name__}" if isinstance(mod, type) else type(mod).__name__
        raise TypeError(f"{kind}_mod: expected a function {SIGNATURES[kind]}, got {got}")
    binding = Binding(mod)
    if binding.key is None:
        return _trace(mod, kind, binding, "lift").bind(binding), False
    entry = _keyed_entry(mod, kind, binding)
    return entry.bind(binding), not entry.size_guards


def find_sources(mod: Callable[..., Any], kind: Kind) -> Sources | None:
    """Trace `mod`, and say where its numbers and tensors come from.

    Returns
    -------
    Sources or None
        None where `mod` closes over something that the walk cannot follow.

    Raises
    ------
    TypeError
        See `trace`.
    """
    binding = Binding(mod)
    if binding.key is None:
        return None
    entry = _keyed_entry(mod, kind, binding)
    tensors = tuple(slot for slot in entry.capture_slots if isinstance(slot, int))
    if len(tensors) < len(entry.capture_slots):  # some are made while tracing
        return None
    return Sources(entry.graph, entry.param_slots, tensors, entry.guards, entry.size_guards)


def _keyed_entry(mod: Callable[..., Any], kind: Kind, binding: Binding) -> _Entry:
    """Find or make the trace of a mod whose walk has a key."""
    key = (kind, binding.key)
    entries = _cache.get(key)
    if entries is None:
        if len(_cache) >= _MAX_KEYS:
            _cache.pop(next(iter(_cache)))
        entries = _cache[key] = []
    for entry in entries:
        if entry.holds(binding):
            return entry
    try:
        entry = _trace(mod, kind, binding, "baked" if binding.asks_type else "symbolic")
    except Exception:
        if not binding.numbers or binding.asks_type:
            raise
        # Some code wants real Python numbers (isinstance, format, C functions): give it those.
        entry = _trace(mod, kind, binding, "baked")
    if len(entries) >= _MAX_GUARDED:
        entries.pop(0)
    entries.append(entry)
    return entry


def _trace(
    mod: Any, kind: Kind, binding: Binding, mode: Literal["symbolic", "baked", "lift"]
) -> _Entry:
    _check_signature(mod, kind)
    tracer = Tracer(lift_constants=mode == "lift")
    numbers = binding.numbers if mode == "symbolic" else []
    function = binding.rebuild(mod, iter([tracer.param(n) for n in numbers]), tracer.capture)
    inputs = [Value(tracer, tracer.builder.node("input", "int64", (), name)) for name in INPUTS]
    if kind == "score":
        score = tracer.builder.node("input", "float32", (), "score")
        inputs.insert(0, Value(tracer, score))
    with _Intercept():
        result = function(*inputs)
        output = _output(tracer, kind, mod, result)
    name, where, source = _describe(mod)
    graph, params, captures = finish(
        kind, name, output, tracer.param_kinds, tracer.capture_specs, where, source
    )
    if mode == "lift":
        # Nothing is looked up again: the entry serves this call alone.
        binding.numbers, binding.tensors = tracer.params, tracer.captures
        return _Entry(graph, params, captures, (), ())
    guards = tuple(tracer.guards.items())
    if mode == "baked":
        guards = tuple(enumerate(binding.numbers))
        params = ()
    first_slot: dict[int, int] = {}
    for slot, tensor in enumerate(binding.tensors):
        first_slot.setdefault(id(tensor), slot)
    sources = [first_slot.get(id(tensor), tensor) for tensor in tracer.captures]
    size_guards = tuple(
        (slot_of, dim, size)
        for (slot, dim), size in tracer.size_guards.items()
        if isinstance(slot_of := sources[slot], int)
    )
    return _Entry(graph, params, tuple(sources[slot] for slot in captures), guards, size_guards)


def _output(tracer: Tracer, kind: Kind, mod: Any, result: Any) -> Node:
    name, where, source = _describe(mod)

    def wrong(message: str) -> TypeError:
        return TypeError(f"{kind}_mod {name} returned {message}\n  at {where}: {source}")

    if isinstance(result, Tensor) and not is_proxy(result):
        result = tracer.capture(result)
    if type(result) is Array:
        array: Any = result
        value = as_value(tracer, array)
        if value is None:
            shape = [size.value for size in array.sizes]
            raise wrong(
                f"a tensor of shape {shape}, expected one value: index captured tensors down to "
                "an element"
            )
    else:
        value = as_value(tracer, result)
    if value is None:
        raise wrong(f"{type(result).__name__}, expected {SIGNATURES[kind]}")
    dtype = value.node.dtype
    if kind == "mask":
        if dtype != "bool":
            raise wrong(
                f"{dtype}, expected bool (True where the query may attend to the key): compare, "
                "or use .to(torch.bool)"
            )
        return value.node
    if dtype == "bool":
        raise wrong("bool, expected a score: a mask goes into block_mask=create_block_mask(...)")
    return tracer.builder.cast(value.node, dtype if is_float(dtype) else "float32")


def _check_signature(mod: Any, kind: Kind) -> None:
    try:
        signature = inspect.signature(mod.fn if isinstance(mod, MaskMod) else mod)
    except (TypeError, ValueError):  # builtins without a signature: calling them will tell
        return
    count = 4 if kind == "mask" else 5
    try:
        signature.bind(*range(count))
    except TypeError:
        name = _describe(mod)[0]
        other: Kind = "score" if kind == "mask" else "mask"
        hint = ""
        try:
            signature.bind(*range(9 - count))
            hint = f"; a function of these arguments is a {other}_mod"
        except TypeError:
            pass
        raise TypeError(
            f"{kind}_mod: expected {SIGNATURES[kind]}, got {name}{signature}{hint}"
        ) from None


def _describe(mod: Any) -> tuple[str, str, str]:
    """Identifier, ``file:line`` and source line of the user's function."""
    while hasattr(mod, "func") or isinstance(mod, MaskMod):
        mod = mod.fn if isinstance(mod, MaskMod) else mod.func
    # Becomes an identifier in generated code: letters that every compiler takes, and not too many.
    name = str(getattr(mod, "__name__", type(mod).__name__))
    name = re.sub(r"[^A-Za-z0-9_]", "", name)[:60] or "mod"
    if name[0].isdigit():
        name = f"mod_{name}"
    if keyword.iskeyword(name):
        name = f"{name}_mod"
    code = getattr(mod, "__code__", None) or getattr(mod.__call__, "__code__", None)
    if code is None:
        return name, "", ""
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return name, f"{code.co_filename}:{code.co_firstlineno}", line


class _Intercept(TorchFunctionMode):
    """Sees torch functions of which only a nested argument is a stand-in: ``tensor[q_idx]``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        flat = [*args, *kwargs.values()]
        flat += [each for part in flat if type(part) in (tuple, list) for each in part]
        if any(is_proxy(each) for each in flat):
            return dispatch(func, args, kwargs)
        return func(*args, **kwargs)
