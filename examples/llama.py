"""A decoder of Llama's kind in plain torch, with random weights; attention is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Attend", "Llama", "Shape"]

# attend(layer, q [B, Hq, n, D], k [B, Hkv, n, D], v [B, Hkv, n, D]) -> out [B, Hq, n, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults run on a CPU in no time."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    vocabulary: int = 211
    rope_theta: float = 10000.0


class Llama:
    """The model: embedding, layers of attention and MLP, and a head.

    Parameters
    ----------
    shape : Shape
    device : torch.device or str
    dtype : torch.dtype
    seed : int
        Of the weights.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.shape, self.device, self.dtype = shape, torch.device(device), dtype
        generator = torch.Generator(self.device).manual_seed(seed)

        def weight(*size: int, scale: float = 1.0) -> Tensor:
            w = torch.empty(size, device=device, dtype=dtype)
            return w.normal_(0, scale * size[-1] ** -0.5, generator=generator)

        s = shape
        calm = (2 * s.layers) ** -0.5  # so that the sum over layers does not drown the token
        attended = s.heads * s.head_dim
        self.embedding = weight(s.vocabulary, s.hidden) * s.hidden**0.5
        self.head = weight(s.vocabulary, s.hidden)
        self.qkv = [
            weight(attended + 2 * s.kv_heads * s.head_dim, s.hidden) for _ in range(s.layers)
        ]
        self.out = [weight(s.hidden, attended, scale=calm) for _ in range(s.layers)]
        self.gate_up = [weight(2 * s.mlp, s.hidden) for _ in range(s.layers)]
        self.down = [weight(s.hidden, s.mlp, scale=calm) for _ in range(s.layers)]
        exponent = torch.arange(0, s.head_dim, 2, device=device, dtype=torch.float32) / s.head_dim
        self.frequencies = s.rope_theta**-exponent

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return logits.

        Parameters
        ----------
        tokens : Tensor, [B, n], int64
        positions : Tensor, [B, n], integer
            Place of each token in its sequence.
        attend : callable
            Attention of one layer, cache included.

        Returns
        -------
        Tensor, [B, n, vocabulary]
        """
        s = self.shape
        angles = positions[:, None, :, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding[tokens]
        for layer in range(s.layers):
            qkv = (_norm(x) @ self.qkv[layer].t()).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
            out = attend(layer, _rotated(q, cos, sin), _rotated(k, cos, sin), v)
            x = x + out.transpose(1, 2).flatten(2) @ self.out[layer].t()
            gate, up = (_norm(x) @ self.gate_up[layer].t()).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ self.down[layer].t()
        return _norm(x) @ self.head.t()


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-5)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(pair, dim=-1).to(x.dtype)
