"""Choose pages of keys by what they can score at most, on the device (Quest)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.masks.arguments import float_tensor, lengths, number

__all__ = ["page_bounds", "top_pages"]


def page_bounds(
    k: Tensor, page_size: int, kv_len: int | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the least and greatest element of each page of keys, channel by channel [1]_.

    Parameters
    ----------
    k : Tensor, [B, Hkv, Lkv, D], floating point
        Keys, as `attention` takes them.
    page_size : int >= 1, tokens
        Keys of a page.
    kv_len : int, or Tensor [] or [B], integer, tokens, optional
        Valid keys; what lies behind has no influence. Default: all.

    Returns
    -------
    least, greatest : Tensor, [B, Hkv, num_pages, D]
        In the dtype of `k`; ``num_pages = ceil(Lkv / page_size)``. Pages without a valid key hold
        inf and -inf.

    Raises
    ------
    TypeError
        `page_size` is not an int.
    ValueError
        `k` is not four-dimensional, or `page_size` is below 1.

    References
    ----------
    .. [1] J. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
       arXiv:2406.10774, 2024.
    """
    float_tensor("k", k, "[B, Hkv, Lkv, D]")
    number("page_size", page_size, 1)
    if kv_len is not None:
        lengths("kv_len", kv_len, k.device)
    B, Hkv, Lkv, D = k.shape
    end = torch.as_tensor(Lkv if kv_len is None else kv_len, device=k.device).reshape(-1, 1, 1, 1)
    missing = (torch.arange(Lkv, device=k.device)[:, None] >= end).expand(B, Hkv, Lkv, 1)
    padding = (0, 0, 0, -Lkv % page_size)
    low, high = (
        torch.nn.functional.pad(k.masked_fill(missing, fill), padding, value=fill)
        .reshape(B, Hkv, -1, page_size, D)
        .aminmax(dim=3)
        for fill in (torch.inf, -torch.inf)
    )
    return low.min, high.max


def top_pages(
    q: Tensor,
    least: Tensor,
    greatest: Tensor,
    count: int,
    *,
    page_size: int,
    kv_len: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """Choose the pages whose keys can score highest, for each sequence and key head [1]_.

    A key of page ``p`` scores at most ``sum(max(q * least[p], q * greatest[p]))``, summed over
    channels. Of the heads and queries that share a key head, the greatest bound counts. The page of
    the newest key is always chosen. Nothing waits for the device.

    Parameters
    ----------
    q : Tensor, [B, Hq, Lq, D], floating point
        Queries, as `attention` takes them.
    least, greatest : Tensor, [B, Hkv, num_pages, D]
        From `page_bounds`.
    count : int >= 1, pages
        How many to choose.
    page_size : int >= 1, tokens
        Keys of a page.
    kv_len : int, or Tensor [] or [B], integer, tokens
        Valid keys; pages behind them are not chosen.

    Returns
    -------
    kv_num_blocks : Tensor, [B, Hkv, 1], int32
        Pages chosen: `count`, or as many as there are.
    kv_indices : Tensor, [B, Hkv, 1, min(count, num_pages)], int32
        Their numbers, ascending. With ``BLOCK_SIZE=(Lq, page_size)`` the two are what
        `BlockMask.from_kv_blocks` takes.

    Raises
    ------
    TypeError
        `count` or `page_size` is not an int.
    ValueError
        Shapes do not fit, or a number is below 1.

    References
    ----------
    .. [1] J. Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
       arXiv:2406.10774, 2024.

    Examples
    --------
    Keys 0 to 7 in pages of two; key 3 points where the query does:

    >>> k = torch.zeros(1, 1, 8, 4)
    >>> k[0, 0, 3] = 1.0
    >>> bounds = page_bounds(k, 2)
    >>> num, pages = top_pages(torch.ones(1, 1, 1, 4), *bounds, 2, page_size=2, kv_len=8)
    >>> num.tolist(), pages.tolist()
    ([[[2]]], [[[[1, 3]]]])
    """
    float_tensor("q", q, "[B, Hq, Lq, D]")
    float_tensor("least", least, "[B, Hkv, num_pages, D]")
    float_tensor("greatest", greatest, "[B, Hkv, num_pages, D]")
    number("count", count, 1)
    number("page_size", page_size, 1)
    lengths("kv_len", kv_len, q.device)
    B, Hq, Lq, D = q.shape
    Hkv, num_pages = least.shape[1:3]
    if least.shape != greatest.shape or least.shape != (B, Hkv, num_pages, D) or Hq % Hkv:
        raise ValueError(
            f"least, greatest: expected shape [{B}, Hkv, num_pages, {D}] with Hkv a divisor of "
            f"{Hq}, got {list(least.shape)} and {list(greatest.shape)}"
        )
    end = (
        torch.as_tensor(kv_len, device=q.device).reshape(-1, 1, 1).clamp(max=num_pages * page_size)
    )
    newest = (end - 1) // page_size
    page = torch.arange(num_pages, device=q.device)
    rows = q.reshape(B, Hkv, Hq // Hkv * Lq, D).float()
    # The greater of two products by the sign of q: no tensor of [..., num_pages, D] is made.
    bound = rows.clamp(min=0) @ greatest.float().mT + rows.clamp(max=0) @ least.float().mT
    score = bound.amax(2).masked_fill(page > newest, -torch.inf)
    score = score.masked_fill(page == newest, torch.inf)
    chosen = score.topk(min(count, num_pages), dim=-1)
    # Pages behind the newest key sort last, where the count does not reach.
    numbers = chosen.indices.masked_fill(chosen.values == -torch.inf, num_pages).sort(-1).values
    listed = (newest + 1).clamp(max=chosen.indices.shape[-1]).expand(B, Hkv, 1)
    return listed.to(torch.int32).contiguous(), numbers[:, :, None].to(torch.int32)
