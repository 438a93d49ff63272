"""`create_block_mask`: from a rule to a mask, lazy or with tables."""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.block_mask import BlockMask
from flexdecode.block_predicates import MaskRule
from flexdecode.mask_arguments import (
    block_size,
    count,
    find_device,
    position,
    token_count,
)
from flexdecode.trace import trace

__all__ = ["create_block_mask"]


def create_block_mask(
    mask_mod: MaskRule,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    *,
    q_offset: int | Tensor | None = None,
    kv_len: int | Tensor | None = None,
) -> BlockMask:
    """Turn a ``mask_mod`` into a `BlockMask`.

    Without sizes the mask is lazy: each call takes them from q and k and builds its tables. With
    ``Q_LEN`` and ``KV_LEN`` the tables are built at once, and again for a call of other lengths.
    Positions follow `attention`: the last query sits on the last key unless `q_offset` says
    otherwise (torch counts queries from 0: that is ``q_offset=0``).

    Parameters
    ----------
    mask_mod : callable (b, h, q_idx, kv_idx) -> bool
        True where query ``q_idx`` of query head ``h`` in sequence ``b`` may attend to ``kv_idx``.
    B, H : int, optional
        Batch and query heads. Default: those of q in a lazy mask, else 1 (as in torch), which is
        enough unless `mask_mod` depends on ``b`` or ``h``.
    Q_LEN, KV_LEN : int, tokens, optional
        Query rows and keys; both or neither.
    device : torch.device or str, optional
        Of the tables. Default: that of the tensors given or captured, else the accelerator if
        there is one, else the CPU.
    BLOCK_SIZE : int or (int, int), default 128
        Queries and keys of a block.
    q_offset : int or Tensor [B], int32 or int64, optional
        Position of the first query row. Makes the mask fixed: the positions belong to it.
    kv_len : int or Tensor [B], int32 or int64, tokens, optional
        Valid keys where fewer than ``KV_LEN``; a call inherits them.

    Returns
    -------
    BlockMask

    Raises
    ------
    ValueError, TypeError
        A size does not fit, or `mask_mod` cannot be traced.

    Examples
    --------
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> create_block_mask(causal)
    BlockMask(causal, lazy, shape=('any', 'any', 'any', 'any'), BLOCK_SIZE=(128, 128))

    Two queries at the end of 300 keys, and the same two at positions 0 and 1:

    >>> create_block_mask(causal, Q_LEN=2, KV_LEN=300, device="cpu").to_dense()
    tensor([[[[1, 1, 1]]]], dtype=torch.int32)
    >>> create_block_mask(causal, Q_LEN=2, KV_LEN=300, device="cpu", q_offset=0).to_dense()
    tensor([[[[1, 0, 0]]]], dtype=torch.int32)
    """
    if isinstance(mask_mod, BlockMask) or not callable(mask_mod):
        remedy = ""
        if isinstance(mask_mod, Tensor):
            remedy = "; a function can index it: lambda b, h, q_idx, kv_idx: dense[q_idx, kv_idx]"
        raise TypeError(
            "mask_mod: expected a function (b, h, q_idx, kv_idx) -> bool, "
            f"got {type(mask_mod).__name__}{remedy}"
        )
    if torch.compiler.is_compiling():
        from flexdecode.compiled_masks import create_mask_in_graph

        return create_mask_in_graph(
            mask_mod,
            BLOCK_SIZE,
            B=B,
            H=H,
            Q_LEN=Q_LEN,
            KV_LEN=KV_LEN,
            device=device,
            q_offset=q_offset,
            kv_len=kv_len,
        )
    traced = trace(mask_mod, "mask")
    block = block_size(BLOCK_SIZE)
    B = None if B is None else count("B", B)
    H = None if H is None else count("H", H)
    if (Q_LEN is None) != (KV_LEN is None):
        raise ValueError(f"Q_LEN, KV_LEN: expected both or neither, got {Q_LEN} and {KV_LEN}")
    if Q_LEN is None or KV_LEN is None:
        if kv_len is not None:
            raise ValueError(
                "kv_len: expected Q_LEN and KV_LEN with it; without sizes, give it to attention"
            )
        where = None if device is None else torch.device(device)
        offset = position("q_offset", q_offset, B, where)
        return BlockMask(mask_mod, block, "lazy", B, H, q_offset=offset)
    where = find_device(device, (kv_len, q_offset, *traced.captures))
    B, H = 1 if B is None else B, 1 if H is None else H
    capacity = token_count("KV_LEN", KV_LEN)
    length = position("kv_len", kv_len, B, where)
    if isinstance(length, int) and not 0 <= length <= capacity:
        raise ValueError(f"kv_len: expected a value in [0, KV_LEN = {capacity}], got {length}")
    mask = BlockMask(
        mask_mod,
        block,
        "sized" if q_offset is None else "fixed",
        B,
        H,
        token_count("Q_LEN", Q_LEN),
        capacity,
        length,
        position("q_offset", q_offset, B, where),
    )
    return mask._with_tables(where)
