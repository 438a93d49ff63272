"""Masks chosen by data: retrieved key blocks, and another mask for each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexdecode.masks.arguments import at_least, id_tensor
from flexdecode.mods import MaskMod, mask_mod, or_masks

__all__ = ["per_head", "selected_blocks"]


def selected_blocks(selected: Tensor, block_size: int, *, group_size: int = 1) -> MaskMod:
    """True for keys of the blocks that were selected (Quest [1]_, NSA [2]_).

    ``selected[b, h // group_size, kv_idx // block_size]``. Says nothing about the future: combine
    it, ``causal & (selected_blocks(...) | sliding_window(256))``.

    Parameters
    ----------
    selected : Tensor, [B or 1, H or 1, num_blocks], bool
        Blocks that may be read. ``H`` counts query heads with ``group_size=1`` and key heads with
        ``group_size=G``. ``num_blocks * block_size`` covers every key that is asked about.
    block_size : int >= 1, tokens
        Keys of one entry of `selected`; need not be the block size of the `BlockMask`.
    group_size : int >= 1, default 1
        Query heads that share one row of `selected`.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `selected` is not a bool tensor.
    ValueError
        `selected` is not three-dimensional, or a size is below 1.

    References
    ----------
    .. [1] J. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
       arXiv:2406.10774, 2024.
    .. [2] J. Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse
       Attention", arXiv:2502.11089, 2025.

    Examples
    --------
    >>> import torch
    >>> selected = torch.tensor([[[True, False, True]]])
    >>> selected_blocks(selected, 2)(0, 0, 5, torch.arange(6)).int()
    tensor([1, 1, 0, 0, 1, 1], dtype=torch.int32)
    """
    if not isinstance(selected, Tensor) or selected.dtype != torch.bool:
        got = selected.dtype if isinstance(selected, Tensor) else type(selected).__name__
        raise TypeError(f"selected: expected a bool tensor, got {got}")
    if selected.ndim != 3:
        raise ValueError(
            f"selected: expected shape [B or 1, H or 1, num_blocks], got {list(selected.shape)}"
        )
    at_least("block_size", block_size, 1)
    at_least("group_size", group_size, 1)

    shares_batch, shares_heads = selected.shape[0] == 1, selected.shape[1] == 1

    @mask_mod
    def selected_blocks(b, h, q_idx, kv_idx):
        row = 0 if shares_batch else b
        head = 0 if shares_heads else h // group_size
        return selected[row, head, kv_idx // block_size]

    return selected_blocks


def per_head(choice: Tensor, *masks: Callable[[Any, Any, Any, Any], Any]) -> MaskMod:
    """True where the mask that head ``h`` has chosen is: ``masks[choice[h]]``.

    Streaming heads beside retrieval heads, as DuoAttention [1]_ has them:
    ``per_head(is_retrieval, sink_window(16, 256), causal)``.

    Parameters
    ----------
    choice : Tensor, [Hq], integer
        Which of `masks` each query head uses. A head with any other number sees nothing.
    *masks : callable (b, h, q_idx, kv_idx) -> bool
        The masks to choose from.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `choice` is not an integer tensor, or one of `masks` not callable.
    ValueError
        `choice` is not one-dimensional.

    References
    ----------
    .. [1] G. Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and
       Streaming Heads", arXiv:2410.10819, 2024.
    """
    id_tensor("choice", choice, "[Hq]")
    return or_masks(*(_on_heads(choice, number) & mask for number, mask in enumerate(masks)))


def _on_heads(choice: Tensor, number: int) -> MaskMod:
    @mask_mod
    def on_heads(b, h, q_idx, kv_idx):
        return choice[h] == number

    return on_heads
