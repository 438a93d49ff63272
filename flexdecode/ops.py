"""Operators of torch for compiled graphs: attention, appending, tables of masks.

Operators take no functions and no masks. So a call is taken apart: its tensors (tables, lengths,
all that rules capture) and numbers become lists, and a text in JSON says where each belongs and
what the rules compute. The operator puts the call together again and runs it. Nothing is looked up
by name or address: a result depends on the arguments alone, which is what CUDA graphs,
functionalisation and saved programs rely on.

Within a compiled region the library's functions call them by themselves, see `compiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdecode.assembly import assemble, assemble_operands, parse
from flexdecode.backends import load_backend
from flexdecode.mask_arguments import check_captures, find_device
from flexdecode.quantized_tensor import QuantizedTensor
from flexdecode.tables import Extent, build_tables
from flexdecode.trace import Traced

__all__ = ["is_transformed"]

# True within torch.func's transforms, whose tensors kernels cannot take.
is_transformed: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)

_library: Any = torch.library.Library("flexdecode", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, str call, Tensor[] tensors, SymInt[] ints, "
    "float[] floats) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "append(Tensor(a!)[] caches, Tensor k_new, Tensor v_new, str call, Tensor[] tensors, "
    "SymInt[] ints, float[] floats) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "update(Tensor(a!)[] tables, str call, Tensor[] tensors, SymInt[] ints, float[] floats) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "tables(str call, Tensor[] tensors, SymInt[] ints, float[] floats, Device device) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides,),
)


_NO_AUX = {"lse": False, "max_scores": False}
_NOTHING_GIVEN = dict.fromkeys(
    "score_mod block_mask scale kv_len kv_start q_offset page_table cu_seqlens_q bias sinks "
    "kernel_options".split()
)


# A compiler that watches frames must not read what runs in here.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    from flexdecode.api import AuxRequest, attention, prepare

    arguments = assemble(call, tensors, ints, floats)
    operands = _operands((q, k, v), arguments)
    arguments["return_aux"] = AuxRequest(**arguments.get("return_aux", _NO_AUX))
    exact = arguments["backend"] == "reference"
    if "block_mask" in arguments or "score_mod" in arguments:
        # Masks and rules are new objects: no earlier call is like this one.
        request, name = prepare(*operands, **{**_NOTHING_GIVEN, **arguments})
        with torch.no_grad():
            result = load_backend(name)(request)
        out, statistics = result.out, (result.lse, result.max_scores)
    else:
        out, statistics = attention(*operands, **arguments)
    lse, max_scores = (
        out.new_empty(0, dtype=torch.float64 if exact else torch.float32)
        if rows is None
        else rows.contiguous()
        for rows in statistics
    )
    if lse is max_scores:  # results may not share memory
        max_scores = lse.clone()
    return out.contiguous(), lse, max_scores


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    stored = parse(call)
    # The rest stays apart: checks of values have nothing to look at here.
    query, _, value = _operands((q, k, v), assemble_operands(call, tensors, ints, floats))
    wanted = stored.get("return_aux", _NO_AUX)
    shape = tuple(q.shape[:3])
    exact = stored["backend"] == ["text", "reference"]
    lse, max_scores = (
        q.new_empty(shape if wanted[name] else 0, dtype=torch.float64 if exact else torch.float32)
        for name in ("lse", "max_scores")
    )
    return q.new_empty((*shape, value.shape[3]), dtype=query.dtype), lse, max_scores


def _operands(data: tuple[Tensor, ...], arguments: dict[str, Any]) -> tuple[Any, ...]:
    """q, k and v; those that are codes with what `arguments` says of them, which is taken out."""
    return tuple(
        QuantizedTensor(x, **arguments.pop(name)) if name in arguments else x
        for name, x in zip(("q", "k", "v"), data, strict=True)
    )


def _attention_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "attention: vmap is not supported; q, k and v have a batch dimension, put the mapped one "
        "there (a rule reads it as b)"
    )


@torch._disable_dynamo  # type: ignore[attr-defined]
def _update(
    tables: list[Tensor],
    call: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> None:
    assemble(call, tensors, ints, floats, tables)["block_mask"].update()


@torch._disable_dynamo  # type: ignore[attr-defined]
def _append(
    caches: list[Tensor],
    k_new: Tensor,
    v_new: Tensor,
    call: str,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> None:
    from flexdecode.appending import append_kv

    arguments = assemble(call, tensors, ints, floats, caches)
    append_kv(k_new=k_new, v_new=v_new, **arguments)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _tables(
    call: str, tensors: list[Tensor], ints: list[int], floats: list[float], device: torch.device
) -> tuple[Tensor, ...]:
    """Tables of a mask with sizes, and their states where those are kept."""
    device = find_device(device, ())
    traced, extent = _extent(assemble(call, tensors, ints, floats), device)
    with torch.no_grad():
        made = build_tables(traced, extent, compact=False)
    states = made.kv_indices.new_empty(0) if made.states is None else made.states
    return tuple(table.clone() for table in (*made.tensors, states))  # lists share a buffer


def _tables_fake(
    call: str, tensors: list[Tensor], ints: list[int], floats: list[float], device: torch.device
) -> tuple[Tensor, ...]:
    device = find_device(device, ())
    traced, extent = _extent(assemble(call, tensors, ints, floats), device)
    extent = extent.for_kernels(traced)
    rows, columns = extent.num_blocks()
    shape = (extent.B, extent.H, rows)

    def lists() -> tuple[Tensor, Tensor]:
        return (
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty((*shape, columns), dtype=torch.int32, device=device),
        )

    if device.type == "cuda":
        states = torch.empty((*shape, columns), dtype=torch.uint8, device=device)
    else:
        states = torch.empty(0, dtype=torch.int32, device=device)
    return (*lists(), *lists(), states)


def _extent(arguments: dict[str, Any], device: torch.device) -> tuple[Traced, Extent]:
    capacity, q_len = arguments["KV_LEN"], arguments["Q_LEN"]
    kv_len = arguments.get("kv_len", capacity)
    if isinstance(kv_len, Tensor):
        kv_len = kv_len.clamp(0, capacity)
    q_offset = arguments.get("q_offset")
    traced = arguments["mask_mod"].traced
    check_captures(traced, device)
    extent = Extent(
        arguments["B"],
        arguments["H"],
        q_len,
        capacity,
        kv_len,
        kv_len - q_len if q_offset is None else q_offset,
        arguments["BLOCK_SIZE"],
        device,
    )
    return traced, extent


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("append", _append, "CompositeExplicitAutograd")
_library.impl("update", _update, "CompositeExplicitAutograd")
_library.impl("tables", _tables, "CompositeExplicitAutograd")
torch.library.register_fake("flexdecode::attention", _attention_fake, lib=_library)
torch.library.register_fake("flexdecode::append", lambda *arguments: None, lib=_library)
torch.library.register_fake("flexdecode::update", lambda *arguments: None, lib=_library)
torch.library.register_fake("flexdecode::tables", _tables_fake, lib=_library)
torch.library.register_vmap("flexdecode::attention", _attention_vmap, lib=_library)
