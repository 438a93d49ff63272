"""Code generation: from a traced mod to the function and the arguments that a kernel takes.

The kernel is written by hand; only the user's mod is printed. Equal structure means the same
function object and one compilation. The source lives in memory.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdecode.graph import Graph
from flexdecode.mod_text import Flavour, Layout, ModPrinter, argument_kinds
from flexdecode.trace import Traced, trace

__all__ = ["Keyed", "captures_moved", "compiled", "lower", "print_mod", "show_code"]


def lower(traced: Traced, flavour: Flavour) -> tuple[Any, tuple[Any, ...]]:
    """Turn a traced mod into the function and the arguments that a kernel takes.

    Parameters
    ----------
    traced : Traced
    flavour : "cuda", "cuda_fast", "hip" or "interpret"

    Returns
    -------
    function : triton.JITFunction
        The same object for every mod of this structure.
    args : tuple of Tensor and float
        Captures and numbers. Integers travel as floats of 16 bits each, since Triton would compile
        anew for an integer that becomes 1 or a multiple of 16; and captures from the last multiple
        of 16 bytes on, since it would for an address that is none.

    Both come in one tuple, the same object until something of `traced` is elsewhere.
    """
    # Captures may be given other data (``parameter.data = ...``), and some are passed as views.
    views = [(tensor.shape, tensor.stride(), tensor.data_ptr()) for tensor in traced.captures]
    earlier = traced.lowered.get(flavour)
    if earlier is not None and earlier[0] == views:
        return earlier[1]  # type: ignore[no-any-return]
    wide, layouts = argument_kinds(traced)
    args: list[Any] = []
    for value, kind, is_wide in zip(traced.params, traced.graph.params, wide, strict=True):
        if kind == "float":
            args.append(float(value))
        else:
            _append_whole(args, int(value), is_wide)
    for tensor, layout in zip(traced.captures, layouts, strict=True):
        args += _from_boundary(tensor.detach() if tensor.requires_grad else tensor)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            _append_whole(args, size, layout.wide)
            if dim < tensor.dim() - 1 or not layout.contiguous:
                _append_whole(args, stride, layout.wide)
    function = _function(traced.graph.key, wide, layouts, flavour, Keyed(traced.graph))
    found = function, tuple(args)
    traced.lowered[flavour] = views, found
    return found


def captures_moved(traced: Traced, device: torch.device) -> Traced:
    """Return `traced` with captured numbers of the CPU (0-dim tensors) copied to `device`.

    torch mixes such tensors with those of a GPU too. The copy is made in every call, so that the
    value stays live; a tensor on `device` costs nothing.
    """
    if all(tensor.device == device for tensor in traced.captures):
        return traced
    moved = tuple([tensor.to(device) for tensor in traced.captures])
    return Traced(traced.graph, traced.params, moved)


def print_mod(traced: Traced, flavour: Flavour = "cuda") -> str:
    """Return the text that `lower` compiles."""
    return ModPrinter(traced.graph, *argument_kinds(traced), flavour).text()


def show_code(mod: Callable[..., Any], flavour: Flavour = "cuda") -> str:
    """Show the Triton function that a mask or score rule becomes.

    Parameters
    ----------
    mod : callable
        ``mask_mod(b, h, q_idx, kv_idx)`` or ``score_mod(score, b, h, q_idx, kv_idx)``.
    flavour : "cuda", "cuda_fast", "hip" or "interpret", default "cuda"
        The printer's variant; 16-bit inputs on CUDA use ``"cuda_fast"``.

    Returns
    -------
    str
        Source text. ``args`` holds the numbers and captured tensors, read at every call.

    Raises
    ------
    TypeError
        `mod` cannot be traced.

    Examples
    --------
    >>> def window(b, h, q_idx, kv_idx):
    ...     return q_idx - kv_idx < 128
    >>> print(show_code(window))  # doctest: +ELLIPSIS
    @triton.jit
    def window(b, h, q_idx, kv_idx, lane, args):
        ...
        t0 = q_idx - kv_idx
        t1 = t0 < 128
        return t1
    """
    try:
        return print_mod(trace(mod, "mask"), flavour).rstrip()
    except TypeError as mask_error:
        if "a function of these arguments is a score_mod" not in str(mask_error):
            raise
    return print_mod(trace(mod, "score"), flavour).rstrip()


def _append_whole(args: list[Any], value: int, wide: bool) -> None:
    if wide:
        args += [
            float(value >> 48),
            float(value >> 32 & 0xFFFF),
            float(value >> 16 & 0xFFFF),
            float(value & 0xFFFF),
        ]
    else:
        args += [float(value >> 16), float(value & 0xFFFF)]


def _from_boundary(tensor: Tensor) -> tuple[Tensor, float]:
    """`tensor` moved back to an address that 16 divides, and by how many elements."""
    bytes_after = tensor.data_ptr() % 16
    back = bytes_after // tensor.element_size()
    first = tensor.storage_offset() - back
    if back * tensor.element_size() != bytes_after or first < 0:
        return tensor, 0.0  # a kernel of its own: its memory begins at an odd address
    if back:
        tensor = tensor.as_strided(tensor.shape, tensor.stride(), first)
    return tensor, float(back)


class Keyed:
    """A graph that does not take part in a cache key: ``graph.key`` stands for it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=4096)
def _function(
    key: str, wide: tuple[bool, ...], layouts: tuple[Layout, ...], flavour: Flavour, keyed: Keyed
) -> Any:
    text = ModPrinter(keyed.graph, wide, layouts, flavour).text()
    return compiled(keyed.graph.name, text)


def compiled(name: str, text: str) -> Any:
    """Return the ``@triton.jit`` function `name` that `text` defines; helpers are at hand."""
    import triton
    import triton.language as tl

    from flexdecode.kernels import interval_math, modmath

    known = vars(modmath) | vars(interval_math)
    helpers = {n: f for n, f in known.items() if hasattr(f, "fn")}
    names = {"tl": tl, "triton": triton, "__name__": "flexdecode.generated", **helpers}
    if name in names:  # a rule named like a helper must not take its place
        text = text.replace(f"def {name}(", f"def {name}_rule(", 1)
        name = f"{name}_rule"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    filename = f"<flexdecode {name} {digest}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), names)
    return names[name]
