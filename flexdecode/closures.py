"""What a mod closes over: the key of its trace, and a copy of it over stand-ins.

A `Binding` walks a function's cells, defaults and the globals that it names, in a fixed order.
Numbers and tensors go into lists (their kinds into the key), functions are walked in turn.
`rebuild` makes the same walk and puts stand-ins in their place.
"""

from __future__ import annotations

import dis
import enum
import functools
import math
import operator
import sys
from collections.abc import Callable, Hashable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexdecode.mods import MaskMod
from flexdecode.operations import facade

__all__ = ["Binding", "Path", "Paths", "Snapshot", "follow"]

# Modules that hold no numbers of the user's, so that naming one changes nothing.
_STATELESS = (math, operator, functools, np, torch)
_STATELESS_ROOTS = ("builtins", "functools", "math", "numpy", "operator", "torch")
_CONSTANT_TYPES = (
    bool,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    enum.Enum,
    BuiltinFunctionType,
)


class Binding:
    """One walk over what a mod closes over.

    Attributes
    ----------
    key : hashable or None
        Equal for mods that trace alike; None when something cannot be keyed.
    numbers : list of int or float
    tensors : list of Tensor
        In the order of the walk, repeats included.
    asks_type : bool
        A function calls ``type``, which tells stand-ins from numbers.
    """

    __slots__ = ("_functions", "_slots", "asks_type", "key", "numbers", "tensors")

    def __init__(self, mod: Any) -> None:
        self.numbers: list[int | float] = []
        self.tensors: list[Tensor] = []
        self._functions: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self.asks_type = False
        try:
            self.key: Hashable | None = self._visit(mod)
        except _Unkeyable:
            self.key = None

    def _visit(self, value: Any) -> Hashable:
        kind: Any = type(value)
        if kind is int or kind is float:
            self.numbers.append(value)
            return kind
        if isinstance(value, Tensor):
            # One tensor in two places is one capture: two tensors there are another trace.
            slot = self._slots.setdefault(id(value), len(self.tensors))
            self.tensors.append(value)
            return (value.dtype, value.dim(), slot)
        if kind is FunctionType:
            return self._visit_function(value)
        if kind is MaskMod:
            return self._visit(value.fn)
        if isinstance(value, _CONSTANT_TYPES) or _is_stateless(value):
            return (kind, value)
        if kind is tuple:
            return ("tuple", *map(self._visit, value))
        if kind is functools.partial:
            words = tuple(value.keywords)
            parts = (value.func, *value.args, *value.keywords.values())
            return ("partial", len(value.args), words, *map(self._visit, parts))
        if isinstance(value, np.generic) and isinstance(value.item(), (int, float)):
            return self._visit(value.item())
        raise _Unkeyable

    def _visit_function(self, fn: FunctionType) -> Hashable:
        if _of_torch(fn):
            return ("torch", fn)
        seen = self._functions.get(id(fn))
        if seen is not None:
            return ("again", seen)
        if _has_attributes(fn) or _imports(fn.__code__):
            raise _Unkeyable
        self.asks_type |= "type" in _global_names(fn.__code__)
        self._functions[id(fn)] = len(self._functions)
        return (fn.__code__, *map(self._visit, _parts(fn)))

    def rebuild(
        self, mod: Any, numbers: Iterator[Any], tensors: Callable[[Tensor, str], Any]
    ) -> Any:
        """Return `mod` over stand-ins.

        A number becomes the next of `numbers`, a tensor ``tensors(tensor, name)``.
        Objects that cannot be walked are left as they are.
        """
        return _Rebuilder(numbers, tensors).visit(mod, "captured")


Path = tuple[tuple[str, int | str], ...]  # steps from a mod to something that it closes over


