"""Block tables that a GPU makes, at sizes that only a GPU makes them in: equal to the CPU's."""

import pytest
import torch

from flexdecode import attention, create_block_mask
from flexdecode.masks import causal

pytestmark = pytest.mark.gpu


def same_tables(first, second):
    """Equal counts, and equal lists up to them."""
    for counts, indices, others, theirs in zip(
        *(x for mask in (first, second) for x in lists(mask)), strict=True
    ):
        if not torch.equal(counts.cpu(), others.cpu()):
            return False
        width = min(indices.shape[-1], theirs.shape[-1])
        assert int(counts.max()) <= width
        listed = torch.arange(width) < counts.cpu()[..., None]
        if not torch.equal(indices[..., :width].cpu()[listed], theirs[..., :width].cpu()[listed]):
            return False
    return True


def lists(mask):
    return (
        (mask.kv_num_blocks, mask.full_kv_num_blocks),
        (mask.kv_indices, mask.full_kv_indices),
    )


def built(rule, side, device, **more):
    return create_block_mask(rule, Q_LEN=side, KV_LEN=side, device=device, **more)


def peak_of(call):
    """What `call` returns, and the MiB that were allocated at most meanwhile."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def test_a_long_causal_mask():
    on_gpu, mib = peak_of(lambda: built(causal, 65536, "cuda"))
    assert mib <= 64
    assert same_tables(on_gpu, built(causal, 65536, "cpu"))


def test_a_million_tokens():
    """Documents, a window and causality: within 256 MiB beside the tables."""
    side, window = 1 << 20, 8192
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(side, generator=generator) < 1 / 5000).cumsum(0)

    def rule_on(documents):
        return lambda b, h, q, kv: (q >= kv) & (q - kv < window) & (documents[q] == documents[kv])

    there = ids.cuda()
    on_gpu, mib = peak_of(lambda: built(rule_on(there), side, "cuda"))
    tables = sum(x.numel() * 4 for pair in lists(on_gpu) for x in pair) / 2**20
    assert mib - tables <= 256
    assert same_tables(on_gpu, built(rule_on(ids), side, "cpu"))


@pytest.mark.parametrize("block", [128, (64, 48), (100, 256)], ids=str)
def test_what_intervals_cannot_decide(block):
    """A hash of the positions leaves every block to its elements; noise most of them."""
    flags = torch.rand(8192, generator=torch.Generator().manual_seed(1)) < 0.999

    def hashed(b, h, q, kv):
        return (q * 7919 + kv * 104729) % 1013 < 1010

    def noisy(flags):
        return lambda b, h, q, kv: flags[q] & flags[kv] & (q // 1000 != kv // 700)

    assert same_tables(
        built(hashed, 8192, "cuda", BLOCK_SIZE=block), built(hashed, 8192, "cpu", BLOCK_SIZE=block)
    )
    assert same_tables(
        built(noisy(flags.cuda()), 8192, "cuda", BLOCK_SIZE=block),
        built(noisy(flags), 8192, "cpu", BLOCK_SIZE=block),
    )


@pytest.mark.parametrize("q_len", [1, 2048])
def test_updates_replay_in_a_graph(q_len):
    """One row of blocks takes the kernel of elements, many rows that of intervals."""
    capacity, heads = 16384, 4
    kv_len = torch.tensor([2048, 9000], device="cuda")
    widths = torch.tensor([64, 200, 3000, 5], device="cuda")
    mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < widths[h]))
    bind = {"batch": 2, "heads": heads, "q_len": q_len, "kv_capacity": capacity}
    step = mask.bind(**bind, kv_len=kv_len)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step.update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.update()
    for token in range(300):
        kv_len += 17
        if token == 150:
            widths += 700
        graph.replay()
        if token % 50 == 49:
            assert same_tables(step, mask.bind(**bind, kv_len=kv_len))


def test_packed_queries_and_starts_by_intervals(monkeypatch):
    from flexdecode import device_tables

    cu = torch.tensor([0, 700, 701, 1500], dtype=torch.int32, device="cuda")
    kv_len = torch.tensor([4000, 90, 2500], device="cuda")
    start = torch.tensor([96, 0, 30], device="cuda")
    mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 300 * (b + 1)))
    call = {"batch": 3, "heads": 2, "q_len": 1500, "kv_len": kv_len, "kv_capacity": 4096}
    found = []
    for intervals in (False, True):
        monkeypatch.setattr(
            device_tables, "_gains_by_intervals", lambda extent, gains=intervals: gains
        )
        found.append(mask.bind(**call, cu_seqlens_q=cu, kv_start=start))
    assert same_tables(*found)


def test_lists_united_in_a_graph_are_not_used_outside_of_it():
    """They are written when the graph is replayed, not when it is captured."""
    widths = torch.tensor([64, 2000, 300, 5], device="cuda")
    rule = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < widths[h]))
    q = torch.randn(1, 4, 1, 64, device="cuda")
    k, v = torch.randn(2, 1, 2, 4096, 64, device="cuda")

    def bound():
        return rule.bind(batch=1, heads=4, q_len=1, kv_len=4096, device="cuda")

    expected = attention(q, k, v, block_mask=bound(), backend="reference")
    attention(q, k, v, block_mask=bound())  # compiles
    step, graph = bound(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        inside = attention(q, k, v, block_mask=step)
    torch.testing.assert_close(attention(q, k, v, block_mask=step), expected)
    inside.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(inside, expected)
