"""The CPU backend: active blocks only, as batched matrix products over views of the cache.

One query tile at a time (a row of the tables), the active blocks are cut into *pieces*: runs of
consecutive blocks, taken as views, or scattered ones, gathered. A piece updates the running
softmax [1]_ of its rows. Sequences and heads with equal lists share a product; where lists differ
between many of them, blocks are gathered row by row into padded batches.

References
----------
.. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
   2018.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.block_codes import Codes, Lengths, are_fragments, block_codes, false_runs, groups
from flexdecode.caches import Cache, CachePart
from flexdecode.evaluate import evaluate
from flexdecode.packed import run_by_runs
from flexdecode.problem import Request, Result
from flexdecode.quantization import as_tensor
from flexdecode.quantized_tensor import QuantizedTensor
from flexdecode.rows import Allowed, Places, Rows, Uncut, scored
from flexdecode.softmax import State, attended
from flexdecode.tables import FULL, PARTIAL

__all__ = ["run"]

BLOCK_SIZE = (128, 128)  # when no table says otherwise
MAX_SCORES = 1 << 22  # elements of a piece's scores: 16 MiB
MAX_COPIED = 1 << 20  # elements of k or v converted or gathered at a time: 4 MiB, cache-sized


def run(request: Request) -> Result:
    """Compute a call from its tables with plain torch operations.

    Parameters
    ----------
    request : Request

    Returns
    -------
    Result
        ``lse`` and ``max_scores`` in float32.
    """
    problem = request.problem
    if isinstance(request.q, QuantizedTensor):
        request = dataclasses.replace(request, q=as_tensor(request.q))
    if problem.packed is not None:
        return run_by_runs(request, run)
    if not (problem.B and problem.Lq):
        rows = torch.zeros(problem.B, problem.Hq, problem.Lq, device=problem.device)
        out = torch.zeros(*rows.shape, problem.Dv, dtype=problem.dtype, device=problem.device)
        return Result(out, rows if request.want_lse else None, rows if request.want_max else None)
    kind = problem.device.type
    rounds = torch.is_autocast_enabled(kind)  # every product, to 16 bits
    with torch.autocast(kind, enabled=False) if rounds else contextlib.nullcontext():
        call = _Call(request)
        tiles = [_Tile(call, start).run() for start in range(0, problem.Lq, call.tile_q)]
    if len(tiles) == 1:
        return tiles[0]
    return Result(
        torch.cat([tile.out for tile in tiles], dim=2),
        _joined([tile.lse for tile in tiles]),
        _joined([tile.max_scores for tile in tiles]),
    )


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found, dim=2) if found else None


class _Call:
    """What all query tiles of a call share."""

    def __init__(self, request: Request) -> None:
        problem, resolved = request.problem, request.resolved
        self.request, self.problem = request, problem
        self.k, self.v = Cache.of(request.k, problem), Cache.of(request.v, problem)
        self.mask = None if resolved is None else resolved.mask
        self.tables = None if resolved is None else resolved.tables
        self.block_size = BLOCK_SIZE if self.tables is None else self.tables.BLOCK_SIZE
        self.ragged = False
        if isinstance(problem.kv_len, int):
            self.lengths: Lengths = np.array([problem.kv_len], dtype=np.int64)
        else:
            lengths = problem.kv_len_rows().numpy(force=True)
            self.ragged = bool((lengths != lengths[0]).any())
            self.lengths = lengths if self.ragged else lengths[:1]
        rules = [rule for rule in (self.mask, request.score) if rule is not None]
        self.uses = frozenset[str]().union(*[rule.graph.uses for rule in rules])
        options = request.options
        self.state_dtype = options.get("partial_dtype", torch.float32)
        self.splits = options.get("num_splits", 1)
        # One row, one key head and one whole block at a time, whatever stands beside them: every
        # product then has the same shape, and its bits depend on its operands alone.
        self.invariant = options.get("deterministic") == "batch_invariant"
        self.tile_q = 1 if self.invariant else self.block_size[0]

    def codes(self, row: int) -> Codes:
        """Codes of one query tile's blocks: [B or 1, Hkv or 1, G or 1, blocks]."""
        problem = self.problem
        return block_codes(
            self.tables,
            row,
            lengths=self.lengths,
            size=self.block_size[1],
            capacity=problem.Lkv,
            groups=(problem.Hkv, problem.G),
        )


