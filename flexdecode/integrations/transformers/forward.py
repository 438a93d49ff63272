"""The attention of one layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexdecode.api import AuxRequest, attention
from flexdecode.block_mask import BlockMask
from flexdecode.integrations.transformers.matrices import element, fitting
from flexdecode.integrations.transformers.model_mask import ModelMask
from flexdecode.integrations.transformers.restriction import is_restricted
from flexdecode.mask_creation import create_block_mask
from flexdecode.mods import ScoreMod

__all__ = ["attention_forward"]


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    backend: str = "auto",
    kernel_options: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' ``AttentionInterface`` asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer.
    query : Tensor, [B, Hq, Lq, D]
        Queries, rotated.
    key, value : Tensor, [B, Hkv, Lkv, D] and [B, Hkv, Lkv, Dv]
        The layer's cache, heads not repeated.
    attention_mask : ModelMask, or Tensor [B or 1, Hq or 1, Lq or 1, Lkv or more], or None
        From `create_mask`, or a user's own: bool (True: attend) or float, added to the scores
        after `softcap`.
    scaling : float, default ``D ** -0.5``
        Multiplies the dot products.
    dropout : float
        Must be 0.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``, before the mask.
    s_aux : Tensor, [Hq], optional
        Attention sinks, logits.
    sinks : Tensor, [B or 1, Hq or 1, Lq or 1, 1], optional
        The same for each query.
    position_bias : Tensor, [B or 1, Hq or 1, Lq or 1, Lkv], optional
        Added to the scaled scores.
    is_causal : bool, optional
        Overrides ``module.is_causal``; only asked where there is no mask.
    indices, block_indices : Tensor, optional
        Keys that the layer selects for itself: must be None.
    backend, kernel_options
        See `attention`.

    Returns
    -------
    out : Tensor, [B, Lq, Hq, Dv], contiguous
    weights : None
        They are never formed.

    Raises
    ------
    ValueError
        Dropout is asked for, a causal layer comes without a mask (continuous batching, or a name
        that was registered without its mask function), the mask is of other sizes, or the layer
        selects keys in a way of its own.
    """
    if dropout > 0:
        raise ValueError(
            f"dropout: expected 0, got {dropout}: attention is forward only, call model.eval()"
        )
    if attention_mask is None and (
        getattr(module, "is_causal", False) if is_causal is None else is_causal
    ):
        raise ValueError(
            "attention_mask: expected a mask in a causal layer, got None (continuous batching is "
            "not supported; register() installs the mask function)"
        )
    if indices is not None or block_indices is not None:
        raise ValueError(
            "indices, block_indices: expected None, got a selection of keys, which is for kernels "
            "of this model's own; use another attn_implementation for it"
        )
    # A partial and not a closure, so that a compiled model can hold it.
    score_mod: ScoreMod | None = None if softcap is None else functools.partial(_capped, softcap)
    block_mask: BlockMask | None = None
    q_offset: int | None = None
    if position_bias is not None:
        position_bias = fitting("position_bias", position_bias, query, key)
    if isinstance(attention_mask, ModelMask):
        if attention_mask.shape[2:] != (query.shape[2], key.shape[2]):
            raise ValueError(
                f"attention_mask: expected {query.shape[2]} queries and {key.shape[2]} keys, got a "
                f"mask of {attention_mask.shape[2]} and {attention_mask.shape[3]}: this layer "
                "attends to other keys than the model's mask is for; use another "
                "attn_implementation for it"
            )
        block_mask = attention_mask.block_mask  # owns its offset
    elif isinstance(attention_mask, Tensor):
        if getattr(module, "is_causal", False) and is_restricted():
            raise ValueError(
                "attention_mask: expected the model's own mask under restrict, got a matrix, which "
                "does not say which positions its rows are of; put the rule into the matrix"
            )
        q_offset = 0  # a given matrix is indexed by row
        matrix = fitting("attention_mask", attention_mask, query, key)
        if matrix.dtype == torch.bool:
            block_mask = create_block_mask(element(matrix))
        elif softcap is not None:
            whole = matrix.expand(query.shape[0], query.shape[1], -1, -1)
            score_mod = functools.partial(_capped_and_added, softcap, whole)
        else:
            position_bias = matrix if position_bias is None else position_bias + matrix
    result = attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scaling,
        q_offset=q_offset,
        bias=position_bias,
        sinks=s_aux,
        return_aux=None if sinks is None else AuxRequest(lse=True),
        backend=backend,
        kernel_options=None if kernel_options is None else dict(kernel_options),
    )
    if sinks is None:
        assert isinstance(result, Tensor)  # no auxiliary outputs were asked for
        out = result
    else:
        assert isinstance(result, tuple) and result[1].lse is not None
        share = torch.sigmoid(result[1].lse[..., None] - sinks.float())  # of all mass, the keys'
        out = (result[0].float() * share).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def _capped(cap: float, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return cap * torch.tanh(score / cap)


def _capped_and_added(
    cap: float, matrix: Tensor, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any
) -> Any:
    return cap * torch.tanh(score / cap) + matrix[b, h, q_idx, kv_idx]
