"""Inputs of a case and what must come out: views of one pool of random numbers, and an oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.rules import Rules

__all__ = ["KVSet", "Pool", "Wanted", "expected", "number_of_sets", "page_table"]

_ALIGNMENT = 1024  # elements


@dataclass(frozen=True)
class KVSet:
    """One set of inputs: q [B, Hq, Lq, D], k [B, Hkv, Lkv, D], v [B, Hkv, Lkv, Dv].

    With a `page_table`, [B, pages], int32, k and v are [B * pages, Hkv, page, D or Dv].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None = None

    def rows(self, x: Tensor, b: int, head: int, length: int) -> Tensor:
        """Rows of k or v in the order of positions: [length, D or Dv]."""
        if self.page_table is None:
            return x[b, head, :length]
        return x[self.page_table[b].long(), head].flatten(0, 1)[:length]


def number_of_sets(active_bytes: int, l2_bytes: int) -> int:
    """Sets whose active parts together are at least four times the L2 cache; two at least."""
    return max(2, math.ceil(4 * l2_bytes / active_bytes))


class Pool:
    """Random numbers that all K and V are views of, so that no case waits for new ones."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.empty(elements, dtype=dtype, device=device)
        self.generator = torch.Generator(device).manual_seed(0)
        for chunk in self.numbers.split(1 << 30):
            chunk.normal_(generator=self.generator)

    def sets(self, case: Case, count: int, layout: str = "BHLD") -> list[KVSet]:
        """Cut `count` sets that do not overlap, or as many as there is room for.

        Parameters
        ----------
        case : Case
        count : int
        layout : "BHLD" or "BLHD"
            Order in memory; the shapes are the same.

        Raises
        ------
        ValueError
            Not even one set fits.
        """
        size = -(-case.stored_elements() // _ALIGNMENT) * _ALIGNMENT
        fits = self.numbers.numel() // size
        if not fits:
            raise ValueError(f"a set of {size} elements does not fit the pool (--pool)")
        return [self._set(case, i * size, layout) for i in range(min(count, fits))]

    def _set(self, case: Case, start: int, layout: str) -> KVSet:
        def view(start: int, width: int) -> Tensor:
            length = case.page or case.Lkv
            made = case.B * case.Lkv // length
            shape = (made, case.Hkv, length, width)
            if layout == "BLHD":
                shape = (made, length, case.Hkv, width)
            flat = self.numbers[start : start + math.prod(shape)].view(shape)
            return flat.transpose(1, 2) if layout == "BLHD" else flat

        k = view(start, case.D)
        if case.shared:
            v = k[..., : case.Dv]
        else:
            v = view(start + case.B * case.Hkv * case.Lkv * case.D, case.Dv)
        q = torch.randn(
            case.B,
            case.Hq,
            case.Lq,
            case.D,
            dtype=self.numbers.dtype,
            device=self.numbers.device,
            generator=self.generator,
        )
        if not case.page:
            return KVSet(q, k, v)
        return KVSet(q, k, v, page_table(case).to(q.device))


def page_table(case: Case) -> Tensor:
    """Pages of each sequence in random order, the same in all sets: [B, pages], int32, CPU."""
    pages = case.Lkv // case.page
    order = torch.randperm(case.B * pages, generator=torch.Generator().manual_seed(0))
    return order.view(case.B, pages).to(torch.int32)


@dataclass(frozen=True)
class Wanted:
    """What a case must give for some sequences and KV heads, computed in float64."""

    places: tuple[tuple[int, int], ...]  # (b, KV head)
    outputs: tuple[Tensor, ...]  # each [G, Lq, Dv]

    def error(self, out: Tensor) -> float:
        """Relative distance in the 2-norm; infinite where anything is not finite.

        Parameters
        ----------
        out : Tensor, [B, Hq, Lq, Dv]
        """
        distance = size = 0.0
        for (b, head), right in zip(self.places, self.outputs, strict=True):
            group = right.shape[0]
            got = out[b, head * group : (head + 1) * group].double()
            distance += (got - right).square().sum().item()
            size += right.square().sum().item()
        error = math.sqrt(distance / size)
        return error if math.isfinite(error) else math.inf


def expected(case: Case, rules: Rules, inputs: KVSet) -> Wanted:
    """Compute a sample of the outputs densely: first, middle and last sequence and KV head."""
    sequences = sorted({0, case.B // 2, case.B - 1})
    heads = sorted({0, case.Hkv - 1})
    places = tuple((b, head) for b in sequences for head in heads)
    return Wanted(places, tuple(_dense(case, rules, inputs, b, head) for b, head in places))


def _dense(case: Case, rules: Rules, inputs: KVSet, b: int, head: int) -> Tensor:
    device, length = inputs.q.device, case.length(b)
    h = head * case.G + torch.arange(case.G, device=device)[:, None, None]
    kv_idx = torch.arange(length, device=device)
    q_idx = torch.arange(case.Lq, device=device)[:, None] + (length - case.Lq)
    place = torch.full((), b, device=device)
    q = inputs.q[b, head * case.G : (head + 1) * case.G].double()
    scores = q @ inputs.rows(inputs.k, b, head, length).double().T / math.sqrt(case.D)
    if rules.score is not None:
        scores = rules.score(scores, place, h, q_idx, kv_idx)
    if rules.mask is not None:
        scores = scores.masked_fill(~rules.mask(place, h, q_idx, kv_idx), -math.inf)
    return scores.softmax(-1) @ inputs.rows(inputs.v, b, head, length).double()
