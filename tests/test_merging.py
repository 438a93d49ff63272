"""Merging partial attentions: exactness of empty states, order, gradients, graphs, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import AuxRequest, attention, merge_attentions, merge_attentions_
from tests.helpers import dense_attention, random_inputs

INF = torch.inf
GPU = torch.cuda.is_available()
DEVICE = {"torch": "cpu", "triton": "cuda" if GPU else "cpu"}
each_path = pytest.mark.parametrize("path", ["torch", "triton"])


def parts(
    *counts: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[list[Tensor], list[Tensor]]:
    """Partial attentions over consecutive sets of keys of these sizes."""
    q, k, v = random_inputs(2, 4, 2, 3, sum(counts), 16, 8, dtype=dtype)
    outs, lses, start = [], [], 0
    for n in counts:
        piece = slice(start, start + n)
        out, aux = attention(
            q, k[:, :, piece], v[:, :, piece], return_aux=AuxRequest(lse=True), backend="cpu"
        )
        outs.append(out.to(device))
        lses.append(aux.lse.to(device))
        start += n
    return outs, lses


def empty_like(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(out), torch.full_like(lse, -INF)


@each_path
@pytest.mark.parametrize("counts", [(100,), (50, 50), (1, 98, 1), (0, 60, 0, 40), (9,) * 37])
def test_merging_equals_attention_over_the_union(counts: tuple[int, ...], path: str) -> None:
    outs, lses = parts(*counts, device=DEVICE[path])
    q, k, v = random_inputs(2, 4, 2, 3, sum(counts), 16, 8)
    sinks = torch.tensor([1.0, -2.0, -INF, 6.0])
    for given in (None, sinks):
        exact = dense_attention(q, k, v, sinks=given)
        given = given if given is None else given.to(DEVICE[path])
        for form in (list, torch.stack):
            out, lse = merge_attentions(form(outs), form(lses), given, backend=path)
            close = {"rtol": 1e-5, "atol": 2e-6}
            torch.testing.assert_close(out.double().cpu(), exact.out, **close)
            torch.testing.assert_close(lse.double().cpu(), exact.lse, **close)


@each_path
@pytest.mark.parametrize("Dv", [5, 64])
def test_strides_of_parts_may_differ(path: str, Dv: int) -> None:
    """Views of wider tensors, other orders of axes, broadcast parts, lses that follow none."""
    B, H, L = 3, 2, 4
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE[path])

    outs = [
        draw(B, L, H, Dv).transpose(1, 2),
        draw(B, H, L, Dv + 3)[..., :Dv],
        draw(H, 1, L, Dv).transpose(0, 1).expand(B, H, L, Dv),
        draw(B, H, L, 2 * Dv)[..., ::2],
        draw(1, H, B * L, Dv).view(H, B, L, Dv).transpose(0, 1),
    ]
    lses = [draw(L, H, B).permute(2, 1, 0), *[draw(B, H, L) for _ in outs[1:]]]
    out, lse = merge_attentions(outs, lses, backend=path)
    weights = torch.stack(lses).double().softmax(0)
    exact = (torch.stack(outs).double() * weights[..., None]).sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=2e-6)
    right = torch.stack(lses).double().logsumexp(0)
    torch.testing.assert_close(lse.double(), right, rtol=1e-5, atol=2e-6)


@each_path
def test_more_than_three_leading_axes_and_none(path: str) -> None:
    outs = torch.randn(3, 2, 3, 2, 3, 4, device=DEVICE[path]).transpose(1, 3).transpose(2, 4)
    lses = torch.randn(outs.shape[:-1], device=DEVICE[path])
    out, lse = merge_attentions(outs, lses, backend=path)
    weights = lses.double().softmax(0)
    exact = (outs.double() * weights[..., None]).sum(0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=2e-6)
    single, single_lse = merge_attentions(outs[:, 0, 0, 0, 0], lses[:, 0, 0, 0, 0], backend=path)
    torch.testing.assert_close(single, out[0, 0, 0, 0])
    torch.testing.assert_close(single_lse, lse[0, 0, 0, 0])
    none, none_lse = merge_attentions(outs[:, :0], lses[:, :0], backend=path)
    assert none.shape == (0, *out.shape[1:]) and none_lse.shape == none.shape[:-1]


@each_path
def test_fc35_empty_states_are_neutral(path: str) -> None:
    (out,), (lse,) = parts(100, device=DEVICE[path])
    out[0, 0, 0, 0] = -0.0
    lse[0, 1, 0] = 80.0
    lse[0, 1, 1] = -200.0
    none = empty_like(out, lse)
    merged, merged_lse = merge_attentions([none[0], none[0]], [none[1], none[1]], backend=path)
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
            merged, merged_lse = merge_attentions(*order, backend=path)
            assert torch.equal(merged, x)
            assert torch.equal(merged.signbit(), x.signbit())
            assert torch.equal(merged_lse, lse)


@each_path
def test_an_empty_part_may_hold_anything(path: str) -> None:
    (out,), (lse,) = parts(100, device=DEVICE[path])
    garbage, none = torch.full_like(out, torch.nan), torch.full_like(lse, -INF)
    merged, merged_lse = merge_attentions([garbage, out], [none, lse], backend=path)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)
    merged, merged_lse = merge_attentions([garbage, garbage], [none, none], backend=path)
    assert torch.equal(merged, torch.zeros_like(out)) and torch.equal(merged_lse, none)


@each_path
def test_a_sink_alone(path: str) -> None:
    """Nothing allowed: out is zero, LSE is the sink."""
    garbage = torch.full((2, 3, 1, 4), torch.nan, device=DEVICE[path])
    none = torch.full((2, 3, 1), -INF, device=DEVICE[path])
    sinks = torch.tensor([0.5, -INF, 7.0], device=DEVICE[path])
    out, lse = merge_attentions([garbage], [none], sinks, backend=path)
    assert torch.equal(out, torch.zeros_like(garbage))
    assert torch.equal(lse, sinks.view(1, 3, 1).expand(2, 3, 1))


@each_path
def test_streaming_in_place(path: str) -> None:
    outs, lses = parts(30, 0, 40, 5, device=DEVICE[path])
    expected, expected_lse = merge_attentions(outs, lses, backend="torch")
    wide = torch.full((2, 3, 4, 8), torch.nan, device=DEVICE[path]).transpose(1, 2)
    total = torch.full_like(lses[0], -INF)
    for out, lse in zip(outs, lses, strict=True):
        # The running result stays float32 whatever the parts are.
        part = out.to(torch.bfloat16) if out is outs[3] else out
        back = merge_attentions_(wide, total, part, lse, backend=path)
        assert back[0] is wide and back[1] is total
    torch.testing.assert_close(wide, expected, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(total, expected_lse, rtol=1e-6, atol=2e-6)


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


@each_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_outputs_are_rounded_once(dtype: torch.dtype, path: str) -> None:
    outs, lses = parts(*(30,) * 20, device=DEVICE[path])  # a tree of merges on a GPU
    low = [out.to(dtype) for out in outs]
    out, lse = merge_attentions(low, lses, backend=path)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact, _ = merge_attentions([x.double() for x in low], lses)
    if path == "torch" or GPU or dtype == torch.float16:  # the interpreter truncates bfloat16
        differ = out != exact.to(dtype)
        assert differ.float().mean() < 0.02, "float32 sums may fall on the other side of a tie"
    torch.testing.assert_close(out, exact.to(dtype))


@pytest.mark.parametrize(
    ("out_dtype", "lse_dtype"),
    [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float16,) * 2],
)
def test_dtypes_of_outs_and_lses_may_differ(out_dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    outs, lses = parts(30, 40)
    low, scores = [x.to(out_dtype) for x in outs], [x.to(lse_dtype) for x in lses]
    expected = merge_attentions(low, scores)
    device = DEVICE["triton"]
    found = merge_attentions(
        [x.to(device) for x in low], [x.to(device) for x in scores], backend="triton"
    )
    for x, right, dtype in zip(found, expected, (out_dtype, lse_dtype), strict=True):
        assert x.dtype == right.dtype == dtype
        torch.testing.assert_close(x.cpu(), right)


def leaves(*shape: int, path: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return numbers.to(DEVICE[path]).requires_grad_()


@pytest.mark.parametrize(("stacked", "sinks"), [(True, False), (False, True)])
@pytest.mark.parametrize("path", ["torch", "operator", "triton"])
def test_gradients(path: str, stacked: bool, sinks: bool) -> None:
    """Of both results, by all arguments, and again of the gradients."""
    fast = path == "triton" and not GPU  # along one direction: the interpreter is slow
    shape = (3, 1, 2, 1) if fast else (3, 2, 2, 1)
    device = "triton" if path == "triton" else "torch"
    given = [leaves(*shape, 3, path=device), leaves(*shape, path=device)]
    if sinks:
        given.append(leaves(2, path=device))

    def merge(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> Any:
        if path == "operator":
            parts = ([outs], [lses]) if stacked else (list(outs), list(lses))
            return torch.ops.flexdecode.merge(*parts, sinks, stacked, "torch")
        if stacked:
            return merge_attentions(outs, lses, sinks, backend=path)
        first = outs[0].transpose(0, 1).contiguous().transpose(0, 1)  # other strides
        return merge_attentions([first, *outs[1:]], list(lses), sinks, backend=path)

    assert torch.autograd.gradcheck(merge, given, fast_mode=fast)
    if not fast:
        assert torch.autograd.gradgradcheck(merge, given)


def test_gradients_of_more_parts_than_a_launch_takes() -> None:
    outs, lses = leaves(21, 1, 3, path="triton"), leaves(21, 1, path="triton")
    grads = []
    for path in ("torch", "triton"):
        out, lse = merge_attentions(list(outs), list(lses), backend=path)
        grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), (outs, lses)))
    for found, right in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(found, right)


@each_path
def test_gradients_beside_empty_states(path: str) -> None:
    outs = torch.ones(3, 4, 2, dtype=torch.float64, device=DEVICE[path])
    lses = torch.zeros(3, 4, dtype=torch.float64, device=DEVICE[path])
    lses[0, 0] = lses[:, 1] = lses[1:, 2] = -INF
    outs[lses == -INF] = torch.nan
    outs.requires_grad_()
    lses.requires_grad_()

    out, lse = merge_attentions(outs, lses, backend=path)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert outs.grad is not None
    assert lses.grad is not None
    assert outs.grad.isfinite().all()
    assert lses.grad.isfinite().all()
    empty = lses == -INF
    assert (outs.grad[empty] == 0).all()
    assert (lses.grad[empty] == 0).all()
    torch.testing.assert_close(lses.grad[1:, 0].cpu(), torch.full((2,), 0.5, dtype=torch.float64))
    lses.grad = None
    merge_attentions(outs, lses, backend=path)[1].sum().backward()  # -inf itself: no slope, no NaN
    assert lses.grad is not None
    assert lses.grad.isfinite().all()


OPERATORS = torch.ops.flexdecode


@each_path
@pytest.mark.parametrize("stacked", [False, True])
def test_operators_keep_torch_rules(path: str, stacked: bool) -> None:
    """Schema, fake results, autograd and tracing of each operator."""
    outs, lses = leaves(2, 2, 2, 1, 3, path=path), leaves(2, 2, 2, 1, path=path)
    args = ([outs], [lses]) if stacked else (list(outs.unbind()), list(lses.unbind()))
    sinks = leaves(2, path=path)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(OPERATORS.merge, (*args, sinks, stacked, path), test_utils=tests)
    plain = [[x.detach() for x in arg] for arg in args]
    grads = torch.ones(2, 2, 1, 3, dtype=torch.float64), torch.ones(2, 2, 1, dtype=torch.float64)
    grads = tuple(x.to(outs.device) for x in grads)
    torch.library.opcheck(
        OPERATORS.merge_backward,
        (*plain, sinks.detach(), *grads, stacked, path),
        test_utils=tests[:2],
    )
    torch.library.opcheck(
        OPERATORS.merge_,
        (*grads, outs[0].detach(), lses[0].detach(), path),
        test_utils=tests[:2],
    )


def test_graphs_hold_a_merge_as_one_node() -> None:
    """``torch.compile(fullgraph=True)`` and ``torch.export`` go through, gradients too."""
    outs, lses = leaves(3, 2, 2, 1, 3, path="torch"), leaves(3, 2, 2, 1, path="torch")
    sinks = leaves(2, path="torch")

    def call(outs: Tensor, lses: Tensor, sinks: Tensor) -> Any:
        out, lse = merge_attentions([outs[0], outs[1]], [lses[0], lses[1]])
        return merge_attentions(torch.stack([out, outs[2]]), torch.stack([lse, lses[2]]), sinks)

    expected = call(outs, lses, sinks)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = compiled(outs, lses, sinks)
    for x, right in zip(found, expected, strict=True):
        torch.testing.assert_close(x, right)
    for results in (expected, found):
        grads = torch.autograd.grad(results[0].sum() + results[1].sum(), (outs, lses, sinks))
        if results is expected:
            wanted = grads
    for x, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x, right)

    def stream(state: Tensor, total: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        merge_attentions_(state, total, out, lse)
        return state * 2

    state, total = torch.zeros(2, 2, 1, 3), torch.full((2, 2, 1), -INF)
    part = torch.randn(2, 2, 1, 3), torch.randn(2, 2, 1)
    doubled = torch.compile(stream, fullgraph=True, backend="aot_eager")(state, total, *part)
    assert torch.equal(state, part[0]) and torch.equal(total, part[1])
    assert torch.equal(doubled, part[0] * 2)

    class Merge(torch.nn.Module):
        def forward(self, outs: Tensor, lses: Tensor, sinks: Tensor) -> Any:
            return call(outs, lses, sinks)

    program = torch.export.export(Merge(), (outs.detach(), lses.detach(), sinks.detach()))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(OPERATORS.merge.default) == 2
    for x, right in zip(program.module()(outs, lses, sinks), expected, strict=True):
        torch.testing.assert_close(x, right)


Z = torch.zeros(2, 1, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, r"outs: expected at least one part"),
        (torch.zeros(0, 2, 3), torch.zeros(0, 2), ValueError, r"outs: expected at least one part"),
        (Z, torch.zeros(2, 2), ValueError, r"lses: expected shape \[2, 1\] to match outs"),
        ([Z[0], Z], [Z[0, :, 0]] * 2, ValueError, r"outs: expected tensors of one shape"),
        (
            [Z[0]] * 2,
            [Z[0, :, 0]] * 3,
            ValueError,
            r"lses: expected 2 tensors of shape \[1\].* 3 of",
        ),
        ([Z[0], Z[0].double()], [Z[0, :, 0]] * 2, TypeError, r"outs: expected one dtype"),
        (Z.int(), Z[..., 0], TypeError, r"outs: expected floating-point tensors"),
        (Z, 3, TypeError, r"lses: expected a Tensor or a sequence of them, got int"),
        ([Z[0], 1.0], Z[..., 0], TypeError, r"outs: expected a Tensor or a sequence of them"),
    ],
)
def test_bad_input(outs: Any, lses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_attentions(outs, lses)


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"sinks: expected shape \[2\]"),
        (torch.zeros(2).int(), TypeError, r"sinks: expected a floating-point tensor"),
        (2.0, TypeError, r"sinks: expected a Tensor, got float"),
    ],
)
def test_bad_sinks(sinks: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_attentions(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1), sinks)


def test_bad_streams_and_backends() -> None:
    with pytest.raises(ValueError, match=r"new_out: expected shape \[1, 3\] to match out"):
        merge_attentions_(Z[0], Z[0, :, 0], Z, Z[..., 0])
    with pytest.raises(ValueError, match=r"new_lse: expected shape \[1\] to match out"):
        merge_attentions_(Z[0], Z[0, :, 0], Z[0], Z[..., 0])
    with pytest.raises(TypeError, match=r"new_lse: expected a floating-point tensor, got int"):
        merge_attentions_(Z[0], Z[0, :, 0], Z[0], 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"new_out: .* does not require grad"):
        merge_attentions_(Z[0], Z[0, :, 0], Z[0].clone().requires_grad_(), Z[0, :, 0])
    whole, one = torch.zeros(2, 2, 3), torch.zeros(1, 2, 3).expand(2, 2, 3)
    with pytest.raises(ValueError, match="out: expected memory of its own"):
        merge_attentions_(one, whole[..., 0], whole, whole[..., 0])
    with pytest.raises(ValueError, match="lse: expected memory of its own"):
        merge_attentions_(whole, one[..., 0], whole, whole[..., 0])
    with pytest.raises(ValueError, match=r"lses: expected \[..., Hq, Lq\] beside sinks"):
        merge_attentions(torch.zeros(1, 2, 3), torch.zeros(1, 2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"backend: expected one of auto, triton, torch"):
        merge_attentions(Z, Z[..., 0], backend="cpu")
