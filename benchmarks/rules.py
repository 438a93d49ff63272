"""Masks and score rules of the cases as plain functions: the same ones for every provider."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import BLOCK, Case

__all__ = ["SOFTCAP", "Rules", "alibi_slopes", "make_rules", "selection"]

SOFTCAP = 50.0


@dataclass(frozen=True)
class Rules:
    """The functions of one case, in absolute positions.

    Attributes
    ----------
    mask : callable (b, h, q_idx, kv_idx) -> bool, or None
    score : callable (score, b, h, q_idx, kv_idx) -> score, or None
    """

    mask: Callable[..., Any] | None
    score: Callable[..., Any] | None


def make_rules(case: Case, device: torch.device) -> Rules:
    """Make the functions of a case; what they capture is on `device` and the same every time."""
    return Rules(_mask(case, device), _score(case, device))


def _mask(case: Case, device: torch.device) -> Callable[..., Any] | None:
    if case.mask is None:
        return None
    if case.mask.kind == "causal":
        return _causal
    if case.mask.kind == "window":
        return _window(case.mask.window)
    return _blocks(selection(case).to(device), case.G)


def _causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return kv_idx <= q_idx


def _window(window: int) -> Callable[..., Any]:
    def newest(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (kv_idx <= q_idx) & (q_idx - kv_idx < window)

    return newest


def _blocks(selected: Tensor, group: int) -> Callable[..., Any]:
    def selected_blocks(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return selected[b, h // group, kv_idx // BLOCK]

    return selected_blocks


def selection(case: Case) -> Tensor:
    """Random blocks for each KV head, the newest one among them: [B, Hkv, blocks], bool."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(case.B, case.Hkv, case.Lkv // BLOCK, generator=generator)
    noise[:, :, -1] = 2.0
    rank = noise.argsort(-1, descending=True).argsort(-1)
    return rank < torch.tensor(case.blocks_kept()).view(case.B, case.Hkv, 1)


def _score(case: Case, device: torch.device) -> Callable[..., Any] | None:
    if case.score == "softcap":
        return _softcap
    if case.score == "alibi":
        return _alibi(alibi_slopes(case.Hq, device))
    return None


def _softcap(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def _alibi(slopes: Tensor) -> Callable[..., Any]:
    def alibi(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes for a number of heads that is a power of two: [heads], float32."""
    step = -8.0 / heads
    return torch.exp2(step * torch.arange(1, heads + 1, dtype=torch.float32, device=device))
