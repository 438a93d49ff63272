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
import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.block_codes import Codes, Lengths, block_codes, groups, runs
from flexdecode.evaluate import evaluate
from flexdecode.problem import Request, Result
from flexdecode.softmax import State, attended, product
from flexdecode.tables import FULL, PARTIAL

__all__ = ["run"]

BLOCK_SIZE = (128, 128)  # when no table says otherwise
MAX_SCORES = 1 << 22  # elements of a piece's scores: 16 MiB
MAX_COPIED = 1 << 20  # elements of k or v converted or gathered at a time: 4 MiB, cache-sized
MAX_GROUPS = 64  # more different lists than that are batched


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
    device = problem.device
    shape = (problem.B, problem.Hq, problem.Lq)
    out = torch.empty(*shape, problem.Dv, dtype=problem.dtype, device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device) if request.want_lse else None
    top = torch.empty(shape, dtype=torch.float32, device=device) if request.want_max else None
    if problem.B and problem.Lq:
        exact: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if torch.is_autocast_enabled(device.type):  # it would round every product
            exact = torch.autocast(device.type, enabled=False)
        with exact:
            call = _Call(request)
            for start in range(0, problem.Lq, call.block_size[0]):
                _Tile(call, start).run(out, lse, top)
    return Result(out, lse, top)