class _Tile:
    """One query tile: rows from ``start`` on, of all heads and sequences."""

    def __init__(self, call: _Call, start: int) -> None:
        problem, request = call.problem, call.request
        stop = min(start + call.tile_q, problem.Lq)
        self.call, self.start, self.T = call, start, stop - start
        self.M = problem.G * self.T
        q = as_tensor(request.q)
        q = q if self.T == problem.Lq else q[:, :, start:stop]
        q = q.float() * problem.scale
        self.q = q.reshape(problem.B, problem.Hkv, self.M, problem.D)
        self.bias = None
        if request.bias is not None:
            bias = request.bias[:, :, start:stop]
            heads = (problem.Hkv, problem.G) if bias.shape[1] > 1 else (1, 1)
            self.bias = bias.view(bias.shape[0], *heads, self.T, problem.Lkv)
        self.state: State | None = None

    def run(self) -> Result:
        """Attend: the tile's rows of the results."""
        call, problem = self.call, self.call.problem
        codes = call.codes(self.start // call.block_size[0])
        if call.invariant:
            codes = np.broadcast_to(codes, (problem.B, problem.Hkv, *codes.shape[2:]))
            for b, h in np.ndindex(codes.shape[:2]):
                self._group(slice(b, b + 1), slice(h, h + 1), codes[b, h])
        elif are_fragments(codes, call.block_size[1] * problem.Hkv * (problem.D + problem.Dv)):
            self._batches(codes)
        else:
            for batch, heads, group in groups(codes):
                batch = batch if len(codes) > 1 else slice(0, problem.B)
                heads = heads if codes.shape[1] > 1 else slice(0, problem.Hkv)
                self._group(batch, heads, group)
        state, request = self._state(), call.request
        rows = (problem.B, problem.Hq, self.T)
        top = state.m.reshape(rows) if request.want_max else None
        if request.sinks is not None:
            sinks = request.sinks.to(state.m.dtype).view(1, problem.Hkv, problem.G, 1)
            sinks = sinks.expand(-1, -1, -1, self.T).reshape(1, problem.Hkv, self.M, 1)
            state = state.with_sinks(sinks)
        return Result(
            state.out().reshape(*rows, problem.Dv).to(problem.dtype),
            state.lse().reshape(rows).float() if request.want_lse else None,
            None if top is None else top.float(),
        )

    def _rows(self, batch: slice, heads: slice) -> Uncut:
        call, problem = self.call, self.call.problem

        def part(x: Tensor) -> Tensor:
            x = x[batch] if x.shape[0] > batch.stop - batch.start else x
            return x[:, heads] if x.shape[1] > heads.stop - heads.start else x

        @functools.cache
        def places() -> Places:
            device, column = problem.device, (-1, 1, 1, 1, 1)
            first, last = problem.first_b + batch.start, problem.first_b + batch.stop
            b: Tensor | int = first
            if "b" in call.uses and last - first > 1:
                b = torch.arange(first, last, device=device).view(column)
            h: Tensor | int = 0
            if "h" in call.uses:
                G = problem.G
                h = torch.arange(heads.start * G, heads.stop * G, device=device).view(
                    1, -1, G, 1, 1
                )
            kv_len = None
            if call.ragged or call.invariant:
                kv_len = torch.from_numpy(call.lengths[batch if call.ragged else slice(None)])
                kv_len = kv_len.to(device).view(column)
            return Places(b, h, self._q_idx(batch), kv_len)

        bias = None if self.bias is None else part(self.bias)
        k, v = (CachePart(cache, batch, heads) for cache in (call.k, call.v))
        return Uncut(part(self.q), k, v, bias, places)

    def _q_idx(self, batch: slice | Tensor) -> Tensor | int:
        offset = self.call.problem.q_offset
        if self.T == 1 and isinstance(offset, int):
            return offset + self.start
        rows = torch.arange(self.start, self.start + self.T, device=self.q.device)
        rows = rows.view(1, 1, 1, self.T, 1)
        return rows + (offset if isinstance(offset, int) else offset[batch].view(-1, 1, 1, 1, 1))

    def _state(self) -> State:
        if self.state is None:
            problem, dtype = self.call.problem, self.call.state_dtype
            self.state = State.empty(self.q.shape[:3], problem.Dv, dtype, problem.device)
        return self.state

    def _group(self, batch: slice, heads: slice, codes: Codes) -> None:
        """Attend for rows that share a list, codes [1 or G, blocks]."""
        call, problem, size = self.call, self.call.problem, self.call.block_size[1]
        X, Y, M = batch.stop - batch.start, heads.stop - heads.start, self.M
        most = max(1, MAX_SCORES // (Y * M * min(size, problem.Lkv)))
        if X > most:  # one block of all these sequences would be too much
            for b in range(batch.start, batch.stop, most):
                self._group(slice(b, min(b + most, batch.stop)), heads, codes)
            return
        rows = self._rows(batch, heads)
        active = codes.max(0).nonzero()[0]
        if not len(active):
            return
        full = codes.min(0) == FULL
        cuts = [0, len(active)]
        if active[-1] - active[0] >= len(active):
            cuts[1:1] = (np.flatnonzero(np.diff(active) != 1) + 1).tolist()
        scattered = len(cuts) > 5 and len(cuts) * 4 > len(active) and not call.invariant
        keys = MAX_SCORES // (X * Y * M)
        if scattered or rows.copies or problem.dtype != torch.float32:  # k and v are copied
            keys = min(keys, MAX_COPIED // (rows.k.sequences * Y * max(problem.D, problem.Dv)))
        if call.splits > 1:
            keys = min(keys, size * -(-len(active) // call.splits))
        step = 1 if call.invariant else max(1, keys // size)
        if scattered:  # partial blocks last, among them the one that crosses the end
            active, cuts = active[np.argsort(~full[active], kind="stable")], [0, len(active)]
        end = int(call.lengths[batch].max()) if call.ragged else int(call.lengths[0])
        end = -(-end // size) * size if call.invariant else end
        for start, stop in itertools.pairwise(cuts):
            for c in range(start, stop, step):
                blocks = active[c : min(c + step, stop)]
                piece = self._piece(rows, blocks, codes, full[blocks], end, scattered)
                if piece is not None:
                    self._update((batch, heads), *piece)

    def _piece(
        self,
        rows: Uncut,
        blocks: NDArray[np.intp],
        codes: Codes,
        full: NDArray[np.bool_],
        end: int,
        scattered: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """Scores and values of some blocks, or None when nobody may see one of their keys."""
        size, device = self.call.block_size[1], self.q.device
        first = int(blocks[0]) * size
        position = None
        if scattered:
            keys = (blocks[:, None] * size + np.arange(size)).ravel()
            position = torch.from_numpy(keys[keys < end]).to(device)

        def kv_idx(start: int, stop: int) -> Tensor:
            if position is None:
                part = torch.arange(first + start, first + stop, device=device)
            else:
                part = position[start:stop]
            return part.view(1, 1, 1, 1, -1)

        total = (
            min((int(blocks[-1]) + 1) * size, end) - first if position is None else len(position)
        )
        lo, hi = 0, total
        found: list[Allowed] = []
        for start, stop in () if full.all() or not self._asks(codes) else false_runs(full):
            left, right = start * size, min(stop * size, total)
            mask = self._mask(rows, kv_idx(left, right), codes[:, blocks[start:stop]])
            if mask is None:
                continue
            if position is None and (left == lo or right == hi) and not self.call.invariant:
                # Narrow the view to the keys that somebody may see: no mask, no copy of v.
                seen = np.flatnonzero(mask.flatten(0, -2).any(0).numpy(force=True))
                origin = left
                if left == lo:
                    left = lo = origin + (int(seen[0]) if len(seen) else mask.shape[-1])
                if right == hi:
                    right = hi = origin + (int(seen[-1]) + 1 if len(seen) else 0)
                if left >= right:
                    continue
                mask = mask[..., left - origin : right - origin]
                if mask.all():
                    continue
            found.append(Allowed(left, mask))
        if lo >= hi:
            return None
        some = rows.cut(slice(first + lo, first + hi) if position is None else position)
        owned = scattered or rows.copies
        if self.call.invariant:  # the bits of a product depend on strides and addresses
            some, owned = some.laid_out(hi - lo), True
        shifted = [Allowed(each.start - lo, each.mask) for each in found]
        return self._scored(some, lambda: kv_idx(lo, hi), shifted, owned)

    def _asks(self, codes: Codes) -> bool:
        """True where a partial block needs more than being cut at a length."""
        call = self.call
        return call.mask is not None or call.ragged or call.invariant or len(codes) > 1

    def _mask(self, rows: Uncut, kv_idx: Tensor, codes: Codes) -> Tensor | None:
        """Who may see the keys of some partial blocks; None when everybody may see all."""
        at = rows.places()
        allowed = None
        if self.call.mask is not None:
            allowed = evaluate(self.call.mask, at.b, at.h, at.q_idx, kv_idx)
        if len(codes) > 1:  # heads of a group have lists of their own
            spread = np.repeat(codes, self.call.block_size[1], axis=1)[:, : kv_idx.shape[-1]]
            code = torch.from_numpy(spread).to(kv_idx.device).view(1, 1, len(codes), 1, -1)
            rule = code == PARTIAL if allowed is None else (code == PARTIAL) & allowed
            allowed = (code == FULL) | rule
        if at.kv_len is not None:
            inside = kv_idx < at.kv_len
            allowed = inside if allowed is None else allowed & inside
        if allowed is None or allowed.all():
            return None
        if allowed.dim() == 0:  # a rule that depends on nothing
            allowed = allowed.view(1, 1, 1, 1, 1)
        return allowed.expand(*allowed.shape[:-1], kv_idx.shape[-1])

    def _scored(
        self, rows: Rows, kv_idx: Callable[[], Tensor], allowed: list[Allowed], owned: bool
    ) -> tuple[Tensor, Tensor]:
        return scored(rows, kv_idx, self.call.request.score, allowed, self.T, owned)

    def _update(self, where: tuple[slice, slice], score: Tensor, v: Tensor) -> None:
        whole = score.shape[:2] == self.q.shape[:2]
        if self.state is None and whole and self.call.state_dtype == torch.float32:
            self.state = attended(None, score, v)
        else:
            state = self._state()
            state[where] = attended(state[where], score, v)

    def _batches(self, codes: Codes) -> None:
        """Attend where lists differ between many rows: padded lists, gathered blocks."""
        problem, size = self.call.problem, self.call.block_size[1]
        B, Hkv, blocks = problem.B, problem.Hkv, codes.shape[-1]
        codes = np.broadcast_to(codes, (B, Hkv, *codes.shape[2:])).reshape(B * Hkv, -1, blocks)
        union = codes.max(1) > 0
        count = union.sum(1)
        lists = np.argsort(~union, axis=1, kind="stable")[:, : count.max()]
        order = np.argsort(-count, kind="stable")  # the rows that still have a block come first
        keys = min(size, problem.Lkv)
        most = max(1, MAX_COPIED // (keys * max(problem.D, problem.Dv, self.M)))  # blocks at a time
        state = self._state().flatten()
        for r in range(0, B * Hkv, most):
            chosen = order[r : r + most]
            column = 0
            while True:
                chosen = chosen[count[chosen] > column]
                if not len(chosen):
                    break
                width = max(1, most // len(chosen))
                listed = lists[chosen, column : column + width]
                column += listed.shape[1]
                picked = np.take_along_axis(codes[chosen], listed[:, None], axis=2)
                index = torch.from_numpy(chosen).to(problem.device)
                score, v = self._padded(index, listed, picked)
                old = state[index]
                old = State(old.m[:, None], old.l[:, None], old.acc[:, None])
                new = attended(old, score, v)
                state[index] = State(new.m[:, 0], new.l[:, 0], new.acc[:, 0])

    def _padded(
        self, index: Tensor, listed: NDArray[np.intp], codes: Codes
    ) -> tuple[Tensor, Tensor]:
        """Scores and values of a list for each row: listed [R, C], codes [R, 1 or G, C]."""
        problem, size = self.call.problem, self.call.block_size[1]
        b, h = index // problem.Hkv, index % problem.Hkv
        n = min(size, problem.Lkv)
        keys = (listed[..., None] * size + np.arange(n)).reshape(len(listed), -1)
        position = torch.from_numpy(keys).to(index.device)
        kv_idx = position.view(len(listed), 1, 1, 1, -1)
        bias = self.bias
        if bias is not None:
            bias_b = b[:, None] if bias.shape[0] > 1 else 0
            bias_h = h[:, None] if bias.shape[1] > 1 else 0
            inside = position.clamp(max=problem.Lkv - 1)
            bias = bias[bias_b, bias_h, ..., inside]  # [R, N, G or 1, T]
            bias = bias.permute(0, 2, 3, 1).unsqueeze(1)
        G, column = problem.G, (-1, 1, 1, 1, 1)
        lengths = torch.from_numpy(self.call.lengths).to(index.device)
        kv_len = (lengths[b] if self.call.ragged else lengths).view(column)
        heads = (h[:, None] * G + torch.arange(G, device=index.device)).view(-1, 1, G, 1, 1)
        at = Places((b + problem.first_b).view(column), heads, self._q_idx(b), kv_len)
        mine = Rows(
            q=self.q[b, h].unsqueeze(1),
            k=self.call.k.gathered(b[:, None], h[:, None], position).unsqueeze(1),
            v=self.call.v.gathered(b[:, None], h[:, None], position).unsqueeze(1),
            bias=bias,
            places=lambda: at,
        )
        if (codes == FULL).all():
            return self._scored(mine, lambda: kv_idx, [], owned=True)
        spread = np.repeat(codes, n, axis=2)
        code = torch.from_numpy(spread).to(index.device)[:, None, :, None]
        allowed = code == PARTIAL
        if self.call.mask is not None:
            allowed = allowed & evaluate(self.call.mask, at.b, at.h, at.q_idx, kv_idx)
        allowed = ((code == FULL) | allowed) & (kv_idx < kv_len)
        return self._scored(mine, lambda: kv_idx, [Allowed(0, allowed)], owned=True)
