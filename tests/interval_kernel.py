"""A kernel that gives the answers of an interval program for the blocks of one row of blocks."""

import triton
import triton.language as tl

from flexdecode.kernels.interval_tables import decide


@triton.jit
def answers(
    state_ptr,  # [LANES] int32, written
    b,
    h,
    q_lo,
    q_hi,
    size,  # blocks of a lane
    kv_len,
    reach,
    mask_args,
    INTERVALS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    lanes = tl.arange(0, LANES)
    zero = tl.full((1,), 0, tl.int64)
    state = decide(
        b,
        h,
        zero + q_lo,
        zero + q_hi,
        lanes * size,
        size,
        kv_len,
        reach,
        mask_args,
        INTERVALS,
        KV_BLOCK,
    )
    tl.store(state_ptr + lanes, state)
