"""Attention over every kind of cache, and what it must give: dense rows and a float64 formula.

A case is made from logical keys and values; a *kind* then says where a cache keeps them. All slots
that hold nothing are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DENSE, PADDED, PACKED, GAPPY = "dense", "padded", "packed", "gappy"
KINDS = (DENSE, PADDED, PACKED, GAPPY, "paged 1", "paged 16", "paged 64", "paged 16 + start")


@dataclass
class Case:
    """Logical keys and values of B sequences, and queries, each sequence with its own number.

    Attributes
    ----------
    q : list of Tensor [Hq, q_len, D]
    k, v : Tensor [B, Hkv, most, D], [B, Hkv, most, Dv]
    kv_len : Tensor [B], int64
    """

    q: list[Tensor]
    k: Tensor
    v: Tensor
    kv_len: Tensor
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        seed: int,
        kv_len: list[int],
        q_len: list[int],
        *,
        Hkv: int = 2,
        G: int = 2,
        D: int = 16,
        Dv: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        """Draw a case."""
        at = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=at).to(device, dtype)

        B, most = len(kv_len), max(*kv_len, 1)
        return cls(
            [draw(Hkv * G, n, D) for n in q_len],
            draw(B, Hkv, most, D),
            draw(B, Hkv, most, D if Dv is None else Dv),
            torch.tensor(kv_len, device=device),
        )

    def queries(self, packed: bool) -> dict[str, Any]:
        """Return q as an argument of `attention`, and cu_seqlens_q where packed."""
        if not packed:
            return {"q": torch.stack(self.q)}
        starts = torch.tensor([0, *(x.shape[1] for x in self.q)], dtype=torch.int32).cumsum(0)
        return {
            "q": torch.cat(self.q, 1)[None],
            "cu_seqlens_q": starts.to(self.k.device, torch.int32),
        }

    def rows(self, out: Tensor, packed: bool) -> list[Tensor]:
        """Cut [B, Hq, Lq, ...] or [1, Hq, total_q, ...] into one tensor for each sequence."""
        if not packed:
            return list(out)
        return list(out[0].split([x.shape[1] for x in self.q], 1))

    def stored(self, kind: str, seed: int = 0) -> dict[str, Any]:
        """Return k, v, kv_len and whatever else describes a cache of that kind."""
        at = torch.Generator().manual_seed(seed)
        lengths = self.kv_len.tolist()
        B, Hkv, most, _ = self.k.shape
        device = self.k.device
        start = torch.zeros(B, dtype=torch.int64)
        if kind == DENSE:
            slots, made = most + 3, B
        elif kind == PADDED:
            slots, made = most + 5, B
            start = slots - torch.tensor(lengths)
        elif kind in (PACKED, GAPPY):
            gaps = torch.zeros(B, dtype=torch.int64)
            if kind == GAPPY:
                gaps = torch.randint(0, 7, (B,), generator=at)
            ends = (torch.tensor(lengths) + gaps).cumsum(0)
            start, slots, made = ends - torch.tensor(lengths), int(ends[-1]) + 2, 1
        else:
            return self._paged(kind, at)
        caches = []
        for x in (self.k, self.v):
            cache = torch.full((made, Hkv, slots, x.shape[3]), torch.nan, device=device)
            cache = cache.to(x.dtype)
            for b, length in enumerate(lengths):
                at_b = slice(int(start[b]), int(start[b]) + length)
                cache[b if made > 1 else 0, :, at_b] = x[b, :, :length]
            caches.append(cache)
        found = {"k": caches[0], "v": caches[1], "kv_len": self.kv_len.clone()}
        if kind != DENSE:
            found["kv_start"] = start.to(device, torch.int32)
        return found

    def _paged(self, kind: str, at: torch.Generator) -> dict[str, Any]:
        size = int(kind.split()[1])
        lengths = self.kv_len.tolist()
        B, Hkv, most, _ = self.k.shape
        device = self.k.device
        start = torch.zeros(B, dtype=torch.int64)
        if "start" in kind:
            start = torch.randint(0, 2 * size, (B,), generator=at)
        entries = -(-(most + int(start.max())) // size) + 1
        used = [-(-(int(start[b]) + n) // size) for b, n in enumerate(lengths)]
        pages = torch.randperm(sum(used) + 3, generator=at)
        table = torch.full((B, entries), -1, dtype=torch.int32)
        # Keys last in memory, as some engines keep them: any strides.
        pools = [
            torch.full((len(pages), size, Hkv, x.shape[3]), torch.nan, device=device).to(x.dtype)
            for x in (self.k, self.v)
        ]
        taken = 0
        for b, n in enumerate(lengths):
            own = pages[taken : taken + used[b]]
            taken += used[b]
            table[b, : used[b]] = own
            slot = int(start[b]) + torch.arange(n)
            page, offset = own[slot // size].to(device), (slot % size).to(device)
            for pool, x in zip(pools, (self.k, self.v), strict=True):
                pool[page, offset] = x[b, :, :n].transpose(0, 1)
        found = {
            "k": pools[0].transpose(1, 2),
            "v": pools[1].transpose(1, 2),
            "kv_len": self.kv_len.clone(),
            "page_table": table.to(device),
        }
        if "start" in kind:
            found["kv_start"] = start.to(device, torch.int32)
        return found

    def expected(
        self,
        allowed: Any = None,
        score: Any = None,
        *,
        q_offset: list[int] | None = None,
        scale: float | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and natural-log LSE of each sequence, from the dense formula in float64.

        `allowed` and `score` are functions of (b, h, q_idx, kv_idx) and (score, b, h, q_idx,
        kv_idx) on whole tensors.
        """
        outs, lses = [], []
        for b, q in enumerate(self.q):
            n, q_len = int(self.kv_len[b]), q.shape[1]
            group = q.shape[0] // self.k.shape[1]
            k = self.k[b, :, :n].double().repeat_interleave(group, 0)
            v = self.v[b, :, :n].double().repeat_interleave(group, 0)
            s = (q.double() @ k.transpose(1, 2)) * (scale or q.shape[2] ** -0.5)
            first = n - q_len if q_offset is None else q_offset[b]
            here = {"device": q.device}
            place = (
                torch.tensor(b, **here),
                torch.arange(q.shape[0], **here).view(-1, 1, 1),
                (first + torch.arange(q_len, **here)).view(1, -1, 1),
                torch.arange(n, **here).view(1, 1, -1),
            )
            if score is not None:
                s = score(s, *place)
            if allowed is not None:
                s = s.masked_fill(~allowed(*place).expand(s.shape), -torch.inf)
            lse = s.logsumexp(-1) if n else s.new_full(s.shape[:2], -torch.inf)
            weight = (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
            outs.append(weight @ v)
            lses.append(lse)
        return outs, lses
