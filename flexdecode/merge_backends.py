"""The merge and its gradients, by torch's operations and by Triton kernels.

Parts come as lists, or `stacked` in one tensor, the only one of its list.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "choose",
    "merge_backward_torch",
    "merge_backward_triton",
    "merge_in_place",
    "merge_torch",
    "merge_triton",
    "new_grads",
    "new_results",
]

_MAX_PARTS = 16  # what one launch takes as a list
_BACKENDS = ("auto", "triton", "torch")


def choose(backend: str, like: Tensor) -> str:
    """Return "triton" or "torch" for `backend`, by where `like` is."""
    if backend not in _BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(_BACKENDS)}, got {backend!r}")
    if backend == "auto":
        return "triton" if like.is_cuda else "torch"
    if backend == "triton" and not like.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend: expected 'auto' or 'torch' for tensors on {like.device}, got 'triton' (it "
            "takes CPU tensors only under TRITON_INTERPRET=1)"
        )
    return backend


def merge_torch(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, stacked: bool
) -> tuple[Tensor, Tensor]:
    """Merge by torch's own operations: differentiable any number of times, under vmap too."""
    values, scores, empty = _widened(outs, lses, sinks, stacked)
    # Constants for the gradient: shifting by them changes no result. A row that is empty
    # everywhere is shifted by 0, so that no -inf - -inf appears, forward or backward.
    top = scores.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (scores.masked_fill(empty, 0.0) - top).exp().masked_fill(empty, 0.0)
    nobody = empty.all(0)
    total = weights.sum(0).masked_fill(nobody, 1.0)
    # A sink's own value is nothing: the last weight has no term.
    terms = (values * weights[: len(values)].unsqueeze(-1)).unbind(0)
    out = functools.reduce(torch.add, terms) / total.unsqueeze(-1)
    none = nobody if sinks is None else empty[:-1].all(0)
    out = out.masked_fill(none.unsqueeze(-1), 0.0)
    lse = (total.log() + top).masked_fill(nobody, -torch.inf)
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


def merge_backward_torch(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor,
    stacked: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of all parts, stacked, and of the sinks [Hq]; differentiable itself."""
    values, scores, empty = _widened(outs, lses, sinks, stacked)
    parts = len(values)
    lse = scores.masked_fill(empty, -torch.inf).logsumexp(0)
    lse = lse.masked_fill(empty.all(0), 0.0)
    weights = (scores.masked_fill(empty, 0.0) - lse).exp().masked_fill(empty, 0.0)
    grad_out, grad_lse = grad_out.to(scores.dtype), grad_lse.to(scores.dtype)
    slopes = (values * grad_out).sum(-1)
    mean = (slopes * weights[:parts]).sum(0)
    grad_outs = (weights[:parts].unsqueeze(-1) * grad_out).masked_fill(
        empty[:parts].unsqueeze(-1), 0.0
    )
    grad_lses = (weights[:parts] * (slopes + grad_lse - mean)).masked_fill(empty[:parts], 0.0)
    grad_sinks = scores.new_zeros(0)
    if sinks is not None:
        rows = (weights[-1] * (grad_lse - mean)).masked_fill(empty[-1], 0.0)
        grad_sinks = _by_head(rows, sinks)
    return grad_outs.to(outs[0].dtype), grad_lses.to(lses[0].dtype), grad_sinks


def _widened(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, stacked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the parts, scores of the parts and of the sink, and which of them are empty."""
    out, score = (outs[0], lses[0]) if stacked else (torch.stack([*outs]), torch.stack([*lses]))
    wide = _wide(out, score)
    score = score.to(wide)
    # Out of an empty part comes nothing, not even a NaN times 0; -0.0 is what adds nothing to -0.0.
    values = out.to(wide).masked_fill((score == -torch.inf).unsqueeze(-1), -0.0)
    if sinks is not None:
        sink = sinks.to(wide).unsqueeze(-1).expand(score.shape[1:])
        score = torch.cat([score, sink.unsqueeze(0)])
    return values, score, score == -torch.inf


def merge_triton(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    stacked: bool,
) -> tuple[Tensor, Tensor]:
    """Merge by kernels, a list 16 parts at a time."""
    from flexdecode.kernels.merge import launch_merge

    out, lse = new_results(outs[0], lses[0], stacked)
    while not stacked and len(outs) > _MAX_PARTS:
        # A tree: each group becomes one wide part, and no group is read twice.
        wide = _wide(out, lse)
        groups = range(0, len(outs), _MAX_PARTS)
        states = out.new_empty((len(groups), *out.shape), dtype=wide)
        totals = lse.new_empty((len(groups), *lse.shape), dtype=wide)
        for first, state, total in zip(groups, states, totals, strict=True):
            piece = slice(first, first + _MAX_PARTS)
            launch_merge(outs[piece], lses[piece], None, state, total, stacked=False)
        outs, lses, stacked = [states], [totals], True
    launch_merge(outs, lses, sinks, out, lse, stacked=stacked)
    return out, lse


def merge_backward_triton(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor,
    stacked: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `merge_backward_torch` does, by a kernel."""
    from flexdecode.kernels.merge import launch_merge_backward

    if not stacked and len(outs) > _MAX_PARTS:
        outs, lses, stacked = [torch.stack([*outs])], [torch.stack([*lses])], True
    grad_outs, grad_lses, grad_sinks = new_grads(outs, lses, sinks, stacked)
    rows = None
    if sinks is not None:
        rows = lses[0].new_empty(grad_lse.shape, dtype=_wide(outs[0], lses[0]))
    launch_merge_backward(
        outs,
        lses,
        sinks,
        grad_out.contiguous(),
        grad_lse.contiguous(),
        grad_outs,
        grad_lses,
        rows,
        stacked=stacked,
    )
    if sinks is not None and rows is not None:
        grad_sinks = _by_head(rows, sinks)
    return grad_outs, grad_lses, grad_sinks


def merge_in_place(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, chosen: str) -> None:
    """Fold a part into `out` and `lse`; `chosen` is what `choose` returned."""
    if chosen == "triton":
        from flexdecode.kernels.merge import launch_merge

        target = out if out.stride(-1) == 1 else out.contiguous()
        launch_merge([target, new_out], [lse, new_lse], None, target, lse, stacked=False)
        if target is not out:
            out.copy_(target)
        return
    wide = torch.promote_types(out.dtype, new_out.dtype)
    wide_lse = torch.promote_types(lse.dtype, new_lse.dtype)
    merged = merge_torch(
        [out.to(wide), new_out.to(wide)], [lse.to(wide_lse), new_lse.to(wide_lse)], None, False
    )
    out.copy_(merged[0])
    lse.copy_(merged[1])


def new_results(out: Tensor, lse: Tensor, stacked: bool) -> tuple[Tensor, Tensor]:
    """Return room for an output and its lse, uninitialised."""
    first = 1 if stacked else 0
    return out.new_empty(out.shape[first:]), lse.new_empty(lse.shape[first:])


def new_grads(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, stacked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for the gradients of all parts, stacked, and of the sinks, uninitialised."""
    count = () if stacked else (len(outs),)
    grad_outs = outs[0].new_empty((*count, *outs[0].shape))
    grad_lses = lses[0].new_empty((*count, *lses[0].shape))
    grad_sinks = lses[0].new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return grad_outs, grad_lses, grad_sinks


def _wide(out: Tensor, lse: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(out.dtype, lse.dtype), torch.float32)


def _by_head(rows: Tensor, sinks: Tensor) -> Tensor:
    """Add gradients of rows [..., Hq, Lq] up to those of the sinks [Hq]."""
    return rows.sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
