"""Random mask and score rules over the traced operations, for comparing backends."""

import random

import torch


class RandomMods:
    """Rules drawn from one seed; captured tensors live on `device`.

    Masks use integers and booleans only, whose arithmetic is exact on every backend.
    """

    def __init__(self, seed, device, kv_len):
        self.rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(-3, 6, (kv_len,), generator=generator).to(device)
        self.narrow = torch.randint(0, 200, (kv_len,), generator=generator).to(torch.int16)
        self.narrow = self.narrow.to(device)
        self.flags = (torch.rand(4, kv_len, generator=generator) < 0.7).to(device)
        self.slopes = (torch.rand(16, generator=generator) * 0.1).to(device)
        self.table = torch.randn(3, kv_len, generator=generator).to(torch.bfloat16).to(device)

    def integer(self, depth):
        """An integer rule."""
        rng, ids, narrow = self.rng, self.ids, self.narrow
        if depth == 0 or rng.random() < 0.2:
            number = rng.choice([0, 1, 2, 3, 7, 16, 31, 100, -5])
            return rng.choice(
                [
                    lambda b, h, q, k: q,
                    lambda b, h, q, k: k,
                    lambda b, h, q, k: q - k,
                    lambda b, h, q, k: h,
                    lambda b, h, q, k: b + 1,
                    lambda b, h, q, k: k * 0 + number,
                    lambda b, h, q, k: ids[k],
                    lambda b, h, q, k: narrow[k],
                    lambda b, h, q, k: ids[q % 16],
                ]
            )
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        size = rng.choice([2, 3, 4, 8, 13, 64, -3])
        choose = self.boolean(0)
        return rng.choice(
            [
                lambda *i: x(*i) + y(*i),
                lambda *i: x(*i) - y(*i),
                lambda *i: x(*i) * size,
                lambda *i: x(*i) // size,
                lambda *i: x(*i) % size,
                lambda *i: torch.minimum(x(*i), y(*i)),
                lambda *i: torch.maximum(x(*i), y(*i)),
                lambda *i: torch.where(choose(*i), x(*i), y(*i)),
                lambda *i: (x(*i) - y(*i)).abs(),
                lambda *i: torch.clamp(x(*i), -20, 50),
                lambda *i: -x(*i),
            ]
        )

    def boolean(self, depth):
        """A mask rule."""
        rng, flags = self.rng, self.flags
        if depth == 0:
            window = rng.choice([1, 5, 40, 300])
            return rng.choice(
                [
                    lambda b, h, q, k: q >= k,
                    lambda b, h, q, k: q - k < window,
                    lambda b, h, q, k: flags[h % 4, k],
                    lambda b, h, q, k: flags[b % 4][k],
                ]
            )
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        p, r = self.boolean(depth - 1), self.boolean(depth - 1)
        return rng.choice(
            [
                lambda *i: x(*i) <= y(*i),
                lambda *i: x(*i) > y(*i),
                lambda *i: x(*i) % 3 != 1,
                lambda *i: p(*i) & r(*i),
                lambda *i: p(*i) | r(*i),
                lambda *i: p(*i) ^ r(*i),
                lambda *i: ~p(*i),
                lambda *i: torch.where(p(*i), r(*i), x(*i) == 0),
            ]
        )

    def score(self):
        """A score rule, or None."""
        rng, slopes, table = self.rng, self.slopes, self.table
        cap = rng.choice([2.0, 5.0, 30.0])
        shift = self.integer(1)
        return rng.choice(
            [
                None,
                lambda s, b, h, q, k: s + slopes[h] * (k - q),
                lambda s, b, h, q, k: cap * torch.tanh(s / cap),
                lambda s, b, h, q, k: s + table[h % 3, k],
                lambda s, b, h, q, k: torch.where(q - k < 9, s, s * 0.5),
                lambda s, b, h, q, k: (
                    s * torch.sigmoid(s) + 0.01 * torch.clamp(shift(b, h, q, k), -50, 50)
                ),
                lambda s, b, h, q, k: torch.minimum(s, s.new_full((), cap)) - (k % 7) * 0.1,
            ]
        )
