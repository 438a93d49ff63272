# mypy: allow-untyped-defs, allow-untyped-decorators
"""Write new keys and values behind those that a cache already holds; one launch."""

import triton
import triton.language as tl
from torch import Tensor

from flexdecode.kernels.arguments import NOT_QUANTIZED
from flexdecode.kernels.call import Codes, dtype_of, vector_stride
from flexdecode.kernels.launch import (
    Launch,
    coefficient_strides,
    format_constants,
    outer_strides,
)
from flexdecode.kernels.quantize_rows import quantize_row
from flexdecode.kernels.rotary import load_rotated
from flexdecode.kernels.sizes import next_power_of_2
from flexdecode.kernels.tiles import loop_bound

CHUNK = 1024  # sequences looked through at a time
TILE = 4096  # elements that a program writes at a time
RUN_TIME = (
    "k_stride_nb k_stride_nh k_stride_nn k_stride_cb k_stride_ch k_stride_cn "
    "v_stride_nb v_stride_nh v_stride_nn v_stride_cb v_stride_ch v_stride_cn "
    "k_stride_sb k_stride_sh k_stride_sn k_stride_sg "
    "v_stride_sb v_stride_sh v_stride_sn v_stride_sg stride_kv_len "
    "stride_kv_start stride_pb stride_cu stride_rotary kv_len capacity sequences rows heads"
).split()
ANY_ADDRESS = (
    "k_coefficients_ptr v_coefficients_ptr kv_len_ptr kv_start_ptr page_table_ptr cu_ptr cos_ptr "
    "sin_ptr"
).split()


