"""Sizes at which 32-bit arithmetic ends, on a CPU: views of sparse files, and many threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexdecode import append_kv, attention, create_block_mask, merge_attentions
from flexdecode.masks import causal, documents, sink_window, sliding_window
from tests.helpers import dense_attention, random_inputs

FAR = (1 << 31) + 64  # elements


@pytest.fixture
def far(tmp_path: Path) -> Callable[..., Tensor]:
    """Make copies of tensors with 2**31 elements and more between the ends of one axis."""
    count = iter(range(100))

    def spread(x: Tensor, axis: int, far: int = FAR) -> Tensor:
        steps = x.shape[axis] - 1
        near = x.select(axis, 0).numel()
        step = -(-far // max(steps, 1)) + near
        kind = {torch.bool: np.int8, torch.float16: np.float16, torch.float32: np.float32,
                torch.int32: np.int32}[x.dtype]  # fmt: skip
        file = np.memmap(tmp_path / str(next(count)), kind, "w+", shape=(steps * step + near,))
        strides = list(x.select(axis, 0).contiguous().stride())
        strides.insert(axis, step)
        memory = torch.from_numpy(file).view(x.dtype)
        return memory.as_strided(x.shape, strides).copy_(x)

    return spread


BACKENDS = ["cpu", "triton"]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_fc49_strides_of_keys_values_and_queries(
    backend: str, axis: int, far: Callable[..., Tensor]
) -> None:
    q, k, v = random_inputs(2 + (axis == 0), 2, 2, 1, 24, 8)
    wanted = dense_attention(q, k, v, mask=causal).out
    spread = [far(x, axis) for x in (q, k, v)]
    mask = create_block_mask(causal)
    close(attention(*spread, block_mask=mask, backend=backend), wanted)


# What goes wrong here ends the process, so it has one of its own.
STRIDES = """
import sys
import numpy as np, torch
from flexdecode import attention
from tests.helpers import dense_attention, random_inputs

