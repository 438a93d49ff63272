"""Quantising tensors, and what quantised and plain ones stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode.codes import FLOAT8, byte_rows, int4_rows, numbers_of
from flexdecode.quantized_tensor import (
    COMPUTE,
    FORMATS,
    GROUPS,
    LAYOUTS,
    QuantizedTensor,
    check_groups,
    check_int4_only,
    check_option,
)

__all__ = ["as_tensor", "dequantize", "quantize", "row_bytes", "with_scales"]


def quantize(
    x: Tensor,
    format: str,
    *,
    groups: int = 1,
    layout: str = "separate",
    per: str = "row",
    scale_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Store a tensor in fewer bits, each element rounded to the nearest code.

    Parameters
    ----------
    x : Tensor, [B, H, L, D], floating point
        Finite. ``B`` may count pages.
    format : {"int4", "fp8", "fp8_e5m2", "int8"}
        See `QuantizedTensor`. int4 takes a scale and a shift from the least and the greatest
        element of a group; int8 and fp8 a scale from the greatest magnitude.
    groups : {1, 2, 4, 8}, default 1
        Groups of a row, int4 only.
    layout : {"separate", "interleaved"}, default "separate"
        int4 only; separate is the fast one.
    per : {"row", "head", "tensor"}, default "row"
        What shares a scale, fp8 and int8 only. A row is one token of one head.
    scale_dtype : torch.dtype, optional
        fp8: float32 (default), or int32 for words of a float16 scale and shift, with `per` "row".
        int8: float32 (default) or float16. int4: int32.
    dtype : torch.dtype, default that of `x`
        What `dequantize` gives.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    TypeError, ValueError
        `x` or an option does not fit the format; the message names it.

    Examples
    --------
    >>> import torch
    >>> from flexdecode import dequantize, quantize
    >>> x = torch.linspace(-1, 1, 16).view(1, 1, 1, 16)
    >>> torch.allclose(dequantize(quantize(x, "int4")), x, atol=1e-3)  # 16 levels, 16 elements
    True
    >>> quantize(x, "fp8", per="tensor").scale.shape
    torch.Size([])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a Tensor, got {type(x).__name__}")
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(
            f"x: expected a floating-point tensor [B, H, L, D], got {x.dtype} {list(x.shape)}"
        )
    check_option("format", format, FORMATS)
    check_option("per", per, ("row", "head", "tensor"))
    check_option("groups", groups, GROUPS)
    if dtype is None:
        dtype = x.dtype if x.dtype in COMPUTE else torch.float32
    check_option("dtype", dtype, COMPUTE)
    kinds: dict[str, tuple[torch.dtype, ...]] = {
        "int4": (torch.int32,),
        "int8": (torch.float32, torch.float16),
    }
    if scale_dtype is None:
        scale_dtype = torch.int32 if format == "int4" else torch.float32
    check_option("scale_dtype", scale_dtype, kinds.get(format, (torch.float32, torch.int32)))
    if per != "row" and scale_dtype == torch.int32:
        raise ValueError(f"per: expected 'row' with coefficient words, got {per!r}")
    with torch.no_grad():
        x = x.detach().float()
        if format == "int4":
            check_option("layout", layout, LAYOUTS)
            check_groups(x.shape[3], groups, layout)
            data, scale = int4_rows(x, groups, layout)
        else:
            check_int4_only(format, groups, layout)
            data, scale = byte_rows(x, format, per, scale_dtype)
    return QuantizedTensor(data, scale, format, groups, layout, dtype)


def dequantize(x: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute what a quantised tensor stands for.

    Parameters
    ----------
    x : QuantizedTensor, [B, H, L, D]
    dtype : torch.dtype, default ``x.dtype``
        Of the result. Codes times scale plus shift are computed in float32, or float64 when that
        is asked for, and rounded once.

    Returns
    -------
    Tensor, [B, H, L, D], contiguous

    Raises
    ------
    TypeError
        `x` is something else.
    """
    if not isinstance(x, QuantizedTensor):
        raise TypeError(f"x: expected a QuantizedTensor, got {type(x).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point torch.dtype, got {dtype!r}")
    dtype = x.dtype if dtype is None else dtype
    return numbers_of(x.codes, x.coefficients, str(x.format), x.groups, x.layout, dtype)


def with_scales(name: str, x: Any) -> Any:
    """Take a float8 tensor for a QuantizedTensor without scales; anything else stays itself."""
    if not isinstance(x, Tensor) or x.dtype not in FLOAT8.values():
        return x
    if x.dim() != 4 or (x.stride(3) != 1 and x.shape[3] > 1):
        raise ValueError(
            f"{name}: expected a float8 tensor [batch, heads, length, head dim] of contiguous "
            f"rows, got shape {list(x.shape)}, strides {list(x.stride())}"
        )
    return QuantizedTensor(x)


def as_tensor(x: Tensor | QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise what is quantised; a tensor stays itself."""
    return dequantize(x, dtype) if isinstance(x, QuantizedTensor) else x


def row_bytes(x: Tensor | QuantizedTensor) -> int:
    """Bytes of a row of a head, coefficients of its own included."""
    if not isinstance(x, QuantizedTensor):
        return x.shape[3] * x.element_size()
    found = x.coefficients
    own = found.shape[3] * found.element_size() if found is not None and x.by_row else 0
    return x.codes.shape[3] * x.codes.element_size() + own