@triton.jit
def copy_row(
    new_ptr,  # at the row
    stride_nh,
    stride_nd,
    cache_ptr,  # at its slot
    stride_ch,
    stride_cd,
    cos_ptr,  # at its position, or None
    sin_ptr,
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Copy a row of all heads, rotated where asked for."""
    column = tl.arange(0, BLOCK_D)[None, :]
    for first in tl.range(0, loop_bound(heads), BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)[:, None]
        there = (head < heads) & (column < D)  # [BLOCK_H, BLOCK_D]
        head = head.to(tl.int64)
        row_ptrs = new_ptr + head * stride_nh
        x = load_rotated(row_ptrs, stride_nd, column, there, cos_ptr, sin_ptr, ROTARY, INTERLEAVED)
        x = x.to(cache_ptr.dtype.element_ty)
        ptrs = cache_ptr + head * stride_ch + column.to(tl.int64) * stride_cd
        tl.store(ptrs, x, mask=there)


@triton.jit
def write_row(
    new_ptr,  # at the row
    stride_nh,
    stride_nd,
    cache_ptr,  # at its slot
    stride_ch,
    stride_cd,
    coefficients_ptr,  # at its slot, or None
    stride_sh,
    stride_sg,
    cos_ptr,  # at its position, or None
    sin_ptr,
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FORMAT: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write a row of all heads as the cache stores rows."""
    if FORMAT == "":
        copy_row(
            new_ptr,
            stride_nh,
            stride_nd,
            cache_ptr,
            stride_ch,
            stride_cd,
            cos_ptr,
            sin_ptr,
            heads,
            D,
            BLOCK_D,
            BLOCK_H,
            ROTARY,
            INTERLEAVED,
        )
    else:
        quantize_row(
            new_ptr,
            stride_nh,
            stride_nd,
            cache_ptr,
            stride_ch,
            coefficients_ptr,
            stride_sh,
            stride_sg,
            cos_ptr,
            sin_ptr,
            heads,
            D,
            BLOCK_H,
            FORMAT,
            COEFFICIENTS,
            GROUPS,
            ROTARY,
            INTERLEAVED,
        )


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=ANY_ADDRESS)
def _append_kernel(
    k_new_ptr,  # [B, Hkv, rows, D], or [1, Hkv, rows, D] where packed
    k_stride_nb: tl.int64,
    k_stride_nh: tl.int64,
    k_stride_nn: tl.int64,
    k_stride_nd,
    k_ptr,  # [B or 1, Hkv, Lkv, D], or [pages, Hkv, page_size, D], or codes; written
    k_stride_cb: tl.int64,
    k_stride_ch: tl.int64,
    k_stride_cn: tl.int64,
    k_stride_cd,
    k_coefficients_ptr,  # [B or pages, Hkv, slots, K_GROUPS], or None; written, unless of a head
    k_stride_sb: tl.int64,
    k_stride_sh: tl.int64,
    k_stride_sn: tl.int64,
    k_stride_sg: tl.int64,
    v_new_ptr,  # like k_new and k, with DV
    v_stride_nb: tl.int64,
    v_stride_nh: tl.int64,
    v_stride_nn: tl.int64,
    v_stride_nd,
    v_ptr,
    v_stride_cb: tl.int64,
    v_stride_ch: tl.int64,
    v_stride_cn: tl.int64,
    v_stride_cd,
    v_coefficients_ptr,
    v_stride_sb: tl.int64,
    v_stride_sh: tl.int64,
    v_stride_sn: tl.int64,
    v_stride_sg: tl.int64,
    kv_len_ptr,  # [B], or None
    stride_kv_len: tl.int64,
    kv_start_ptr,  # [B], or None
    stride_kv_start: tl.int64,
    page_table_ptr,  # [B, entries] int32, or None
    stride_pb: tl.int64,
    cu_ptr,  # [B + 1], or None: new rows are not packed
    stride_cu: tl.int64,
    cos_ptr,  # [positions, ROTARY // 2], or None
    sin_ptr,
    stride_rotary: tl.int64,
    kv_len: tl.int32,
    capacity: tl.int32,
    sequences: tl.int32,
    rows: tl.int32,  # new rows of a sequence, or of all where packed
    heads: tl.int32,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # or 0
    ROTARY: tl.constexpr,  # columns of keys that are rotated, from the first on
    INTERLEAVED: tl.constexpr,
    K_FORMAT: tl.constexpr,  # see `flexdecode.kernels.codes`; "" is not quantised
    K_COEFFICIENTS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_COEFFICIENTS: tl.constexpr,
    V_GROUPS: tl.constexpr,
    C: tl.constexpr,
):
    """Write one new row of k and of v, all heads."""
    # -- which row of which sequence, and where it goes ----
    pid = tl.program_id(0)
    if cu_ptr is None:
        b = pid // rows
        row = pid % rows
        place = row
        table_b = b
    else:
        row = pid
        b = 0
        for start in tl.range(0, loop_bound(sequences), C):
            other = start + tl.arange(0, C)
            ends_ptrs = cu_ptr + (other + 1).to(tl.int64) * stride_cu
            ends = tl.load(ends_ptrs, mask=other < sequences, other=rows + 1)
            b += tl.sum((ends <= row).to(tl.int32), 0)
        if b >= sequences:
            return
        place = row - tl.load(cu_ptr + tl.cast(b, tl.int64) * stride_cu).to(tl.int32)
        table_b = 0
        if place < 0:
            return
    b64 = tl.cast(b, tl.int64)
    if kv_len_ptr is not None:
        kv_len = tl.load(kv_len_ptr + b64 * stride_kv_len)
    kv_idx = tl.cast(kv_len, tl.int64) + place
    slot = kv_idx
    if kv_start_ptr is not None:
        slot += tl.load(kv_start_ptr + b64 * stride_kv_start)
    if (kv_idx < 0) | (slot < 0) | (slot >= capacity):
        return
    first = b64
    if PAGE_SIZE > 0:
        first = tl.load(page_table_ptr + b64 * stride_pb + slot // PAGE_SIZE).to(tl.int64)
        slot = slot % PAGE_SIZE
        if first < 0:
            return
    table_b = tl.cast(table_b, tl.int64)
    row = tl.cast(row, tl.int64)
    if ROTARY > 0:
        cos_ptr += kv_idx * stride_rotary
        sin_ptr += kv_idx * stride_rotary
    if k_coefficients_ptr is not None:
        k_coefficients_ptr += first * k_stride_sb + slot * k_stride_sn
    if v_coefficients_ptr is not None:
        v_coefficients_ptr += first * v_stride_sb + slot * v_stride_sn
    write_row(
        k_new_ptr + (table_b * k_stride_nb + row * k_stride_nn),
        k_stride_nh,
        k_stride_nd,
        k_ptr + (first * k_stride_cb + slot * k_stride_cn),
        k_stride_ch,
        k_stride_cd,
        k_coefficients_ptr,
        k_stride_sh,
        k_stride_sg,
        cos_ptr,
        sin_ptr,
        heads,
        D,
        BLOCK_D,
        BLOCK_H,
        K_FORMAT,
        K_COEFFICIENTS,
        K_GROUPS,
        ROTARY,
        INTERLEAVED,
    )
    write_row(
        v_new_ptr + (table_b * v_stride_nb + row * v_stride_nn),
        v_stride_nh,
        v_stride_nd,
        v_ptr + (first * v_stride_cb + slot * v_stride_cn),
        v_stride_ch,
        v_stride_cd,
        v_coefficients_ptr,
        v_stride_sh,
        v_stride_sg,
        None,
        None,
        heads,
        DV,
        BLOCK_DV,
        BLOCK_H,
        V_FORMAT,
        V_COEFFICIENTS,
        V_GROUPS,
        0,
        False,
    )


def launch_append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    k_codes: Codes | None = None,
    v_codes: Codes | None = None,
    kv_len: int | Tensor,
    kv_start: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> None:
    """Write new rows; arguments as in `flexdecode.append_kv`, checked.

    A cache with `Codes` is a tensor of their units: int16 for int4, uint8 for all else.
    """
    made, heads, rows, D = k_new.shape
    programs = rows if cu_seqlens is not None else made * rows
    if programs == 0 or heads == 0:
        return
    Dv = v_new.shape[3]
    BLOCK_D, BLOCK_DV = next_power_of_2(D), next_power_of_2(Dv)
    k_codes, v_codes = k_codes or NOT_QUANTIZED, v_codes or NOT_QUANTIZED
    lengths, stride_kv_len, length = vector_stride(kv_len)
    starts, stride_kv_start, _ = vector_stride(kv_start)
    capacity, sequences = k_cache.shape[2], made
    if page_table is not None:
        capacity *= page_table.shape[1]
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
    cos, sin = rotary or (None, None)
    launch = Launch(
        _append_kernel,
        programs,
        {
            "D": D,
            "BLOCK_D": BLOCK_D,
            "DV": Dv,
            "BLOCK_DV": BLOCK_DV,
            "BLOCK_H": min(next_power_of_2(heads), max(TILE // max(BLOCK_D, BLOCK_DV), 1)),
            "PAGE_SIZE": 0 if page_table is None else k_cache.shape[2],
            "ROTARY": 0 if cos is None else 2 * cos.shape[1],
            "INTERLEAVED": interleaved,
            **format_constants(k_codes, v_codes),
            "C": CHUNK,
        },
        # A rotation is two products and a sum, as in torch.
        {"num_warps": 4 if heads * BLOCK_D > 512 else 1, "enable_fp_fusion": False},
    )
    beside = k_codes.coefficients, v_codes.coefficients, lengths, starts, page_table, cu_seqlens
    kinds = (
        *[(x.dtype, x.stride(3), x.data_ptr() & 15 == 0) for x in (k_new, k_cache, v_new, v_cache)],
        *[dtype_of(x) for x in (*beside, cos, sin)],
        k_new.device.index,
    )
    arguments = (
        *_with_strides(k_new),
        *_with_strides(k_cache),
        k_codes.coefficients,
        *coefficient_strides(k_codes),
        *_with_strides(v_new),
        *_with_strides(v_cache),
        v_codes.coefficients,
        *coefficient_strides(v_codes),
        lengths,
        stride_kv_len,
        starts,
        stride_kv_start,
        page_table,
        0 if page_table is None else page_table.stride(0),
        cu_seqlens,
        0 if cu_seqlens is None else cu_seqlens.stride(0),
        cos,
        sin,
        0 if cos is None else cos.stride(0),
        length,
        capacity,
        sequences,
        rows,
        heads,
    )
    launch(kinds, arguments)


def _with_strides(x: Tensor) -> tuple[Tensor | int, ...]:
    return x, *outer_strides(x), x.stride(3)
