# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=assignment
"""Tile helpers: the words in which the decode kernel and the reduction are written.

Head dims of any size are held as one or two power-of-two *pieces* (96 = 64 + 32, 576 = 512 + 64);
a tile that spans a head dim is therefore a tuple of one or two tensors, columns in order.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cdiv(a, b):
    """Smallest integer not below a / b, for a >= 0 and b > 0."""
    return quotient(a + b - 1, b)


@triton.jit
def quotient(a, b):
    """Return a // b for a >= 0 and b > 0: a third fewer instructions than with signs."""
    return (tl.cast(a, tl.uint32) // tl.cast(b, tl.uint32)).to(tl.int32)


@triton.jit
def divide(a, b):
    """Quotient and remainder, for a >= 0 and b > 0."""
    whole = quotient(a, b)
    return whole, a - whole * b


@triton.jit
def address_of(ptr):
    """Return a pointer as an int64, for `begin`."""
    return ptr.to(tl.int64)


@triton.jit
def begin(first, PDL: tl.constexpr):
    """Wait for earlier kernels, then let the next one be launched, which waits in its turn.

    In this order: what the next one reads before it waits is then older than this kernel, and it
    takes the place of no program that this one waits for. `first` is what must be worked out
    before, where it costs nothing: an int64 that is never negative, or None. Compilers put
    arithmetic off beyond a wait unless the wait itself depends on it.
    """
    if PDL:
        if first is None:
            tl.extra.cuda.gdc_wait()
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ge.s64 p, $1, 0; @p griddepcontrol.wait; mov.b32 $0, 0; }",
                "=r,l",
                [first],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def loop_bound(n):
    """Pass a scalar to `tl.range`; with NumPy 2.4, Triton 3.6's interpreter needs a Python int."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n


@triton.jit
def load_kv_len(
    lengths,  # (kv_len_ptr or None, its stride, kv_len, kv_start_ptr or None, its stride, capacity)
    b,  # scalar, or [N]
    there,  # [N], int1: which sequences exist; None for a scalar
):
    """Valid keys of sequence b, between none and all that its part of the cache can hold."""
    kv_len_ptr, stride_kv_len, kv_len, kv_start_ptr, stride_kv_start, capacity = lengths
    if kv_len_ptr is not None:
        kv_len = tl.load(kv_len_ptr + b * stride_kv_len, mask=there)
    elif there is not None:
        kv_len = tl.zeros(b.shape, tl.int32) + kv_len
    if kv_start_ptr is not None:
        capacity = capacity - tl.load(kv_start_ptr + b * stride_kv_start, mask=there)
    # An offset past the cache leaves it without keys.
    return tl.maximum(tl.minimum(kv_len, capacity), 0).to(tl.int32)


@triton.jit
def load_kv_start(lengths, b):
    """First slot of sequence b, int64, where there are starts."""
    return tl.load(lengths[3] + b * lengths[4]).to(tl.int64)


@triton.jit
def load_q_offset(q_offset_ptr, stride_q_offset, q_offset, b, kv_len, q_len, DERIVE: tl.constexpr):
    """Position of query row 0: given, or such that the last query sits on the last key."""
    if DERIVE:
        return kv_len - q_len
    elif q_offset_ptr is not None:
        return tl.load(q_offset_ptr + b * stride_q_offset).to(tl.int32)
    else:
        return q_offset


@triton.jit
def load_query_tile(tiles_ptr, nQ, tile):
    """Read what a tile of packed queries holds; see `flexdecode.kernels.query_tiles`.

    Returns its sequence (negative: there is no such tile), its first row in q, its number of
    rows, the place of the first one in its sequence, and the queries of that sequence.
    """
    tiles_ptr += tile
    return (
        tl.load(tiles_ptr),
        tl.load(tiles_ptr + nQ),
        tl.load(tiles_ptr + 2 * nQ),
        tl.load(tiles_ptr + 3 * nQ),
        tl.load(tiles_ptr + 4 * nQ),
    )


@triton.jit
def load_block_row(
    row,  # of [B or 1, heads, nQ]
    heads,
    nQ,
    Lq,
    BLOCK_Q,
    lengths,  # see `load_kv_len`
    offsets,  # (q_offset_ptr or None, its stride, q_offset)
    tiles_ptr,  # rows of blocks of packed queries, see `load_query_tile`; or None
    DERIVE_OFFSET: tl.constexpr,
):
    """Read what a row of a mask's blocks stands for.

    Returns its sequence, its head, the position of its first query, its number of queries, and the
    valid keys of the sequence.
    """
    q_block = row % nQ
    h = row // nQ % heads
    b = row // nQ // heads
    position = q_block * BLOCK_Q
    queries = tl.minimum(BLOCK_Q, Lq - position)
    q_len = Lq
    if tiles_ptr is not None:
        b, _, queries, position, q_len = load_query_tile(tiles_ptr, nQ, q_block)
        queries = tl.where(b >= 0, queries, 0)
        b = tl.maximum(b, 0)
    b64 = b.to(tl.int64)
    kv_len = load_kv_len(lengths, b64, None)
    q_offset_ptr, stride_q_offset, q_offset = offsets
    first = position + load_q_offset(
        q_offset_ptr, stride_q_offset, q_offset, b64, kv_len, q_len, DERIVE_OFFSET
    )
    return b, h, first, queries, kv_len


@triton.jit
def count_units(
    num_ptr,
    full_num_ptr,
    table_row,
    kv_len,
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Units of BLOCK_N keys that a table row lists, or that lie below kv_len: (full, partial)."""
    if num_ptr is None:
        full, partial = units_below(kv_len, BLOCK_N)
    else:
        full, partial = load_units(num_ptr, full_num_ptr, table_row, None, KV_BLOCK, BLOCK_N)
    return full, partial