class _Call:
    """What all query tiles of a call share."""

    def __init__(self, request: Request) -> None:
        problem, resolved = request.problem, request.resolved
        self.request, self.problem = request, problem
        self.mask = None if resolved is None else resolved.mask
        self.tables = None if resolved is None else resolved.tables
        self.block_size = BLOCK_SIZE if self.tables is None else self.tables.BLOCK_SIZE
        if isinstance(problem.kv_len, int):
            lengths = np.full(1, problem.kv_len, dtype=np.int64)
        else:
            lengths = problem.kv_len_rows().numpy(force=True)
        self.ragged = bool((lengths != lengths[0]).any())
        self.lengths: Lengths = lengths if self.ragged else lengths[:1]
        self.state_dtype = request.options.get("partial_dtype", torch.float32)
        self.splits = request.options.get("num_splits", 1)
        device = problem.device
        self.b = torch.arange(problem.B, device=device).view(-1, 1, 1, 1, 1)
        self.h = torch.arange(problem.Hq, device=device).view(1, problem.Hkv, problem.G, 1, 1)
        self.kv_len = None
        if self.ragged:
            self.kv_len = torch.from_numpy(lengths).to(device).view(-1, 1, 1, 1, 1)

    def codes(self, row: int) -> Codes:
        """Codes of one query tile's blocks: [B or 1, Hkv or 1, G or 1, blocks]."""
        problem = self.problem
        codes = block_codes(
            self.tables,
            row,
            lengths=self.lengths,
            size=self.block_size[1],
            capacity=problem.Lkv,
        )
        heads = (problem.Hkv, problem.G) if codes.shape[1] > problem.Hkv else (codes.shape[1], 1)
        codes = codes.reshape(len(codes), *heads, codes.shape[-1])
        for dim in (0, 1, 2):  # equal lists are one list
            if codes.shape[dim] > 1:
                first = codes.take([0], axis=dim)
                codes = first if (codes == first).all() else codes
        return codes


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a product, X sequences by Y key heads, and what is theirs."""

    q: Tensor  # [X, Y, M, D], scaled, float32; M = G * T
    k: Tensor  # [X or 1, Y, N, D]
    v: Tensor  # [X or 1, Y, N, Dv]
    b: Tensor  # [X, 1, 1, 1, 1]
    h: Tensor  # [X or 1, Y, G, 1, 1]
    q_idx: Tensor  # [X or 1, 1, 1, T, 1]
    kv_len: Tensor | None  # [X, 1, 1, 1, 1]; None when all are equal
    bias: Tensor | None  # [X or 1, Y or 1, G or 1, T, N]

    def select(self, batch: slice, heads: slice) -> _Rows:
        """Some sequences and key heads: views."""

        def part(x: Tensor) -> Tensor:
            x = x[batch] if x.shape[0] > 1 else x
            return x[:, heads] if x.shape[1] > 1 else x

        return _Rows(
            *(part(x) for x in (self.q, self.k, self.v, self.b, self.h, self.q_idx)),
            *(None if x is None else part(x) for x in (self.kv_len, self.bias)),
        )

    def cut(self, keys: slice | Tensor) -> _Rows:
        """Some keys: views for a slice, copies for a tensor of positions."""
        if isinstance(keys, slice):
            k, v = self.k[:, :, keys], self.v[:, :, keys]
            bias = None if self.bias is None else self.bias[..., keys]
        else:
            k, v = self.k.index_select(2, keys), self.v.index_select(2, keys)
            bias = None if self.bias is None else self.bias.index_select(4, keys)
        return replace(self, k=k, v=v, bias=bias)


@dataclass(frozen=True, eq=False)
class _Allowed:
    """Who may see the keys from column ``start`` on; columns outside are open to all rows."""

    start: int
    mask: Tensor  # [X or 1, Y or 1, G or 1, T or 1, n], bool

    @property
    def stop(self) -> int:
        return self.start + self.mask.shape[-1]


class _Tile:
    """One query tile: rows from ``start`` on, of all heads and sequences."""

    def __init__(self, call: _Call, start: int) -> None:
        problem, request = call.problem, call.request
        stop = min(start + call.block_size[0], problem.Lq)
        self.call, self.start, self.stop = call, start, stop
        T = stop - start
        q = request.q[:, :, start:stop].float() * problem.scale
        i = torch.arange(start, stop, device=problem.device).view(1, 1, 1, T, 1)
        offset, bias = problem.q_offset, request.bias
        if bias is not None:
            heads = (problem.Hkv, problem.G) if bias.shape[1] > 1 else (1, 1)
            bias = bias[:, :, start:stop].view(bias.shape[0], *heads, T, problem.Lkv)
        self.rows = _Rows(
            q=q.reshape(problem.B, problem.Hkv, problem.G * T, problem.D),
            k=request.k,
            v=request.v,
            b=call.b,
            h=call.h,
            q_idx=i + (offset.view(-1, 1, 1, 1, 1) if isinstance(offset, Tensor) else offset),
            kv_len=call.kv_len,
            bias=bias,
        )
        self.state: State | None = None

    def run(self, out: Tensor, lse: Tensor | None, top: Tensor | None) -> None:
        """Attend, and write the tile's rows of the results."""
        call, problem = self.call, self.call.problem
        codes = call.codes(self.start // call.block_size[0])
        few = list(itertools.islice(groups(codes), MAX_GROUPS + 1))
        if len(few) > MAX_GROUPS:
            self._batches(codes)
        else:
            everyone = slice(None)
            for batch, heads, group in few:
                batch = batch if len(codes) > 1 else everyone
                heads = heads if codes.shape[1] > 1 else everyone
                self._group(batch, heads, group)
        state = self._state()
        T = self.stop - self.start
        rows, shape = slice(self.start, self.stop), (problem.B, problem.Hq, T)
        if top is not None:
            top[:, :, rows] = state.m.reshape(shape)
        if call.request.sinks is not None:
            sinks = call.request.sinks.to(state.m.dtype).view(1, problem.Hkv, problem.G, 1)
            sinks = sinks.expand(-1, -1, -1, T).reshape(1, problem.Hkv, problem.G * T, 1)
            state = state.with_sinks(sinks)
        out[:, :, rows] = state.out().reshape(*shape, problem.Dv)
        if lse is not None:
            lse[:, :, rows] = state.lse().reshape(shape)

    def _state(self) -> State:
        if self.state is None:
            problem, rows = self.call.problem, self.rows.q.shape[:3]
            dtype = self.call.state_dtype
            self.state = State.empty(rows, problem.Dv, dtype, problem.device)
        return self.state

    def _group(self, batch: slice, heads: slice, codes: Codes) -> None:
        """Attend for rows that share a list, codes [1 or G, blocks]."""
        call, problem, size = self.call, self.call.problem, self.call.block_size[1]
        rows = self.rows.select(batch, heads)
        X, Y, M, _ = rows.q.shape
        most = max(1, MAX_SCORES // (Y * M * min(size, problem.Lkv)))
        if X > most:  # not even one block of all these sequences at once
            first = batch.start or 0
            for b in range(first, first + X, most):
                self._group(slice(b, min(b + most, first + X)), heads, codes)
            return
        active = np.flatnonzero(codes.max(0))
        full = codes.min(0) == FULL
        cuts = np.flatnonzero(np.diff(active) != 1) + 1
        scattered = len(cuts) > 3 and (len(cuts) + 1) * 4 > len(active)
        keys = MAX_SCORES // (X * Y * M)
        if scattered or rows.k.dtype != torch.float32:  # k and v are copied
            keys = min(keys, MAX_COPIED // (rows.k.shape[0] * Y * max(problem.D, problem.Dv)))
        if call.splits > 1:
            keys = min(keys, size * -(-len(active) // call.splits))
        step = max(1, keys // size)
        if scattered:  # partial blocks last, among them the one that crosses the end
            strips = [active[np.argsort(~full[active], kind="stable")]]
        else:
            strips = np.split(active, cuts)
        end = int(call.lengths[batch if call.ragged else slice(None)].max())
        for strip in strips:
            for c in range(0, len(strip), step):
                blocks = strip[c : c + step]
                piece = self._piece(rows, blocks, codes[:, blocks], end, scattered)
                if piece is not None:
                    self._update((batch, heads), *piece)

    def _piece(
        self, rows: _Rows, blocks: NDArray[np.intp], codes: Codes, end: int, scattered: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Scores and values of some blocks, or None when nobody may see one of their keys."""
        size, device = self.call.block_size[1], rows.q.device
        first = int(blocks[0]) * size
        if scattered:
            keys = (blocks[:, None] * size + np.arange(size)).ravel()
            position = torch.from_numpy(keys[keys < end]).to(device)
        else:
            position = torch.arange(first, min((int(blocks[-1]) + 1) * size, end), device=device)
        lo, hi = 0, len(position)
        found: list[_Allowed] = []
        for start, stop, is_full in runs(codes.min(0) == FULL):
            if is_full:
                continue
            columns = slice(start * size, min(stop * size, len(position)))
            mask = self._mask(rows, position[columns], codes[:, start:stop])
            if mask is None:
                continue
            left, right = columns.start, columns.stop
            if not scattered and (left == lo or right == hi):
                # Narrow the view to the keys that somebody may see: no mask, no copy of v.
                seen = np.flatnonzero(mask.flatten(0, -2).any(0).numpy(force=True))
                if left == lo:
                    left = lo = left + (int(seen[0]) if len(seen) else mask.shape[-1])
                if right == hi:
                    right = hi = columns.start + (int(seen[-1]) + 1 if len(seen) else 0)
                if left >= right:
                    continue
                mask = mask[..., left - columns.start : right - columns.start]
                if mask.all():
                    continue
            found.append(_Allowed(left, mask))
        if lo >= hi:
            return None
        kv_idx = position[lo:hi]
        rows = rows.cut(kv_idx if scattered else slice(first + lo, first + hi))
        shifted = [_Allowed(each.start - lo, each.mask) for each in found]
        return self._scores(rows, kv_idx.view(1, 1, 1, 1, -1), shifted, owned=scattered)

    def _mask(self, rows: _Rows, kv_idx: Tensor, codes: Codes) -> Tensor | None:
        """Who may see the keys of some partial blocks; None when everybody may see all."""
        kv_idx = kv_idx.view(1, 1, 1, 1, -1)
        allowed = None
        if self.call.mask is not None:
            allowed = evaluate(self.call.mask, rows.b, rows.h, rows.q_idx, kv_idx)
        if len(codes) > 1:  # heads of a group have lists of their own
            spread = np.repeat(codes, self.call.block_size[1], axis=1)[:, : kv_idx.shape[-1]]
            code = torch.from_numpy(spread).to(kv_idx.device).view(1, 1, len(codes), 1, -1)
            rule = code == PARTIAL if allowed is None else (code == PARTIAL) & allowed
            allowed = (code == FULL) | rule
        if rows.kv_len is not None:
            inside = kv_idx < rows.kv_len
            allowed = inside if allowed is None else allowed & inside
        if allowed is None or allowed.all():
            return None
        if allowed.dim() == 0:  # a rule that depends on nothing
            allowed = allowed.view(1, 1, 1, 1, 1)
        return allowed.expand(*allowed.shape[:-1], kv_idx.shape[-1])

    def _scores(
        self, rows: _Rows, kv_idx: Tensor, allowed: list[_Allowed], owned: bool
    ) -> tuple[Tensor, Tensor]:
        """Scores [X, Y, M, N], ``-inf`` where not allowed, and values fit to be weighted by 0."""
        k, v = rows.k.float(), rows.v.float()
        X, Y, M, _ = rows.q.shape
        G, T = self.call.problem.G, self.stop - self.start
        score = product(rows.q, k.transpose(-1, -2)).view(X, Y, G, T, -1)
        if rows.bias is not None:
            score.add_(rows.bias)
        if self.call.request.score is not None:
            shape = score.shape
            changed = evaluate(self.call.request.score, rows.b, rows.h, rows.q_idx, kv_idx, score)
            # Smaller than the scores, it may be the user's own tensor, not to be written to.
            score = changed if changed.shape == shape else changed.expand(shape).clone()
        for each in allowed:
            columns = slice(each.start, each.stop)
            score[..., columns].masked_fill_(~each.mask, -torch.inf)
            unseen = ~each.mask.any(dim=3).any(dim=2)  # [X or 1, Y or 1, n]
            if unseen.any():  # NaN times 0 would be NaN
                if unseen.shape[0] > v.shape[0]:
                    v, owned = v.expand(X, -1, -1, -1), False
                if not owned and v.dtype == rows.v.dtype:
                    v, owned = v.clone(), True
                v[:, :, columns].masked_fill_(unseen.unsqueeze(-1), 0.0)
        return score.reshape(X, Y, M, -1), v

    def _update(self, where: tuple[slice, slice], score: Tensor, v: Tensor) -> None:
        whole = score.shape[:2] == self.rows.q.shape[:2]
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
        M = self.rows.q.shape[2]
        most = max(1, MAX_COPIED // (keys * max(problem.D, problem.Dv, M)))  # blocks at a time
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
        problem, size, rows = self.call.problem, self.call.block_size[1], self.rows
        b, h = index // problem.Hkv, index % problem.Hkv
        keys = (listed[..., None] * size + np.arange(min(size, problem.Lkv))).reshape(
            len(listed), -1
        )
        position = torch.from_numpy(keys).to(index.device)
        kv_idx = position.view(len(listed), 1, 1, 1, -1)
        slot = position.clamp(max=problem.Lkv - 1)
        at = (b[:, None] if problem.Bkv > 1 else 0, h[:, None], slot)
        bias = rows.bias
        if bias is not None:
            bias = bias[
                b[:, None] if bias.shape[0] > 1 else 0,
                h[:, None] if bias.shape[1] > 1 else 0,
                ...,
                slot,
            ]  # [R, N, G or 1, T]
            bias = bias.permute(0, 2, 3, 1).unsqueeze(1)
        lengths = torch.from_numpy(self.call.lengths).to(index.device)
        kv_len = (lengths[b] if len(lengths) > 1 else lengths).view(-1, 1, 1, 1, 1)
        mine = _Rows(
            q=rows.q[b, h].unsqueeze(1),
            k=rows.k[at].unsqueeze(1),
            v=rows.v[at].unsqueeze(1),
            b=b.view(-1, 1, 1, 1, 1),
            h=rows.h[0][h].unsqueeze(1),
            q_idx=rows.q_idx[b] if rows.q_idx.shape[0] > 1 else rows.q_idx,
            kv_len=kv_len,
            bias=bias,
        )
        if (codes == FULL).all():
            return self._scores(mine, kv_idx, [], owned=True)
        spread = np.repeat(codes, keys.shape[1] // listed.shape[1], axis=2)
        code = torch.from_numpy(spread).to(index.device)[:, None, :, None]
        allowed = code == PARTIAL
        if self.call.mask is not None:
            allowed = allowed & evaluate(self.call.mask, mine.b, mine.h, mine.q_idx, kv_idx)
        allowed = ((code == FULL) | allowed) & (kv_idx < kv_len)
        return self._scores(mine, kv_idx, [_Allowed(0, allowed)], owned=True)
