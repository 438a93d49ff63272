# mypy: allow-untyped-defs, allow-untyped-decorators
"""The loop of the decode kernel: a tile of query rows attends to lists of blocks of keys.

Arguments come in groups, tuples with names. Those in capitals are constants of the compiler: hand
groups that have any on as they are, since Triton turns what is assigned to a variable into a
run-time value.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from flexdecode.kernels.codes import value_dtype
from flexdecode.kernels.coefficients import coefficients_at, load_scales
from flexdecode.kernels.float8 import accumulate_float8, float8_pointer, suits_float8
from flexdecode.kernels.pages import Unit, find_pages, key_rows
from flexdecode.kernels.quantized import accumulate_quantized, quantized_scores
from flexdecode.kernels.tiles import (
    LOG2E,
    accumulate_pieces,
    dot_pieces,
    drop_rows,
    load_pieces,
    loop_bound,
    online_softmax_update,
    seen_by_a_row,
)


class Share(NamedTuple):
    """The program's units [first, last) of a row, of which `full` are full, before partial ones."""

    first: tl.tensor
    last: tl.tensor
    full: tl.tensor
    full_indices: tl.tensor | None  # block numbers, int32; None: blocks are counted through
    partial_indices: tl.tensor | None


class Tile(NamedTuple):
    """BLOCK_M query rows, and what is theirs."""

    q: tl.tuple  # pieces of [BLOCK_M, D], or the columns that go with quantised keys
    q_sums: tl.tuple | None  # of q over each group of its elements, [BLOCK_M]
    scale: tl.tensor  # or [BLOCK_M, 1]
    b: tl.tensor
    h: tl.tensor  # [BLOCK_M, 1]
    q_idx: tl.tensor  # [BLOCK_M, 1], or [1, 1]
    real: tl.tensor  # [BLOCK_M]
    bias_rows: tl.tensor | None  # [BLOCK_M, 1] pointers
    stride_bn: tl.tensor
    state_rows: tl.tensor | None  # [BLOCK_M, 1] pointers, see `block_state_ptr`


class Cache(NamedTuple):
    """Keys or values of the program's sequence and KV head."""

    ptr: tl.tensor  # at this KV head and this sequence's first key; with pages, at page 0
    stride_b: tl.tensor  # from page to page
    stride_n: tl.tensor
    stride_d: tl.tensor
    coefficients: tl.tuple | None  # from `coefficients_of`
    FORMAT: tl.constexpr  # where quantised, see `flexdecode.kernels.codes`; or ""
    COEFFICIENTS: tl.constexpr
    GROUPS: tl.constexpr
    DIM: tl.constexpr
    PIECE_0: tl.constexpr
    PIECE_1: tl.constexpr


class Mods(NamedTuple):
    """The user's rules: Triton functions or None, and what they read."""

    SCORE: tl.constexpr
    score_args: tl.tuple
    MASK: tl.constexpr
    mask_args: tl.tuple


class Mode(NamedTuple):
    """How to go about it."""

    KV_BLOCK: tl.constexpr
    BLOCK_N: tl.constexpr
    EXACT: tl.constexpr  # full blocks end within kv_len
    ASK_FULL: tl.constexpr  # a full block that crosses kv_len is as good as a partial one
    LIKE_K: tl.constexpr  # pages of v have the strides of those of k
    V_IN_K: tl.constexpr  # v is the first columns of k, a latent cache: no need to load it
    FLOAT8: tl.constexpr  # q and k are multiplied as e4m3, and so are weights and such values
    ASSEMBLY: tl.constexpr  # CUDA instructions may be written out
    INPUT_PRECISION: tl.constexpr


@triton.jit
def attend(
    carry,  # (m_i, l_i, acc): maximum in log2, sum, output pieces of every row so far
    share,
    kv_len,
    tile,
    keys,
    values,
    pages,
    mods,
    mode,
    HAS_FULL: tl.constexpr,
    ONE_LOOP: tl.constexpr,  # a share has either full or partial blocks
):
    """Attend to a share: to full blocks with neither mask nor bounds, to partial ones with both."""
    if HAS_FULL:
        if not ONE_LOOP or share.full > share.first:
            carry = attend_list(carry, share, kv_len, tile, keys, values, pages, mods, mode, False)
    if share.last > share.full:  # or else the start of its pipeline would be run in vain
        carry = attend_list(carry, share, kv_len, tile, keys, values, pages, mods, mode, True)
    return carry


