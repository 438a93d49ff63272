# mypy: allow-untyped-defs, allow-untyped-decorators
"""Split-KV decode attention over the active blocks of a programmable mask.

Read the legend and `_decode_kernel` first, then `flexdecode.kernels.attend`, the loop that it runs
over each list of blocks, then `flexdecode.kernels.tiles`. `flexdecode.kernels.launch` runs this
kernel and, where rows may have been shared among programs, the reduction.

The method is Flash-Decoding [1]_ (independent programs over parts of the KV sequence, joined
afterwards) with the block lists of FlexAttention [2]_.

References
----------
.. [1] T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023.
.. [2] J. Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
   Kernels", arXiv:2412.05496, 2024.
"""

import triton
import triton.language as tl

from flexdecode.kernels.attend import Cache, Mode, Mods, Share, Tile, attend
from flexdecode.kernels.codes import grain, value_dtype
from flexdecode.kernels.coefficients import coefficients_of, is_by_row
from flexdecode.kernels.float8 import float8_pointer, suits_float8
from flexdecode.kernels.pages import Pages, lie_of_units
from flexdecode.kernels.pieces import load_columns, store_columns
from flexdecode.kernels.quantized import (
    decode_queries,
    finish_output,
    lift_queries,
    sum_groups,
    zero_output,
)
from flexdecode.kernels.splits import SHORT_SHARE as _SHORT_SHARE
from flexdecode.kernels.tiles import (
    address_of,
    begin,
    cdiv,
    count_units,
    divide,
    drop_rows,
    finish_rows,
    load_kv_len,
    load_kv_start,
    load_pieces,
    load_q_offset,
    load_query_tile,
    scale_pieces,
    store_pieces,
    zero_pieces,
)
from flexdecode.kernels.worklist import (
    number_items,
    pick,
    place_rows,
    plan_items,
    share_of,
    span_of,
)

SHORT_SHARE = tl.constexpr(_SHORT_SHARE)
# Everything that changes from call to call: no value of these compiles a kernel of its own.
RUN_TIME = (
    "stride_qb stride_qh stride_ql stride_kb stride_kh stride_kn stride_vb stride_vh stride_vn "
    "stride_bb stride_bh stride_bl stride_bn stride_ob stride_oh stride_ol "
    "stride_qcb stride_qch stride_qcl stride_kcb stride_kch stride_kcn stride_kcg "
    "stride_vcb stride_vch stride_vcn stride_vcg "
    "stride_pb parts stride_kv_len stride_kv_start stride_q_offset "
    "stride_tb stride_th columns full_columns "
    "stride_sb stride_sh stride_sq scale kv_len q_offset Hkv G Lq Lkv "
    "BLOCK_Q TG TQ rows heads nQ inner num_splits slots"
).split()
# Small arrays that may be views at any address.
ANY_ADDRESS = (
    "qc_ptr kc_ptr vc_ptr bias_ptr sinks_ptr page_table_ptr lse_ptr max_ptr kv_len_ptr "
    "kv_start_ptr q_offset_ptr tiles_ptr kv_num_blocks_ptr "
    "kv_indices_ptr full_kv_num_blocks_ptr full_kv_indices_ptr block_state_ptr"
).split()


@triton.jit
def load_queries(
    q_ptr,
    rows,  # [BLOCK_M], int64
    stride_qd,
    real,  # [BLOCK_M]
    FLOAT8: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_GROUPS: tl.constexpr,
    D: tl.constexpr,
    D_0: tl.constexpr,
    D_1: tl.constexpr,
):
    """Return the queries of a tile in the pieces, or the columns, that the keys come in."""
    if FLOAT8:
        q = load_pieces(float8_pointer(q_ptr), rows, stride_qd, real, D, D_0, D_1)
    elif K_FORMAT == "":
        q = load_pieces(q_ptr, rows, stride_qd, real, D, D_0, D_1)
    else:
        q = load_columns(q_ptr, rows, stride_qd, real, K_FORMAT, K_GROUPS, D)
    if Q_FORMAT != "" and not FLOAT8:
        q = decode_queries(q, Q_FORMAT)
    return q


