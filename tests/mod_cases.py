"""Mods that between them use every operation, for the tests of tracing and code generation."""

import math

import torch

G = torch.Generator().manual_seed(7)
doc = torch.randint(0, 5, (40,), generator=G)
doc32 = doc.to(torch.int32)
small = torch.randint(-100, 100, (40,), generator=G).to(torch.int8)
bytes_ = torch.randint(0, 255, (40,), generator=G).to(torch.uint8)
flags = torch.rand(4, 40, generator=G) > 0.5
bias = torch.randn(2, 3, 40, 40, generator=G)
half = torch.randn(3, 40, generator=G).to(torch.bfloat16)
double = torch.randn(40, generator=G, dtype=torch.float64)
length = torch.tensor([17])
scalar = torch.tensor(3)
strided = torch.randn(80, 6, generator=G)[::2, ::3]
window, chunk, cap = 7, 8, 20.0


def masks() -> dict:
    """Name to mask mod; valid for b < 2, h < 3, positions in 0..39."""
    helper = lambda q, k: q - k < window  # noqa: E731
    big = 2**40
    return {
        "causal": lambda b, h, q, k: q >= k,
        "always": lambda b, h, q, k: True,
        "never": lambda b, h, q, k: k != k,
        "sliding": lambda b, h, q, k: (q >= k) & helper(q, k),
        "chunks": lambda b, h, q, k: q // chunk == k // chunk,
        "floor_of_negative": lambda b, h, q, k: (k - q) // chunk == -1,
        "floor_by_negative": lambda b, h, q, k: (k - q) // -5 == 1,
        "mod_of_negative": lambda b, h, q, k: (k - q) % chunk < 3,
        "mod_by_negative": lambda b, h, q, k: (k - q) % -3 == -1,
        "constant_divisor": lambda b, h, q, k: (k // 4 + q % 4) % 2 == 0,
        "documents": lambda b, h, q, k: doc[q] == doc[k],
        "documents32": lambda b, h, q, k: (doc32[q] == doc32[k]) & (q >= k),
        "narrow_wraps": lambda b, h, q, k: small[q] + small[k] > 0,
        "unsigned": lambda b, h, q, k: bytes_[q] > bytes_[k],
        "unsigned_mixed": lambda b, h, q, k: bytes_[q] - small[k] > 0,
        "flag_table": lambda b, h, q, k: flags[b, k] | flags[b + 1][q],
        "length_one": lambda b, h, q, k: k < length,
        "zero_dim": lambda b, h, q, k: (q - k).abs() <= scalar,
        "negative_index": lambda b, h, q, k: doc[k - 40] == doc[-1 - q],
        "out_of_range_reads_zero": lambda b, h, q, k: doc[k + 20] < 2,
        "nested_index": lambda b, h, q, k: doc[doc[k]] <= doc[q],
        "slice": lambda b, h, q, k: flags[1:, ::2][b, k // 2],
        "array_arithmetic": lambda b, h, q, k: (doc * 2 - 1)[k] > doc[q],
        "bit_operations": lambda b, h, q, k: ((q ^ k) & 5 | (q >> 1)) > (1 << (k % 3)),
        "shift_wide": lambda b, h, q, k: (k << 33) > (q << 33),
        "wide_product": lambda b, h, q, k: q * 1_000_000_007 * (h + 1) > k * 1_000_000_009,
        "wide_number": lambda b, h, q, k: k + big > q + 2**40 + 3,
        "where_min_max": lambda b, h, q, k: (
            torch.where(h > 0, torch.minimum(q, k + 3), torch.maximum(q, k)) >= k
        ),
        "clamp": lambda b, h, q, k: torch.clamp(q, 3, window) >= torch.clamp(k, max=9),
        "logic": lambda b, h, q, k: torch.logical_or(~(q >= k), torch.logical_not(k % 3)),
        "xor": lambda b, h, q, k: (q > 3) ^ (k > 3) ^ True,
        "float_test": lambda b, h, q, k: torch.sqrt(k.to(torch.float32)) * 2.5 <= q / 3,
        "double_table": lambda b, h, q, k: double[q] + 1e-9 > double[k],
        "int_power": lambda b, h, q, k: k**2 + 2 ** (h + 1) < q**2,
        "strided": lambda b, h, q, k: strided[k, b] > strided[q][0],
        "new_ones": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (k <= q),
        "cast_wraps": lambda b, h, q, k: (k * 100).to(torch.int8) > 0,
        "casts": lambda b, h, q, k: (k.bool() | (q.float() > 3)).to(torch.int64) == 1,
        "size": lambda b, h, q, k: k < doc.shape[0] - flags.size(1) + 12,
        "sign": lambda b, h, q, k: torch.sign(q - k) + 1 == 1,
        "sums_of_booleans": lambda b, h, q, k: (
            (flags[b, k] + (q > k)) & torch.maximum(flags[0, q], (k > 2) * flags[1, k])
        ),
        "shifted_booleans": lambda b, h, q, k: ((q >= k) << 1) > (flags[b, k] << (k % 3)),
        "array_signs": lambda b, h, q, k: ((-doc)[k] <= -1) & (~flags)[b, q] | (doc.abs()[k] == 2),
        "array_choices": lambda b, h, q, k: torch.where(flags[0], doc, doc32)[k] > doc[q] - 2,
        "array_shapes": lambda b, h, q, k: (
            flags.t()[k, b] ^ flags.transpose(0, 1)[q, b] ^ flags.permute((1, 0))[k, h]
        ),
        "array_ones": lambda b, h, q, k: (
            (doc.unsqueeze(0)[0, k] > doc[:, None].squeeze(1)[q]) | (k < length.squeeze())
        ),
        "like_another": lambda b, h, q, k: (k * 300).to(small) > q.type(torch.int16),
        "rounded_integers": lambda b, h, q, k: torch.floor(q) + torch.round(k) > torch.trunc(q) * 2,
        "division_rounded": lambda b, h, q, k: (
            torch.div(q - k, 4, rounding_mode="floor") < torch.div(q, 8)
        ),
    }


def scores() -> dict:
    """Name to score mod; valid for b < 2, h < 3, positions in 0..39."""
    return {
        "identity": lambda s, b, h, q, k: s,
        "alibi": lambda s, b, h, q, k: s + 2.0 ** (-(h + 1)) * (k - q),
        "alibi_table": lambda s, b, h, q, k: s + half[h, 0] * (k - q),
        "softcap": lambda s, b, h, q, k: cap * torch.tanh(s / cap),
        "bias": lambda s, b, h, q, k: s + bias[b, h, q, k],
        "bias_chain": lambda s, b, h, q, k: s * bias[b][h][q, k] + half[h][k],
        "constant": lambda s, b, h, q, k: 1.5,
        "integer": lambda s, b, h, q, k: q - k,
        "functions": lambda s, b, h, q, k: (
            torch.exp(-s.abs()) + torch.log(s * s + 1) + torch.sin(s) * torch.cos(s)
        ),
        "functions2": lambda s, b, h, q, k: (
            torch.exp2(s) - torch.log2(s.abs() + 0.5) + torch.rsqrt(s * s + 1) + torch.erf(s)
        ),
        "functions3": lambda s, b, h, q, k: (
            torch.sigmoid(s) + torch.nn.functional.silu(s) + torch.sqrt(s.abs())
        ),
        "rounding": lambda s, b, h, q, k: (
            torch.floor(s) + torch.ceil(s) * 2 + torch.trunc(s) * 3 + torch.round(s * 2)
        ),
        "powers": lambda s, b, h, q, k: s**3 + s.abs() ** 0.5 + torch.pow(1.5, s),
        "powers_of_numbers": lambda s, b, h, q, k: s.abs() ** (cap / 7) + (cap / 2) ** s,
        "division": lambda s, b, h, q, k: (s * 10) // 3.0 + (s * 10) % 3.0 + 1 / (k + 1),
        "where": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
        "new_numbers": lambda s, b, h, q, k: s * s.new_full((), 2) + s.new_tensor(0.5) + (q > k),
        "constants": lambda s, b, h, q, k: s + torch.where(q >= k, 1.0, 2.0),
        "max_min": lambda s, b, h, q, k: torch.maximum(s, torch.minimum(s * 2, s.new_zeros(()))),
        "double": lambda s, b, h, q, k: s + double[k],
        "mask_as_number": lambda s, b, h, q, k: s * (q >= k),
    }