class Paths:
    """The walk of a `Binding`, as directions to what it finds instead of the things themselves.

    Attributes
    ----------
    numbers, tensors : list of Path
        In the order of `Binding`, repeats included.
    functions : list of Path
    constants : list of (Path, object)
        Strings, None, bools: what is neither number, tensor nor function and can be compared.
    """

    def __init__(self, mod: FunctionType) -> None:
        self.numbers: list[Path] = []
        self.tensors: list[Path] = []
        self.functions: list[Path] = []
        self.constants: list[tuple[Path, Any]] = []
        self._seen: set[int] = set()
        self._visit(mod, ())

    def _visit(self, value: Any, path: Path) -> None:
        kind = type(value)
        if kind is int or kind is float:
            self.numbers.append(path)
        elif isinstance(value, Tensor):
            self.tensors.append(path)
        elif kind is MaskMod:
            self._visit(value.fn, (*path, ("attribute", "fn")))
        elif kind is tuple:
            for i, each in enumerate(value):
                self._visit(each, (*path, ("item", i)))
        elif kind is functools.partial:
            self._visit(value.func, (*path, ("attribute", "func")))
            for i, each in enumerate(value.args):
                self._visit(each, (*path, ("attribute", "args"), ("item", i)))
            for word, each in value.keywords.items():
                self._visit(each, (*path, ("attribute", "keywords"), ("item", word)))
        elif kind is FunctionType and not _of_torch(value):
            self._visit_function(value, path)
        elif kind in (bool, str, bytes, type(None)):
            self.constants.append((path, value))

    def _visit_function(self, fn: FunctionType, path: Path) -> None:
        if id(fn) in self._seen:
            return
        self._seen.add(id(fn))
        self.functions.append(path)
        for i, cell in enumerate(fn.__closure__ or ()):
            if _is_full(cell):
                self._visit(cell.cell_contents, (*path, ("cell", i)))
        for name in _global_names(fn.__code__):
            if name in fn.__globals__:
                self._visit(fn.__globals__[name], (*path, ("global", name)))
        for i, default in enumerate(fn.__defaults__ or ()):
            self._visit(default, (*path, ("default", i)))
        for word, default in (fn.__kwdefaults__ or {}).items():
            self._visit(default, (*path, ("kwdefault", word)))


def follow(value: Any, path: Path) -> Any:
    """Go from a mod along `path`, in steps that ``torch.compile`` sees and guards."""
    for step, key in path:
        if step == "cell":
            value = value.__closure__[key].cell_contents
        elif step == "global":
            value = value.__globals__[key]
        elif step == "default":
            value = value.__defaults__[key]
        elif step == "kwdefault":
            value = value.__kwdefaults__[key]
        elif step == "attribute":
            value = getattr(value, str(key))
        else:
            value = value[key]
    return value


class Snapshot:
    """Everything that a function closes over, by identity: a quick test that nothing was replaced.

    Values of tensors don't count, they are live in any case. Numbers are compared by identity too,
    which errs on the side of walking again.
    """

    __slots__ = ("_cells", "_code", "_defaults", "_names", "_tensors")

    def __init__(self, code: CodeType, cells: Any, names: Any, defaults: Any, tensors: Any) -> None:
        self._code = code
        self._cells: tuple[tuple[Any, Any], ...] = tuple(cells)
        self._names: tuple[tuple[dict[str, Any], str, Any], ...] = tuple(names)
        self._defaults: tuple[tuple[Any, Any], ...] = tuple(defaults)
        self._tensors: tuple[tuple[Tensor, Any, int], ...] = tuple(tensors)

    @classmethod
    def of(cls, fn: FunctionType) -> Snapshot | None:
        """Record what `fn` closes over; None where identity would not tell a change."""
        cells: list[Any] = []
        names: list[Any] = []
        defaults: list[Any] = []
        tensors: list[Any] = []
        done: set[int] = set()
        stack: list[Any] = [fn]
        while stack:
            value = stack.pop()
            if type(value) is tuple:
                stack.extend(value)
            elif type(value) in (MaskMod, functools.partial):
                return None  # their parts can be replaced
            elif isinstance(value, Tensor):
                tensors.append((value, value.dtype, value.dim()))
            elif type(value) is FunctionType and not _of_torch(value):
                if value is fn and done:
                    return None  # a snapshot that holds its own key would never be freed
                if id(value) in done:
                    continue
                done.add(id(value))
                if value.__kwdefaults__ or (value is fn and value.__defaults__):
                    return None
                if value is not fn:
                    defaults.append((value, (value.__code__, value.__defaults__)))
                    stack.extend(value.__defaults__ or ())
                full = [cell for cell in value.__closure__ or () if _is_full(cell)]
                cells += [(cell, cell.cell_contents) for cell in full]
                stack += [cell.cell_contents for cell in full]
                found = value.__globals__
                loaded = _global_names(value.__code__)
                if loaded and not _is_of_module(found):
                    return None  # it may hold the key, which would never be freed
                names += [(found, name, found.get(name)) for name in loaded]
                stack += [found[name] for name in loaded if name in found]
        return cls(fn.__code__, cells, names, defaults, tensors)

    def holds(self, fn: Any) -> bool:
        """True while `fn` and everything that it closes over is what it was."""
        if fn.__code__ is not self._code or fn.__defaults__ or fn.__kwdefaults__:
            return False
        for tensor, dtype, rank in self._tensors:
            if tensor.dtype is not dtype or tensor.dim() != rank:
                return False  # another tensor's data was put into it
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                return False
        for names, name, value in self._names:
            if names.get(name) is not value:
                return False
        for function, (code, defaults) in self._defaults:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__:
                return False
        return True


