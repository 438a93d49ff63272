"""Block states from all elements of a mask, a bounded number at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdecode.evaluate import evaluate

if TYPE_CHECKING:
    from flexdecode.extent import Extent
    from flexdecode.trace import Traced

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Span",
    "axis",
    "evaluated_states",
    "parts",
    "reduced_states",
]

EMPTY, PARTIAL, FULL = 0, 1, 2  # values of a block state

WORK_ELEMENTS = 1 << 22  # most elements evaluated at a time
_WORD = 0x0101010101010101  # eight True bytes read as one int64


@dataclass(frozen=True)
class Span:
    """Elements ``start .. stop`` of an axis: `blocks` blocks, or a part of one, from `block` on."""

    start: int
    stop: int
    block: int
    blocks: int

    @property
    def blocks_slice(self) -> slice:
        """Its blocks, as an index."""
        return slice(self.block, self.block + self.blocks)


def _spans(length: int, block: int, most: int) -> list[Span]:
    """Cut an axis into groups of whole blocks; into parts of blocks where one exceeds `most`."""
    spans = []
    start = 0
    while start < length:
        first = start // block
        count = min(most, length - start) // block
        if start % block == 0 and count:
            stop = start + count * block
        else:
            count = 1
            stop = min(start + most, length, (first + 1) * block)
        spans.append(Span(start, stop, first, count))
        start = stop
    return spans


def evaluated_states(mask: Traced, extent: Extent) -> Tensor:
    """Block states by evaluating every element, one bounded chunk at a time."""
    block_q, block_kv = extent.BLOCK_SIZE
    Bt, Ht, Lq, kv_len, device = extent.B, extent.H, extent.Lq, extent.kv_len, extent.device
    states = torch.zeros((Bt, Ht, *extent.num_blocks()), dtype=torch.uint8, device=device)
    if isinstance(kv_len, int):
        end = kv_len
    elif kv_len.device.type == "cpu" and kv_len.numel():
        end = int(kv_len.max())  # free to read on the host; elsewhere the capacity stands in
    else:
        end = extent.Lkv
    if states.numel() == 0 or end == 0:
        return states

    # The last block of several is evaluated whole, its positions kept inside the keys.
    lone = end <= block_kv
    kv_stop = end if lone else -(-end // block_kv) * block_kv
    cell_q, cell_kv = min(block_q, Lq), min(block_kv, kv_stop)
    kv_most = min(max(WORK_ELEMENTS // cell_q, min(cell_kv, 1024)), kv_stop)
    q_most = min(max(WORK_ELEMENTS // kv_most, 1), Lq)
    h_most = min(max(WORK_ELEMENTS // (kv_most * q_most), 1), Ht)
    b_most = max(WORK_ELEMENTS // (kv_most * q_most * h_most), 1)
    bounded = isinstance(kv_len, Tensor) or kv_stop != end
    assert extent.q_offset is not None

    for b_part in parts(Bt, b_most):
        b = extent.first_b + (axis(b_part, 0, device) if "b" in mask.graph.uses else 0)
        length, offset = _rows(kv_len, b_part), _rows(extent.q_offset, b_part)
        for h_part in parts(Ht, h_most):
            h = axis(h_part, 1, device) if "h" in mask.graph.uses else 0
            for kv in _spans(kv_stop, block_kv, kv_most):
                kv_idx = axis(slice(kv.start, kv.stop), 3, device)
                inside = kv_idx < length if bounded else None
                if kv.stop > extent.Lkv:
                    kv_idx = kv_idx.clamp(max=extent.Lkv - 1)
                for q in _spans(Lq, block_q, q_most):
                    q_idx = axis(slice(q.start, q.stop), 2, device) + offset
                    allowed = evaluate(mask, b, h, q_idx, kv_idx)
                    if inside is not None:
                        allowed = allowed & inside
                    piece = reduced_states(allowed, q, kv)
                    if lone and end < block_kv:
                        piece.clamp_(max=PARTIAL)  # the block crosses the end of the keys
                    part = states[b_part, h_part, q.blocks_slice, kv.blocks_slice]
                    if q.start % block_q or kv.start % block_kv:
                        piece = torch.where(part == piece, part, PARTIAL)
                    part.copy_(piece)
    return states


def parts(size: int, most: int) -> list[slice]:
    """Cut an axis into slices of at most `most`."""
    return [slice(start, min(start + most, size)) for start in range(0, size, most)]


def axis(part: slice, dim: int, device: torch.device) -> Tensor:
    """Indices of `part` along one of four dims."""
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    return torch.arange(part.start, part.stop, device=device).view(shape)


def _rows(value: int | Tensor, part: slice) -> int | Tensor:
    return value[part].view(-1, 1, 1, 1) if isinstance(value, Tensor) else value


def reduced_states(allowed: Tensor, q: Span, kv: Span) -> Tensor:
    """State of each block of a chunk.

    Parameters
    ----------
    allowed : Tensor, broadcasts to [b, h, q, kv], bool
    q, kv : Span

    Returns
    -------
    Tensor, broadcasts to [b, h, q.blocks, kv.blocks], uint8, owned
    """
    while allowed.dim() < 4:
        allowed = allowed[None]
    # Booleans are compared as bytes, or eight at a time: torch.any is fifty times slower on a CPU.
    some = every = allowed.view(torch.uint8)
    if allowed.shape[3] > 1:
        size = (kv.stop - kv.start) // kv.blocks
        if size % 8 == 0 and size <= 2040 and some.storage_offset() % 8 == 0:
            words = some.contiguous().view(torch.int64)
            total = words.view(*words.shape[:3], kv.blocks, -1).sum(-1)  # bytes never carry
            some, every = total.ne(0).view(torch.uint8), total.eq(_WORD * (size // 8))
            every = every.view(torch.uint8)
        else:
            by_block = some.reshape(*some.shape[:3], kv.blocks, size)
            some, every = by_block.amax(-1), by_block.amin(-1)
    if allowed.shape[2] > 1:
        shape = (*some.shape[:2], q.blocks, -1, some.shape[3])
        some, every = some.reshape(shape).amax(3), every.reshape(shape).amin(3)
    return some + every
