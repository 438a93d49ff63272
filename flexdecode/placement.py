"""Where a rank's keys are in their sequences, and rules that see them there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexdecode import checks
from flexdecode.block_mask import BlockMask
from flexdecode.exchange import rank_of
from flexdecode.mask_creation import create_block_mask

if TYPE_CHECKING:
    from flexdecode.mods import ScoreMod
    from flexdecode.quantized_tensor import QuantizedTensor

__all__ = [
    "Interleaved",
    "Place",
    "check_rule",
    "local_lengths",
    "place_of",
    "placed_mask",
    "placed_score",
]

# (sequence, this rank's key counted from 0) -> position in the whole sequence
Place = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Interleaved:
    """Keys dealt out in turn: tokens ``[0, size)`` to rank 0, the next ``size`` to rank 1, ...

    Attributes
    ----------
    size : int, tokens, default 1
        Of a run that stays together; the page size where whole pages are dealt out.

    Examples
    --------
    >>> Interleaved(16)
    Interleaved(size=16)
    """

    size: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"size: expected an int of at least 1, got {self.size!r}")

    def local_len(
        self, kv_len: int | Tensor, *, group: dist.ProcessGroup | None = None
    ) -> int | Tensor:
        """Keys that this rank holds of whole sequences of `kv_len` tokens.

        Parameters
        ----------
        kv_len : int or integer Tensor, tokens
        group : torch.distributed.ProcessGroup, default all ranks

        Returns
        -------
        int or Tensor
            As `kv_len`. Nothing is communicated, nothing waits for the device.
        """
        rank, ranks = rank_of(group)
        rest = kv_len % (self.size * ranks) - rank * self.size
        if isinstance(rest, Tensor):
            rest = rest.clamp(0, self.size)
        else:
            rest = min(max(rest, 0), self.size)
        return kv_len // (self.size * ranks) * self.size + rest


def check_rule(block_mask: Any, q_offset: int | Tensor | None) -> None:
    """Raise unless a mask is a rule over whole sequences, whose tables can be built anew."""
    if block_mask is None:
        return
    if not isinstance(block_mask, BlockMask):
        if checks.check_mask(block_mask):
            raise ValueError(
                "block_mask: expected a rule over whole sequences, got torch's BlockMask, whose "
                "tables are of one device; pass create_block_mask(mask.mask_mod) and q_offset=0"
            )
    elif block_mask.kind == "bound":
        raise ValueError(
            "block_mask: expected a rule, or a mask of flexdecode.distributed.bind, got one that "
            "is bound without positions of this rank's keys"
        )
    elif (
        block_mask.kind == "fixed"
        or block_mask.source != "rule"
        or block_mask.rule_of_call is not None
        or block_mask.kv_len is not None
    ):
        raise ValueError(
            "block_mask: expected a rule over whole sequences, create_block_mask(mask_mod), got "
            f"{block_mask!r} with tables or lengths of its own"
        )
    elif block_mask.q_offset is not None and q_offset is not None:
        raise ValueError("q_offset: expected None, the block_mask has its own; leave it out")


# -- positions: closures over numbers and tensors only, so that their traces are found again


def place_of(kv_position: Any, rank: int, ranks: int, B: int, device: torch.device | None) -> Place:
    """Position of a rank's keys as a rule."""
    if isinstance(kv_position, Interleaved):
        return _dealt(kv_position.size, rank, ranks)
    if callable(kv_position):
        return kv_position  # type: ignore[no-any-return]
    limit = checks.MAX_POSITION
    if device is None:
        device = torch.device("cpu")  # an int is nowhere
    first = checks.check_rows("kv_position", kv_position, B, device, -limit, limit)
    if isinstance(first, Tensor):
        return lambda b, slot: first[b] + slot
    return lambda b, slot: first + slot


def _dealt(size: int, rank: int, ranks: int) -> Place:
    if size == 1:
        return lambda b, slot: slot * ranks + rank
    return lambda b, slot: (slot // size * ranks + rank) * size + slot % size


def placed_mask(block_mask: BlockMask, place: Place) -> BlockMask:
    """Make of a mask over whole sequences one over this rank's keys."""
    rule: Any = block_mask.mask_mod
    rule = getattr(rule, "fn", rule)

    def placed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return rule(b, h, q_idx, place(b, kv_idx))

    return create_block_mask(placed, BLOCK_SIZE=block_mask.BLOCK_SIZE)


def placed_score(score_mod: ScoreMod, place: Place) -> ScoreMod:
    """Make of a score rule one over this rank's keys."""
    checks.check_score_mod(score_mod)

    def placed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score_mod(score, b, h, q_idx, place(b, kv_idx))

    return placed


def local_lengths(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    B: int,
    kv_len: int | Tensor | None,
    kv_start: Tensor | None,
    page_table: Tensor | None,
) -> Tensor:
    """Valid keys of this rank as [B], int64, as `flexdecode.attention` counts them."""
    capacity: int = k.shape[2]
    if page_table is not None:
        capacity *= checks.check_page_table(page_table, k, B, kv_len).shape[1]
    room: int | Tensor = capacity
    if kv_len is not None:
        kv_len = checks.check_rows("kv_len", kv_len, B, q.device, 0, capacity)
    if kv_start is not None:
        start = checks.check_kv_start(kv_start, B, q.device)
        room = (capacity - start.to(torch.int64)).clamp(min=0)
    length = room if kv_len is None else kv_len
    if not isinstance(length, Tensor):
        length = torch.full((B,), length, dtype=torch.int64, device=q.device)
    return length.to(torch.int64).clamp(min=0).clamp(max=room)