class _Unkeyable(Exception):
    pass


class _Rebuilder:
    def __init__(self, numbers: Iterator[Any], tensors: Callable[[Tensor, str], Any]) -> None:
        self.numbers = numbers
        self.tensors = tensors
        self.functions: dict[int, FunctionType] = {}

    def visit(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind is int or kind is float:
            return next(self.numbers, value)
        if isinstance(value, Tensor):
            return self.tensors(value, name)
        if kind is FunctionType:
            return self.visit_function(value)
        if kind is MaskMod:
            return self.visit(value.fn, name)
        if kind is tuple:
            return tuple(self.visit(each, name) for each in value)
        if kind is functools.partial:
            func = self.visit(value.func, name)
            args = [self.visit(each, name) for each in value.args]
            words = {word: self.visit(each, word) for word, each in value.keywords.items()}
            return functools.partial(func, *args, **words)
        if isinstance(value, np.generic) and isinstance(value.item(), (int, float)):
            return self.visit(value.item(), name)
        if value is Tensor:
            return facade(value)
        if isinstance(value, (BuiltinFunctionType, ModuleType)) and _of_torch(value):
            return facade(value)
        return value

    def visit_function(self, fn: FunctionType) -> Any:
        if _of_torch(fn):
            return facade(fn)
        if id(fn) in self.functions:
            return self.functions[id(fn)]
        code = fn.__code__
        cells = tuple(type(cell)() for cell in fn.__closure__ or ())
        # Only the names that the code loads are replaced; the copy leaves the module untouched.
        names = dict(fn.__globals__)
        new = FunctionType(code, names, fn.__name__, None, cells or None)
        new.__dict__.update(fn.__dict__)
        self.functions[id(fn)] = new
        for name, cell, old in zip(code.co_freevars, cells, fn.__closure__ or (), strict=True):
            if _is_full(old):
                cell.cell_contents = self.visit(old.cell_contents, name)
        for name in _global_names(code):
            if name in fn.__globals__:
                names[name] = self.visit(fn.__globals__[name], name)
        new.__defaults__ = tuple(self.visit(d, "default") for d in fn.__defaults__ or ()) or None
        if fn.__kwdefaults__:
            new.__kwdefaults__ = {
                word: self.visit(default, word) for word, default in fn.__kwdefaults__.items()
            }
        return new


def _parts(fn: FunctionType) -> Iterator[Any]:
    """What `fn` closes over, in the order in which `_Rebuilder.visit_function` replaces it."""
    for cell in fn.__closure__ or ():
        if _is_full(cell):
            yield cell.cell_contents
    for name in _global_names(fn.__code__):
        if name in fn.__globals__:
            yield fn.__globals__[name]
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _is_of_module(names: dict[str, Any]) -> bool:
    module = sys.modules.get(names.get("__name__", ""))
    return module is not None and vars(module) is names


def _has_attributes(fn: FunctionType) -> bool:
    return any(name != "__wrapped__" for name in fn.__dict__)


def _is_stateless(value: Any) -> bool:
    if type(value) is type:
        return _root(value.__module__) in _STATELESS_ROOTS
    if not isinstance(value, ModuleType):
        return False
    return value in _STATELESS or value.__name__.startswith("torch.nn")


def _of_torch(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
    if name in ("torch", "torch.nn.functional", "torch._C._nn", "torch.nn"):
        return True
    return isinstance(value, BuiltinFunctionType) and "_VariableFunctions" in repr(value)


@functools.lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Names of globals that `code` or a function defined in it loads."""
    names = {
        instruction.argval: None
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def _imports(code: CodeType) -> bool:
    """True where `code` or a function defined in it imports what may hold the user's numbers."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and _root(instruction.argval) not in (
            _STATELESS_ROOTS
        ):
            return True
    return any(_imports(each) for each in code.co_consts if isinstance(each, CodeType))


def _root(module: str) -> str:
    return module.partition(".")[0]
