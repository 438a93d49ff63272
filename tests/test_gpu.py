"""What only a GPU can show: graphs that replay with new lengths, compilations, repeated bits."""

import pytest
import torch

from flexdecode import append_kv, attention, compile_count, create_block_mask
from flexdecode.masks import causal, sliding_window

pytestmark = pytest.mark.gpu


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


def window_of(ids, size):
    return lambda b, h, q_idx, kv_idx: (
        (q_idx >= kv_idx) & (q_idx - kv_idx < size) & (ids[q_idx] == ids[kv_idx])
    )


def test_fc64_a_graph_replays_with_new_lengths_tables_and_captures():
    B, capacity = 5, 3000
    q, k, v = draw(B, 8, 1, 64), draw(B, 2, capacity, 64), draw(B, 2, capacity, 64)
    kv_len = torch.tensor([1, 40, 700, 2000, 0], device="cuda")
    ids = torch.zeros(capacity, dtype=torch.int64, device="cuda")
    mask = create_block_mask(window_of(ids, 500))
    step = mask.bind(batch=B, heads=8, q_len=1, kv_len=kv_len, kv_capacity=capacity)
    out = torch.full_like(q, float("nan"))

    def decode():
        step.update()
        out.copy_(attention(q, k, v, block_mask=step))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for token in range(200):
        kv_len += 1
        if token % 50 == 25:
            ids[token * 5 :] += 1
        graph.replay()
        if token % 25 == 24:
            expected = attention(q, k, v, block_mask=mask, kv_len=kv_len)
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
            reference = attention(q, k, v, block_mask=mask, kv_len=kv_len, backend="reference")
            torch.testing.assert_close(out, reference, rtol=2e-2, atol=2e-2)


def test_fc58_a_growing_cache_compiles_two_kernels():
    """100 steps, kv_len 1 to 300, a new closure at every step, batches of 1 to 9."""
    ids = torch.zeros(400, dtype=torch.int64, device="cuda")
    counts = []
    before = compile_count()
    for step in range(100):
        B, Lkv = 1 + step % 9, 3 * step + 1
        mask = create_block_mask(window_of(ids, 10 + step))
        k = draw(B, 2, Lkv, 48)
        out = attention(draw(B, 8, 1, 48), k, k, block_mask=mask)
        counts.append(compile_count() - before)
        assert torch.isfinite(out).all()
    assert counts[-1] <= 2, counts


