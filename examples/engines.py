"""Two engines with one interface: a paged cache with flexdecode, a dense one with torch's flex.

Both keep a fixed number of *slots*, one running sequence each, in buffers that never move, so that
a decode step of all slots is one CUDA graph. Which sequence sits where is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from llama import Llama
from torch import Tensor

from flexdecode import append_kv, attention, create_block_mask
from flexdecode.masks import causal

__all__ = ["Engine", "PagedEngine", "Pages", "TorchFlexEngine", "captured"]


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """Return `step` as a CUDA graph that replays, or as it is where there is no GPU.

    The step runs a few times before it is captured.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, and settles all choices
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Pages:
    """A pool of pages, and the table of those that each slot holds.

    Parameters
    ----------
    slots, max_pages : int
        Size of the table.
    num_pages, page_size : int
        Of the pool; tokens in a page.
    device : torch.device
    """

    def __init__(
        self, slots: int, max_pages: int, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.free = list(range(num_pages - 1, -1, -1))
        self.reserved = [0] * slots  # pages that a slot may still ask for
        self.most_used, self.num_pages = 0, num_pages
        self._table = torch.full((slots, max_pages), -1, dtype=torch.int32)
        self.table = self._table.to(device, copy=True)
        self._changed = False

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def admits(self, tokens: int) -> bool:
        """True where a sequence that grows to `tokens` will never run out of pages."""
        return len(self.free) - sum(self.reserved) >= self.pages_for(tokens)

    def reserve(self, slot: int, tokens: int) -> None:
        """Promise pages for so many tokens."""
        self.reserved[slot] = self.pages_for(tokens)

    def grow(self, slot: int, first: int, end: int) -> None:
        """Give the slot pages for its tokens from `first` to `end`, where it has none yet."""
        row = self._table[slot]
        for page in range(first // self.page_size, self.pages_for(end)):
            if row[page] < 0:
                row[page] = self.free.pop()
                self.reserved[slot] = max(0, self.reserved[slot] - 1)
                self._changed = True
        self.most_used = max(self.most_used, self.num_pages - len(self.free))

    def release(self, slot: int, pages: slice = slice(None)) -> None:
        """Take pages back, all of the slot's or some entries of its table."""
        held = self._table[slot, pages]
        self.free += held[held >= 0].tolist()
        held.fill_(-1)
        if pages == slice(None):
            self.reserved[slot] = 0
        self._changed = True

    def push(self) -> None:
        """Copy the table to the device where it changed."""
        if self._changed:
            self.table.copy_(self._table)
            self._changed = False


class Engine:
    """Slots, their tokens and lengths; a subclass knows the cache.

    Attributes
    ----------
    tokens : Tensor, [slots, 1], int64
        Next token of each slot: not yet in the cache.
    seen : Tensor, [slots], int32
        Tokens in the cache.
    active : Tensor, [slots], int32
        1 where a sequence runs.
    """

    def __init__(self, model: Llama, slots: int, capacity: int) -> None:
        self.model, self.slots, self.capacity = model, slots, capacity
        device = model.device
        self.tokens = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.seen = torch.zeros(slots, dtype=torch.int32, device=device)
        self.active = torch.zeros_like(self.seen)
        self.total = torch.zeros_like(self.seen)  # seen, and the token that is being decoded
        self._replay: Callable[[], object] | None = None

    def decode(self) -> Tensor:
        """Decode one token of every running slot; returns the new `tokens`, [slots]."""
        if self._replay is None:
            tokens, active = self.tokens.clone(), self.active.clone()
            self.active.zero_()  # lengths stand still while the step is warmed up
            self._replay = captured(self._step, self.model.device)
            self.tokens.copy_(tokens)
            self.active.copy_(active)
        self._replay()
        return self.tokens[:, 0].clone()

    def _step(self) -> None:
        torch.add(self.seen, self.active, out=self.total)
        self.begin_step()
        logits = self.model.forward(self.tokens, self.seen[:, None], self.attend)
        self.tokens.copy_(logits.argmax(-1))
        self.seen.copy_(self.total)

    def start(self, slots: Sequence[int], prompts: Sequence[Tensor]) -> Tensor:
        """Put prompts into slots; returns the first token of each, [len(slots)]."""
        where = torch.tensor(slots, device=self.model.device)
        first = self.prefill(where, prompts)
        self.tokens[where, 0] = first
        lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
        self.seen[where] = lengths.to(self.model.device)
        self.active[where] = 1
        return first

    def stop(self, slot: int) -> None:
        """Empty a slot."""
        self.seen[slot] = 0
        self.active[slot] = 0

    def begin_step(self) -> None:
        """Prepare what all layers of a step share."""
        raise NotImplementedError

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one decode step: append, then attend."""
        raise NotImplementedError

    def prefill(self, where: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        """Run prompts through the model; returns the token that follows each."""
        raise NotImplementedError


class PagedEngine(Engine):
    """flexdecode on pages: bound mask, appended keys, packed prompts.

    Parameters
    ----------
    model : Llama
    slots, capacity : int
        Sequences at a time, and most tokens of one.
    num_pages, page_size : int
    rule : callable
        The ``mask_mod``.
    """

    def __init__(
        self,
        model: Llama,
        slots: int,
        capacity: int,
        num_pages: int,
        page_size: int,
        rule: Any = causal,
    ) -> None:
        super().__init__(model, slots, capacity)
        shape, device = model.shape, model.device
        self.pages = Pages(slots, -(-capacity // page_size), num_pages, page_size, device)
        size = (shape.layers, num_pages, shape.kv_heads, page_size, shape.head_dim)
        self.k, self.v = (torch.empty(size, dtype=model.dtype, device=device) for _ in range(2))
        # Blocks are pages: a page that the rule excludes is never touched, and may be taken back.
        self.mask = create_block_mask(rule, BLOCK_SIZE=(128, page_size))
        self.step_mask = self.mask.bind(
            batch=slots,
            heads=shape.heads,
            q_len=1,
            kv_len=self.total,
            kv_capacity=capacity,
            page_table=self.pages.table,
        )

    def begin_step(self) -> None:
        """Rewrite the tables, once for all layers."""
        self.step_mask.update()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append to the pages and attend to them; a slot without pages is left out."""
        cache = self.k[layer], self.v[layer]
        append_kv(*cache, k, v, kv_len=self.seen, page_table=self.pages.table)
        return _out(attention(q, *cache, block_mask=self.step_mask))

    def prefill(self, where: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        """All prompts in one pass: their queries are packed."""
        device = self.model.device
        lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]).to(device)
        positions = torch.cat([torch.arange(len(p)) for p in prompts])[None].to(device)
        table = self.pages.table[where]
        kv_len, nothing = lengths.to(device), torch.zeros_like(lengths).to(device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self.k[layer], self.v[layer]
            append_kv(*cache, k, v, kv_len=nothing, page_table=table, cu_seqlens=starts)
            return _out(
                attention(
                    q,
                    *cache,
                    block_mask=self.mask,
                    kv_len=kv_len,
                    page_table=table,
                    cu_seqlens_q=starts,
                )
            )

        logits = self.model.forward(torch.cat(list(prompts))[None].to(device), positions, attend)
        return logits[0, starts[1:].long() - 1].argmax(-1)


class TorchFlexEngine(Engine):
    """The same with torch's FlexAttention, compiled, on a dense cache; needs a GPU."""

    def __init__(self, model: Llama, slots: int, capacity: int, rule: Any = None) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        super().__init__(model, slots, capacity)
        shape, device = model.shape, model.device
        size = (shape.layers, slots, shape.kv_heads, capacity, shape.head_dim)
        self.k, self.v = (torch.zeros(size, dtype=model.dtype, device=device) for _ in range(2))
        self._flex = torch.compile(flex_attention)
        self._create = torch.compile(create_block_mask)
        self._rows = torch.arange(slots, device=device)
        seen = self.seen
        if rule is None:
            self._rule = lambda b, h, q_idx, kv_idx: kv_idx <= seen[b]
        else:  # torch counts queries from 0
            self._rule = lambda b, h, q_idx, kv_idx: rule(b, h, seen[b], kv_idx)

    def begin_step(self) -> None:
        """Make the block mask, once for all layers."""
        self._mask = self._create(
            self._rule, self.slots, None, 1, self.capacity, device=self.model.device
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new token's row, then attend."""
        place = self.seen.long()
        self.k[layer][self._rows, :, place] = k[:, :, 0]
        self.v[layer][self._rows, :, place] = v[:, :, 0]
        return _out(
            self._flex(q, self.k[layer], self.v[layer], block_mask=self._mask, enable_gqa=True)
        )

    def prefill(self, where: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        """One prompt after the other, through torch's dense attention."""
        device, firsts = self.model.device, []
        for slot, prompt in zip(where.tolist(), prompts, strict=True):
            positions = torch.arange(len(prompt), device=device)[None]

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, slot: int = slot) -> Tensor:
                self.k[layer][slot, :, : k.shape[2]] = k[0]
                self.v[layer][slot, :, : v.shape[2]] = v[0]
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )

            logits = self.model.forward(prompt[None].to(device), positions, attend)
            firsts.append(logits[0, -1].argmax(-1))
        return torch.stack(firsts)


def _out(result: Any) -> Tensor:
    assert isinstance(result, Tensor)  # no statistics were asked for
    return result
