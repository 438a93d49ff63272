"""Calls put together from their parts: tensors, integers, floats, and a text that says how.

The other half of `compiled.Parts`, which takes them apart. The text is JSON; a string in it stands
for the next entry of the list that it names.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flexdecode.block_mask import BlockMask
from flexdecode.bound_mask import BoundMask
from flexdecode.graph_text import graph_from_text
from flexdecode.packed import PackedQueries
from flexdecode.quantized_tensor import QuantizedTensor
from flexdecode.tables import Tables
from flexdecode.trace import Traced, TracedRule

__all__ = ["assemble", "assemble_operands", "parse"]


@functools.lru_cache(maxsize=1024)
def parse(call: str) -> Any:
    """Read a text; the result is shared and must not change."""
    return json.loads(call)


class _Assembler:
    def __init__(
        self,
        tensors: list[Tensor],
        ints: list[int],
        floats: list[float],
        tables: list[Tensor] | None,
    ) -> None:
        self._lists: dict[str, Iterator[Any]] = {
            "tensor": iter(tensors),
            "int": iter(ints),
            "float": iter(floats),
        }
        self._written = None if tables is None else iter(tables)

    def value(self, stored: Any) -> Any:
        if isinstance(stored, str):
            return next(self._lists[stored])
        if isinstance(stored, dict):
            return {name: self.value(each) for name, each in stored.items()}
        if not isinstance(stored, list):
            return stored
        kind, *rest = stored
        if kind == "text":
            return rest[0]
        if kind == "dtype":
            return getattr(torch, rest[0].removeprefix("torch."))
        if kind == "tuple":
            return tuple([self.value(each) for each in rest])
        if kind == "rule":
            return self._rule(*rest)
        if kind == "quantized":
            return self.value(rest[0])
        if kind == "cache":
            return self._cache(rest[0])
        return self._mask(kind, *rest)

    def _rule(self, text: str, values: list[str]) -> TracedRule:
        graph = graph_from_text(text)
        found = [self.value(each) for each in values]
        count = len(graph.params)
        return TracedRule(Traced(graph, tuple(found[:count]), tuple(found[count:])))

    def _mask(self, kind: str, fields: Any, tables: Any, rule: Any) -> BlockMask:
        named = self.value(fields)
        made = None
        if tables is not None:
            packed, made = self._tables(*tables)
            if packed is not None:
                named["packed"] = packed
        mask_mod = None if rule is None else self.value(rule)
        if kind == "torch":
            return _torch_mask(mask_mod, **named)
        make = BoundMask if kind == "BoundMask" else BlockMask
        return make(mask_mod=mask_mod, tables=made, **named)

    def _cache(self, stored: Any) -> Any:
        assert self._written is not None
        others = self._lists["tensor"]
        self._lists["tensor"] = self._written
        found = self.value(stored)
        self._lists["tensor"] = others
        return QuantizedTensor(**found) if isinstance(found, dict) else found

    def _tables(
        self, queries: Any, fields: Any, *unions: Any
    ) -> tuple[PackedQueries | None, Tables]:
        named = self.value(queries[0])
        others = self._lists["tensor"]
        if self._written is not None:
            self._lists["tensor"] = self._written
        tiles = self.value(queries[1])
        packed = None if named is None else PackedQueries(tiles=tiles, **named)
        tables = Tables(**self.value(fields))
        if tables.states is not None:
            from flexdecode.kernels.tables import TableBuffers

            own = TableBuffers(tables.states, *tables.tensors)
            tables.laid_out["buffers"] = own
            for heads, union in unions:  # of the same states
                tables.unions[heads] = dataclasses.replace(own, **self.value(union))
        self._lists["tensor"] = others
        return packed, tables


def _torch_mask(mask_mod: TracedRule | None, *, seq_lengths: Any, **tables: Any) -> BlockMask:
    nQ = tables["kv_num_blocks"].shape[-1]
    q_len = min(seq_lengths[0], nQ * tables["BLOCK_SIZE"][0])
    mask = BlockMask.from_kv_blocks(
        **tables, mask_mod=mask_mod, seq_lengths=(q_len, seq_lengths[1]), q_offset=0
    )
    return dataclasses.replace(mask, source="torch")


def assemble(
    call: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
    tables: list[Tensor] | None = None,
) -> dict[str, Any]:
    """Put a call together again.

    Parameters
    ----------
    call : str
    tensors, ints, floats : list
        In the order in which `call` mentions them.
    tables : list of Tensor, optional
        Tables, where they are kept apart from the other tensors.

    Returns
    -------
    dict
        The arguments by name. Rules are `TracedRule`; ``return_aux`` and ``kernel_options`` are
        dicts.
    """
    arguments: dict[str, Any] = _Assembler(tensors, ints, floats, tables).value(parse(call))
    return arguments


def assemble_operands(
    call: str, tensors: list[Tensor], ints: list[int], floats: list[float]
) -> dict[str, Any]:
    """Put together only what is said of q, k and v, which comes first in a call."""
    stored = parse(call)
    coded = {name: stored[name] for name in ("q", "k", "v") if name in stored}
    arguments: dict[str, Any] = _Assembler(tensors, ints, floats, None).value(coded)
    return arguments
