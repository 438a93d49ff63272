"""Cases that users of other libraries have met, each on every backend that it concerns.

Cases of one part of the library are tested beside it; docs/reliability.md lists which test has
which case.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import BlockMask, attention, compile_count, create_block_mask, explain
from flexdecode.masks import causal, documents, prefix_lm, sliding_window
from flexdecode.masks.trees import create_ancestors
from tests.backend_cases import (
    BACKENDS,
    BOTH,
    Backend,
    check,
    every_backend,
    on_every_backend,
)
from tests.helpers import assert_within, dense_attention, random_inputs


def run(backend: Backend, *qkv: Tensor, **call: Any) -> Tensor:
    moved = {n: x.to(backend.device) if isinstance(x, Tensor) else x for n, x in call.items()}
    out = attention(*(x.to(backend.device) for x in qkv), backend=backend.name, **moved)
    assert isinstance(out, Tensor)
    return out.cpu()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=1e-5)


# ---- positions ----


@every_backend
def test_fc01_the_whole_cache_equals_its_used_slots(backend: Backend) -> None:
    q, k, v = random_inputs(1, 4, 2, 1, 512, 16)
    k[:, :, 100:], v[:, :, 100:] = torch.nan, torch.nan
    mask = create_block_mask(causal)
    whole = run(backend, q, k, v, block_mask=mask, kv_len=100)
    used = run(backend, q, k[:, :, :100], v[:, :, :100], block_mask=mask)
    assert torch.equal(whole, used)
    close(whole, dense_attention(q, k[:, :, :100], v[:, :, :100]).out)
    first = run(backend, q, k, v, block_mask=mask, kv_len=100, q_offset=0)  # unshifted: one key
    close(first, v[:, :, :1].repeat_interleave(2, 1))


@every_backend
def test_fc02_a_length_of_any_form_gives_equal_bits(backend: Backend) -> None:
    q, k, v = random_inputs(2, 2, 1, 2, 150, 16)
    forms: list[Any] = [77, torch.tensor(77), torch.tensor([77]), torch.tensor([77, 77])]
    if backend.slow:
        del forms[1]
    mask = create_block_mask(causal)
    for name in ("kv_len", "q_offset"):
        found = [run(backend, q, k, v, block_mask=mask, **{name: form}) for form in forms]
        for other in found[1:]:
            close(other, found[0])
            assert torch.equal(other, found[1])


@every_backend
def test_fc03_fc04_rows_of_a_slice_are_rows_of_the_whole(backend: Backend) -> None:
    q, k, v = random_inputs(2, 4, 2, 300, 300, 8)
    size = 16 if backend.slow else 128
    mask = create_block_mask(
        sliding_window(150), None, None, 300, 300, backend.device, (size, 128), q_offset=0
    )
    whole = dense_attention(q, k, v, mask=sliding_window(150), q_offset=0).out
    for r, index in ((127, int), (128, torch.tensor), (299, lambda i: slice(i, i + 1))):
        i = r // size
        part = mask[:, :, index(i)]
        rows = slice(size * i, size * i + part.shape[2])
        close(run(backend, q[:, :, rows], k, v, block_mask=part), whole[:, :, rows])


@pytest.mark.parametrize(
    ("backend", "pair"),
    on_every_backend([(129, 128), (20096, 20000), (128, 129), (256, 2)], 2),
    ids=str,
)
def test_fc05_a_mask_declared_for_another_length(backend: Backend, pair: tuple[int, int]) -> None:
    declared, real = pair
    q, k, v = random_inputs(2, 1, 1, 2, real, 16)
    mask = create_block_mask(causal, Q_LEN=2, KV_LEN=declared, device=backend.device)
    close(run(backend, q, k, v, block_mask=mask), dense_attention(q, k, v, mask=causal).out)
    fixed = create_block_mask(
        causal, Q_LEN=2, KV_LEN=declared, q_offset=real - 2, device=backend.device
    )
    if declared < real:
        with pytest.raises(ValueError, match="kv_len = 129 keys, got a mask with KV_LEN = 128"):
            run(backend, q, k, v, block_mask=fixed)
    else:
        close(run(backend, q, k, v, block_mask=fixed), dense_attention(q, k, v, mask=causal).out)


@every_backend
def test_fc06_a_full_block_cropped_to_a_partial_one(backend: Backend) -> None:
    """Mask 256 x 257 for 101 queries and 129 keys; entries past the counts are garbage."""

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < 60

    mask = create_block_mask(window, Q_LEN=256, KV_LEN=257, q_offset=0, device=backend.device)
    assert mask.full_kv_num_blocks is not None and int(mask.full_kv_num_blocks.sum()) > 0
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        places = torch.arange(indices.shape[-1], device=backend.device)
        indices.masked_fill_(places >= counts[..., None], 1 << 20)
    q, k, v = random_inputs(1, 1, 1, 101, 129, 8)
    wanted = dense_attention(q, k, v, mask=window, q_offset=0).out
    if not backend.slow:
        close(run(backend, q, k, v, block_mask=mask), wanted)
    roomy = [torch.cat([x, torch.full_like(x, torch.nan)], 2) for x in (k, v)]
    close(run(backend, q, *roomy, block_mask=mask, kv_len=129), wanted)


@every_backend
def test_fc08_only_listed_blocks_contribute(backend: Backend) -> None:
    q, k, v = random_inputs(2, 4, 2, 1, 256, 16)
    wanted = dense_attention(q, k[:, :, 128:], v[:, :, 128:]).out
    one = torch.ones(1, 1, 1, dtype=torch.int32, device=backend.device)
    for rule in (None, lambda b, h, q_idx, kv_idx: kv_idx >= 0):
        for full in (False, True):
            lists = (
                (0 * one, one[..., None], one, one[..., None]) if full else (one, one[..., None])
            )
            mask = BlockMask.from_kv_blocks(*lists, mask_mod=rule)
            close(run(backend, q, k, v, block_mask=mask), wanted)


@pytest.mark.parametrize(
    ("backend", "window"), on_every_backend([1, 2, 127, 128, 129, 200, 201], 3), ids=str
)
def test_fc10_a_window_of_w_holds_w_keys(backend: Backend, window: int) -> None:
    k = torch.zeros(1, 1, 200, 8)
    v = torch.eye(200).view(1, 1, 200, 200)
    mask = create_block_mask(sliding_window(window))
    decoded = run(backend, k[:, :, :1], k, v, block_mask=mask)
    held = min(window, 200)
    wanted = (torch.arange(200) >= 200 - held) / held
    close(decoded.view(-1), wanted)
    prefilled = run(backend, k[:, :, :40], k, v, block_mask=mask)
    close(prefilled[0, 0, -1], wanted)


@every_backend
def test_fc11_causal_is_aligned_at_the_bottom_right(backend: Backend) -> None:
    k = torch.zeros(2, 1, 5, 8)
    v = torch.eye(5).expand(2, 1, 5, 5)
    mask = create_block_mask(causal)
    out = run(backend, k[:, :, :2], k, v, block_mask=mask, kv_len=torch.tensor([3, 5]))
    for row, kept in ((out[0, 0, 0], 2), (out[0, 0, 1], 3), (out[1, 0, 0], 4), (out[1, 0, 1], 5)):
        close(row, (torch.arange(5) < kept) / kept)


@every_backend
def test_fc12_left_padded_prompts_equal_those_run_alone(backend: Backend) -> None:
    starts = torch.tensor([0, 3, 17, 130])
    q, k, v = random_inputs(4, 2, 1, 1, 150, 16)
    pad = torch.arange(150) < starts[:, None]
    for x in (k, v):
        x.masked_fill_(pad[:, None, :, None], torch.nan)
    first = starts.to(backend.device)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx >= first[b]) & (kv_idx <= q_idx)

    masked = run(backend, q, k, v, block_mask=create_block_mask(visible))
    placed = run(backend, q, k, v, block_mask=create_block_mask(causal), kv_start=starts)
    for b, start in enumerate(starts.tolist()):
        alone = dense_attention(q[b : b + 1], k[b : b + 1, :, start:], v[b : b + 1, :, start:])
        close(masked[b : b + 1], alone.out)
        close(placed[b : b + 1], alone.out)


# ---- batch and heads ----


@every_backend
def test_fc13_lengths_of_the_batch_in_the_rule(backend: Backend) -> None:
    lengths = torch.tensor([1, 64, 129, 300], device=backend.device)
    rule = lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]  # noqa: E731
    q, k, v = random_inputs(4, 2, 1, 1, 300, 16)
    check(backend, q, k, v, mask=rule)
    mask = create_block_mask(rule, 4, None, 1, 300, device=backend.device)
    wanted = dense_attention(q, k, v, mask=lambda b, h, i, j: j < lengths.cpu()[b]).out
    close(run(backend, q, k, v, block_mask=mask), wanted)
    one = create_block_mask(rule, 1, None, 1, 300, device=backend.device)
    with pytest.raises(ValueError, match="depends on b"):
        run(backend, q, k, v, block_mask=one)


@pytest.mark.parametrize(
    ("backend", "G"), on_every_backend([3, 1, 2, 7, 5, 6, 12, 8, 9, 16, 71], 3), ids=str
)
def test_fc18_any_group_size(backend: Backend, G: int) -> None:
    for Lq in (1, 2, 5) if not backend.slow else (1 + 4 * (G % 2),):
        q, k, v = random_inputs(2, G, 1, Lq, 40, 16, seed=G)
        check(backend, q, k, v, mask=causal, BLOCK_SIZE=16)


@pytest.mark.parametrize(
    ("backend", "rows"), on_every_backend([129, 127, 128, 256, 200, 1016], 3), ids=str
)
def test_fc19_more_rows_than_a_tile(backend: Backend, rows: int) -> None:
    G = 2 if rows % 2 == 0 else 1
    q, k, v = random_inputs(1, G, 1, rows // G, 48, 8)
    check(backend, q, k, v, mask=sliding_window(30), BLOCK_SIZE=(128, 16))


@every_backend
def test_fc20_two_to_eight_queries(backend: Backend) -> None:
    cases = list(itertools.product(range(1, 9), (1, 4, 8), (1, 3)))
    for Lq, G, B in cases if not backend.slow else cases[5::14]:
        q, k, v = random_inputs(1, G, 1, Lq, 70, 32, seed=Lq)
        q, k, v = (x.repeat(B, 1, 1, 1) for x in (q, k, v))
        out, _ = check(backend, q, k, v, mask=causal)
        assert torch.equal(out, out[:1].expand_as(out))


@every_backend
def test_fc22_a_tree_of_drafts_after_a_prefix(backend: Backend) -> None:
    before = compile_count()
    tree = torch.empty(2, 7, 7, dtype=torch.bool, device=backend.device)
    counts = []
    for step, parents in enumerate(([-1, 0, 0, 1, 1, 2, 5], [-1, -1, 1, 1, 0, 4, 4])):
        prefix = 60 + step

        def drafts(b: Any, h: Any, q_idx: Any, kv_idx: Any, prefix: int = prefix) -> Any:
            row, column = q_idx - prefix, kv_idx - prefix
            return (column < 0) | tree[b, row, torch.clamp(column, min=0)]

        tree[0], tree[1] = create_ancestors(parents), create_ancestors(parents[:1] * 7)
        q, k, v = random_inputs(2, 2, 1, 7, prefix + 7, 16, seed=step)
        check(backend, q, k, v, mask=drafts)
        counts.append(compile_count() - before)
    assert counts[0] == counts[1]


def test_fc23_several_queries_keep_the_splits() -> None:
    """Programs launched at 32k keys do not fall from q_len 1 to 8."""
    programs = []
    for Lq in (1, 2, 4, 8):
        q, k = torch.empty(1, 32, Lq, 128), torch.empty(1, 8, 32768, 128)
        programs.append(explain(q, k, k, block_mask=create_block_mask(causal)).work.programs)
    assert min(programs) >= programs[0]


# ---- head dims ----


@pytest.mark.parametrize(
    ("backend", "D"),
    on_every_backend([1, 8, 16, 31, 40, 72, 80, 96, 112, 120, 128, 192, 256], 3),
    ids=str,
)
def test_fc24_head_dims_that_are_no_power_of_two(backend: Backend, D: int) -> None:
    q, k, v = random_inputs(1, 2, 1, 2, 40, D)
    if not backend.slow:
        check(backend, q, k, v, mask=causal)
    # Columns beyond the head dim hold a neighbour's data: neither read nor written.
    wide = [torch.full((*x.shape[:3], D + 3), torch.nan) for x in (q, k, v)]
    for into, x in zip(wide, (q, k, v), strict=True):
        into[..., :D] = x
    check(backend, *(x[..., :D] for x in wide), mask=causal)


@pytest.mark.parametrize(("backend", "D"), on_every_backend([4, 1, 2, 8, 15], 2), ids=str)
def test_fc26_tiny_heads(backend: Backend, D: int) -> None:
    q, k, v = random_inputs(2, 4, 2, 3, 50, D)
    for dtype in (torch.float32, torch.bfloat16):
        check(backend, *(x.to(dtype) for x in (q, k, v)), mask=causal, slack=2.0)


@every_backend
@pytest.mark.parametrize("D", [256, 512])
def test_fc28_wide_heads(backend: Backend, D: int) -> None:
    q, k, v = random_inputs(1, 2, 1, 1, 70, D, dtype=torch.bfloat16)
    check(backend, q, k, v, mask=causal, slack=2.0)


# ---- lengths, tables, splits ----


@every_backend
def test_fc30_a_capture_of_exactly_as_many_entries_as_keys(backend: Backend) -> None:
    for S, block in ((46, 128), (240, 128), (100, 8), (100, (64, 16)))[:: 1 + backend.slow]:
        ids = torch.arange(S, device=backend.device) // 30
        q, k, v = random_inputs(1, 2, 1, S if S < 50 else 3, S, 8)
        check(backend, q, k, v, mask=documents(ids), BLOCK_SIZE=block)


@every_backend
def test_fc32_empty_requests_among_others(backend: Backend) -> None:
    """Rows of length 0 are written; on the others they have no effect."""
    q, k, v = random_inputs(4, 2, 1, 1, 90, 16)
    kv_len = torch.tensor([0, 90, 0, 13])
    k[0], v[0], k[2], v[2] = torch.nan, torch.nan, torch.inf, torch.inf
    for mask in (None, causal, sliding_window(20)):
        out, aux = check(backend, q, k, v, mask=mask, kv_len=kv_len)
        assert (out[[0, 2]] == 0).all()
        assert (aux.lse[[0, 2]] == -torch.inf).all()


@every_backend
def test_fc35_parts_of_a_cache_merge_to_the_whole(backend: Backend) -> None:
    from flexdecode import merge_attentions

    q, k, v = random_inputs(2, 4, 2, 2, 90, 16)
    parts = [(0, 0), (0, 40), (40, 40), (40, 90), (90, 90)]
    outs, lses = [], []
    for start, end in parts:
        out, aux = attention(
            *(x.to(backend.device) for x in (q, k[:, :, start:end], v[:, :, start:end])),
            return_aux=BOTH,
            backend=backend.name,
        )
        outs.append(out)
        lses.append(aux.lse.float())
    out, lse = merge_attentions(outs, lses)
    whole = dense_attention(q, k, v)
    assert_within(out, whole.out, 1e-5)
    assert_within(lse, whole.lse, 1e-5, "lse")
    empty, nothing = merge_attentions([outs[0], outs[2]], [lses[0], lses[2]])
    assert (empty == 0).all()
    assert (nothing == -torch.inf).all()


@every_backend
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_fc37_splits_without_work(backend: Backend, splits: int) -> None:
    """Active blocks from none to one more than splits; new buffers hold NaN (conftest.py)."""
    q, k, v = random_inputs(1, 2, 1, 1, 160, 8)
    for blocks in range(0, splits + 2, 1 if not backend.slow else 2):
        check(
            backend,
            q,
            k,
            v,
            mask=lambda b, h, q_idx, kv_idx, n=16 * blocks: kv_idx < n,
            BLOCK_SIZE=16,
            kernel_options={"num_splits": splits, "BLOCK_N": 16},
        )


@every_backend
def test_fc40_every_split_count_is_finite_and_right(backend: Backend) -> None:
    """Paged, with calls of other shapes in between."""
    q, pools = random_inputs(3, 4, 2, 1, 1, 16)[0], random_inputs(12, 1, 2, 1, 16, 16)[1:]
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).int()
    kv_len = torch.tensor([64, 17, 0])
    dense = [x[table.long()].transpose(1, 2).flatten(2, 3) for x in pools]
    wanted = dense_attention(q, *dense, kv_len=kv_len).out
    for splits in (None, 1, 2, 3, 7, 64) if not backend.slow else (None, 3):
        options = None if splits is None else {"num_splits": splits, "BLOCK_N": 16}
        out = run(backend, q, *pools, page_table=table, kv_len=kv_len, kernel_options=options)
        close(out, wanted)
        run(backend, q[:1, :2], pools[0][:1], pools[1][:1], kernel_options=options)


@every_backend
def test_fc48_full_blocks_listed_as_partial(backend: Backend) -> None:
    """The same blocks, told apart or not: equal results."""
    q, k, v = random_inputs(1, 4, 2, 2, 300, 16)
    keep = torch.ones(300, dtype=torch.bool, device=backend.device)
    told = run(backend, q, k, v, block_mask=create_block_mask(causal))
    rule = lambda b, h, q_idx, kv_idx: keep[kv_idx] & (kv_idx <= q_idx)  # noqa: E731
    close(run(backend, q, k, v, block_mask=create_block_mask(rule)), told)
    options = {"deterministic": True}
    first = run(backend, q, k, v, block_mask=create_block_mask(causal), kernel_options=options)
    again = run(backend, q, k, v, block_mask=create_block_mask(causal), kernel_options=options)
    assert torch.equal(first, again)


@every_backend
def test_fc59_one_row_of_a_long_mask(backend: Backend) -> None:
    """A mask of a million keys: its tables hold what is active, and closed forms agree."""
    kv_len = 1_000_000
    q, k = torch.zeros(1, 1, 1, 1, device=backend.device), torch.zeros(1, 1, 1, 1)
    mask = create_block_mask(sliding_window(1000), 1, 1, 1, kv_len, device=backend.device)
    entries = mask.kv_indices.numel() + mask.full_kv_indices.numel()
    assert entries <= 2 * -(-kv_len // 128)
    assert int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) <= 9
    k = torch.zeros(1, 1, 1, 1, device=backend.device).expand(1, 1, kv_len, 1)
    v = torch.arange(kv_len, dtype=torch.float32, device=backend.device).view(1, 1, -1, 1)
    out = attention(q, k, v, block_mask=create_block_mask(sliding_window(1000)),
                    backend=backend.name)  # fmt: skip
    assert out.item() == pytest.approx(kv_len - 1 - 999 / 2, rel=1e-6)


def test_fc60_splits_follow_the_active_blocks() -> None:
    """A window in a long cache is as much work as a short cache, and both are divided alike."""
    q, long, short = (torch.empty(1, 8, n, 64) for n in (1, 131072, 1152))
    windowed = explain(q, long, long, block_mask=create_block_mask(sliding_window(1024)))
    whole = explain(q, short, short)
    assert windowed.work.programs <= 2 * whole.work.programs
    assert windowed.work.busiest <= 2 * whole.work.busiest


@every_backend
def test_fc62_a_dense_boolean_table_as_the_rule(backend: Backend) -> None:
    q, k, v = random_inputs(1, 2, 1, 3, 300, 8)
    table = torch.zeros(3, 300, dtype=torch.bool, device=backend.device)
    table[:, 30:70], table[1, 290:] = True, True
    check(backend, q, k, v, mask=lambda b, h, q_idx, kv_idx: table[q_idx - 297, kv_idx])
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: table[q_idx - 297, kv_idx], 1, 1, 3, 300, device=backend.device
    )
    assert int(mask.kv_num_blocks.sum()) == 2, "the block of keys 128 to 255 is empty"


@every_backend
def test_fc64_tables_lengths_and_captures_change_in_place(backend: Backend) -> None:
    q, k, v = (x.to(backend.device) for x in random_inputs(3, 4, 1, 1, 200, 16))
    kv_len = torch.tensor([1, 60, 150], device=backend.device)
    ids = torch.zeros(200, dtype=torch.int64, device=backend.device)
    rule = lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]  # noqa: E731
    bound = create_block_mask(rule, BLOCK_SIZE=32).bind(
        batch=3, heads=4, q_len=1, kv_len=kv_len, kv_capacity=200
    )
    places = [x.data_ptr() for x in (bound.kv_indices, bound.kv_num_blocks)]
    for step in range(3):
        kv_len += 20 * step
        ids[step * 50 :] += 1
        bound.update()
        assert places == [x.data_ptr() for x in (bound.kv_indices, bound.kv_num_blocks)]
        wanted = dense_attention(q, k, v, mask=rule, kv_len=kv_len).out
        close(attention(q, k, v, block_mask=bound, backend=backend.name), wanted)


# ---- devices ----


def test_fc66_masks_move_with_their_tables() -> None:
    """A captured tensor decides where tables are made, and ``to`` moves every one of them."""
    ids = torch.zeros(100, dtype=torch.int64, device="meta")
    mask = create_block_mask(causal, 1, 1, 100, 100, device="cpu")
    moved = mask.to("meta")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(mask, name).device.type == "cpu"
    q, k, v = random_inputs(1, 1, 1, 1, 100, 8)
    with pytest.raises(ValueError, match=r"captured tensor ids on cpu, got meta"):
        attention(q, k, v, block_mask=create_block_mask(documents(ids)))
    with pytest.raises(ValueError, match=r"block_mask: expected tables on cpu.*\.to\(device\)"):
        fixed = create_block_mask(causal, 1, 1, 1, 100, device="cpu", q_offset=99).to("meta")
        attention(q, k, v, block_mask=fixed)


# ---- dtypes, statistics, sizes of blocks ----


@every_backend
def test_fc68_eight_bit_caches_and_mismatched_dtypes(backend: Backend) -> None:
    from flexdecode import dequantize, quantize

    q, k, v = random_inputs(2, 4, 2, 1, 70, 32, dtype=torch.bfloat16)
    stored = [quantize(x.to(backend.device), "fp8") for x in (k, v)]
    out = attention(q.to(backend.device), *stored, backend=backend.name)
    plain = [dequantize(x).cpu().bfloat16() for x in stored]
    wanted = dense_attention(q, *plain).out
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=2e-2, atol=2e-2)
    for name in ("k", "v"):
        given = {"q": q, "k": k, "v": v} | {name: k.half()}
        with pytest.raises(TypeError, match=rf"{name}: expected torch.bfloat16 to match q, got"):
            run(backend, *given.values())


def test_fc69_tables_do_not_grow_with_the_pool() -> None:
    sizes = []
    for pages in (8, 4096):
        pool = torch.zeros(1, 1, 16, 8).expand(pages, 1, 16, 8)
        table = torch.zeros(2, 4, dtype=torch.int32)
        mask = create_block_mask(causal, BLOCK_SIZE=16).bind(
            batch=2, heads=1, q_len=1, kv_len=torch.tensor([60, 64]), kv_capacity=64,
            page_table=table,
        )  # fmt: skip
        attention(torch.zeros(2, 1, 1, 8), pool, pool, block_mask=mask)
        sizes.append(mask.kv_indices.numel() + mask.full_kv_indices.numel())
    assert sizes[0] == sizes[1] <= 2 * 2 * 4


@every_backend
def test_fc71_the_greatest_score_is_natural(backend: Backend) -> None:
    q, k, v = random_inputs(1, 4, 2, 1, 200, 16)
    for splits in (1, 3):
        _, aux = check(
            backend,
            q,
            k,
            v,
            mask=causal,
            sinks=torch.full((4,), 50.0),
            kernel_options={"num_splits": splits},
        )
        scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) * 0.25
        close(aux.max_scores.cpu(), scores.amax(-1))


@every_backend
def test_fc78_any_block_size_is_exact(backend: Backend) -> None:
    """A rule made of blocks of 48, whatever block size its tables have."""

    def staircase(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx // 48 == kv_idx // 48) | (kv_idx // 48 == 1)

    q, k, v = random_inputs(1, 2, 1, 5, 290, 8)
    for size in (1, 7, 16, 48, 128, 512) if not backend.slow else (7, 16, 48, 512):
        check(backend, q, k, v, mask=staircase, BLOCK_SIZE=size)


@every_backend
def test_fc52_scores_are_not_loaded_where_no_key_is_allowed(backend: Backend) -> None:
    """Relative tables of exactly the rows that are allowed, behind a length and behind a rule."""
    q, k, v = random_inputs(1, 2, 1, 1, 128, 8)
    table = torch.randn(100, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(1, 1, 1, 128)
    bias[..., 28:] = table.flip(0)
    held = table.to(backend.device)
    rule = lambda s, b, h, q_idx, kv_idx: s + held[q_idx - kv_idx]  # noqa: E731
    mask = create_block_mask(prefix_lm(torch.zeros(1, dtype=torch.int64, device=backend.device))
                             & sliding_window(100))  # fmt: skip
    out = run(backend, q, k, v, block_mask=mask, score_mod=rule)
    close(out, dense_attention(q, k, v, mask=sliding_window(100), bias=bias).out)


def test_fc73_short_sequences_are_not_split() -> None:
    for keys in (1, 64, 512):
        q, k = torch.empty(16, 32, 1, 128), torch.empty(16, 8, keys, 128)
        assert explain(q, k, k, device_name="H200").work.config.num_splits == 1


TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_the_page_of_cases_and_the_tests_agree() -> None:
    written = "\n".join(path.read_text() for path in TESTS.glob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)", written, re.MULTILINE))
    page = PAGE.read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named - tests == set(), "the page names tests that are not there"
    for test in sorted(tests):
        for case in re.findall(r"fc(\d\d)_", test):
            assert f"| FC-{case} " in page, f"the page has no line for {test}"


def test_backends_are_all_covered() -> None:
    assert {backend.name for backend in BACKENDS} == {"cpu", "reference", "triton"}
