"""Merging partial attentions: exactness of empty states, order, gradients, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import AuxRequest, attention, merge_attentions
from tests.helpers import dense_attention, random_inputs

INF = torch.inf


def parts(*counts: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Partial attentions over consecutive sets of keys of these sizes."""
    q, k, v = random_inputs(2, 4, 2, 3, sum(counts), 16, 8, dtype=dtype)
    outs, lses, start = [], [], 0
    for n in counts:
        piece = slice(start, start + n)
        out, aux = attention(
            q, k[:, :, piece], v[:, :, piece], return_aux=AuxRequest(lse=True), backend="cpu"
        )
        outs.append(out)
        lses.append(aux.lse)
        start += n
    return outs, lses


def empty_like(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(out), torch.full_like(lse, -INF)


@pytest.mark.parametrize("counts", [(100,), (50, 50), (1, 98, 1), (0, 60, 0, 40), (9,) * 13])
def test_merging_equals_attention_over_the_union(counts: tuple[int, ...]) -> None:
    outs, lses = parts(*counts)
    q, k, v = random_inputs(2, 4, 2, 3, sum(counts), 16, 8)
    exact = dense_attention(q, k, v)
    for form in (list, tuple, torch.stack):
        out, lse = merge_attentions(form(outs), form(lses))
        torch.testing.assert_close(out.double(), exact.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=1e-6)


def test_fc35_empty_states_are_neutral() -> None:
    (out,), (lse,) = parts(100)
    out[0, 0, 0, 0] = -0.0
    lse[0, 1, 0] = 80.0
    lse[0, 1, 1] = -200.0
    none = empty_like(out, lse)
    merged, merged_lse = merge_attentions([none[0], none[0]], [none[1], none[1]])
    assert torch.equal(merged, none[0])
    assert torch.equal(merged_lse, none[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = out.to(dtype)
        for order in (
            ([none[0].to(dtype), x], [none[1], lse]),
            ([x, none[0].to(dtype)], [lse, none[1]]),
            ([none[0].to(dtype), x, none[0].to(dtype)], [none[1], lse, none[1]]),
            ([x], [lse]),
        ):
            merged, merged_lse = merge_attentions(*order)
            assert torch.equal(merged, x)
            assert torch.equal(merged.signbit(), x.signbit())
            assert torch.equal(merged_lse, lse)


def test_an_empty_part_may_hold_anything() -> None:
    (out,), (lse,) = parts(100)
    garbage = torch.full_like(out, torch.nan)
    merged, merged_lse = merge_attentions([garbage, out], [torch.full_like(lse, -INF), lse])
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)


def test_order_and_grouping_change_roundings_only() -> None:
    outs, lses = parts(10, 20, 30)
    right = merge_attentions(outs, lses)
    backwards = merge_attentions(outs[::-1], lses[::-1])
    first = merge_attentions(outs[:2], lses[:2])
    nested = merge_attentions([first[0], outs[2]], [first[1], lses[2]])
    for found in (backwards, nested):
        torch.testing.assert_close(found[0], right[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[1], right[1], rtol=1e-6, atol=1e-6)


def test_extreme_lse_do_not_overflow() -> None:
    outs = torch.tensor([[[1.0]], [[2.0]]])
    out, lse = merge_attentions(outs, torch.tensor([[1e4], [1e4]]))
    torch.testing.assert_close(out, torch.tensor([[1.5]]))
    torch.testing.assert_close(lse, torch.tensor([1e4 + 0.6931472]))
    out, lse = merge_attentions(outs, torch.tensor([[-1e4], [1e4]]))
    assert out.item() == 2
    assert lse.item() == 1e4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_outputs_are_rounded_once(dtype: torch.dtype) -> None:
    outs, lses = parts(30, 40)
    low = [out.to(dtype) for out in outs]
    out, lse = merge_attentions(low, lses)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact, _ = merge_attentions([x.double() for x in low], lses)
    assert torch.equal(out, exact.to(dtype))


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 2, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(merge_attentions, (outs, lses))
    assert torch.autograd.gradgradcheck(merge_attentions, (outs, lses))


def test_gradients_beside_empty_states() -> None:
    outs = torch.ones(3, 4, 2, dtype=torch.float64).requires_grad_()
    lses = torch.zeros(3, 4, dtype=torch.float64)
    lses[0, 0] = lses[:, 1] = lses[1:, 2] = -INF
    lses.requires_grad_()
    out, lse = merge_attentions(outs, lses)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert outs.grad is not None
    assert lses.grad is not None
    assert outs.grad.isfinite().all()
    assert lses.grad.isfinite().all()
    empty = lses == -INF
    assert (outs.grad[empty] == 0).all()
    assert (lses.grad[empty] == 0).all()
    torch.testing.assert_close(lses.grad[1:, 0], torch.full((2,), 0.5, dtype=torch.float64))
    lses.grad = None
    merge_attentions(outs, lses)[1].sum().backward()  # -inf itself: no slope, no NaN
    assert lses.grad is not None
    assert lses.grad.isfinite().all()


Z = torch.zeros(2, 1, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, r"outs: expected at least one part"),
        (torch.zeros(0, 2, 3), torch.zeros(0, 2), ValueError, r"outs: expected at least one part"),
        (Z, torch.zeros(2, 2), ValueError, r"lses: expected shape \[2, 1\] to match outs"),
        ([Z[0], Z], [Z[0, :, 0]] * 2, ValueError, r"outs: expected tensors of one shape"),
        ([Z[0]] * 2, [Z[0, :, 0]] * 3, ValueError, r"lses: expected shape \[2, 1\]"),
        ([Z[0], Z[0].double()], [Z[0, :, 0]] * 2, TypeError, r"outs: expected one dtype"),
        (Z.int(), Z[..., 0], TypeError, r"outs: expected floating-point tensors"),
        (Z, 3, TypeError, r"lses: expected a Tensor or a sequence of them, got int"),
        ([Z[0], 1.0], Z[..., 0], TypeError, r"outs: expected a Tensor or a sequence of them"),
    ],
)
def test_bad_input(outs: Any, lses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_attentions(outs, lses)
