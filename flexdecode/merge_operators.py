"""The merge as operators that a graph can hold, with autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexdecode.merge_backends import (
    choose,
    merge_backward_torch,
    merge_backward_triton,
    merge_in_place,
    merge_torch,
    merge_triton,
    new_grads,
    new_results,
)

__all__ = ["merge_operator", "merge_operator_"]


@torch.library.custom_op(
    "flexdecode::merge",
    mutates_args=(),
    schema="(Tensor[] outs, Tensor[] lses, Tensor? sinks, bool stacked, str backend) "
    "-> (Tensor, Tensor)",
)
def merge_operator(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    stacked: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Merge parts; see `merge_attentions`, which has checked them."""
    if choose(backend, outs[0]) == "triton":
        return merge_triton(outs, lses, sinks, stacked)
    out, lse = merge_torch(outs, lses, sinks, stacked)
    return out.contiguous(), lse.contiguous()


@merge_operator.register_fake
def _(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: object, stacked: bool, backend: str
) -> tuple[Tensor, Tensor]:
    return new_results(outs[0], lses[0], stacked)


@torch.library.custom_op(
    "flexdecode::merge_backward",
    mutates_args=(),
    schema="(Tensor[] outs, Tensor[] lses, Tensor? sinks, Tensor grad_out, Tensor grad_lse, "
    "bool stacked, str backend) -> (Tensor, Tensor, Tensor)",
)
def _backward_operator(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor,
    stacked: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if choose(backend, outs[0]) == "triton":
        return merge_backward_triton(outs, lses, sinks, grad_out, grad_lse, stacked)
    grads = merge_backward_torch(outs, lses, sinks, grad_out, grad_lse, stacked)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


@_backward_operator.register_fake
def _(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    grad_out: object,
    grad_lse: object,
    stacked: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return new_grads(outs, lses, sinks, stacked)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    outs, lses, sinks, ctx.stacked, ctx.backend = inputs
    ctx.parts, ctx.sinks = len(outs), sinks is not None
    ctx.save_for_backward(*outs, *lses, *([] if sinks is None else [sinks]))


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
    saved = list(ctx.saved_tensors)
    sinks = saved.pop() if ctx.sinks else None
    outs, lses = saved[: ctx.parts], saved[ctx.parts :]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        grads = merge_backward_torch(outs, lses, sinks, grad_out, grad_lse, ctx.stacked)
    else:
        grads = _backward_operator(outs, lses, sinks, grad_out, grad_lse, ctx.stacked, ctx.backend)
    of_parts = [[x] if ctx.stacked else list(x.unbind(0)) for x in grads[:2]]
    return *of_parts, None if sinks is None else grads[2], None, None


merge_operator.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(
    "flexdecode::merge_",
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor new_out, Tensor new_lse, str backend) -> ()",
)
def merge_operator_(
    out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, backend: str
) -> None:
    """Fold a part in; see `merge_attentions_`, which has checked it."""
    merge_in_place(out, lse, new_out, new_lse, choose(backend, out))


@merge_operator_.register_fake
def _(out: object, lse: object, new_out: object, new_lse: object, backend: str) -> None:
    return None
