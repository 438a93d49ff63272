"""Vectorised evaluation of a traced mod in torch: the meaning that every backend shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdecode.graph import Node, is_float
from flexdecode.proxies import TORCH_DTYPE
from flexdecode.trace import Traced

__all__ = ["FUNCTIONS", "evaluate", "evaluate_nodes", "load_elements"]


def evaluate(
    traced: Traced,
    b: Tensor | int,
    h: Tensor | int,
    q_idx: Tensor | int,
    kv_idx: Tensor | int,
    score: Tensor | None = None,
    *,
    float_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Evaluate a traced mod for all elements of its broadcast index arguments.

    A captured tensor is never read out of bounds: indices are wrapped once, as torch wraps negative
    ones, and what lies outside then reads as zero.

    Parameters
    ----------
    traced : Traced
    b, h, q_idx, kv_idx : int or Tensor, int64
        Batch row, query head and logical positions; shapes broadcast together.
    score : Tensor, float, optional
        Scaled scores in natural units, for a score mod.
    float_dtype : torch.dtype, default float32
        What float32 nodes are computed in; float64 for an oracle.

    Returns
    -------
    Tensor
        Bool for a mask mod, `float_dtype` for a score mod. It broadcasts to the common shape but
        may be smaller: ``causal`` has no batch dimension.
    """
    inputs = (b, h, q_idx, kv_idx, score)
    device = next((x.device for x in inputs if isinstance(x, Tensor)), None)
    result = evaluate_nodes(traced, *inputs, float_dtype=float_dtype)[traced.graph.output]
    if traced.graph.kind == "score":
        result = result.to(float_dtype)
    return result if device is None else result.to(device)


def evaluate_nodes(
    traced: Traced,
    b: Tensor | int,
    h: Tensor | int,
    q_idx: Tensor | int,
    kv_idx: Tensor | int,
    score: Tensor | None = None,
    *,
    float_dtype: torch.dtype = torch.float32,
) -> dict[Node, Tensor]:
    """Values of all nodes of a traced mod, see `evaluate`; numbers may be on the CPU."""
    graph = traced.graph
    inputs = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "score": score}
    values: dict[Node, Tensor] = {}
    for node in graph.nodes:
        args = [values[arg] for arg in node.args]
        dtype = _compute_dtype(node.dtype, float_dtype)
        if node.op == "input":
            value = inputs[node.attr]
            if not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=torch.int64, device="cpu")
            values[node] = value.to(dtype)
        elif node.op == "const":
            values[node] = torch.tensor(node.attr, dtype=dtype, device="cpu")
        elif node.op == "param":
            values[node] = torch.tensor(traced.params[node.attr], dtype=dtype, device="cpu")
        elif node.op == "size":
            slot, dim = node.attr
            values[node] = torch.tensor(traced.captures[slot].shape[dim], device="cpu")
        elif node.op == "load":
            values[node] = load_elements(traced.captures[node.attr], args).to(dtype)
        elif node.op == "cast":
            values[node] = args[0].to(dtype)
        else:
            values[node] = FUNCTIONS[node.op](*args)
    return values


def _compute_dtype(name: str, float_dtype: torch.dtype) -> torch.dtype:
    return (
        torch.promote_types(float_dtype, TORCH_DTYPE[name])
        if is_float(name)
        else (TORCH_DTYPE[name])
    )


def load_elements(tensor: Tensor, indices: list[Tensor]) -> Tensor:
    """Elements of a captured tensor: indices wrap once, and what lies outside reads as zero.

    Parameters
    ----------
    tensor : Tensor, any dtype and rank
    indices : list of Tensor, int64
        One for each dimension; shapes broadcast together.

    Returns
    -------
    Tensor, of the indices' common shape and the dtype of `tensor`
    """
    tensor = tensor.detach()
    if not indices:
        return tensor
    inside: Tensor | None = None
    safe = []
    for index, size in zip(indices, tensor.shape, strict=True):
        if size == 0:
            shape = sum(indices, torch.zeros((), dtype=torch.int64, device="cpu")).shape
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        wrapped = torch.where(index < 0, index + size, index)
        clamped = wrapped.clamp(0, size - 1)
        ok = wrapped == clamped
        inside = ok if inside is None else inside & ok
        safe.append(clamped.to(tensor.device))
    assert inside is not None
    return tensor[tuple(safe)].masked_fill(~inside.to(tensor.device), 0)


def _pow(x: Tensor, y: Tensor) -> Tensor:
    if x.is_floating_point():
        return torch.pow(x, y)
    # torch refuses negative exponents of integers given as tensors on some devices: 0, 1 or -1.
    whole = torch.pow(x, y.clamp(min=0))
    odd = torch.where(y % 2 == 0, 1, x)
    return torch.where(y >= 0, whole, torch.where(x.abs() == 1, odd, 0))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": lambda x, y: torch.div(x, _nonzero(y), rounding_mode="floor"),
    "mod": lambda x, y: torch.remainder(x, _nonzero(y)),
    "pow": _pow,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "neg": torch.neg,
    "abs": torch.abs,
    "where": torch.where,
    "isnan": torch.isnan,
    **{
        name: getattr(torch, name)
        for name in "exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid erf".split()
        + "floor ceil trunc round".split()
    },
}


def _nonzero(divisor: Tensor) -> Tensor:
    """Replace a zero integer divisor by one.

    Lanes outside the tile read zeros, and torch raises on integer division by zero where hardware
    does not.
    """
    if divisor.is_floating_point():
        return divisor
    return torch.where(divisor == 0, torch.ones((), dtype=divisor.dtype, device="cpu"), divisor)
