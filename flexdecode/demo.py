"""``python -m flexdecode demo``: a few masks on random tensors, checked, timed and drawn."""

# The rules stand as a user would write them, without annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexdecode import BlockMask, attention, create_block_mask, mask_mod
from flexdecode.console import print_table, track
from flexdecode.tables import EMPTY, table_states
from flexdecode.visualize import legend_handles, plot_blocks

__all__ = ["Case", "Measured", "create_cases", "draw", "measure", "run", "states"]

B, HQ, HKV, D = 2, 8, 2, 64  # sequences, query heads, key heads, head dim


@dataclass(frozen=True)
class Case:
    """A mask or a score rule, and how a picture of it is titled."""

    name: str
    mask_mod: Callable[[Any, Any, Any, Any], Any]
    score_mod: Callable[[Any, Any, Any, Any, Any], Any] | None = None


def create_cases(length: int, device: torch.device) -> list[Case]:
    """Return the rules of the demonstration, for sequences of `length` tokens."""
    window, sinks, prefix, stride = length // 16, 4, length // 4, max(1, length // 32)
    # Documents of different lengths, one after the other.
    document = (torch.arange(length, device=device) * 13 // length) ** 2 // 24
    slope = 2.0 ** -torch.arange(1, HQ + 1, device=device)

    @mask_mod
    def causal(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx

    @mask_mod
    def sliding(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window

    @mask_mod
    def sink(b, h, q_idx, kv_idx):
        return kv_idx < sinks

    @mask_mod
    def same_document(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    @mask_mod
    def in_prefix(b, h, q_idx, kv_idx):
        return kv_idx < prefix

    @mask_mod
    def strided(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) // stride % 8 == h // 4

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slope[h] * (q_idx - kv_idx)

    return [
        Case("causal", causal),
        Case("window", causal & sliding),
        Case("sinks + window", causal & (sink | sliding)),
        Case("documents", causal & same_document),
        Case("prefix", in_prefix | (causal & sliding)),
        Case("strided by head", causal & strided),
        Case("causal, ALiBi", causal, alibi),
    ]


@dataclass(frozen=True)
class Measured:
    """What one case gave: share of blocks read, largest error, seconds of both ways."""

    name: str
    share: float
    error: float
    seconds: float
    sdpa_seconds: float


def measure(case: Case, keys: int, device: torch.device, dtype: torch.dtype) -> Measured:
    """Decode one token a sequence against `keys` cached ones; compare with float64 and SDPA."""
    torch.manual_seed(0)
    q = torch.randn(B, HQ, 1, D, device=device, dtype=dtype)
    k, v = torch.randn(2, B, HKV, keys, D, device=device, dtype=dtype)
    # Both masks are made beforehand: in a model all layers of a step share one.
    block_mask = create_block_mask(case.mask_mod, B, HQ, 1, keys, device=device)
    dense = dense_mask(case, keys, device, dtype)

    def ours(dtype: torch.dtype = dtype, backend: str = "auto") -> Tensor:
        out = attention(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            score_mod=case.score_mod,
            block_mask=block_mask,
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out

    def sdpa() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=dense, enable_gqa=True
        )

    oracle = ours(torch.float32, "reference")  # the sums in float64
    error = (ours().double() - oracle.double()).abs().max().item()
    share = (states(block_mask) != EMPTY).double().mean().item()
    return Measured(case.name, share, error, seconds(ours, device), seconds(sdpa, device))


def dense_mask(case: Case, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What SDPA needs: every element of the mask, [1, HQ, 1, keys], bool or a bias in `dtype`."""
    h = torch.arange(HQ, device=device)[:, None, None]
    q_idx = torch.full((1, 1), keys - 1, device=device)
    kv_idx = torch.arange(keys, device=device)
    allowed: Tensor = case.mask_mod(0, h, q_idx, kv_idx).expand(HQ, 1, keys)[None]
    if case.score_mod is None:
        return allowed
    bias: Tensor = case.score_mod(torch.zeros((), device=device), 0, h, q_idx, kv_idx)
    return bias.expand(HQ, 1, keys)[None].masked_fill(~allowed, float("-inf")).to(dtype)


def seconds(run: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """Best time of a call, in seconds, of as many calls as fit in `budget` seconds."""
    times: list[float] = []
    run()
    stop = time.perf_counter() + budget
    while len(times) < 5 or time.perf_counter() < stop:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def states(block_mask: BlockMask) -> Tensor:
    """State of every block of a mask with tables: 0 empty, 1 partial, 2 full.

    Returns
    -------
    Tensor, [B or 1, H or 1, nQ, nKV], uint8
    """
    assert block_mask.tables is not None, "a lazy mask has none"
    return table_states(block_mask.tables)


def draw(cases: list[Case], length: int, block: int, path: Path) -> None:
    """Draw the block tables of `cases` over `length` queries and keys into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    for axis, case in zip(axes.flat, cases, strict=False):
        mask = create_block_mask(case.mask_mod, 1, HQ, length, length, BLOCK_SIZE=block)
        table = states(mask)[0, 0].cpu()
        plot_blocks(table, mask.BLOCK_SIZE, (length, length), axis, legend=False)
        axis.set_title(f"{case.name}: {(table != EMPTY).double().mean().item():.0%} of blocks read")
        axis.set_aspect("equal")
        axis.label_outer()
    figure.legend(handles=legend_handles(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Block tables of {length} queries over {length} keys")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def run(device: str, keys: int, picture: str) -> int:
    """Print the table and draw the picture; returns the exit status.

    Parameters
    ----------
    device : str
    keys : int
        Tokens in the cache.
    picture : str
        Path of the PNG file.
    """
    place = torch.device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    print(
        f"One new token for each of {B} sequences, {keys} keys in the cache, {HQ} query and {HKV} "
        f"key heads,\nhead dim {D}, {str(dtype).removeprefix('torch.')} on {place}. SDPA gets the "
        "same mask, dense.\n"
    )
    rows = []
    for case in track(create_cases(keys, place), "timing"):
        m = measure(case, keys, place, dtype)
        times = f"{m.seconds * 1e3:.3f} ms", f"{m.sdpa_seconds * 1e3:.3f} ms"
        rows.append((m.name, f"{m.share:.1%}", f"{m.error:.1e}", *times))
    print_table(rows, ("mask", "blocks read", "max error", "flexdecode", "SDPA"))
    print("\nThe error is against the float64 reference; times are the best of many.")
    if importlib.util.find_spec("matplotlib") is None:
        print("With matplotlib installed, a picture of the block tables is drawn too.")
        return 0
    length = 1024
    draw(create_cases(length, torch.device("cpu"))[:6], length, 32, Path(picture))
    print(f"Picture of the block tables: {picture}")
    return 0
