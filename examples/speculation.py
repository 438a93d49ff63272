"""Speculative decoding of a token tree: draft, verify in one pass, keep the path that agrees."""

from __future__ import annotations

import torch
from engines import captured
from llama import Llama
from torch import Tensor

from flexdecode import append_kv, attention, create_block_mask
from flexdecode.masks import create_ancestors, tree

__all__ = ["Speculation"]

# Two guesses for the next token; for what follows them two and one; and one more in a row.
PARENTS = (-1, 0, 0, 1, 1, 2, 3)


class Speculation:
    """Sequences of equal standing, decoded by trees. A round is one CUDA graph.

    The draft is a table: what the model itself would say after each token without context.

    Parameters
    ----------
    model : Llama
    batch, capacity : int
        Sequences, and most tokens of one, trees included.
    parents : sequence of int
        The tree; node 0 is the token that is already known.
    """

    def __init__(
        self, model: Llama, batch: int, capacity: int, parents: tuple[int, ...] = PARENTS
    ) -> None:
        self.model, self.parents = model, parents
        device, shape = model.device, model.shape
        depth = [0] * len(parents)
        rank = [0] * len(parents)
        for node in range(1, len(parents)):
            depth[node] = depth[parents[node]] + 1
            rank[node] = parents[:node].count(parents[node])
        self.depth = torch.tensor(depth, device=device)
        self._rank = rank
        self._parent = torch.tensor(parents, device=device)
        self.longest = max(depth) + 1  # tokens that a round may gain
        size = (shape.layers, batch, shape.kv_heads, capacity, shape.head_dim)
        self.k, self.v = (torch.zeros(size, dtype=model.dtype, device=device) for _ in range(2))
        self.next = torch.zeros(batch, dtype=torch.int64, device=device)
        self.seen = torch.zeros(batch, dtype=torch.int32, device=device)
        self.total = torch.zeros_like(self.seen)
        self.gained = torch.zeros_like(self.seen)
        self.path = torch.zeros(batch, self.longest, dtype=torch.int64, device=device)
        mask = create_block_mask(tree(create_ancestors(parents, device), self.seen))
        self.mask = mask.bind(
            batch=batch,
            heads=shape.heads,
            q_len=len(parents),
            kv_len=self.total,
            kv_capacity=capacity,
        )
        vocabulary = torch.arange(shape.vocabulary, device=device)[:, None]

        def alone(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return v.repeat_interleave(shape.heads // shape.kv_heads, dim=1)  # one key: its value

        logits = model.forward(vocabulary, torch.zeros_like(vocabulary), alone)
        self.guesses = logits[:, 0].topk(max(rank) + 1).indices
        self._round = captured(self._step, device)

    def start(self, prompts: Tensor) -> None:
        """Run prompts [batch, n] through the model."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.k[layer][:, :, : k.shape[2]] = k
            self.v[layer][:, :, : v.shape[2]] = v
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

        positions = torch.arange(prompts.shape[1], device=prompts.device).expand(prompts.shape)
        self.next.copy_(self.model.forward(prompts, positions, attend)[:, -1].argmax(-1))
        self.seen.fill_(prompts.shape[1])

    def round(self) -> tuple[Tensor, Tensor]:
        """Verify one tree.

        Returns
        -------
        path : Tensor, [batch, longest], int64
            Tokens that became certain, in order.
        gained : Tensor, [batch], int32
            How many of them count.
        """
        self._round()
        return self.path.clone(), self.gained.clone()

    def _step(self) -> None:
        nodes = [self.next]
        for node in range(1, len(self.parents)):
            nodes.append(self.guesses[nodes[self.parents[node]], self._rank[node]])
        tokens = torch.stack(nodes, dim=1)  # [batch, T]
        torch.add(self.seen, len(self.parents), out=self.total)
        self.mask.update()
        logits = self.model.forward(tokens, self.seen[:, None] + self.depth, self._attend)
        best = logits.argmax(-1)

        # Walk down as long as a child holds the token that the model wants after its parent.
        rows = torch.arange(len(tokens), device=tokens.device)
        node = torch.zeros_like(self.next)
        alive = torch.ones_like(node, dtype=torch.bool)
        path, gained = [node], torch.ones_like(self.seen)
        for _ in range(self.longest - 1):
            right = (self._parent == node[:, None]) & (tokens == best[rows, node][:, None])
            alive = alive & right.any(1)
            node = torch.where(alive, right.int().argmax(1), node)
            path.append(node)
            gained = gained + alive.int()
        kept = torch.stack(path, dim=1)  # [batch, longest]: nodes
        self._compact(kept)
        self.path.copy_(tokens.gather(1, kept))
        self.gained.copy_(gained)
        self.next.copy_(best[rows, node])
        self.seen.add_(gained)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        append_kv(self.k[layer], self.v[layer], k, v, kv_len=self.seen)
        out = attention(q, self.k[layer], self.v[layer], block_mask=self.mask)
        assert isinstance(out, Tensor)
        return out

    def _compact(self, kept: Tensor) -> None:
        """Move the rows of the path to where a sequence would have them.

        What is copied behind its end is overwritten by the next tree.
        """
        where = (self.seen[:, None] + kept)[None, :, None, :, None]
        where = where.expand(*self.k.shape[:3], -1, self.k.shape[4])
        k, v = self.k.gather(3, where), self.v.gather(3, where)
        for layer in range(len(k)):
            append_kv(self.k[layer], self.v[layer], k[layer], v[layer], kv_len=self.seen)