@triton.jit
def units_below(kv_len, BLOCK_N: tl.constexpr):
    """Units of BLOCK_N keys, (full, partial), where every key is allowed: a cut one is partial."""
    full = kv_len // BLOCK_N
    return full, cdiv(kv_len, BLOCK_N) - full


@triton.jit
def load_units(
    num_ptr,
    full_num_ptr,
    row,  # scalar, or [N]
    there,  # [N], int1: which rows exist; None for a scalar
    KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Units that rows of a table list, as (full, partial)."""
    SUBS: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    other: tl.constexpr = None if there is None else 0
    partial = tl.load(num_ptr + row, mask=there, other=other) * SUBS
    full = partial * 0
    if full_num_ptr is not None:
        full = tl.load(full_num_ptr + row, mask=there, other=other) * SUBS
    return full, partial


@triton.jit
def load_pieces(
    ptr,
    rows,  # [R], int64: where each row starts, in elements
    stride_d,
    lane,  # [R], int1, or None when every row may be read
    DIM: tl.constexpr,
    PIECE_0: tl.constexpr,
    PIECE_1: tl.constexpr,
):
    """Rows of a head as a tuple of pieces, zero past DIM and where lane is false."""
    piece_0 = load_piece(ptr, rows, stride_d, lane, 0, DIM, PIECE_0)  # [R, PIECE_0]
    if PIECE_1 == 0:
        return (piece_0,)
    else:
        return (piece_0, load_piece(ptr, rows, stride_d, lane, PIECE_0, DIM, PIECE_1))


@triton.jit
def load_piece(
    ptr,
    rows,
    stride_d,
    lane,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Columns FIRST to FIRST + SIZE of some rows, zero past DIM and where lane is false."""
    offs_d = FIRST + tl.arange(0, SIZE)
    ptrs = ptr + (rows[:, None] + offs_d[None, :] * stride_d)  # [R, SIZE]
    PADDED: tl.constexpr = FIRST + SIZE > DIM
    if PADDED:
        inside = (offs_d < DIM)[None, :]
        if lane is not None:
            inside = inside & lane[:, None]
        return tl.load(ptrs, mask=inside, other=0.0)
    elif lane is not None:
        return tl.load(ptrs, mask=lane[:, None], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_pieces(
    ptr,
    rows,  # [R], int64: where each row starts, in elements
    lane,  # [R], int1
    pieces,
    DIM: tl.constexpr,
    PIECE_0: tl.constexpr,
    PIECE_1: tl.constexpr,
):
    """Store real rows of a head, without the padding columns."""
    offs_0 = tl.arange(0, PIECE_0)
    inside = lane[:, None] & (offs_0 < DIM)[None, :]
    tl.store(ptr + (rows[:, None] + offs_0[None, :]), pieces[0], mask=inside)
    if PIECE_1 > 0:
        offs_1 = PIECE_0 + tl.arange(0, PIECE_1)
        inside = lane[:, None] & (offs_1 < DIM)[None, :]
        tl.store(ptr + (rows[:, None] + offs_1[None, :]), pieces[1], mask=inside)


@triton.jit
def dot(a, b, acc, INPUT_PRECISION: tl.constexpr):
    """Return a @ b + acc in float32; the interpreter would multiply the bits of bfloat16."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=INPUT_PRECISION)


@triton.jit
def dot_pieces(q, k, INPUT_PRECISION: tl.constexpr):
    """Inner products of query rows and key rows, float32, [BLOCK_M, BLOCK_N]."""
    qk = tl.zeros((q[0].shape[0], k[0].shape[0]), tl.float32)
    qk = dot(q[0], tl.trans(k[0]), qk, INPUT_PRECISION)
    if len(q) == 2:
        qk = dot(q[1], tl.trans(k[1]), qk, INPUT_PRECISION)
    return qk


@triton.jit
def accumulate_pieces(acc, alpha, p, v, INPUT_PRECISION: tl.constexpr):
    """Rescale the running output and add p @ v, piece by piece."""
    p = p.to(v[0].dtype)
    acc_0 = dot(p, v[0], acc[0] * alpha[:, None], INPUT_PRECISION)
    if len(v) == 2:
        return (acc_0, dot(p, v[1], acc[1] * alpha[:, None], INPUT_PRECISION))
    else:
        return (acc_0,)


@triton.jit
def scale_pieces(acc, factor):
    """Multiply each row of a tuple of pieces by its factor."""
    scaled = ()
    for piece in tl.static_range(len(acc)):
        scaled += (acc[piece] * factor[:, None],)
    return scaled


@triton.jit
def drop_rows(pieces, keep):
    """Replace the rows of a tile that are not kept by zeros, whatever they hold."""
    kept = ()
    for piece in tl.static_range(len(pieces)):
        kept += (tl.where(keep[:, None], pieces[piece], 0.0),)
    return kept


@triton.jit
def seen_by_a_row(keep, real, BLOCK_N: tl.constexpr):
    """Return which keys some row of the tile may see, [BLOCK_N], from what a mask keeps."""
    if len(keep.shape) == 2:
        if keep.shape[0] > 1:
            keep = keep & real[:, None]
        keep = tl.max(keep.to(tl.int32), 0)
    return tl.broadcast_to(keep != 0, (BLOCK_N,))


@triton.jit
def zero_pieces(ROWS: tl.constexpr, PIECE_0: tl.constexpr, PIECE_1: tl.constexpr):
    """Return float32 zeros for a head's pieces."""
    zero_0 = tl.zeros((ROWS, PIECE_0), tl.float32)
    if PIECE_1 == 0:
        return (zero_0,)
    else:
        return (zero_0, tl.zeros((ROWS, PIECE_1), tl.float32))


@triton.jit
def finite_or_zero(m):
    """Replace the maximum of nothing (-inf) by 0, so that differences from it stay defined."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def online_softmax_update(qk_log2, m_i, l_i):
    """Fold one tile of log2 scores into the running maximum and sums.

    Returns the weights, the new maximum and sums, and the factor that rescales older output.
    """
    m_new = tl.maximum(m_i, tl.max(qk_log2, 1))  # [BLOCK_M]
    m_safe = finite_or_zero(m_new)
    alpha = tl.math.exp2(m_i - m_safe)
    p = tl.math.exp2(qk_log2 - m_safe[:, None])  # [BLOCK_M, BLOCK_N]
    if l_i.shape[1] == 1:
        l_new = l_i * alpha[:, None] + tl.sum(p, 1, keep_dims=True)
    else:
        l_new = l_i * alpha[:, None] + p
    return p, m_new, l_new, alpha


@triton.jit
def finish_rows(m_i, l_i, sink):
    """Close the softmax: the factor for the accumulator, the LSE and the maximum in natural log.

    A sink takes its share of the mass here, once, and gives no value; None without sinks.
    """
    if sink is not None:
        sink_log2 = sink.to(tl.float32) * LOG2E
        m_all = tl.maximum(m_i, sink_log2)
        m_safe = finite_or_zero(m_all)
        rescale = tl.math.exp2(m_i - m_safe)
        l_all = l_i * rescale + tl.math.exp2(sink_log2 - m_safe)
    else:
        m_all = m_i
        rescale = tl.full(m_i.shape, 1.0, tl.float32)
        l_all = l_i
    # An empty row has l = 0 and m = -inf: it divides by 1, which keeps its output 0 and LSE -inf.
    l_all = tl.where(l_all == 0.0, 1.0, l_all)
    return rescale / l_all, m_all * LN2 + tl.log(l_all), m_i * LN2