@triton.jit
def attend_list(carry, share, kv_len, tile, keys, values, pages, mods, mode, PARTIAL: tl.constexpr):
    """Attend to the units of one list: partial blocks ask the mask, full ones do not.

    A unit is BLOCK_N keys of a block. Bounds are checked where a block may cross kv_len.
    """
    m_i, l_i, acc = carry
    if PARTIAL:
        first = tl.maximum(share.first - share.full, 0)
        last = share.last - share.full
        indices_ptr = share.partial_indices
        first_block = share.full
    else:
        first = share.first
        last = tl.minimum(share.last, share.full)
        indices_ptr = share.full_indices
        first_block = 0
    KV_BLOCK: tl.constexpr = mode.KV_BLOCK
    BLOCK_N: tl.constexpr = mode.BLOCK_N
    ASK_FULL: tl.constexpr = mode.ASK_FULL
    SUBS: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    PADDED: tl.constexpr = KV_BLOCK % BLOCK_N != 0
    offs_n = tl.arange(0, BLOCK_N)
    k_rows = offs_n.to(tl.int64) * keys.stride_n  # [BLOCK_N]
    v_rows = offs_n.to(tl.int64) * values.stride_n  # [BLOCK_N]
    if indices_ptr is not None:
        next_block = tl.load(indices_ptr + first // SUBS, mask=first < last, other=0)
    if pages.SIZE > 0:
        if indices_ptr is None:
            next_start = (first_block + first) * BLOCK_N
        else:
            next_start = next_block * KV_BLOCK + (first % SUBS) * BLOCK_N
            next_unit = tl.minimum(first + 1, last - 1)
            next_block = tl.load(indices_ptr + next_unit // SUBS, mask=first < last, other=0)
        length = tl.where(first < last, kv_len, 0)
        next_page = find_pages(pages, next_start, offs_n, length)

    for unit in tl.range(loop_bound(first), loop_bound(last)):
        # -- which keys: numbers of blocks and pages are fetched ahead, nothing waits for them ----
        if pages.SIZE == 0:
            page = None
            if indices_ptr is None:
                block = first_block + unit
                start_n = block * BLOCK_N
            else:
                block = next_block
                start_n = block * KV_BLOCK + (unit % SUBS) * BLOCK_N
                next_block = tl.load(indices_ptr + tl.minimum(unit + 1, last - 1) // SUBS)
        else:
            # What is carried must be computed anew: a loop that hands a value on is not pipelined.
            start_n = next_start
            block = start_n // KV_BLOCK
            if indices_ptr is None:
                next_start = start_n + BLOCK_N
            else:
                next_start = next_block * KV_BLOCK + ((unit + 1) % SUBS) * BLOCK_N
                next_block = tl.load(indices_ptr + tl.minimum(unit + 2, last - 1) // SUBS)
            page = next_page
            length = tl.where(unit + 1 < last, kv_len, 0)
            next_page = find_pages(pages, next_start, offs_n, length)
        at = Unit(page, start_n, offs_n)
        if pages.SIZE == 0:
            k_start = start_n.to(tl.int64) * keys.stride_n
            v_start = start_n.to(tl.int64) * values.stride_n
        else:
            k_start, k_rows = key_rows(pages, at, keys.stride_b, keys.stride_n)
            v_start, v_rows = k_start, k_rows
            if not mode.LIKE_K:
                v_start, v_rows = key_rows(pages, at, values.stride_b, values.stride_n)
        kv_idx = (start_n + offs_n)[None, :]  # [1, BLOCK_N]
        lane = tile.real[:, None]
        present = None
        if PARTIAL or not mode.EXACT or PADDED:
            limit = kv_len
            if PADDED:
                limit = tl.minimum(kv_len, (block + 1) * KV_BLOCK)
            present = start_n + offs_n < limit  # [BLOCK_N]
            lane = lane & present[None, :]

        # -- scores: q @ k in natural units, the user's rule, then log2 ----
        qk, k = score_keys(tile, keys, pages, at, k_start, k_rows, present, mode)
        if mods.SCORE is None and tile.bias_rows is None:
            qk = qk * (tile.scale * LOG2E)
        else:
            qk = qk * tile.scale
            if tile.bias_rows is not None:
                bias_ptrs = tile.bias_rows + kv_idx.to(tl.int64) * tile.stride_bn
                qk += tl.load(bias_ptrs, mask=lane, other=0.0).to(tl.float32)
            if mods.SCORE is not None:
                qk = mods.SCORE(qk, tile.b, tile.h, tile.q_idx, kv_idx, lane, mods.score_args)
            qk = qk * LOG2E

        # -- what the mask allows ----
        keep = lane
        if mods.MASK is not None and (PARTIAL or ASK_FULL):
            keep = mods.MASK(tile.b, tile.h, tile.q_idx, kv_idx, lane, mods.mask_args)
        if PARTIAL:
            if tile.state_rows is not None:
                state = tl.load(tile.state_rows + block, mask=tile.real[:, None], other=0)
                sure = state == 2
                if ASK_FULL:
                    sure = sure & (keep | ((block + 1) * KV_BLOCK <= kv_len))
                keep = (keep & (state == 1)) | sure
            qk = tl.where(lane & keep, qk, float("-inf"))
        elif ASK_FULL:
            keep = keep | ((block + 1) * KV_BLOCK <= kv_len)
            qk = tl.where(lane & keep, qk, float("-inf"))
        elif present is not None:
            qk = tl.where(present[None, :], qk, float("-inf"))

        # -- online softmax, and the values; 0 * NaN is NaN, so unseen values must not be there ----
        p, m_i, l_i, alpha = online_softmax_update(qk, m_i, l_i)
        seen = None
        if ASK_FULL or (PARTIAL and (mods.MASK is not None or tile.state_rows is not None)):
            seen = seen_by_a_row(keep, tile.real, BLOCK_N)
        if mode.V_IN_K:
            v = k if values.PIECE_1 == keys.PIECE_1 else (k[0],)
            if seen is not None:
                v = drop_rows(v, seen)
            acc = accumulate_pieces(acc, alpha, p, v, mode.INPUT_PRECISION)
        else:
            acc = add_values(
                acc, alpha, p, tile, values, pages, at, v_start, v_rows, present, seen, mode
            )
    return m_i, l_i, acc


@triton.jit
def score_keys(
    tile,
    keys,
    pages,
    at,
    start,
    rows,  # [BLOCK_N], from there
    present,  # [BLOCK_N], int1, or None: all are
    mode,
):
    """Inner products of a unit, float32, [BLOCK_M, BLOCK_N]; and its keys, where `v` is in them."""
    if keys.FORMAT == "":
        k = load_pieces(
            keys.ptr + start, rows, keys.stride_d, present, keys.DIM, keys.PIECE_0, keys.PIECE_1
        )
        return dot_pieces(tile.q, k, mode.INPUT_PRECISION), k
    elif mode.FLOAT8:
        k = load_pieces(
            float8_pointer(keys.ptr + start),
            rows * 2,
            1,
            present,
            keys.DIM,
            keys.PIECE_0,
            keys.PIECE_1,
        )
        qk = dot_pieces(tile.q, k, "ieee")
        if keys.coefficients is not None:
            beside = coefficients_at(keys.coefficients, pages, at)
            qk = qk * load_scales(beside, present, 1.0)[None, :]
        return qk, ()
    else:
        beside = None
        if keys.coefficients is not None:
            beside = coefficients_at(keys.coefficients, pages, at)
        qk = quantized_scores(
            tile.q,
            tile.q_sums,
            keys.ptr + start,
            rows,
            beside,
            present,
            keys.FORMAT,
            keys.COEFFICIENTS,
            keys.GROUPS,
            keys.DIM,
            mode.ASSEMBLY,
            mode.INPUT_PRECISION,
        )
        return qk, ()


@triton.jit
def add_values(
    acc,
    alpha,  # [BLOCK_M]
    p,  # [BLOCK_M, BLOCK_N]
    tile,
    values,
    pages,
    at,
    start,
    rows,
    present,
    seen,  # [BLOCK_N], int1, or None
    mode,
):
    """Rescale the running output and add p times the values of a unit."""
    if values.FORMAT == "":
        v = load_pieces(
            values.ptr + start,
            rows,
            values.stride_d,
            present,
            values.DIM,
            values.PIECE_0,
            values.PIECE_1,
        )
        if seen is not None:
            v = drop_rows(v, seen)
        return accumulate_pieces(acc, alpha, p, v, mode.INPUT_PRECISION)
    else:
        beside = None
        if values.coefficients is not None:
            beside = coefficients_at(values.coefficients, pages, at)
        if mode.FLOAT8 and suits_float8(values.FORMAT, values.COEFFICIENTS):
            return accumulate_float8(
                acc,
                alpha,
                p,
                values.ptr + start,
                rows,
                beside,
                present,
                seen,
                values.COEFFICIENTS,
                values.DIM,
                mode.ASSEMBLY,
            )
        else:
            return accumulate_quantized(
                acc,
                alpha,
                p,
                values.ptr + start,
                rows,
                beside,
                present,
                seen,
                values.FORMAT,
                values.COEFFICIENTS,
                values.GROUPS,
                values.DIM,
                tl.bfloat16 if mode.FLOAT8 else value_dtype(values.FORMAT, tile.q[0].dtype),
                mode.ASSEMBLY,
                mode.INPUT_PRECISION,
            )
