# mypy: allow-untyped-defs, allow-untyped-decorators
"""Join the partial results of the splits: M, L and ACC of every row become out, LSE and maximum."""

import triton
import triton.language as tl

from flexdecode.kernels.tiles import (
    address_of,
    begin,
    cdiv,
    count_units,
    finish_rows,
    finite_or_zero,
    load_kv_len,
    load_query_tile,
    loop_bound,
)
from flexdecode.kernels.worklist import (
    count_working,
    number_items,
    pick,
    place_rows,
    plan_items,
    share_of,
)

RUN_TIME = (
    "parts stride_ob stride_oh stride_ol stride_kv_len stride_kv_start stride_tb stride_th kv_len "
    "Hkv G Lq Lkv "
    "BLOCK_Q TG TQ rows heads nQ inner num_splits slots"
).split()
ANY_ADDRESS = (
    "sinks_ptr lse_ptr max_ptr kv_len_ptr kv_start_ptr tiles_ptr kv_num_blocks_ptr "
    "full_kv_num_blocks_ptr"
).split()


@triton.jit
def load_parts(
    m_ptr,
    acc_ptr,  # at the row's first partial result
    parts,
    start,
    working,
    stride_part,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Partial results start ... start + SPLITS of a row: m and l, [SPLITS], acc, [SPLITS, DV]."""
    part = start + tl.arange(0, SPLITS)
    written = part < working
    at = part.to(tl.int64) * stride_part
    offs_d = tl.arange(0, BLOCK_DV)
    # First, since the compiler may put what is loaded after m off until m is there.
    tile = tl.load(
        acc_ptr + (at * DV)[:, None] + offs_d[None, :],
        mask=written[:, None] & (offs_d < DV)[None, :],
        other=0.0,
    )
    m = tl.load(m_ptr + at, mask=written, other=float("-inf"))
    l = tl.load(m_ptr + parts + at, mask=written, other=0.0)
    return m, l, tile


# Legend: B sequences, Hq = Hkv * G query heads, G of them to a KV head, Lq query rows, DV the
# head dim of values. A program owns one row (b, h, i) of the output; it takes SPLITS partial
# results at a time, and only those that exist: it works out the shares of the row's blocks as the
# decode kernel did.
@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=ANY_ADDRESS)
def _reduce_kernel(
    acc_ptr,  # [parts, DV] float32 or float64, then m in log2 and l, [parts] each
    parts: tl.int64,
    sinks_ptr,  # [Hq], or None
    out_ptr,  # [B, Hq, Lq, DV]
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_ol: tl.int64,
    lse_ptr,  # [B, Hq, Lq] float32, or None
    max_ptr,  # [B, Hq, Lq] float32, or None
    kv_len_ptr,  # [B], or None
    stride_kv_len: tl.int64,
    kv_start_ptr,  # [B], or None
    stride_kv_start: tl.int64,
    tiles_ptr,  # [5, nQ] int32, or None
    kv_num_blocks_ptr,  # [B or 1, Hkv or 1, nQ] int32, or None
    full_kv_num_blocks_ptr,
    stride_tb: tl.int64,
    stride_th: tl.int64,
    kv_len: tl.int32,
    Hkv: tl.int32,
    G: tl.int32,
    Lq: tl.int32,
    Lkv: tl.int32,
    BLOCK_Q: tl.int32,
    TG: tl.int32,
    TQ: tl.int32,
    rows: tl.int32,
    heads: tl.int32,
    nQ: tl.int32,
    inner: tl.int32,
    num_splits: tl.int32,
    slots: tl.int32,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MORE: tl.constexpr,  # a row may have more than SPLITS partial results
    PDL: tl.constexpr,
):
    # -- which row, and which programs wrote it; of packed queries, one of a tile's BLOCK_Q ----
    pid = tl.program_id(0).to(tl.int64)
    Hq = Hkv * G
    lines = Lq
    if tiles_ptr is not None:
        lines = nQ * BLOCK_Q
    row = (pid % lines).to(tl.int32)
    head = (pid // lines % Hq).to(tl.int32)
    table_b = pid // lines // Hq
    head_kv = head // G
    q_block = row // BLOCK_Q
    row_in_block = row % BLOCK_Q
    b = table_b
    there = True
    if tiles_ptr is not None:
        b, base, count, _, _ = load_query_tile(tiles_ptr, nQ, q_block)
        there = (b >= 0) & (row_in_block < count)
        b = tl.maximum(b, 0).to(tl.int64)
        row = base + row_in_block
    out_row = (table_b * Hq + head) * Lq + row
    table_row = (table_b.to(tl.int32) * heads + head_kv % heads) * nQ + q_block
    lengths = (kv_len_ptr, stride_kv_len, kv_len, kv_start_ptr, stride_kv_start, Lkv)
    if ROWS > 0:
        lists = (kv_num_blocks_ptr, full_kv_num_blocks_ptr, stride_tb, stride_th)
        where = place_rows(tl.arange(0, ROWS), heads, nQ, False, False)
        plan = plan_items(
            where, lengths, lists, rows, num_splits, slots, tiles_ptr, ROWS, KV_BLOCK, BLOCK_N
        )
        mine = tl.arange(0, ROWS) == table_row
        share = pick(mine, plan.shares)
    kv_len = load_kv_len(lengths, b, None)
    at = table_b * stride_tb + head_kv * stride_th + q_block
    full, partial = count_units(
        kv_num_blocks_ptr, full_kv_num_blocks_ptr, at, kv_len, KV_BLOCK, BLOCK_N
    )
    if SPAN > 0:
        working = tl.maximum(cdiv(kv_len, SPAN), 1)
    else:
        if ROWS == 0:
            share = share_of(full + partial, num_splits, KV_BLOCK, BLOCK_N)
        working = count_working(full + partial, share)
    first_item = table_row * num_splits
    if ROWS > 0:
        if working > 1:
            first_item = pick(mine, number_items(plan, num_splits, slots))
    head_tiles = cdiv(G, TG)
    q_tiles = cdiv(tl.minimum(BLOCK_Q, Lq), TQ)
    part_of_item = tl.where(heads == 1, head_kv, 0) * q_tiles + row_in_block // TQ
    part_of_item = part_of_item * head_tiles + head % G // TG
    m_row = head % G % TG * TQ + row_in_block % TQ  # of the tile
    first_part = (first_item.to(tl.int64) * inner + part_of_item) * (TG * TQ) + m_row
    stride_part = inner * (TG * TQ)
    m_ptr = acc_ptr + parts * DV + first_part
    acc_ptr += first_part * DV
    sink = None
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head + tl.arange(0, 1))
    out_ptr += table_b * stride_ob + head * stride_oh + row * stride_ol
    # Even where nothing is left to do: what comes after this kernel must not come before that.
    begin(address_of(acc_ptr) | address_of(m_ptr) | address_of(out_ptr) | out_row | working, PDL)
    if working == 1:
        return  # that program wrote the outputs itself
    if tiles_ptr is not None:
        if not there:
            return

    # -- join them ----
    m, l, tile = load_parts(m_ptr, acc_ptr, parts, 0, working, stride_part, DV, BLOCK_DV, SPLITS)
    m_i = tl.max(m, 0, keep_dims=True)  # [1]
    weight = tl.math.exp2(m - finite_or_zero(m_i))  # [SPLITS]
    l_i = tl.sum(l * weight, 0, keep_dims=True)  # [1]
    acc = tl.sum(tile * weight[:, None], 0, keep_dims=True)  # [1, BLOCK_DV]
    if MORE:
        for start in tl.range(SPLITS, loop_bound(working), SPLITS):
            m_s, l_s, tile_s = load_parts(
                m_ptr, acc_ptr, parts, start, working, stride_part, DV, BLOCK_DV, SPLITS
            )
            m_new = tl.maximum(m_i, tl.max(m_s, 0, keep_dims=True))
            m_safe = finite_or_zero(m_new)
            alpha = tl.math.exp2(m_i - m_safe)
            weight_s = tl.math.exp2(m_s - m_safe)  # [SPLITS]
            l_i = l_i * alpha + tl.sum(l_s * weight_s, 0, keep_dims=True)
            acc = acc * alpha[:, None] + tl.sum(tile_s * weight_s[:, None], 0, keep_dims=True)
            m_i = m_new

    # -- close the softmax ----
    factor, lse, m = finish_rows(m_i, l_i, sink)
    out = (acc * factor[:, None]).to(tl.float32)
    offs_d = tl.arange(0, BLOCK_DV)
    tl.store(out_ptr + offs_d[None, :], out, mask=(offs_d < DV)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + out_row + tl.arange(0, 1), lse)
    if max_ptr is not None:
        tl.store(max_ptr + out_row + tl.arange(0, 1), m)
