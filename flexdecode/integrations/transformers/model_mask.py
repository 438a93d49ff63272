"""The mask that transformers hands from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from flexdecode.block_mask import BlockMask
from flexdecode.mask_creation import create_block_mask

__all__ = ["NO_MATRIX", "ModelMask"]

NO_MATRIX = (
    "layers of this model read their mask as a matrix, and flexdecode's masks are block masks; use "
    "another attn_implementation for this model"
)


class ModelMask(TorchBlockMask):
    """The mask of one forward pass, shared by all layers of one kind.

    With a static cache, ``generate`` builds the mask and hands it back to the model, which leaves
    alone only tensors and instances of torch's ``BlockMask`` with four dimensions: that is the
    reason for the base class. The tables are flexdecode's; torch's own are not there.

    ``mask[:, :, rows]`` is the mask of these rows: some models compute the last layers of a prompt
    for its last token alone.

    Parameters
    ----------
    block_mask : flexdecode.BlockMask
        Fixed to the positions of this pass.
    shape : (B, H, Lq, Lkv)
        Elements that the mask stands for.
    """

    def __init__(self, block_mask: BlockMask, shape: tuple[int, int, int, int]) -> None:
        self.block_mask = block_mask
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Lq, Lkv), in elements."""
        return self._shape

    def to(self, device: torch.device | str) -> ModelMask:
        """Copy to another device."""
        if isinstance(device, torch.dtype):
            raise TypeError(NO_MATRIX)
        return ModelMask(self.block_mask.to(device), self._shape)

    def __getitem__(self, index: Any) -> ModelMask:
        rest = list(index) if isinstance(index, tuple) else [index]
        rows = rest.pop(2) if len(rest) > 2 else None
        if not isinstance(rows, slice) or any(other != slice(None) for other in rest):
            raise TypeError(NO_MATRIX)
        B, H, Lq, Lkv = self._shape
        start, stop, step = rows.indices(Lq)
        if step != 1:
            raise ValueError(f"mask[:, :, rows]: expected rows in a row, got a step of {step}")
        mask, Lq = self.block_mask, max(0, stop - start)
        assert mask.mask_mod is not None and mask.tables is not None and mask.q_offset is not None
        part = create_block_mask(
            mask.mask_mod,
            B,
            H,
            Lq,
            Lkv,
            device=mask.tables.kv_num_blocks.device,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            q_offset=mask.q_offset + start,
        )
        return ModelMask(part, (B, H, Lq, Lkv))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'ModelMask' object has no attribute {name!r}: {NO_MATRIX}")

    def __radd__(self, other: Any) -> Any:  # scores + mask
        raise TypeError(NO_MATRIX)

    def __repr__(self) -> str:
        return f"ModelMask({self.block_mask!r})"

    __str__ = __repr__
