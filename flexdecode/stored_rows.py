"""New rows as the memory of a cache is to hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.codes import byte_rows, int4_rows, round_to_codes
from flexdecode.quantized_tensor import QuantizedTensor

__all__ = ["has_scales_to_write", "stored_like"]


def has_scales_to_write(cache: QuantizedTensor) -> bool:
    """True where each row has coefficients of its own; those of heads or the whole are given.

    Raises
    ------
    ValueError
        Some rows share coefficients, but not all of a head.
    """
    scale = cache.scale
    if cache.layout == "interleaved":
        return True
    if scale is None or not (cache.by_row or scale.dtype == torch.int32):
        return False
    if scale.dim() < 3 or scale.shape[2] != cache.shape[2]:
        raise ValueError(
            f"scale: expected one for each row, head or cache to append to, got shape "
            f"{list(scale.shape)}"
        )
    return True


def stored_like(cache: Tensor | QuantizedTensor, new: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split new rows into what each part of a cache's memory is to hold.

    Parameters
    ----------
    cache : Tensor or QuantizedTensor, [B, H, L, D]
    new : Tensor, [n, H, rows, D]

    Returns
    -------
    list of (Tensor [B, H, L, d], Tensor [n, H, rows, d])
        Views of the cache, and rows of the same kind: codes and coefficients, or the rows
        themselves.
    """
    if not isinstance(cache, QuantizedTensor):
        return [(cache, new)]
    format, scale = str(cache.format), cache.scale
    if cache.layout == "interleaved":
        return [(cache.data, int4_rows(new.float(), cache.groups, cache.layout)[0])]
    codes = cache.codes
    if has_scales_to_write(cache):
        assert scale is not None
        if format == "int4":
            made, words = int4_rows(new.float(), cache.groups, cache.layout)
        else:
            made, words = byte_rows(new.float(), format, "row", scale.dtype)
        assert words is not None
        if scale.dim() == 3:
            scale = scale.unsqueeze(-1)
        words = words.view(*new.shape[:3], scale.shape[3])
        return [(_as_bytes(codes), _as_bytes(made)), (scale, words)]
    wide = torch.ones((), device=new.device) if scale is None else scale.float()
    wide = wide.view(1, -1, 1, 1) if wide.dim() else wide
    return [(_as_bytes(codes), _as_bytes(round_to_codes(new.float(), wide, format)))]


def _as_bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.int16 else codes.view(torch.uint8)
