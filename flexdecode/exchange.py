"""One message between the ranks of a group, and whether all of them expect the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from flexdecode.quantized_tensor import QuantizedTensor

__all__ = ["check_ranks", "exchange", "rank_of"]

# The name until torch 2.12.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
_ALIGNMENT = 16  # bytes: what a thread of the merge reads at once


def rank_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank of this process in the group, and how many there are."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group: expected an initialised process group, got none; call "
            "torch.distributed.init_process_group() first"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: expected a group that this rank is in; others must not call this")
    return rank, dist.get_world_size(group)


def check_ranks(
    group: dist.ProcessGroup | None,
    ranks: int,
    q: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    **asked: bool,
) -> None:
    """Raise on all ranks where the messages of one would not fit those of another."""
    own = {"q": f"{list(q.shape)} {q.dtype}", "head dim of v": v.shape[3], **asked}
    found: list[dict[str, Any]] = [{} for _ in range(ranks)]
    dist.all_gather_object(found, own, group=group)
    for name in own:
        values = [x[name] for x in found]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name}: expected the same on all ranks, got {values}")


def exchange(parts: Sequence[Tensor], ranks: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Send parts in one message and receive those of all ranks: [ranks, ...] each.

    Parameters
    ----------
    parts : sequence of Tensor
        [1, ...] each, for all ranks, or [ranks, ...] each, one for each rank.
    """
    width = sum(_padded(x[0].nbytes) for x in parts)
    send = torch.empty((len(parts[0]), width), dtype=torch.uint8, device=parts[0].device)
    received = torch.empty((ranks, width), dtype=torch.uint8, device=send.device)
    for view, x in zip(_views(send, parts), parts, strict=True):
        view.copy_(x)
    if len(send) == ranks:
        dist.all_to_all_single(received, send, group=group)
    else:
        _all_gather(received.view(-1), send.view(-1), group=group)
    return list(_views(received, parts))


def _views(message: Tensor, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Where the parts lie in a message [n, bytes]: as [n, ...], with their dtypes."""
    at = 0
    for x in parts:
        size = x[0].nbytes
        yield message[:, at : at + size].view(x.dtype).view(len(message), *x.shape[1:])
        at += _padded(size)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
