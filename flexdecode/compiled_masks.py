"""`create_block_mask` within a compiled region: tables are made by an operator.

Imported by the first such call, since the decorators load the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode.block_mask import BlockMask
from flexdecode.compiled import Inseparable, Parts
from flexdecode.mask_arguments import cdiv
from flexdecode.mask_creation import create_block_mask
from flexdecode.tables import Tables

__all__ = ["create_mask_in_graph"]


def create_mask_in_graph(
    mask_mod: Any,
    BLOCK_SIZE: Any,
    *,
    B: int | None,
    H: int | None,
    Q_LEN: int | None,
    KV_LEN: int | None,
    device: torch.device | str | None,
    q_offset: int | Tensor | None,
    kv_len: int | Tensor | None,
) -> BlockMask:
    """`create_block_mask`; outside of the graph where a rule cannot be taken apart.

    Parameters
    ----------
    mask_mod, BLOCK_SIZE, B, H, Q_LEN, KV_LEN, device, q_offset, kv_len
        As in `create_block_mask`. The device is that of the tensors where they name one.

    Returns
    -------
    BlockMask
    """
    size = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    own_offset = None
    if isinstance(q_offset, Tensor):
        own_offset = q_offset.detach().to(torch.int64).clone().reshape(-1)
        if B is not None:
            own_offset = own_offset.expand(B)
    offset = q_offset if own_offset is None else own_offset
    if Q_LEN is None and KV_LEN is None and kv_len is None:
        return BlockMask(mask_mod, size, "lazy", B, H, q_offset=offset)
    if Q_LEN is None or KV_LEN is None:
        lazy: BlockMask = _create_outside(
            mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, q_offset, kv_len
        )
        return lazy
    B, H = 1 if B is None else B, 1 if H is None else H
    parts = Parts()
    try:
        call: str | None = parts.call(
            {
                "mask_mod": mask_mod,
                "BLOCK_SIZE": size,
                "B": B,
                "H": H,
                "Q_LEN": Q_LEN,
                "KV_LEN": KV_LEN,
                "q_offset": offset,
                "kv_len": kv_len,
            }
        )
    except Inseparable:
        call = None
    where = None if device is None else torch.device(device)
    for tensor in parts.tensors:
        if where is None and (tensor.dim() > 0 or tensor.device.type != "cpu"):
            where = tensor.device
    if call is None or where is None:
        made: BlockMask = _create_outside(
            mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, q_offset, kv_len
        )
        return made
    num, indices, full_num, full, states = torch.ops.flexdecode.tables(
        call, parts.tensors, parts.ints, parts.floats, where
    )
    kept = states if where.type == "cuda" else None
    columns = cdiv(KV_LEN, size[1])
    tables = Tables(num, indices, full_num, full, size, columns, True, kept)
    kind: Any = "sized" if offset is None else "fixed"
    return BlockMask(mask_mod, size, kind, B, H, Q_LEN, KV_LEN, kv_len, offset, tables)


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="flexdecode.create_block_mask: the rule closes over what a graph cannot hold, or "
    "nothing says on which device the tables belong; make the mask outside of the region"
)
def _create_outside(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any,
    BLOCK_SIZE: Any,
    q_offset: Any,
    kv_len: Any,
) -> BlockMask:
    """Make the mask as ever, between two graphs."""
    return create_block_mask(
        mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, q_offset=q_offset, kv_len=kv_len
    )
