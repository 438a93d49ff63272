"""Sizes at which 32-bit arithmetic and grids end, graphs, streams, threads, devices: on a GPU.

A test takes up to 25 GB of the GPU's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import (
    BlockMask,
    append_kv,
    attention,
    create_block_mask,
    merge_attentions,
    merge_attentions_,
    quantize,
)
from flexdecode.masks import causal, documents, sink_window, sliding_window
from tests.helpers import dense_attention

pytestmark = pytest.mark.gpu

FAR = (1 << 31) + 64  # elements


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """These tests take tens of gigabytes, and others run beside them."""
    yield
    torch.cuda.empty_cache()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def spread(x: Tensor, axis: int) -> Tensor:
    """Copy a tensor so that the ends of one axis lie 2**31 elements apart; the rest is not read."""
    steps = x.shape[axis] - 1
    near = x.select(axis, 0)
    step = -(-FAR // steps) + near.numel()
    step += -step % 64
    strides = list(near.contiguous().stride())
    strides.insert(axis, step)
    memory = torch.zeros(steps * step + near.numel(), dtype=x.dtype, device="cuda")
    return memory.as_strided(x.shape, strides).copy_(x)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2e-2, atol=2e-2)


# ---- addresses ----


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_fc49_strides_of_keys_and_values(axis: int, splits: int) -> None:
    q, k, v = draw(2, 8, 2, 64), draw(2, 2, 700, 64), draw(2, 2, 700, 64)
    mask = create_block_mask(causal & sliding_window(500))
    wanted = dense_attention(q, k, v, mask=causal & sliding_window(500)).out
    options = {"num_splits": splits}
    close(attention(q, spread(k, axis), v, block_mask=mask, kernel_options=options), wanted)
    close(attention(q, k, spread(v, axis), block_mask=mask, kernel_options=options), wanted)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_fc49_strides_of_queries(axis: int) -> None:
    q, k, v = draw(2, 8, 3, 64), draw(2, 2, 700, 64), draw(2, 2, 700, 64)
    out = attention(spread(q, axis), k, v, block_mask=create_block_mask(causal))
    close(out, dense_attention(q, k, v, mask=causal).out)


def test_fc49_captures() -> None:
    """Dense tables of 2.5e9 elements, read at their end by mask and score."""
    keys = 50_000
    flags = torch.zeros(keys, keys, dtype=torch.bool, device="cuda")
    bias = torch.zeros(keys, keys, dtype=torch.float16, device="cuda")
    flags[-2:] = torch.rand(2, keys, device="cuda") < 0.5
    bias[-2:] = torch.randn(2, keys, device="cuda")
    q, k, v = draw(1, 4, 2, 64), draw(1, 1, keys, 64), draw(1, 1, keys, 64)
    rule = lambda b, h, q_idx, kv_idx: flags[q_idx, kv_idx]  # noqa: E731
    score = lambda s, b, h, q_idx, kv_idx: s + bias[q_idx, kv_idx]  # noqa: E731
    out = attention(q, k, v, block_mask=create_block_mask(rule), score_mod=score)
    wanted = dense_attention(
        q, k, v, mask=rule, score_mod=lambda s, b, h, i, j: s + bias[i, j].double()
    )
    close(out, wanted.out)


@pytest.mark.parametrize("axis", [1, 2])
def test_fc49_bias(axis: int) -> None:
    q, k, v = draw(1, 4, 2, 64), draw(1, 1, 700, 64), draw(1, 1, 700, 64)
    bias = torch.randn(1, 4, 2, 700, dtype=torch.float16, device="cuda")
    out = attention(q, k, v, bias=spread(bias, axis))
    close(out, dense_attention(q, k, v, bias=bias).out)


def test_fc49_page_tables() -> None:
    q, k, v = draw(2, 4, 1, 64), draw(2, 1, 640, 64), draw(2, 1, 640, 64)
    table = torch.randperm(80, device="cuda").view(2, 40).int()
    pools = [torch.zeros(80, 1, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    far = spread(table, 0)
    append_kv(*pools, k, v, kv_len=0, page_table=far)
    out = attention(q, *pools, kv_len=640, page_table=far)
    close(out, dense_attention(q, k, v).out)


def test_fc49_tables_of_blocks() -> None:
    q, k, v = draw(2, 4, 1, 64), draw(2, 1, 1280, 64), draw(2, 1, 1280, 64)
    counts = torch.tensor([3, 2], device="cuda").view(2, 1, 1).int()
    indices = torch.tensor([[0, 5, 9], [2, 8, 0]], device="cuda").view(2, 1, 1, 3).int()
    mask = BlockMask.from_kv_blocks(counts, spread(indices, 0), seq_lengths=(1, 1280))
    out = attention(q, k, v, block_mask=mask)
    listed = torch.zeros(2, 10, dtype=torch.bool, device="cuda")
    listed[0, [0, 5, 9]], listed[1, [2, 8]] = True, True
    close(out, dense_attention(q, k, v, mask=lambda b, h, i, j: listed[b, j // 128]).out)


def test_fc49_output_and_statistics() -> None:
    """525,000 sequences of 32 heads: 2.15e9 elements of q and of the output."""
    B = 525_000
    q = torch.zeros(B, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    q[-3:] = draw(3, 32, 1, 128)
    k, v = draw(1, 1, 40, 128), draw(1, 1, 40, 128)
    out = attention(q, k, v)
    assert out.numel() > 2**31
    close(out[-3:], dense_attention(q[-3:], k, v).out)
    close(out[:1], dense_attention(q[:1], k, v).out)


def test_fc49_scratch() -> None:
    """Partial accumulators of 2.16e9 elements."""
    q, k, v = draw(1, 64, 2048, 256), draw(1, 2, 8448, 256), draw(1, 2, 8448, 256)
    many = attention(q, k, v, kernel_options={"num_splits": 66})
    assert 66 * many.numel() > 2**31
    torch.testing.assert_close(many, attention(q, k, v, kernel_options={"num_splits": 1}),
                               rtol=2e-2, atol=2e-2)  # fmt: skip
    close(many[:, -2:, -1:], dense_attention(q[:, -2:, -1:], k[:, -1:], v[:, -1:]).out)


# ---- grids ----


@pytest.mark.parametrize("heads", [1, 32])
def test_fc51_batch_times_heads_beyond_65535(heads: int) -> None:
    B = 70_000 // heads * 2
    v = draw(B, heads, 1, 16)
    for options in ({}, {"num_splits": 2}):
        assert torch.equal(attention(torch.randn_like(v), v, v, kernel_options=options), v)
    kv_len = torch.arange(B, device="cuda") % 2
    for mask in (None, create_block_mask(causal), create_block_mask(lambda b, h, i, j: j < b)):
        out = attention(torch.randn_like(v), v, v, kv_len=kv_len, block_mask=mask)
        assert torch.equal(out, v * kv_len.view(B, 1, 1, 1))


def test_fc51_appending_packing_and_merging_many() -> None:
    B = 70_000
    table = torch.randperm(B, device="cuda").int().view(B, 1)
    pools = [torch.zeros(B, 1, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    new = draw(B, 1, 1, 16)
    append_kv(*pools, new, new, kv_len=0, page_table=table)
    starts = torch.arange(B + 1, device="cuda").int()
    q = draw(1, 1, B, 16)
    out = attention(q, *pools, kv_len=1, page_table=table, cu_seqlens_q=starts)
    assert torch.equal(out[0, 0], new[:, 0, 0])
    lse = torch.zeros(1, 1, B, device="cuda")
    merged, total = merge_attentions([out, out], [lse, lse])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(total, torch.full_like(total, 2.0).log())


def test_a_million_keys() -> None:
    keys = 1_000_000
    q, k, v = draw(1, 8, 1, 64), draw(1, 1, keys, 64), draw(1, 1, keys, 64)
    ids = torch.arange(keys, device="cuda") // 70_000
    for rule in (causal, sliding_window(999_000), sink_window(4, 5000), documents(ids)):
        out = attention(q, k, v, block_mask=create_block_mask(rule))
        close(out, dense_attention(q, k, v, mask=rule).out)
    stored = [quantize(x, "fp8") for x in (k, v)]
    torch.testing.assert_close(attention(q, *stored).double(), dense_attention(q, k, v).out,
                               rtol=5e-2, atol=2e-2)  # fmt: skip


# ---- the same bits ----


@pytest.mark.parametrize("kind", ["equal", "ragged", "table"])
def test_fc40_a_thousand_repeats_beside_other_work(kind: str) -> None:
    """Bits stay while another stream loads the device more and less."""
    q, k, v = draw(5, 8, 2, 128), draw(5, 2, 6000, 128), draw(5, 2, 6000, 128)
    kv_len = None if kind == "equal" else torch.tensor([6000, 3, 0, 900, 64], device="cuda")
    flags = torch.rand(6000, device="cuda") < 0.9
    mask = create_block_mask(causal)
    if kind == "table":
        mask = create_block_mask(lambda b, h, i, j: flags[j] & (j <= i))
    first = attention(q, k, v, block_mask=mask, kv_len=kv_len)
    assert torch.isfinite(first).all()
    side = torch.cuda.Stream()
    work = draw(4096, 4096)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for repeat in range(1000):
        if repeat % 7 < 3:
            with torch.cuda.stream(side):
                n = 256 << (repeat % 5)
                work[:n] @ work[:, :n]
        differ += (attention(q, k, v, block_mask=mask, kv_len=kv_len) != first).any()
    assert int(differ) == 0


def test_fc64_4096_replays_equal_eager_calls() -> None:
    """Lengths, page table, captures, sinks and queries change between replays."""
    B, size, entries = 4, 16, 24
    k, v = draw(2, B * entries, 2, size, 64)
    q = draw(B, 8, 1, 64)
    table = torch.arange(B * entries, device="cuda", dtype=torch.int32).view(B, entries)
    kv_len = torch.full((B,), 100, dtype=torch.int32, device="cuda")
    ids = torch.zeros(size * entries, dtype=torch.int64, device="cuda")
    slopes, sinks = torch.rand(8, device="cuda"), torch.randn(8, device="cuda")
    rule = lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)  # noqa: E731
    score = lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx - kv_idx)  # noqa: E731
    step = create_block_mask(rule, BLOCK_SIZE=32).bind(
        batch=B, heads=8, q_len=1, kv_len=kv_len, kv_capacity=size * entries, page_table=table
    )
    out = torch.full_like(q, torch.nan)

    def decode() -> Tensor:
        step.update()
        return attention(q, k, v, block_mask=step, score_mod=score, sinks=sinks)

    torch.cuda.synchronize()  # a page table that is not there yet names any page
    with torch.cuda.stream(torch.cuda.Stream()):
        out.copy_(decode())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(decode())
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(4096):
        kv_len.random_(0, size * entries + 1)
        slopes.uniform_(0, 0.2)
        sinks.normal_()
        q.normal_()
        if replay % 8 == 0:
            table.copy_(torch.randperm(B * entries, device="cuda").view(B, entries))
            ids.random_(0, 3)
        graph.replay()
        differ += (out != decode()).any()
        if replay % 512 == 0:
            pages = [x[table.long()].transpose(1, 2).flatten(2, 3) for x in (k, v)]
            close(out, dense_attention(q, *pages, mask=rule, score_mod=score, kv_len=kv_len,
                                       sinks=sinks).out)  # fmt: skip
    assert int(differ) == 0


# ---- threads and devices ----


def test_eight_threads_with_masks_and_streams_of_their_own() -> None:
    q, k, v = draw(2, 8, 1, 64), draw(2, 2, 3000, 64), draw(2, 2, 3000, 64)
    ids = torch.arange(3000, device="cuda") // 290
    failures: list[BaseException] = []
    start = threading.Barrier(8)
    torch.cuda.synchronize()

    def rule_of(n: int) -> Callable[..., Any]:
        width = 100 + 300 * n
        rules: list[Any] = [
            sliding_window(width),
            sink_window(n + 1, width),
            documents(ids) & causal,
            lambda b, h, i, j: (i - j < width) & (j % 7 != h % 3),
        ]
        return rules[n % 4]

    def work(n: int) -> None:
        try:
            stream = torch.cuda.Stream()
            rule = rule_of(n)
            mask = create_block_mask(rule)
            wanted = dense_attention(q, k, v, mask=rule).out
            start.wait(timeout=60)
            with torch.cuda.stream(stream):
                found = [
                    attention(q, k, v, block_mask=mask, kernel_options={"num_splits": 1 + n})
                    for _ in range(40)
                ]
            stream.synchronize()
            for out in found:
                assert torch.equal(out, found[0])
            close(found[0], wanted)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_fc65_a_gpu_and_the_cpu() -> None:
    q, k, v = draw(1, 4, 1, 64), draw(1, 2, 300, 64), draw(1, 2, 300, 64)
    ids = torch.zeros(300, dtype=torch.int64)
    for name, call in {
        "v": {"v": v.cpu()},
        "kv_len": {"kv_len": torch.tensor([3])},
        "sinks": {"sinks": torch.zeros(4)},
        "bias": {"bias": torch.zeros(1, 1, 1, 300)},
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: expected device cuda:\d.*, got cpu"):
            attention(**{"q": q, "k": k, "v": v, **call})
    with pytest.raises(
        ValueError, match=r"mask_mod: expected the captured tensor ids on cuda:\d, "
    ):
        attention(q, k, v, block_mask=create_block_mask(documents(ids)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fc65_the_device_is_that_of_the_tensors() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    assert torch.cuda.current_device() == 0
    q, k, v = (x.to(last) for x in (draw(1, 4, 1, 64), draw(1, 2, 900, 64), draw(1, 2, 900, 64)))
    ids = torch.arange(900, device=last) // 100
    for rule in (causal, documents(ids)):
        mask = create_block_mask(rule)
        for options in ({"num_splits": 1}, {"num_splits": 3}):
            out = attention(q, k, v, block_mask=mask, kernel_options=options)
            assert out.device == last
            close(out, dense_attention(q, k, v, mask=rule).out)
        bound = mask.bind(batch=1, heads=4, q_len=1, kv_len=900, device=last)
        bound.update()
        close(attention(q, k, v, block_mask=bound), dense_attention(q, k, v, mask=rule).out)
    stored = [quantize(x, "int4") for x in (k, v)]
    assert attention(q, *stored).device == last
    new = draw(1, 2, 1, 64).to(last)
    append_kv(k, v, new, new, kv_len=10)
    assert torch.equal(k[:, :, 10:11], new)
    lse = torch.zeros(1, 4, 1, device=last)
    out = attention(q, k, v)
    torch.testing.assert_close(merge_attentions([out, out], [lse, lse])[0], out)
    parts = torch.stack([out, -out]).requires_grad_()
    merge_attentions(parts, torch.stack([lse, lse]))[0].float().sum().backward()
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, torch.full_like(parts, 0.5))
    merged = out.clone()
    merge_attentions_(merged, lse.clone(), out, lse)
    torch.testing.assert_close(merged, out)
    packed = attention(q, k, v, cu_seqlens_q=torch.tensor([0, 1], device=last).int())
    close(packed, dense_attention(q, k, v).out)
    with pytest.raises(ValueError, match="k: expected device cuda:1 to match q, got cuda:0"):
        attention(q, k.to("cuda:0"), v)
    assert torch.cuda.current_device() == 0
