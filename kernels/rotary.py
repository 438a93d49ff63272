# mypy: allow-untyped-defs, allow-untyped-decorators
"""Load rows as they enter a cache: turned by the angles of their position where asked for."""

import triton
import triton.language as tl


@triton.jit
def load_rotated(
    row_ptrs,  # [R, 1]
    stride_d,
    column,  # [1 or R, C]: which columns
    there,  # [R, C], int1
    cos_ptr,  # [ROTARY // 2], at the position, or None
    sin_ptr,
    ROTARY: tl.constexpr,  # columns that are rotated, from the first on
    INTERLEAVED: tl.constexpr,  # pairs are neighbours, not half of the rotated columns apart
):
    """Some columns of some rows, [R, C], zero where there is none; float32 if any is rotated."""
    x = tl.load(row_ptrs + column.to(tl.int64) * stride_d, mask=there, other=0.0)
    if ROTARY > 0:
        if INTERLEAVED:
            pair = column // 2
            partner = column ^ 1
            sign = tl.where(column % 2 == 0, -1.0, 1.0)
        else:
            pair = column % (ROTARY // 2)
            partner = tl.where(column < ROTARY // 2, column + ROTARY // 2, column - ROTARY // 2)
            sign = tl.where(column < ROTARY // 2, -1.0, 1.0)
        turned = column < ROTARY  # [1 or R, C]
        cos = tl.load(cos_ptr + pair, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + pair, mask=turned, other=0.0).to(tl.float32)
        partner_ptrs = row_ptrs + partner.to(tl.int64) * stride_d
        y = tl.load(partner_ptrs, mask=there & turned, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        x = tl.where(turned, x * cos + sign * y * sin, x)
    return x
