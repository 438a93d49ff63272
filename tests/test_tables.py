"""Tables equal the dense mask, block by block, whatever the mask, the lengths and the blocks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from mask_oracle import dense_states

from flexdecode import block_elements
from flexdecode.device_tables import unite_heads
from flexdecode.tables import (
    Extent,
    Tables,
    block_states,
    build_into,
    build_tables,
    cached_tables,
    table_states,
    tables_from_mask_states,
)
from flexdecode.trace import trace

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([0] * 70 + [1] * 33 + [2] * 140 + [3] * 57)  # exactly 300 tokens
WINDOWS = torch.tensor([3, 40, 17, 130])
LENGTHS = torch.tensor([1, 64, 129, 300])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 50)


def strided(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 == 0


def documents(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def windows_by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < WINDOWS[h]


def lengths_by_batch(b, h, q_idx, kv_idx):
    return kv_idx < LENGTHS[b]


def everything(b, h, q_idx, kv_idx):
    return kv_idx >= 0


def nothing(b, h, q_idx, kv_idx):
    return kv_idx < 0


def rows_only(b, h, q_idx, kv_idx):
    return q_idx % 2 == 0


MASKS = [
    causal,
    window,
    strided,
    documents,
    windows_by_head,
    lengths_by_batch,
    everything,
    nothing,
    rows_only,
]
BLOCKS = [
    (16, 16),
    (32, 32),
    (64, 64),
    (128, 128),
    (64, 128),
    (128, 16),
    (1, 24),
    (1 << 20, 1 << 20),
]


def extent(
    Lq: int,
    Lkv: int,
    block: tuple[int, int] = (128, 128),
    *,
    B: int = 1,
    H: int = 1,
    kv_len: int | Tensor | None = None,
    q_offset: int | Tensor | None = None,
) -> Extent:
    kv_len = Lkv if kv_len is None else kv_len
    if q_offset is None:
        q_offset = (kv_len.clamp(0, Lkv) if isinstance(kv_len, Tensor) else kv_len) - Lq
    return Extent(B, H, Lq, Lkv, kv_len, q_offset, block, CPU)


def states_of(mask, what: Extent) -> Tensor:
    """Block states through lists and back, expanded over batch and heads."""
    tables = build_tables(trace(mask, "mask"), what)
    assert tables.exact
    for counts, indices in tables.pairs():
        assert counts.dtype == indices.dtype == torch.int32
        place = torch.arange(indices.shape[-1])
        listed = place < counts[..., None]
        assert not indices[~listed].any(), "the rest of a list is 0"
        ascending = indices[..., 1:] > indices[..., :-1]
        assert bool((ascending | ~listed[..., 1:]).all())
    states = table_states(tables)
    return states.expand(what.B, what.H, *states.shape[2:])


def check(mask, what: Extent) -> None:
    assert torch.equal(states_of(mask, what), dense_states(mask, what))


def picture(states: Tensor) -> list[str]:
    return ["".join(".+#"[state] for state in row) for row in states.tolist()]


def test_pictures():
    """Empty ``.``, partial ``+``, full ``#``."""
    assert picture(states_of(causal, extent(8, 8, (2, 2)))[0, 0]) == [
        "+...",
        "#+..",
        "##+.",
        "###+",
    ]
    assert picture(states_of(causal, extent(8, 8, (4, 2)))[0, 0]) == ["++..", "##++"]
    assert picture(states_of(causal, extent(8, 8, (2, 4)))[0, 0]) == ["+.", "+.", "#+", "#+"]
    # The last of five rows alone in its block counts alone; keys end inside a block.
    assert picture(states_of(causal, extent(5, 5, (2, 2)))[0, 0]) == ["+..", "#+.", "##+"]
    assert picture(states_of(everything, extent(4, 5, (2, 2)))[0, 0]) == ["##+", "##+"]


def test_fc11_two_queries_at_the_end_of_three_keys():
    assert picture(states_of(causal, extent(2, 3, (1, 1)))[0, 0]) == ["##.", "###"]
    per_row = extent(2, 4, (1, 1), B=2, kv_len=torch.tensor([3, 2]))
    assert picture(states_of(causal, per_row)[0, 0]) == ["##..", "###."]
    assert picture(states_of(causal, per_row)[1, 0]) == ["#...", "##.."]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_equals_dense(mask, block):
    for Lq, Lkv in ((1, 300), (5, 297), (130, 300), (300, 300), (64, 128), (3, 2)):
        check(mask, extent(Lq, Lkv, block, B=4, H=4))


