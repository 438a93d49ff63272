"""torch's FlexAttention names, signatures and position rule: ported code changes one import.

``from torch.nn.attention.flex_attention import ...`` becomes ``from flexdecode.compat import ...``.
What differs from `flexdecode.attention` is the position of the first query: 0 here, as in torch,
for mask and score alike, where `flexdecode.attention` puts the last query on the last key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexdecode import mask_creation
from flexdecode.api import AuxOutput, AuxRequest, attention
from flexdecode.block_mask import BlockMask
from flexdecode.mods import ScoreMod, and_masks, mask_mod, or_masks

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

_NAMES = {"q": "query", "k": "key", "v": "value"}  # as the caller knows them
# torch's hints for its own kernels: they never change a result, and mean nothing here.
_TORCH_HINTS = frozenset(
    "BACKEND BLOCKS_ARE_CONTIGUOUS FORCE_USE_FLEX_ATTENTION IS_DIVISIBLE OUTPUT_LOGSUMEXP "
    "OUTPUT_MAX PRESCALE_QK ROWS_GUARANTEED_SAFE SPLIT_KV USE_TMA WRITE_DQ".split()
)


@mask_mod
def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """True everywhere."""
    return kv_idx == kv_idx


def create_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> BlockMask:
    """`flexdecode.create_block_mask` with torch's signature: the first query is at position 0.

    Parameters
    ----------
    mask_mod : callable (b, h, q_idx, kv_idx) -> bool
    B, H : int or None
        Batch and query heads; None means 1, shared by all.
    Q_LEN, KV_LEN : int, tokens
    device : torch.device or str, optional
        Default: where the captured tensors are, else the CPU. torch's default is ``"cuda"``.
    BLOCK_SIZE : int or (int, int), default 128
        Queries and keys of a block.
    _compile : bool
        Accepted and without effect: nothing needs compiling.

    Returns
    -------
    BlockMask

    Raises
    ------
    ValueError, TypeError
        As `flexdecode.create_block_mask`.
    """
    return mask_creation.create_block_mask(
        mask_mod, B, H, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=BLOCK_SIZE, q_offset=0
    )


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`flexdecode.attention` with torch's signature: the first query is at position 0.

    Parameters
    ----------
    query : Tensor, [B, Hq, Lq, D]
    key : Tensor, [B or 1, Hkv, Lkv, D]
    value : Tensor, [B or 1, Hkv, Lkv, Dv]
    score_mod : callable (score, b, h, q_idx, kv_idx) -> score, optional
    block_mask : BlockMask of `flexdecode` or of torch, optional
    scale : float, default ``D ** -0.5``
    enable_gqa : bool, default False
        Let ``Hq`` be a multiple of ``Hkv``.
    return_lse : bool, default False
        Return ``(out, lse)``.
    kernel_options : dict, optional
        As in `flexdecode.attention`; torch's hints for its own kernels are accepted and ignored.
    return_aux : AuxRequest, optional
        Return ``(out, AuxOutput)``; not together with `return_lse`.

    Returns
    -------
    out : Tensor, [B, Hq, Lq, Dv]
    lse : Tensor, [B, Hq, Lq], float32, natural log
        Only with `return_lse`.
    aux : AuxOutput
        Only with `return_aux`.

    Raises
    ------
    ValueError
        Head counts differ without `enable_gqa`, both statistics are asked for, or as
        `flexdecode.attention`.

    Examples
    --------
    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 4, 256, 32)
    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256)
    >>> flex_attention(q, k, v, block_mask=mask).shape
    torch.Size([1, 4, 256, 32])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
    for name, flag in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(f"kernel_options: expected a dict, got {type(kernel_options).__name__}")
    if return_lse and return_aux is not None:
        raise ValueError("return_lse: expected not to be given together with return_aux")
    if not enable_gqa and query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa: expected True for {query.shape[1]} query and {key.shape[1]} key heads"
        )
    options = {n: x for n, x in (kernel_options or {}).items() if n not in _TORCH_HINTS}
    if isinstance(block_mask, BlockMask) and block_mask.kind == "fixed":
        if block_mask.q_offset is None:  # from_kv_blocks leaves the positions to the call
            block_mask = replace(block_mask, q_offset=0)
    owns_offset = block_mask is not None and not _is_lazy(block_mask)
    try:
        result = attention(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            q_offset=None if owns_offset else 0,
            return_aux=AuxRequest(lse=True) if return_lse else return_aux,
            kernel_options=options,
        )
    except (TypeError, ValueError) as error:
        name, colon, rest = str(error).partition(": ")
        if not colon or name not in _NAMES:
            raise
        raise type(error)(f"{_NAMES[name]}: {rest}") from None
    if return_lse:
        out, aux = result
        return out, aux.lse
    return result


def _is_lazy(block_mask: Any) -> bool:
    return isinstance(block_mask, BlockMask) and block_mask.kind in ("lazy", "sized")
