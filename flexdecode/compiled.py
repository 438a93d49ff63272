"""`attention` within a compiled region: the call is taken apart and made through the operator.

All here runs while ``torch.compile`` reads it. Rules are walked in steps that the compiler sees
(`closures.follow`), so that it guards what they close over: a new closure of the same code with
other integers or tensors runs the same graph.

Imported by the first such call, since the decorators load the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from flexdecode import checks
from flexdecode.block_mask import BlockMask
from flexdecode.bound_mask import BoundMask
from flexdecode.closures import Paths, follow
from flexdecode.graph_text import graph_to_text
from flexdecode.mods import MaskMod
from flexdecode.packed import PackedQueries
from flexdecode.quantized_tensor import QuantizedTensor
from flexdecode.tables import Tables
from flexdecode.trace import Kind, find_sources

__all__ = ["Inseparable", "Parts", "append_in_graph", "attention_in_graph", "update_in_graph"]


def _names(record: type, but: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record) if field.name not in but)


_MASK_FIELDS = _names(BlockMask, ("mask_mod", "tables", "rule_of_call"))
_BOUND_FIELDS = _names(BoundMask, ("mask_mod", "tables", "rule_of_call", "packed"))
_TABLE_FIELDS = _names(Tables, ("unions", "laid_out"))
_QUANTIZED_FIELDS = _names(QuantizedTensor, ("data",))
_UNION_FIELDS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_TORCH_FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "BLOCK_SIZE",
    "seq_lengths",
)


# inductor of torch 2.11 counts the storage offset of an input twice where an operator changes it in
# place: the second half of one allocation for keys and values was read past its end.
_LOSES_OFFSETS = torch.__version__ < "2.13"


class Inseparable(Exception):
    """Something that cannot be taken apart into tensors, numbers and text."""


def _is_made_within(rule: FunctionType) -> bool:
    """True for a function that the region defines: what it closes over is out of reach."""
    try:
        rule.__globals__  # noqa: B018
    except AttributeError:
        return True
    return False


# Called while a region is compiled, with the function itself; what it returns is a constant there.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _read_rule(
    rule: FunctionType, kind: Kind, arguments: tuple[Any, ...] | None
) -> tuple[Any, ...] | None:
    result: tuple[Any, ...] | None = _read_rule_outside(rule, kind, arguments)
    return result


# The compiler may also come here by itself, where it has given up on a caller.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read_rule_outside(
    rule: Any, kind: Kind, arguments: tuple[Any, ...] | None
) -> tuple[Any, ...] | None:
    if arguments is not None:
        # A partial of the region: tensors of the same kind stand in for those that it was given.
        rule = functools.partial(rule, *map(_stand_in, arguments))
    found = find_sources(rule, kind)
    if found is None:
        return None
    ways = Paths(rule)
    return (
        json.dumps(graph_to_text(found.graph)),
        tuple(ways.functions),
        tuple(ways.constants),
        tuple(ways.numbers),
        tuple(ways.tensors),
        found.numbers,
        found.tensors,
        found.guards,
        found.size_guards,
    )


def _stand_in(argument: Any) -> Any:
    if isinstance(argument, tuple):
        dtype, rank = argument
        return torch.empty((1,) * rank, dtype=dtype, device="cpu")
    return argument


class Parts:
    """The lists of a call that is taken apart; `call` fills them.

    Parameters
    ----------
    writes : bool
        Tables are to be written: they go into a list of their own, as caches do.
    """

    def __init__(self, writes: bool = False) -> None:
        self.tensors: list[Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.tables: list[Tensor] = []
        self.writes = writes

    def call(self, arguments: dict[str, Any]) -> str:
        """Take arguments apart, by name, but those that are None.

        Returns
        -------
        str

        Raises
        ------
        Inseparable
            Something cannot be taken apart.
        """
        parts = []
        for name, value in arguments.items():
            if value is None:
                continue
            if name == "score_mod":
                text = self._rule(value, "score")
            elif name == "mask_mod":
                text = self._rule(value, "mask")
            elif name == "block_mask":
                text = self._mask(value)
            elif name == "return_aux":
                text = self._fields(value, ("lse", "max_scores"))
            elif name in ("k_cache", "v_cache"):
                text = self._cache(value)
            elif name == "kernel_options":
                text = self._options(value)
            elif isinstance(value, QuantizedTensor):
                text = f'["quantized", {self._fields(value, _QUANTIZED_FIELDS)}]'
            else:
                text = self._value(value)
            parts.append(f'"{name}": {text}')
        return "{" + ", ".join(parts) + "}"

    def _value(self, value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, Tensor):
            self.tensors.append(value.detach() if value.requires_grad else value)
            return '"tensor"'
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (int, torch.SymInt)):
            self.ints.append(value)  # type: ignore[arg-type]
            return '"int"'
        if isinstance(value, (float, torch.SymFloat)):
            self.floats.append(value)  # type: ignore[arg-type]
            return '"float"'
        if isinstance(value, str):
            return f'["text", "{value}"]'
        if isinstance(value, torch.dtype):
            return f'["dtype", "{value}"]'
        if isinstance(value, tuple):
            return '["tuple", ' + ", ".join([self._value(each) for each in value]) + "]"
        raise Inseparable

    def _fields(self, record: Any, names: tuple[str, ...]) -> str:
        parts = [f'"{name}": ' + self._value(getattr(record, name)) for name in names]
        return "{" + ", ".join(parts) + "}"

    def _tables(self, tables: Tables, packed: PackedQueries | None) -> str:
        queries = "null"
        if packed is not None:
            queries = self._fields(packed, ("cu_seqlens", "total", "BLOCK_Q"))
        others = self.tensors
        if self.writes:
            self.tensors = self.tables
        tiles = "null" if packed is None else self._value(packed.tiles)
        parts = [f"[{queries}, {tiles}]", self._fields(tables, _TABLE_FIELDS)]
        for heads, union in tables.unions.items():
            parts.append(f"[{heads}, {self._fields(union, _UNION_FIELDS)}]")
        self.tensors = others
        return "[" + ", ".join(parts) + "]"

    def _cache(self, cache: Tensor | QuantizedTensor) -> str:
        others = self.tensors
        self.tensors = self.tables  # what is written
        if isinstance(cache, QuantizedTensor):
            text = self._fields(cache, ("data", *_QUANTIZED_FIELDS))
        else:
            text = self._value(cache)
        self.tensors = others
        return f'["cache", {text}]'

    def _options(self, options: Any) -> str:
        if not isinstance(options, dict):
            raise Inseparable
        parts = [f'"{name}": ' + self._value(value) for name, value in options.items()]
        return "{" + ", ".join(parts) + "}"

    def _mask(self, mask: Any) -> str:
        kind = "BlockMask"
        if isinstance(mask, BlockMask):
            if mask.rule_of_call is not None:
                raise Inseparable
            names = _MASK_FIELDS
            if isinstance(mask, BoundMask):
                kind, names = "BoundMask", _BOUND_FIELDS
            fields = self._fields(mask, names)
            tables = "null"
            if mask.tables is not None:
                packed = mask.packed if isinstance(mask, BoundMask) else None
                tables = self._tables(mask.tables, packed)
        elif hasattr(mask, "kv_num_blocks") and hasattr(mask, "mask_mod"):  # torch's own
            kind, tables = "torch", "null"
            fields = self._fields(mask, _TORCH_FIELDS)
        else:
            raise Inseparable
        rule = "null" if mask.mask_mod is None else self._rule(mask.mask_mod, "mask")
        return f'["{kind}", {fields}, {tables}, {rule}]'

    def _rule(self, rule: Any, kind: Kind) -> str:
        while isinstance(rule, MaskMod):
            rule = rule.fn
        within = False
        if isinstance(rule, functools.partial):
            read = self._read_partial(rule, kind)
        else:
            if not isinstance(rule, FunctionType):
                raise Inseparable
            within = _is_made_within(rule)
            if within and rule.__code__.co_freevars:
                raise Inseparable
            read = _read_rule(rule, kind, None)
        if read is None:
            raise Inseparable
        text, functions, constants, numbers, tensors, params, captures, guards, sizes = read
        if within and (len(functions) > 1 or constants or numbers or tensors):
            raise Inseparable
        # What follows tells the compiler what the text depends on.
        for path in functions:
            follow(rule, path).__code__  # noqa: B018
        for path, value in constants:
            if follow(rule, path) != value:
                raise Inseparable
        for slot, number in guards:
            if follow(rule, numbers[slot]) != number:
                raise Inseparable
        found = [follow(rule, path) for path in tensors]
        for slot, dim, size in sizes:
            if found[slot].shape[dim] != size:
                raise Inseparable
        values = [follow(rule, numbers[slot]) for slot in params]
        values += [found[slot] for slot in captures]
        parts = [self._value(each) for each in values]
        return f'["rule", {text}, [' + ", ".join(parts) + "]]"

    def _read_partial(self, rule: functools.partial[Any], kind: Kind) -> Any:
        function: Any = rule.func
        while isinstance(function, MaskMod):
            function = function.fn
        if rule.keywords or not isinstance(function, FunctionType) or _is_made_within(function):
            raise Inseparable
        arguments: list[Any] = []
        for value in rule.args:
            if isinstance(value, Tensor):
                arguments.append((value.dtype, value.dim()))
            elif isinstance(value, (bool, str)) or value is None:
                arguments.append(value)
            elif isinstance(value, (int, torch.SymInt)):
                arguments.append(1)  # any: a value that matters is guarded, and does not fit then
            elif isinstance(value, (float, torch.SymFloat)):
                arguments.append(1.0)
            else:
                raise Inseparable
        return _read_rule(function, kind, tuple(arguments))


def attention_in_graph(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    """`attention` as one operator; outside the graph where a rule cannot be taken apart.

    Parameters
    ----------
    q, k, v : Tensor or QuantizedTensor
    **arguments
        All others of `attention`.

    Returns
    -------
    out, lse, max_scores : Tensor or None
        None where a statistic was not asked for.

    Raises
    ------
    ValueError
        q, k or v requires grad while grad mode is on.
    """
    checks.check_grad(q, k, v)
    parts = Parts()
    stored = {"q": q, "k": k, "v": v}
    coded = {name: x for name, x in stored.items() if isinstance(x, QuantizedTensor)}
    data = [x.data if isinstance(x, QuantizedTensor) else x for x in (q, k, v)]
    try:
        call = parts.call({**coded, **arguments})  # the codes' scales and formats come first
    except Inseparable:
        return _attention_outside(q, k, v, arguments)
    out, lse, max_scores = torch.ops.flexdecode.attention(
        *data, call, parts.tensors, parts.ints, parts.floats
    )
    wanted = arguments["return_aux"]
    if wanted is None:
        return out, None, None
    return out, lse if wanted.lse else None, max_scores if wanted.max_scores else None


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="flexdecode.attention: a rule or mask closes over what a graph cannot hold (an object, "
    "a list, tables combined with a rule, tensors of the compiled region); make the rule outside "
    "of the region and let it close over numbers, tensors and functions, or make it of them with "
    "functools.partial"
)
def _attention_outside(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Any:
    from flexdecode.api import attention

    result = attention(q, k, v, **arguments)
    return (result, None, None) if isinstance(result, Tensor) else (result[0], *result[1])


def update_in_graph(mask: BoundMask) -> None:
    """Rewrite the tables of a bound mask, as an operator that changes them in place."""
    parts = Parts(writes=True)
    try:
        call = parts.call({"block_mask": mask})
    except Inseparable:
        _update_outside(mask)
        return
    torch.ops.flexdecode.update(parts.tables, call, parts.tensors, parts.ints, parts.floats)


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="flexdecode.BoundMask.update: the rule closes over what a graph cannot hold (an object, "
    "a list); close over numbers, tensors and functions"
)
def _update_outside(mask: BoundMask) -> None:
    mask.update()


def _is_whole(x: Tensor) -> bool:
    return bool(x.untyped_storage().size() == x.nbytes)


def append_in_graph(k_new: Tensor, v_new: Tensor, **arguments: Any) -> None:
    """`append_kv` as an operator that changes the caches in place."""
    parts = Parts()
    call = parts.call(arguments)
    if _LOSES_OFFSETS and not all(map(_is_whole, parts.tables)):
        _append_outside(k_new, v_new, arguments)
        return
    torch.ops.flexdecode.append(
        parts.tables, k_new, v_new, call, parts.tensors, parts.ints, parts.floats
    )


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="flexdecode.append_kv: a cache is part of a larger allocation, and this version of "
    "torch may lose where it begins; allocate keys and values apart, or update torch"
)
def _append_outside(k_new: Tensor, v_new: Tensor, arguments: dict[str, Any]) -> None:
    from flexdecode.appending import append_kv

    append_kv(k_new=k_new, v_new=v_new, **arguments)