@triton.jit
def store_output(
    ptr,
    rows,  # [BLOCK_M], int64
    real,  # [BLOCK_M]
    acc,
    V_FORMAT: tl.constexpr,
    V_GROUPS: tl.constexpr,
    DV: tl.constexpr,
    DV_0: tl.constexpr,
    DV_1: tl.constexpr,
):
    """Store the rows of a tile from the pieces, or the columns, that the values come in."""
    if V_FORMAT == "":
        store_pieces(ptr, rows, real, acc, DV, DV_0, DV_1)
    else:
        store_columns(ptr, rows, real, acc, V_FORMAT, V_GROUPS, DV)


# Legend: B sequences, Hq query heads, Hkv KV heads, G = Hq // Hkv, Lq query rows, Lkv key
# capacity, D and DV head dims of keys and values. A program owns one sequence b, one KV head, one
# share of its active blocks and one tile of BLOCK_M rows: TG query heads of the group times TQ
# query rows, row m of the tile being head m // TQ and query m % TQ. Blocks of the table are
# BLOCK_Q x KV_BLOCK; a tile never straddles two of its rows. A block is worked through in units
# of BLOCK_N keys. Queries may be packed: q and out then have a batch of one, and tiles_ptr lists
# nQ tiles of at most BLOCK_Q queries, each of one sequence, in place of rows of blocks. Strides of
# k and v are in units of ALIGN elements, those of q and out in units of ALIGN_Q: the product tells
# the compiler how wide it may load, while the strides stay run-time values. Quantised keys and
# values are int16 units, and D and DV still count their elements.
@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=ANY_ADDRESS)
def _decode_kernel(
    q_ptr,  # [B, Hq, Lq, D]
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_ql: tl.int64,
    stride_qd,
    k_ptr,  # [B or 1, Hkv, Lkv, D]
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_kn: tl.int64,
    stride_kd,
    v_ptr,  # [B or 1, Hkv, Lkv, DV]
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vn: tl.int64,
    stride_vd,
    qc_ptr,  # [B, Hq, Lq] float32, scales of a quantised q, or None
    stride_qcb: tl.int64,
    stride_qch: tl.int64,
    stride_qcl: tl.int64,
    kc_ptr,  # [B or 1, Hkv, Lkv, groups], coefficients of quantised keys, or None
    stride_kcb: tl.int64,
    stride_kch: tl.int64,
    stride_kcn: tl.int64,
    stride_kcg: tl.int64,
    vc_ptr,  # [B or 1, Hkv, Lkv, groups], those of values
    stride_vcb: tl.int64,
    stride_vch: tl.int64,
    stride_vcn: tl.int64,
    stride_vcg: tl.int64,
    bias_ptr,  # [B, Hq, Lq, Lkv], or None
    stride_bb: tl.int64,
    stride_bh: tl.int64,
    stride_bl: tl.int64,
    stride_bn: tl.int64,
    sinks_ptr,  # [Hq], or None
    page_table_ptr,  # [B, pages] int32, or None; pages of k and v then stand in place of B
    stride_pb: tl.int64,
    out_ptr,  # [B, Hq, Lq, DV]
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_ol: tl.int64,
    lse_ptr,  # [B, Hq, Lq] float32, or None
    max_ptr,  # [B, Hq, Lq] float32, or None
    acc_ptr,  # [parts, DV], float32 or float64, m and l, [parts] each; TG * TQ parts a program
    parts: tl.int64,
    kv_len_ptr,  # [B], or None
    stride_kv_len: tl.int64,
    kv_start_ptr,  # [B], or None: where each sequence's keys begin
    stride_kv_start: tl.int64,
    q_offset_ptr,  # [B], or None
    stride_q_offset: tl.int64,
    tiles_ptr,  # [5, nQ] int32, see `load_query_tile`; or None
    kv_num_blocks_ptr,  # [B or 1, Hkv or 1, nQ] int32, or None: every key is allowed
    kv_indices_ptr,  # [B or 1, Hkv or 1, nQ, columns] int32
    full_kv_num_blocks_ptr,  # like kv_num_blocks, or None
    full_kv_indices_ptr,
    stride_tb: tl.int64,
    stride_th: tl.int64,
    columns: tl.int64,
    full_columns: tl.int64,
    block_state_ptr,  # [B or 1, Hq, nQ, nKV] uint8: 0 empty, 1 partial, 2 full; or None
    stride_sb: tl.int64,
    stride_sh: tl.int64,
    stride_sq: tl.int64,
    scale: tl.float32,
    kv_len: tl.int32,  # keys of every sequence, where kv_len_ptr is None
    q_offset: tl.int32,  # position of query 0, where q_offset_ptr is None
    Hkv: tl.int32,
    G: tl.int32,
    Lq: tl.int32,
    Lkv: tl.int32,
    BLOCK_Q: tl.int32,
    TG: tl.int32,
    TQ: tl.int32,
    rows: tl.int32,  # lists of active blocks: B * heads * nQ
    heads: tl.int32,  # KV heads whose lists differ, or 1
    nQ: tl.int32,
    inner: tl.int32,  # programs of an item: KV heads that share a list, times tiles of its queries
    num_splits: tl.int32,  # of each row; of a balanced launch, of all rows together
    slots: tl.int32,  # items that the device works on at a time
    score_args,
    mask_args,
    SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr,
    DERIVE_OFFSET: tl.constexpr,  # q_offset = kv_len - queries of the sequence
    EXACT: tl.constexpr,  # full blocks end within kv_len
    ASK_FULL: tl.constexpr,  # those that do not are asked about like partial ones
    ONE_QUERY: tl.constexpr,  # BLOCK_Q == 1
    ONE_LIST: tl.constexpr,  # heads == 1
    ONE_TILE: tl.constexpr,  # nQ == 1, and one tile holds a list's queries and heads
    ROWS: tl.constexpr,  # power of two, at least rows, to balance items over rows; or 0
    SPAN: tl.constexpr,  # keys of a split, where all are cut at the same places; or 0
    ALIGN_K: tl.constexpr,
    ALIGN_V: tl.constexpr,
    ALIGN_Q: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,  # of quantised keys, see `flexdecode.kernels.codes`; or ""
    K_COEFFICIENTS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_COEFFICIENTS: tl.constexpr,
    V_GROUPS: tl.constexpr,
    FLOAT8: tl.constexpr,  # q and k are multiplied as e4m3, and so are weights and such values
    ASSEMBLY: tl.constexpr,  # CUDA instructions may be written out
    D: tl.constexpr,
    D_0: tl.constexpr,
    D_1: tl.constexpr,
    DV: tl.constexpr,
    DV_0: tl.constexpr,
    DV_1: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # or 0
    LIKE_K: tl.constexpr,  # pages of v have the strides of those of k
    V_IN_K: tl.constexpr,  # v is the first columns of k, a latent cache: no need to load it
    PDL: tl.constexpr,  # launched before the kernel before it has ended
):
    # Whatever is read may come from the kernel before this one, which may not have finished. Until
    # it has, so much is worked out as needs nothing of it.
    READS_PLAN: tl.constexpr = ROWS > 0 or tiles_ptr is not None
    FIXED: tl.constexpr = not READS_PLAN and (
        kv_len_ptr is None and kv_start_ptr is None and kv_num_blocks_ptr is None
    )
    ONE_LOOP: tl.constexpr = (
        kv_num_blocks_ptr is None and ROWS == 0 and SPAN == 0 and K_FORMAT == "" and V_FORMAT == ""
    )
    if READS_PLAN:
        begin(None, PDL)

    # -- who am I: an item of a row's active blocks, some of its heads and queries ----
    pid = tl.program_id(0)
    # Either lists differ by KV head, or all KV heads work on the same one.
    item, part_of_item = pid, 0
    if not ONE_TILE or ONE_LIST:
        item, part_of_item = divide(pid, inner)
    lengths = (kv_len_ptr, stride_kv_len, kv_len, kv_start_ptr, stride_kv_start, Lkv)
    if ROWS > 0:
        where = place_rows(tl.arange(0, ROWS), heads, nQ, ONE_LIST, ONE_TILE)
        lists = (kv_num_blocks_ptr, full_kv_num_blocks_ptr, stride_tb, stride_th)
        plan = plan_items(
            where, lengths, lists, rows, num_splits, slots, tiles_ptr, ROWS, KV_BLOCK, BLOCK_N
        )
        firsts = number_items(plan, num_splits, slots)
        mine = (firsts <= item) & (item < firsts + plan.items)
        if pick(mine, plan.items) == 0:
            return  # there is no such item
        split = item - pick(mine, firsts)
        table_b = pick(mine, plan.b)
        head_kv = item * 0 if ONE_LIST else pick(mine, plan.h)
        q_block = item * 0 if ONE_TILE else pick(mine, plan.q_block)
    else:
        table_row, split = divide(item, num_splits)
        table_b, head_kv, q_block = place_rows(table_row, heads, nQ, ONE_LIST, ONE_TILE)
    first_head = 0  # of the group
    first_row = 0
    last_row = Lq
    if not ONE_TILE:
        head_tiles = cdiv(G, TG)
        q_tiles = cdiv(tl.minimum(BLOCK_Q, Lq), TQ)
        part_of_item, head_tile = divide(part_of_item, head_tiles)
        part_of_item, q_tile = divide(part_of_item, q_tiles)
        first_head = head_tile * TG
        first_row = q_block * BLOCK_Q + q_tile * TQ
        last_row = tl.minimum(Lq, (q_block + 1) * BLOCK_Q)
    head_kv = (head_kv + part_of_item).to(tl.int64)
    b = table_b
    q_len = Lq
    position = first_row  # in the sequence, of the first row of this tile
    if tiles_ptr is not None:
        b, base, count, position, q_len = load_query_tile(tiles_ptr, nQ, q_block)
        first_row = first_row - q_block * BLOCK_Q
        last_row = tl.where(b >= 0, base + count, 0)
        position += first_row
        first_row += base
    if not ONE_TILE:
        if first_row >= last_row:
            return
    b64 = b.to(tl.int64)
    table_b = table_b.to(tl.int64)

    # -- my rows ----
    offs_m = tl.arange(0, BLOCK_M)
    if ONE_QUERY:
        head = first_head + offs_m  # [BLOCK_M], within the group
        row = tl.zeros((BLOCK_M,), tl.int64) + first_row  # [BLOCK_M]
        real = (offs_m < TG) & (head < G)
    else:
        head = first_head + offs_m // TQ
        row = (first_row + offs_m % TQ).to(tl.int64)
        real = (offs_m < TG * TQ) & (head < G) & (row < last_row)
    head = head_kv * G + head
    q_rows = (table_b * stride_qb + head * stride_qh + row * stride_ql) * ALIGN_Q

    # -- my share of the active blocks, full ones first ----
    if not FIXED:
        if not READS_PLAN:
            begin(b64 | head_kv, PDL)
        q = load_queries(
            q_ptr, q_rows, stride_qd, real, FLOAT8, Q_FORMAT, K_FORMAT, K_GROUPS, D, D_0, D_1
        )
    table_row = table_b * stride_tb + head_kv * stride_th + q_block
    if ROWS > 0:
        full = pick(mine, plan.full)
        partial = pick(mine, plan.partial)
        share = pick(mine, plan.shares)
    if ROWS > 0 and kv_num_blocks_ptr is None:
        kv_len = pick(mine, plan.kv_len)
    else:
        kv_len = load_kv_len(lengths, b64, None)
    if ROWS == 0:
        full, partial = count_units(
            kv_num_blocks_ptr, full_kv_num_blocks_ptr, table_row, kv_len, KV_BLOCK, BLOCK_N
        )
        share = share_of(full + partial, num_splits, KV_BLOCK, BLOCK_N)
    if SPAN == 0:
        first = split * share
        last = tl.minimum(first + share, full + partial)
        idle = first >= tl.maximum(full + partial, 1)
        alone = share >= full + partial
        if ONE_LOOP:
            # A second loop would wait for its first keys again. Bounds in every step cost less, but
            # where other programs of the row would have to wait for this one.
            full = tl.where((last > full) & (alone | (share <= SHORT_SHARE)), 0, full)
    else:
        idle = split >= tl.maximum(cdiv(kv_len, SPAN), 1)
        alone = kv_len <= SPAN

    # -- where my keys, pages and blocks are ----
    k_ptr += head_kv * stride_kh * ALIGN_K
    v_ptr += head_kv * stride_vh * ALIGN_V
    # Declared as int64, but the interpreter has them as int32.
    stride_kb = stride_kb.to(tl.int64) * ALIGN_K
    stride_kn = stride_kn.to(tl.int64) * ALIGN_K
    stride_vb = stride_vb.to(tl.int64) * ALIGN_V
    stride_vn = stride_vn.to(tl.int64) * ALIGN_V
    page_numbers = None
    start = None
    if PAGE_SIZE > 0:
        page_numbers = page_table_ptr + b64 * stride_pb
    else:
        k_ptr += b64 * stride_kb
        v_ptr += b64 * stride_vb
    if kv_start_ptr is not None:
        start = load_kv_start(lengths, b64)
        if PAGE_SIZE == 0:
            k_ptr += start * stride_kn
            v_ptr += start * stride_vn
    k_coefficients = None
    if is_by_row(K_COEFFICIENTS):
        k_coefficients = coefficients_of(
            kc_ptr, stride_kcb, stride_kch, stride_kcn, stride_kcg, head_kv, b64, start, PAGE_SIZE
        )
    v_coefficients = None
    if is_by_row(V_COEFFICIENTS):
        v_coefficients = coefficients_of(
            vc_ptr, stride_vcb, stride_vch, stride_vcn, stride_vcg, head_kv, b64, start, PAGE_SIZE
        )
    full_indices = None
    partial_indices = None
    if kv_num_blocks_ptr is not None:
        partial_indices = kv_indices_ptr + table_row * columns
        if full_kv_num_blocks_ptr is not None:
            full_indices = full_kv_indices_ptr + table_row * full_columns

    # -- my queries, and whether there is anything to do ----
    if FIXED:
        begin(address_of(k_ptr) | address_of(v_ptr) | share, PDL)
        q = load_queries(
            q_ptr, q_rows, stride_qd, real, FLOAT8, Q_FORMAT, K_FORMAT, K_GROUPS, D, D_0, D_1
        )
    DTYPE: tl.constexpr = tl.bfloat16 if Q_FORMAT != "" else q[0].dtype
    if idle:
        return
    bias_rows = None
    if bias_ptr is not None:
        bias_rows = bias_ptr + (table_b * stride_bb + head * stride_bh + row * stride_bl)[:, None]
    state_rows = None
    if block_state_ptr is not None:
        state_rows = (
            block_state_ptr
            + (table_b * stride_sb + head * stride_sh + q_block * stride_sq)[:, None]
        )
    if SPAN > 0:
        listed = partial // ((KV_BLOCK + BLOCK_N - 1) // BLOCK_N)
        first, last = span_of(
            split, partial_indices, listed, kv_len, SPAN, KV_BLOCK, BLOCK_N, CHUNK=256
        )
        full = 0
    q_offset = load_q_offset(
        q_offset_ptr, stride_q_offset, q_offset, b64, kv_len, q_len, DERIVE_OFFSET
    )
    h = head.to(tl.int32)[:, None]  # [BLOCK_M, 1]
    if ONE_QUERY:
        # One position for all rows: a mask that ignores h is computed once, not per row.
        q_idx = tl.zeros((1, 1), tl.int32) + (q_offset + position)
    else:
        q_idx = (q_offset + position + offs_m % TQ)[:, None]  # [BLOCK_M, 1]

    # Drops nothing; keeps the compiler from waiting for q before the keys' addresses are known.
    if not FLOAT8:
        q = drop_rows(q, real)
    q_sums = None
    if K_COEFFICIENTS == "words":
        q_sums = sum_groups(q, K_FORMAT, K_GROUPS, D)
    if K_FORMAT != "" and not FLOAT8:
        q = lift_queries(q, K_FORMAT, ASSEMBLY)
        if not is_by_row(K_COEFFICIENTS):
            scale = scale * grain(K_FORMAT, DTYPE)
    if K_COEFFICIENTS == "head":
        scale = scale * tl.load(kc_ptr + head_kv * stride_kch).to(tl.float32)
    if qc_ptr is not None:
        qc_rows = table_b * stride_qcb + head * stride_qch + row * stride_qcl
        scale = (scale * tl.load(qc_ptr + qc_rows, mask=real, other=0.0))[:, None]

    # -- attend: full blocks with neither mask nor bounds, partial ones with both ----
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Warps share the rows of a small tile: its sums stay apart for each lane until the end, which
    # saves an exchange between warps in every step. A large tile has no registers for that.
    l_i = tl.zeros((BLOCK_M, BLOCK_N if BLOCK_M <= 32 else 1), tl.float32)
    if V_FORMAT == "":
        acc = zero_pieces(BLOCK_M, DV_0, DV_1)
    else:
        acc = zero_output(BLOCK_M, BLOCK_N, V_FORMAT, V_COEFFICIENTS, V_GROUPS, DV)
    m_i, l_i, acc = attend(
        (m_i, l_i, acc),
        Share(first, last, full, full_indices, partial_indices),
        kv_len,
        Tile(q, q_sums, scale, b, h, q_idx, real, bias_rows, stride_bn, state_rows),
        Cache(
            k_ptr,
            stride_kb,
            stride_kn,
            stride_kd,
            k_coefficients,
            K_FORMAT,
            K_COEFFICIENTS,
            K_GROUPS,
            D,
            D_0,
            D_1,
        ),
        Cache(
            v_ptr,
            stride_vb,
            stride_vn,
            stride_vd,
            v_coefficients,
            V_FORMAT,
            V_COEFFICIENTS,
            V_GROUPS,
            DV,
            DV_0,
            DV_1,
        ),
        Pages(
            page_numbers,
            start,
            PAGE_SIZE,
            lie_of_units(PAGE_SIZE, KV_BLOCK, BLOCK_N, kv_start_ptr is not None),
        ),
        Mods(SCORE_MOD, score_args, MASK_MOD, mask_args),
        Mode(KV_BLOCK, BLOCK_N, EXACT, ASK_FULL, LIKE_K, V_IN_K, FLOAT8, ASSEMBLY, INPUT_PRECISION),
        HAS_FULL=SPAN == 0 and (kv_num_blocks_ptr is None or full_kv_num_blocks_ptr is not None),
        ONE_LOOP=ONE_LOOP,
    )
    l_i = tl.sum(l_i, 1)  # [BLOCK_M]
    if V_FORMAT != "":
        v_scale = None
        if V_COEFFICIENTS == "head":
            v_scale = tl.load(vc_ptr + head_kv * stride_vch).to(tl.float32)
        acc = finish_output(
            acc,
            v_scale,
            V_FORMAT,
            V_COEFFICIENTS,
            V_GROUPS,
            DV,
            value_dtype(V_FORMAT, DTYPE),
            ASSEMBLY,
            FLOAT8 and suits_float8(V_FORMAT, V_COEFFICIENTS),
        )

    # -- the result, or this split's part of it ----
    out_row = (table_b * Hkv * G + head) * Lq + row  # [BLOCK_M], of [B, Hq, Lq]
    if alone:
        sink = None
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=real, other=0.0)
        factor, lse, m = finish_rows(m_i, l_i, sink)
        out_rows = (table_b * stride_ob + head * stride_oh + row * stride_ol) * ALIGN_Q
        acc = scale_pieces(acc, factor)
        store_output(out_ptr, out_rows, real, acc, V_FORMAT, V_GROUPS, DV, DV_0, DV_1)
        if lse_ptr is not None:
            tl.store(lse_ptr + out_row, lse, mask=real)
        if max_ptr is not None:
            tl.store(max_ptr + out_row, m, mask=real)
    else:
        part = pid.to(tl.int64) * (TG * TQ) + offs_m  # [BLOCK_M]
        m_ptr = acc_ptr + parts * DV
        store_output(acc_ptr, part * DV, real, acc, V_FORMAT, V_GROUPS, DV, DV_0, DV_1)
        tl.store(m_ptr + part, m_i, mask=real)
        tl.store(m_ptr + parts + part, l_i, mask=real)