for axis, length in ((0, 40), (2, 2)):
    q, k, v = random_inputs(2, 2, 1, 1, length, 8)
    wanted = dense_attention(q, k, v).out
    strides = list(v.stride())
    strides[axis] = 2**31 + 64
    file = np.memmap(sys.argv[1], np.float32, "w+", shape=(strides[axis] + 400,))
    far = torch.from_numpy(file).as_strided(v.shape, strides).copy_(v)
    out = attention(q, k, far, backend="triton")
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
"""


def test_fc49_one_stride_beyond_two_to_the_31(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", STRIDES, str(tmp_path / "far")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_fc49_columns_beyond_two_to_the_31(far: Callable[..., Tensor]) -> None:
    """Kernels count columns in 32 bits, and say so before they read."""
    q, k, v = random_inputs(2, 2, 1, 1, 40, 8)
    spread = far(v, 3)
    with pytest.raises(ValueError, match=r"v: expected elements of a row less than 2\*\*31 apart"):
        attention(q, k, spread, backend="triton")
    close(attention(q, k, spread, backend="cpu"), dense_attention(q, k, v).out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fc49_captures_and_bias(backend: str, far: Callable[..., Tensor]) -> None:
    q, k, v = random_inputs(2, 2, 1, 3, 40, 8)
    at = torch.Generator().manual_seed(0)
    flags = torch.rand(3, 40, generator=at) < 0.7
    slopes = torch.randn(40, 2, generator=at)
    bias = torch.randn(2, 1, 3, 40, generator=at)
    far_flags, far_slopes, far_bias = far(flags, 0), far(slopes, 0), far(bias, 2)
    out = attention(
        q,
        k,
        v,
        block_mask=create_block_mask(lambda b, h, i, j: far_flags[i - 37, j]),
        score_mod=lambda s, b, h, i, j: s + far_slopes[j, h],
        bias=far_bias,
        backend=backend,
    )
    wanted = dense_attention(
        q,
        k,
        v,
        mask=lambda b, h, i, j: flags[i - 37, j],
        score_mod=lambda s, b, h, i, j: s + slopes[j, h],
        bias=bias,
    )
    close(out, wanted.out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fc49_pages_and_their_table(backend: str, far: Callable[..., Tensor]) -> None:
    """Pools whose last page, and a table whose last row, lie beyond 2**31; append reaches them."""
    q, k, v = random_inputs(2, 2, 1, 1, 48, 8)
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    pools = [far(torch.zeros(6, 1, 16, 8), 0) for _ in range(2)]
    place = {"page_table": far(table, 0)}
    append_kv(*pools, k, v, kv_len=0, **place, backend=backend)
    out = attention(q, *pools, kv_len=48, **place, backend=backend)
    close(out, dense_attention(q, k, v).out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_fc49_appended_rows(backend: str, axis: int, far: Callable[..., Tensor]) -> None:
    at = torch.Generator().manual_seed(0)
    new = torch.randn(2, 2, 2, 5, 8, generator=at)
    caches = [far(torch.zeros(2, 2, 16, 8), axis) for _ in range(2)]
    append_kv(*caches, *(far(x, axis) for x in new), kv_len=3, backend=backend)
    for cache, x in zip(caches, new, strict=True):
        assert torch.equal(cache[:, :, 3:8], x)
        assert not cache[:, :, :3].any() and not cache[:, :, 8:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fc49_starts_of_packed_queries(backend: str, far: Callable[..., Tensor]) -> None:
    q, k, v = random_inputs(3, 2, 1, 2, 24, 8)
    starts = far(torch.tensor([0, 2, 4, 6], dtype=torch.int32), 0, 2 * FAR)
    packed = q.transpose(0, 1).reshape(1, 2, 6, 8)
    out = attention(packed, k, v, cu_seqlens_q=starts, backend=backend)
    close(out.view(2, 3, 2, 8).transpose(0, 1), dense_attention(q, k, v).out)
    caches = [torch.zeros(3, 2, 4, 8) for _ in range(2)]
    append_kv(*caches, packed, packed, kv_len=1, cu_seqlens=starts, backend=backend)
    assert torch.equal(caches[0][:, :, 1:3], q) and torch.equal(caches[1][:, :, 1:3], q)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_fc49_parts_of_a_merge(backend: str, far: Callable[..., Tensor]) -> None:
    at = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(4, 2, 3, 5, 7, generator=at), torch.randn(4, 2, 3, 5, generator=at)
    near = [outs.clone().requires_grad_(), lses.clone().requires_grad_()]
    apart = [far(outs, 0).requires_grad_(), far(lses, 0).requires_grad_()]
    results = [merge_attentions(*parts, backend=backend) for parts in (near, apart)]
    for out, lse in results:
        (out.square().sum() + lse.square().sum()).backward()
    for x, y in zip((*results[0], *(x.grad for x in near)),
                    (*results[1], *(x.grad for x in apart)), strict=True):  # fmt: skip
        torch.testing.assert_close(x, y)


def test_fc65_captures_and_tensors_of_several_devices() -> None:
    q, k, v = random_inputs(1, 2, 1, 1, 40, 8)
    elsewhere = torch.zeros(40, dtype=torch.int64, device="meta")
    for name, call in {
        "v": {"v": v.to("meta")},
        "page_table": {"page_table": elsewhere[None].int(), "kv_len": 3},
        "kv_start": {"kv_start": elsewhere[:1]},
        "q_offset": {"q_offset": elsewhere[:1]},
        "cu_seqlens_q": {"cu_seqlens_q": elsewhere[:2]},
    }.items():
        with pytest.raises(ValueError, match=f"{name}: expected device cpu.*, got meta"):
            attention(**{"q": q, "k": k, "v": v, **call})
    with pytest.raises(
        ValueError, match="mask_mod: expected the captured tensor ids on cpu, got m"
    ):
        attention(q, k, v, block_mask=create_block_mask(documents(elsewhere)))
    with pytest.raises(
        ValueError, match="score_mod: expected the captured tensor elsewhere on cpu"
    ):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: s + elsewhere[j])


def test_eight_threads_with_masks_of_their_own() -> None:
    """Traces, tables and the caches of both are shared; results are not mixed up."""
    q, k, v = random_inputs(2, 4, 2, 2, 100, 16)
    ids = torch.arange(100) // 9
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(n: int) -> None:
        try:
            start.wait(timeout=60)
            for step in range(12):
                size = 5 + 3 * n + step
                rules: list[Any] = [
                    sliding_window(size),
                    sink_window(n, size),
                    documents(ids + n) & causal,
                    lambda b, h, i, j: (i - j < 20 + n) & (j % (n + 2) != 1),
                ]
                rule = rules[step % 4]
                out = attention(
                    q,
                    k,
                    v,
                    block_mask=create_block_mask(rule, BLOCK_SIZE=16),
                    score_mod=lambda s, b, h, i, j: s * (1 + n) - 0.01 * j,
                    backend="cpu",
                )
                wanted = dense_attention(
                    q,
                    k,
                    v,
                    mask=rule,
                    score_mod=lambda s, b, h, i, j: s * (1 + n) - 0.01 * j,
                )
                close(out, wanted.out)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
