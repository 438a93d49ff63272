"""Score rules against formulas written apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import masks


def score(mod: Any, *, q: int, Lkv: int, h: int) -> Tensor:
    out: Tensor = mod(
        torch.zeros(1, Lkv),
        torch.tensor(0),
        torch.tensor(h),
        torch.tensor([[q]]),
        torch.arange(Lkv)[None],
    )
    return out[0]


def paper_slopes(n: int) -> list[float]:
    """The recursion of the authors' own code."""

    def of_power_of_two(m: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(m) - 3)))
        return [start * start**i for i in range(m)]

    if math.log2(n).is_integer():
        return of_power_of_two(n)
    m = 2 ** math.floor(math.log2(n))
    return of_power_of_two(m) + paper_slopes(2 * m)[0::2][: n - m]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20, 32, 71])
def test_fc46_alibi_slopes_and_sign(heads: int) -> None:
    slopes = torch.tensor(paper_slopes(heads))
    for mod in (masks.alibi(heads), masks.alibi(slopes)):
        for h in range(heads):
            bias = score(mod, q=5, Lkv=6, h=h)
            assert (bias <= 0).all()
            assert bias[5] == 0
            torch.testing.assert_close(bias, slopes[h] * torch.arange(-5.0, 1.0))


def test_fc42_softcap_is_in_natural_units() -> None:
    x = torch.tensor([-1000.0, -1.0, 0.0, 1.0, 1000.0])
    torch.testing.assert_close(masks.softcap(30)(x, 0, 0, 0, 0), 30 * torch.tanh(x / 30))


def t5_bucket(relative: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """Bucket of key minus query, as the paper's code computes it, a number at a time."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    growth = math.log(distance / exact) / math.log(max_distance / exact)
    return bucket + min(exact + int(growth * (num_buckets - exact)), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_bias_follows_the_buckets_of_t5(bidirectional: bool) -> None:
    table = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    mod = masks.relative_bias(table, bidirectional=bidirectional)
    for q in (0, 150, 299):
        buckets = [t5_bucket(kv - q, bidirectional, 32, 128) for kv in range(300)]
        assert torch.equal(score(mod, q=q, Lkv=300, h=2), table[buckets, 2])


def test_relative_bias_changed_in_place_is_seen() -> None:
    table = torch.zeros(32, 1)
    mod = masks.relative_bias(table)
    table.fill_(2.0)
    assert (score(mod, q=3, Lkv=4, h=0) == 2.0).all()


HEADS = torch.tensor([0.5, 2.0])


def distances(q: int, Lkv: int) -> list[int]:
    return [abs(q - kv) for kv in range(Lkv)]


@pytest.mark.parametrize("h", [0, 1])
def test_distance_penalty(h: int) -> None:
    expected = [-0.5 * d for d in distances(6, 9)]
    assert score(masks.distance_penalty(0.5), q=6, Lkv=9, h=h).tolist() == expected
    expected = [-HEADS[h].item() * min(d, 4) for d in distances(6, 9)]
    assert score(masks.distance_penalty(HEADS, limit=4), q=6, Lkv=9, h=h).tolist() == expected


@pytest.mark.parametrize("h", [0, 1])
def test_kerple(h: int) -> None:
    r1, r2 = HEADS[h].item(), HEADS.flip(0)[h].item()
    found = score(masks.kerple_log(HEADS, HEADS.flip(0)), q=6, Lkv=9, h=h)
    expected = torch.tensor([-r1 * math.log(1 + r2 * d) for d in distances(6, 9)])
    torch.testing.assert_close(found, expected)
    found = score(masks.kerple_power(HEADS, HEADS.flip(0)), q=6, Lkv=9, h=h)
    torch.testing.assert_close(found, torch.tensor([-r1 * d**r2 for d in distances(6, 9)]))


def test_sandwich_is_the_product_of_position_embeddings() -> None:
    dim, heads = 16, 3
    i = torch.arange(dim // 2)
    angle = torch.arange(40)[:, None] / 10000 ** (2 * i / dim)
    embedding = torch.cat([angle.sin(), angle.cos()], -1).double()
    product = embedding @ embedding.T
    for h in range(heads):
        ratio = (h + 1) * 8 / heads
        found = score(masks.sandwich(heads, max_distance=39, dim=dim), q=30, Lkv=40, h=h)
        torch.testing.assert_close(found, (product[30] / ratio).float())


def test_sandwich_stays_as_it_is_beyond_its_table() -> None:
    found = score(masks.sandwich(1, max_distance=5), q=20, Lkv=21, h=0)
    assert (found[:16] == found[15]).all() and found[16] != found[15]


def test_head_temperature() -> None:
    temperature = HEADS.clone()
    mod = masks.head_temperature(temperature)
    assert mod(torch.tensor(3.0), 0, torch.tensor(1), 0, 0) == 1.5
    temperature.fill_(3.0)
    assert mod(torch.tensor(3.0), 0, torch.tensor(1), 0, 0) == 1.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.alibi(0), ValueError, "slopes: expected at least 1 head"),
        (lambda: masks.alibi("8"), TypeError, "slopes: expected an int or a tensor, got str"),
        (lambda: masks.softcap(0.0), ValueError, "cap: expected a positive number"),
        (lambda: masks.softcap(math.nan), ValueError, "cap: expected a positive number"),
        (lambda: masks.relative_bias(torch.ones(1, 2)), ValueError, "table: expected more buckets"),
        (
            lambda: masks.relative_bias(torch.ones(32, 2), max_distance=16),
            ValueError,
            "max_distance: expected more than 16, got 16",
        ),
        (lambda: masks.distance_penalty("1"), TypeError, "weight: expected a number or a tensor"),
        (lambda: masks.distance_penalty(1, limit=0), ValueError, "limit: expected at least 1"),
        (lambda: masks.kerple_log(HEADS, HEADS.int()), TypeError, "r2: expected a floating-point"),
        (lambda: masks.kerple_power(HEADS[None], HEADS), ValueError, r"r1: expected shape \[Hq\]"),
        (lambda: masks.sandwich(0), ValueError, "heads: expected at least 1"),
        (lambda: masks.head_temperature(2.0), TypeError, "temperature: expected a floating-point"),
    ],
)
def test_bad_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