def test_fc58_the_first_token_compiles_all():
    """A cache of 20,000 keys fills up: past every length where launches change."""
    ids = torch.zeros(30_000, dtype=torch.int64, device="cuda")
    q, k = draw(1, 8, 1, 80), draw(1, 2, 20_000, 80)
    near = [2**power + d for power in range(5, 15) for d in (-1, 0, 1)]
    counts = []
    for length in [*range(1, 30), *near, 20_000]:
        mask = create_block_mask(window_of(ids[length % 7 :][:length], length // 2 + 1))
        out = attention(q, k, k, block_mask=mask, kv_len=length)
        counts.append(compile_count())
        newest = k[:, :, length - length // 2 - 1 : length]
        expected = attention(q, newest, newest, backend="reference")
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert counts[0] == counts[-1], counts


@pytest.mark.parametrize("B", [1, 3, 160])
@pytest.mark.parametrize("capacity", [600, 9000])
def test_calls_that_overlap_see_what_earlier_ones_wrote(B, capacity):
    """Each call's query is the output of the one before; whole rows, and rows in splits."""
    k, v = draw(B, 1, capacity, 64), draw(B, 1, capacity, 64)
    first = draw(B, 4, 1, 64)
    ends = []
    for wait in (True, False):
        q = first
        for step in range(60):
            q = attention(q, k, v, kv_len=capacity - step % 3 * (capacity - 300) // 2)
            if wait:
                torch.cuda.synchronize()
        ends.append(q)
    assert torch.isfinite(ends[0]).all() and torch.equal(*ends)


@pytest.mark.parametrize("lengths", ["equal", "ragged"])
def test_fc40_repeats_give_equal_bits(lengths):
    B, capacity = 6, 20000
    q, k, v = draw(B, 8, 1, 128), draw(B, 2, capacity, 128), draw(B, 2, capacity, 128)
    kv_len = None
    if lengths == "ragged":
        kv_len = torch.tensor([20000, 3, 0, 900, 8000, 64], device="cuda")
    mask = create_block_mask(causal & sliding_window(12345))
    first = attention(q, k, v, block_mask=mask, kv_len=kv_len)
    assert torch.isfinite(first).all()
    for _ in range(300):
        assert torch.equal(attention(q, k, v, block_mask=mask, kv_len=kv_len), first)


def test_streams_do_not_share_scratch():
    """Calls on two streams at once give what each gives alone."""
    q, k, v = draw(1, 8, 1, 128), draw(1, 2, 30000, 128), draw(1, 2, 30000, 128)
    other = draw(1, 8, 1, 128)
    alone, other_alone = attention(q, k, v), attention(other, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        with torch.cuda.stream(side):
            there = attention(other, k, v)
        here = attention(q, k, v)
        torch.cuda.synchronize()
        assert torch.equal(here, alone)
        assert torch.equal(there, other_alone)


def test_sequences_longer_than_a_table_row_program():
    """Tables of long rows take two launches, of short ones one: both equal the reference."""
    for capacity in (8192, 40000):
        q, k, v = draw(2, 4, 2, 32), draw(2, 2, capacity, 32), draw(2, 2, capacity, 32)
        kv_len = torch.tensor([capacity, 77], device="cuda")
        flags = torch.rand(capacity, device="cuda") < 0.3
        mask = create_block_mask(lambda b, h, q_idx, kv_idx, f=flags: f[kv_idx] & (q_idx >= kv_idx))
        out = attention(q, k, v, block_mask=mask, kv_len=kv_len)
        reference = attention(q, k, v, block_mask=mask, kv_len=kv_len, backend="reference")
        torch.testing.assert_close(out, reference, rtol=2e-2, atol=2e-2)


def test_numbers_on_the_cpu_are_read_at_every_call():
    """A captured 0-dim CPU tensor works as in torch; a longer one is refused before a launch."""
    q, k, v = draw(1, 4, 1, 32), draw(1, 2, 300, 32), draw(1, 2, 300, 32)
    factor, window = torch.tensor(2.0), torch.tensor(7)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window)

    def scaled(score, b, h, q_idx, kv_idx):
        return score * factor

    for number in (2.0, 0.25):
        factor.fill_(number)
        window.fill_(int(number * 40))
        out = attention(q, k, v, score_mod=scaled, block_mask=mask)
        kept = k[:, :, 300 - int(window) :], v[:, :, 300 - int(window) :]
        expected = attention(q, *kept, scale=number * 32**-0.5)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    slopes = torch.ones(4)
    with pytest.raises(ValueError, match="score_mod: expected the captured tensor slopes on cuda"):
        attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s * slopes[h])


@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_replays_with_new_lengths_starts_and_pages(packed):
    """1,000 replays while every length, start and page moves; appending is part of the graph."""
    B, size, entries, rows = 6, 16, 40, 9
    pools = draw(2, B * entries, size, 2, 64).transpose(2, 3)
    k, v = pools[0], pools[1]
    table = torch.empty(B, entries, dtype=torch.int32, device="cuda")
    kv_len = torch.empty(B, dtype=torch.int32, device="cuda")
    kv_start = torch.empty(B, dtype=torch.int32, device="cuda")
    starts = torch.zeros(B + 1, dtype=torch.int32, device="cuda")
    q = draw(1, 8, rows, 64) if packed else draw(B, 8, 1, 64)
    new = draw(1, 2, rows, 64) if packed else draw(B, 2, 1, 64)
    at = torch.Generator().manual_seed(0)

    def move():
        lengths = torch.randint(0, (entries - 2) * size - rows, (B,), generator=at)
        kv_len.copy_(lengths)
        kv_start.copy_(torch.randint(0, 2 * size, (B,), generator=at))
        table.copy_(torch.randperm(B * entries, generator=at).view(B, entries))
        cuts = torch.randint(0, rows + 1, (B - 1,), generator=at).sort().values
        starts[1:-1].copy_(cuts)
        starts[-1] = rows

    move()
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % 97 != b))
    places = {"kv_start": kv_start, "page_table": table}
    packing = {"cu_seqlens_q": starts} if packed else {}
    step = mask.bind(
        batch=B, heads=8, q_len=q.shape[2], kv_len=kv_len, kv_capacity=entries * size,
        **places, **packing,
    )  # fmt: skip
    out = torch.full_like(q, float("nan"))

    def decode():
        writing = {"cu_seqlens": starts} if packed else {}
        append_kv(k, v, new, new, kv_len=kv_len, **places, **writing)
        added = starts.diff() if packed else 1
        kv_len.add_(added)
        step.update()
        out.copy_(attention(q, k, v, block_mask=step))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for replay in range(1000):
        move()
        graph.replay()
        options = {"block_mask": mask, "kv_len": kv_len, **places, **packing}
        if replay % 4 == 0:
            torch.testing.assert_close(
                out, attention(q, k, v, **options), rtol=2e-2, atol=2e-2, msg=f"replay {replay}"
            )
        if replay % 100 == 0:
            reference = attention(q, k, v, **options, backend="reference")
            torch.testing.assert_close(out, reference, rtol=2e-2, atol=2e-2)


def test_pools_beyond_two_to_the_31_elements():
    """The last pages of a pool of 2.4e9 elements, keys last in memory."""
    pages, size = 9400, 128
    pool = torch.zeros(pages, size, 16, 128, dtype=torch.bfloat16, device="cuda")
    assert pool.numel() > 2**31
    k = pool.transpose(1, 2)
    table = torch.tensor([[pages - 1, 3], [pages - 2, pages - 1]], dtype=torch.int32, device="cuda")
    new = draw(2, 16, 130, 128)
    kv_len = torch.zeros(2, dtype=torch.int32, device="cuda")
    append_kv(k, k, new[:1], new[:1], kv_len=0, page_table=table[:1])
    append_kv(k, k, new[1:], new[1:], kv_len=0, page_table=table[1:])
    kv_len += 130
    q = draw(2, 16, 1, 128)
    out = attention(q, k, k, page_table=table, kv_len=kv_len)
    # Sequence 0 sees its own two keys of page 3 and what sequence 1 wrote over its first page.
    first = torch.cat([new[1:, :, 128:], new[:1, :, 2:128], new[:1, :, 128:]], 2)
    kv = torch.cat([first, new[1:]])
    kv[1, :, 128:] = new[1, :, 128:]
    torch.testing.assert_close(out, attention(q, kv, kv, backend="reference"), rtol=2e-2, atol=2e-2)
