"""Numbers to codes and coefficients, and back, by torch's operations.

Kernels make the same bits (`flexdecode.kernels.quantize_rows`). To divide by a number would not: on
some devices torch multiplies by its reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOAT8", "byte_rows", "int4_rows", "numbers_of", "round_to_codes", "split_words"]

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_LARGEST = {"fp8": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
_FLOAT16_MAX = 65504.0


def int4_rows(x: Tensor, groups: int, layout: str) -> tuple[Tensor, Tensor | None]:
    """Quantise float32 rows to ``data`` and ``scale`` of a `QuantizedTensor` in int4."""
    grouped = _by_group(x, groups)
    # The shift is rounded down, so that no element lies below it and a constant group is scale 15.
    shift = _round_down(grouped.amin(-1))
    scale = _to_half((grouped.amax(-1) - shift.float()) * (1 / 15))
    codes = _nearest(grouped - shift.float().unsqueeze(-1), scale.float().unsqueeze(-1), 0, 15)
    codes = codes.flatten(-2).short()
    words = _pack_halves(scale, shift)
    if layout == "separate":
        return _pack_nibbles(*codes.chunk(4, dim=-1)), words
    halves = _pack_nibbles(*[codes[..., j::4] for j in range(4)])
    return torch.cat([words, halves.view(torch.int32)], dim=-1), None


def byte_rows(x: Tensor, format: str, per: str, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise float32 rows to one byte an element: codes, and scales [B, H, L], [H] or []."""
    largest = _LARGEST[format]
    shift = None
    if scale_dtype == torch.int32:
        # The middle of a row's range costs nothing and halves the range that one-sided rows need.
        shift = _to_half((x.amin(-1) + x.amax(-1)) / 2)
        x = x - shift.float().unsqueeze(-1)
    axes = {"row": (3,), "head": (0, 2, 3), "tensor": (0, 1, 2, 3)}[per]
    if x.numel() == 0 and per != "row":  # no greatest element; any scale will do
        scale = x.new_zeros(x.shape[1:2] if per == "head" else ())
    else:
        scale = x.abs().amax(axes) * (1 / largest)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    stored = scale if scale_dtype == torch.float32 else _to_half(scale)
    wide = stored.float()
    wide = wide.view(1, -1, 1, 1) if per == "head" else wide.unsqueeze(-1) if per == "row" else wide
    codes = round_to_codes(x, wide, format)
    return codes, stored if shift is None else _pack_halves(stored, shift)


def round_to_codes(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """Divide by the scale and round to the nearest code of one byte."""
    if format == "int8":
        return _nearest(x, scale, -127, 127).to(torch.int8)
    largest = _LARGEST[format]
    return _ratio(x, scale).clamp(-largest, largest).to(FLOAT8[format])


def numbers_of(
    codes: Tensor,
    coefficients: Tensor | None,
    format: str,
    groups: int,
    layout: str,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what codes [..., n] with coefficients [..., groups] stand for: [..., D]."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    if format == "int4":
        codes = _unpack_nibbles(codes, layout)
    out = _by_group(codes.to(work), groups)
    if coefficients is not None:
        scale, shift = split_words(coefficients)
        out = out * scale.to(work).unsqueeze(-1)
        if shift is not None:
            out = out + shift.to(work).unsqueeze(-1)
    return out.flatten(-2).to(dtype)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """View rows [..., D] as [..., groups, D / groups]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _ratio(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, 0 where the scale is 0."""
    return torch.where(scale > 0, x / scale, 0.0)


def _nearest(x: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    return _ratio(x, scale).round().clamp(least, most)


def _to_half(x: Tensor) -> Tensor:
    """Round to the nearest finite float16; zero has no sign, as minima may find either."""
    return (x.clamp(-_FLOAT16_MAX, _FLOAT16_MAX) + 0.0).half()


def _round_down(x: Tensor) -> Tensor:
    """Round to the greatest finite float16 that is not above x."""
    near = _to_half(x)
    bits = near.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, torch.where(bits == 0, -32767, bits + 1))
    return torch.where((near.float() > x) & (near > -_FLOAT16_MAX), below.view(torch.half), near)


def _pack_halves(scale: Tensor, shift: Tensor) -> Tensor:
    """Make coefficient words: the scale's bits in the low half, the shift's in the high half."""
    low = scale.contiguous().view(torch.int16).int() & 0xFFFF
    return low | (shift.contiguous().view(torch.int16).int() << 16)


def split_words(words: Tensor) -> tuple[Tensor, Tensor | None]:
    """Read coefficients: scales and, of words, shifts; float32."""
    if words.dtype != torch.int32:
        return words.float(), None
    low = words << 16 >> 16
    return low.short().view(torch.half).float(), (words >> 16).short().view(torch.half).float()


def _pack_nibbles(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Make int16 words of int16 numbers 0 to 15, the first in the lowest bits."""
    return (a | (b << 4) | (c << 8) | (d << 12)).contiguous()


def _unpack_nibbles(packed: Tensor, layout: str) -> Tensor:
    """Return int4 codes in the order of the elements, int16."""
    places = [(packed >> (4 * j)) & 15 for j in range(4)]
    if layout == "separate":
        return torch.cat(places, dim=-1)
    return torch.stack(places, dim=-1).flatten(-2)