@pytest.mark.parametrize("block", BLOCKS[:5], ids=str)
def test_fc29_no_tail_key_is_dropped_at_any_length(block):
    for kv_len in range(1, 301, 1 if block == (128, 128) else 7):
        check(everything, extent(1, kv_len, block))
        check(documents, extent(1, kv_len, block))
        check(causal, extent(2, 300, block, kv_len=kv_len))


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_lengths_and_offsets_per_sequence(mask):
    lengths = torch.tensor([0, 1, 128, 300])
    for offset in (None, 7, torch.tensor([0, -5, 100, 3])):
        for Lq in (1, 40):
            check(mask, extent(Lq, 300, (16, 64), B=4, H=4, kv_len=lengths, q_offset=offset))
            check(mask, extent(Lq, 300, (16, 64), B=4, H=4, kv_len=260, q_offset=offset))


def test_lengths_are_clamped_to_the_capacity():
    wild = states_of(everything, extent(1, 256, B=3, kv_len=torch.tensor([-4, 1000, 256])))
    assert wild[:, 0, 0].tolist() == [[0, 0], [2, 2], [2, 2]]


def test_fc02_offsets_as_int_and_tensors_give_identical_tables():
    mask = trace(causal, "mask")
    as_int = build_tables(mask, extent(1, 2048, q_offset=99))
    for offset in (torch.tensor(99), torch.tensor([99]), torch.tensor([99], dtype=torch.int32)):
        as_tensor = build_tables(mask, extent(1, 2048, q_offset=offset))
        assert all(map(torch.equal, as_int.tensors, as_tensor.tensors))
    for position in (torch.tensor(99), torch.tensor([99])):

        def captured(b, h, q_idx, kv_idx, position=position):
            return q_idx + position >= kv_idx

        tables = build_tables(trace(captured, "mask"), extent(1, 2048, q_offset=0))
        assert all(map(torch.equal, as_int.tensors, tables.tensors))


def test_fc30_a_capture_of_exactly_s_entries_is_enough():
    for S in (240, 300):
        ids = DOCUMENTS[:S].clone()

        def same(b, h, q_idx, kv_idx, ids=ids):
            return ids[q_idx] == ids[kv_idx]

        for block in ((128, 128), (64, 128), (8, 8)):
            check(same, extent(S, S, block))


def test_fc30_rectangular_blocks_are_not_swapped():
    states = states_of(causal, extent(256, 512, (64, 128), q_offset=0))
    assert states.shape == (1, 1, 4, 4)
    assert picture(states[0, 0]) == ["+...", "+...", "#+..", "#+.."]


def test_size_one_where_nothing_varies():
    def shape(mask, **more):
        tables = build_tables(trace(mask, "mask"), extent(1, 300, B=4, H=4, **more))
        return tuple(tables.kv_num_blocks.shape[:2])

    lengths = torch.tensor([1, 2, 3, 300])
    assert shape(causal) == (1, 1)
    assert shape(windows_by_head) == (1, 4)
    assert shape(lengths_by_batch) == (4, 1)
    assert shape(causal, kv_len=lengths) == (4, 1)
    assert shape(causal, q_offset=lengths) == (4, 1)
    assert shape(everything, q_offset=lengths) == (1, 1), "no query position, no offset"


