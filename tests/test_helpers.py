"""The oracle itself, against torch's dense attention and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flexdecode.masks import causal, left_padding, sliding_window
from tests.helpers import assert_matches, assert_within, budget, dense_attention, random_inputs


def test_dense_equals_torch_with_grouped_heads() -> None:
    q, k, v = random_inputs(2, 6, 2, 5, 33, 16, 24, dtype=torch.float64)
    right = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(dense_attention(q, k, v).out, right)


def test_fc11_causal_is_aligned_to_the_last_key() -> None:
    q, k, v = random_inputs(1, 1, 1, 2, 3, 8, dtype=torch.float64)
    out = dense_attention(q, k, v, mask=causal).out
    torch.testing.assert_close(
        out[:, :, :1], dense_attention(q[:, :, :1], k[:, :, :2], v[:, :, :2]).out
    )
    torch.testing.assert_close(out[:, :, 1:], dense_attention(q[:, :, 1:], k, v).out)


def test_lengths_are_data_and_what_lies_beyond_has_no_influence() -> None:
    q, k, v = random_inputs(3, 4, 2, 1, 20, 8, dtype=torch.float64)
    lengths = torch.tensor([0, 7, 99])
    for b, n in enumerate((0, 7, 20)):
        k[b, :, n:], v[b, :, n:] = torch.nan, torch.inf
    found = dense_attention(q, k, v, kv_len=lengths)
    assert (found.out[0] == 0).all()
    assert (found.lse[0] == -torch.inf).all()
    for b, n in ((1, 7), (2, 20)):
        alone = dense_attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        torch.testing.assert_close(found.out[b : b + 1], alone.out)
        torch.testing.assert_close(found.lse[b : b + 1], alone.lse)


def test_captures_need_no_room_beyond_the_length() -> None:
    q, k, v = random_inputs(1, 1, 1, 1, 9, 4)
    ids = torch.zeros(5, dtype=torch.int64)
    mask = lambda b, h, q_idx, kv_idx: ids[kv_idx] == ids[q_idx]  # noqa: E731
    assert dense_attention(q, k, v, mask=mask, kv_len=5).out.isfinite().all()


def test_fc34_lse_is_a_natural_logarithm() -> None:
    q, k, v = torch.zeros(1, 1, 1, 16), torch.randn(1, 1, 100, 16), torch.randn(1, 1, 100, 16)
    for n in (1, 2, 3, 100):
        lse = dense_attention(q, k, v, mask=sliding_window(n)).lse
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(n)))


def test_fc47_sinks_take_mass_once() -> None:
    q, k, v = random_inputs(1, 4, 2, 3, 17, 8, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    mask = causal & left_padding(15)  # the first row sees nothing
    plain, found = (dense_attention(q, k, v, mask=mask, sinks=s) for s in (None, sinks))
    total = torch.logaddexp(plain.lse, sinks[None, :, None])
    torch.testing.assert_close(found.lse, total)
    torch.testing.assert_close(found.out, plain.out * torch.exp(plain.lse - total)[..., None])
    assert torch.equal(found.max_scores, plain.max_scores)
    assert plain.max_scores[0, 0, 0] == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_budget_admits_rounding_and_nothing_larger(dtype: torch.dtype) -> None:
    q, k, v = random_inputs(2, 4, 2, 3, 63, 32, dtype=dtype)
    low = dense_attention(q, k, v, mask=causal, rounded=True)
    assert low.out.dtype == dtype
    assert_matches(low.out, q, k, v, mask=causal, lse=low.lse, max_scores=low.max_scores)
    with pytest.raises(AssertionError, match="out: error"):
        assert_matches(low.out, q, k, v)
    allowed = budget(dense_attention(q, k, v).out, dense_attention(q, k, v, rounded=True).out)
    assert allowed < {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]


def test_assert_within_sees_nan_and_misplaced_infinities() -> None:
    with pytest.raises(AssertionError, match="1 NaN"):
        assert_within(torch.tensor([torch.nan, 0.0]), torch.zeros(2), 1.0)
    with pytest.raises(AssertionError, match="not finite"):
        assert_within(torch.zeros(1), torch.tensor([-torch.inf]), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_fresh_memory_is_poisoned(dtype: torch.dtype) -> None:
    for buffer in (
        torch.empty(3, dtype=dtype),
        torch.empty_like(torch.zeros(3, dtype=dtype)),
        torch.zeros(3, dtype=dtype).new_empty(3),
        torch.empty_strided((3,), (1,), dtype=dtype),
    ):
        assert buffer.float().isnan().all()
    assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
