# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code="assignment"
"""Scales and shifts of quantised rows.

They are "words" (int32: scale and shift, float16), "scales" (floats), or, without a row in the
loop, "head" (one scale, a float) or "".
"""

import triton
import triton.language as tl

from flexdecode.kernels.codes import is_int4
from flexdecode.kernels.pages import key_rows


@triton.constexpr_function
def is_by_row(COEFFICIENTS):
    """Whether the loop reads coefficients."""
    return COEFFICIENTS in ("words", "scales")


@triton.jit
def load_scales(coefficients, lane, FACTOR: tl.constexpr):
    """Return the scales of some rows times a factor, float32 [BLOCK_N]; 0 where lane is false."""
    ptrs = coefficients[0] + coefficients[1]
    if lane is None:
        scale = tl.load(ptrs)
    else:
        scale = tl.load(ptrs, mask=lane, other=0.0)
    return scale.to(tl.float32) * FACTOR


@triton.jit
def load_words(
    coefficients,
    GROUP: tl.constexpr,
    lane,
    FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    ABOVE: tl.constexpr = False,
):
    """Return scales times a factor, and shifts, of some rows' codes, float32 [BLOCK_N] each."""
    ptrs = coefficients[0] + coefficients[1]
    if GROUP > 0:
        ptrs += GROUP * coefficients[2]
    if lane is None:
        word = tl.load(ptrs)
    else:
        word = tl.load(ptrs, mask=lane, other=0)
    scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    shift = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if is_int4(FORMAT):
        shift += scale * (-128.0 if ABOVE else 8.0)
    return scale * FACTOR, shift


@triton.jit
def coefficients_of(
    ptr,  # [B or 1, Hkv, Lkv, groups]
    stride_b,
    stride_h,
    stride_n,
    stride_group,
    head_kv,
    b,
    start,  # the sequence's first slot, or None
    PAGE_SIZE: tl.constexpr,
):
    """Where a sequence's coefficients of a head are, or page 0's; and strides b, n and group."""
    if PAGE_SIZE == 0 and start is not None:
        ptr += start * stride_n
    ptr += head_kv * stride_h
    if PAGE_SIZE == 0:
        ptr += b * stride_b
    return ptr, stride_b, stride_n, stride_group


@triton.jit
def coefficients_at(
    coefficients,  # from `coefficients_of`
    pages,
    at,
):
    """Where the coefficients of a unit of keys are: a pointer, and [BLOCK_N] from there."""
    ptr, stride_b, stride_n, stride_group = coefficients
    start, rows = key_rows(pages, at, stride_b, stride_n)
    return ptr + start, rows, stride_group