def test_zero_sizes():
    for Lq, Lkv, B in ((0, 300, 2), (1, 0, 2), (0, 0, 1), (1, 300, 0)):
        for kv_len in (Lkv, torch.full((B,), Lkv)):
            tables = build_tables(trace(causal, "mask"), extent(Lq, Lkv, B=B, kv_len=kv_len))
            assert tables.kv_num_blocks.shape[2] == -(-Lq // 128)
            assert tables.num_kv_blocks == -(-Lkv // 128)


@pytest.mark.parametrize("work", [1, 100, 1 << 12])
def test_chunks_of_any_size_give_the_same_tables(monkeypatch, work):
    masks = [window, strided, windows_by_head, lengths_by_batch]
    whole = [states_of(mask, extent(50, 110, (16, 24), B=3, H=4)) for mask in masks]
    lone = states_of(causal, extent(50, 110, (1 << 20, 1 << 20)))
    monkeypatch.setattr(block_elements, "WORK_ELEMENTS", work)
    seen = []

    def watched(mask, b, h, q_idx, kv_idx):
        result = evaluate(mask, b, h, q_idx, kv_idx)
        seen.append(result.numel())
        return result

    evaluate = block_elements.evaluate
    monkeypatch.setattr(block_elements, "evaluate", watched)
    for mask, expected in zip(masks, whole, strict=True):
        assert torch.equal(states_of(mask, extent(50, 110, (16, 24), B=3, H=4)), expected)
    assert torch.equal(states_of(causal, extent(50, 110, (1 << 20, 1 << 20))), lone)
    assert max(seen, default=0) <= max(work, 1024)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_dense_captures(data):
    B, H = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([1, 2]))
    Lq, Lkv = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    block = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    density = data.draw(st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    allowed = torch.rand((B, H, Lq, Lkv), generator=generator) < density

    def captured(b, h, q_idx, kv_idx):
        return allowed[b, h, q_idx, kv_idx]

    kv_len: int | Tensor = data.draw(st.integers(0, Lkv))
    if data.draw(st.booleans()):
        kv_len = torch.randint(0, Lkv + 1, (B,), generator=generator)
    check(captured, extent(Lq, Lkv, block, B=B, H=H, kv_len=kv_len, q_offset=0))


def test_compact_lists_say_the_same():
    states = block_states(trace(window, "mask"), extent(300, 300, (16, 16)))
    wide = tables_from_mask_states(states, (16, 16))
    narrow = tables_from_mask_states(states, (16, 16), compact=True)
    assert wide.kv_indices.shape[-1] == 19
    assert narrow.kv_indices.shape[-1] == int(wide.kv_num_blocks.max()) < 19
    assert torch.equal(table_states(narrow), states)
    assert torch.equal(table_states(wide), states)


def test_entries_past_the_count_are_ignored():
    states = block_states(trace(window, "mask"), extent(300, 300, (16, 16)))
    tables = tables_from_mask_states(states, (16, 16))
    for counts, indices in tables.pairs():
        place = torch.arange(indices.shape[-1])
        indices.masked_fill_(place >= counts[..., None], -(1 << 30))
    assert torch.equal(table_states(tables), states)


def test_fc16_union_of_the_heads_of_a_group(device):
    def local(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 16 * (h + 1))

    what = extent(8, 300, (128, 16), H=8)
    tables = build_tables(trace(local, "mask"), what)
    lists = unite_heads(tables.map(lambda table: table.to(device)), Hkv=2)
    block_state = lists.state.cpu()
    assert torch.equal(block_state, dense_states(local, what))
    assert lists.kv_num_blocks.shape == (1, 2, 1)
    union = Tables(
        lists.kv_num_blocks.cpu(),
        lists.kv_indices.cpu(),
        lists.full_kv_num_blocks.cpu(),
        lists.full_kv_indices.cpu(),
        tables.BLOCK_SIZE,
        tables.num_kv_blocks,
        tables.exact,
    )
    grouped = block_state.view(1, 2, 4, 1, -1)
    merged = table_states(union)
    assert torch.equal(merged > 0, (grouped > 0).any(2))
    assert torch.equal(merged == 2, (grouped == 2).all(2))


def test_cache_holds_pure_functions_of_numbers_only():
    ids = DOCUMENTS.clone()

    def same(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    def near(width):
        return trace(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width, "mask")

    what = extent(1, 300)
    assert cached_tables(near(9), what) is cached_tables(near(9), what)
    assert cached_tables(near(9), what) is not cached_tables(near(10), what)
    assert cached_tables(near(9), what) is not cached_tables(near(9), extent(1, 300, kv_len=299))
    lengths = extent(1, 300, kv_len=torch.tensor([300]))
    assert cached_tables(near(9), lengths) is not cached_tables(near(9), lengths)

    mask = trace(same, "mask")
    before = table_states(cached_tables(mask, what))
    ids.zero_()
    assert not torch.equal(before, table_states(cached_tables(mask, what)))


def test_cached_tables_outlive_inference_mode():
    with torch.inference_mode():
        tables = cached_tables(trace(lambda b, h, q, kv: q - kv < 77, "mask"), extent(1, 301))
    assert not any(table.is_inference() for table in tables.tensors)


def test_fixed_buffers_keep_their_addresses():
    mask = trace(causal, "mask")
    buffers = build_tables(mask, extent(1, 300, kv_len=5), compact=False)
    addresses = [table.data_ptr() for table in buffers.tensors]
    for kv_len in (300, 129, 0):
        what = extent(1, 300, kv_len=kv_len)
        build_into(buffers, mask, what)
        assert torch.equal(table_states(buffers), dense_states(causal, what))
    assert addresses == [table.data_ptr() for table in buffers.tensors]
