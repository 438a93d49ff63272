"""The CPU backend against what a PyTorch user writes: ``python benchmarks/cpu.py``.

Batch 1, 32 query heads over 8 key heads, head dim 128, one query row, float32. Prints medians of
`timeit` repeats; every line is checked against the plain formula first.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import timeit
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexdecode import attention, create_block_mask
from flexdecode.masks import causal, sliding_window

B, HQ, HKV, D = 1, 32, 8, 128


def median(call: Callable[[], Tensor], repeats: int) -> float:
    """Median seconds of one call; a repeat lasts at least 50 ms."""
    timer = timeit.Timer(call)
    call()
    number = max(1, int(0.05 / max(timer.timeit(1), 1e-7)))
    return statistics.median(seconds / number for seconds in timer.repeat(repeats, number))


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Grouped matmul, softmax, matmul: attention as written by hand."""
    rows = q.view(B, HKV, HQ // HKV, D) * D**-0.5
    score = rows @ k.transpose(-1, -2)
    if bias is not None:
        score = score + bias
    return (score.softmax(-1) @ v).view(B, HQ, 1, D)


def sdpa_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """SDPA with a dense mask, groups left to it."""
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def sdpa_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """SDPA with a dense mask, key heads repeated at every call."""
    k, v = (x.repeat_interleave(HQ // HKV, dim=1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def report(name: str, ours: float, others: dict[str, float]) -> None:
    """Print one line: times in ms and how many times slower the others are."""
    print(f"{name:34} {ours * 1e3:9.3f} ms", end="")
    for other, seconds in others.items():
        print(f"   {other} {seconds * 1e3:9.3f} ms ({seconds / ours:7.2f}x)", end="")
    print(flush=True)


def main() -> None:
    """Run all cases once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--length", type=int, default=32768, help="keys in the cache")
    parser.add_argument("--window", type=int, default=1024)
    options = parser.parse_args()
    L, window, n = options.length, options.window, options.repeats
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor()}; "
        f"B={B} Hq={HQ} Hkv={HKV} D={D} Lkv={L} float32"
    )
    torch.manual_seed(0)
    q = torch.randn(B, HQ, 1, D)
    k, v = torch.randn(2, B, HKV, L, D).unbind(0)

    mask = torch.zeros(1, 1, 1, L, dtype=torch.bool)
    mask[..., L - window :] = True
    block_mask = create_block_mask(causal & sliding_window(window))
    right = sdpa_grouped(q, k, v, mask)
    torch.testing.assert_close(attention(q, k, v, block_mask=block_mask), right)
    report(
        f"window of {window}",
        median(lambda: attention(q, k, v, block_mask=block_mask), n),
        {
            "SDPA, dense mask": median(lambda: sdpa_grouped(q, k, v, mask), n),
            "SDPA, repeated heads": median(lambda: sdpa_repeated(q, k, v, mask), min(n, 3)),
        },
    )
    ks, vs = k[:, :, L - window :], v[:, :, L - window :]
    report(
        f"a cache of {window}",
        median(lambda: attention(q, ks, vs), n),
        {
            "grouped matmul": median(lambda: grouped(q, ks, vs), n),
            "SDPA": median(lambda: sdpa_grouped(q, ks, vs, None), n),
        },
    )
    torch.testing.assert_close(attention(q, k, v), grouped(q, k, v))
    report(
        "dense",
        median(lambda: attention(q, k, v), n),
        {
            "grouped matmul": median(lambda: grouped(q, k, v), n),
            "SDPA": median(lambda: sdpa_grouped(q, k, v, None), n),
        },
    )


if __name__ == "__main__":
    main()
