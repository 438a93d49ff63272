"""Merging attention over disjoint sets of keys, differentiably, on any device."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexdecode.checks import check_written

__all__ = ["merge_attentions", "merge_attentions_"]

_MAX_PARTS = 16  # what one launch takes as a list
_BACKENDS = ("auto", "triton", "torch")


def merge_attentions(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    sinks: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Combine outputs over disjoint sets of keys into the output over their union.

    With ``w[n] = exp(lse[n] - lse)``::

        lse = ln (sum exp(lse[n]) [+ exp(sinks[h])])
        out = sum w[n] * out[n]

    The operation is associative and commutative up to rounding, its neutral element is the empty
    state ``(0, -inf)``, and it is differentiable in all arguments, through both results [1]_.

    Parameters
    ----------
    outs : Tensor [N, ..., Dv], or sequence of N tensors [..., Dv], floating point
        Outputs of `attention`, one for each set of keys, of one dtype and any strides. A list of
        up to 16 is read where it lies; more are merged 16 at a time, in float32 in between.
    lses : Tensor [N, ...], or sequence of N tensors [...], floating point, natural log
        The ``aux.lse`` of each, of one dtype, which need not be that of `outs`; ``-inf`` where
        that set held no allowed key.
    sinks : Tensor [Hq], floating point, logits in natural units, optional
        Take softmax mass and give no value: for parts that were computed without sinks, once,
        in the last merge. Then `lses` are [..., Hq, Lq]. A single part is fine.
    backend : str, default "auto"
        ``"triton"`` (also takes CPU tensors, under ``TRITON_INTERPRET=1``), ``"torch"``, or
        ``"auto"``: triton on a GPU, torch elsewhere.

    Returns
    -------
    out : Tensor, [..., Dv], dtype of `outs`
        Zero in a row that is empty in every part.
    lse : Tensor, [...], dtype of `lses`
        ``-inf`` in such a row, or the sink.

    Raises
    ------
    ValueError
        There is nothing to merge, shapes, counts or devices do not fit, or `backend` is unknown.
    TypeError
        Something is not a floating-point tensor, or dtypes differ.

    See Also
    --------
    merge_attentions_ : Fold one more part into a running result, in place.

    Notes
    -----
    The weights are computed in float32, in float64 where anything is float64. A row that is not
    empty in one part only comes out bit for bit, whatever the empty parts hold. Under
    ``torch.compile`` and ``torch.export`` the call is one node, ``flexdecode::merge``.

    References
    ----------
    .. [1] Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch
       Decoding", 2024.

    Examples
    --------
    >>> import torch
    >>> from flexdecode import AuxRequest, attention, merge_attentions
    >>> q, (k, v) = torch.randn(1, 4, 1, 32), torch.randn(2, 1, 4, 600, 32)
    >>> aux = AuxRequest(lse=True)
    >>> first, first_aux = attention(q, k[:, :, :200], v[:, :, :200], return_aux=aux)
    >>> rest, rest_aux = attention(q, k[:, :, 200:], v[:, :, 200:], return_aux=aux)
    >>> out, lse = merge_attentions([first, rest], [first_aux.lse, rest_aux.lse])
    >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
    True
    """
    stacked = isinstance(outs, Tensor) and isinstance(lses, Tensor)
    if stacked:
        outs, lses = [outs], [lses]  # type: ignore[list-item]
        _check_dim("outs", outs[0])
        _check_dim("lses", lses[0])
    else:
        outs, lses = _listed("outs", outs), _listed("lses", lses)
    _check_parts(outs, lses, stacked)
    if sinks is not None:
        _check_sinks(sinks, lses[0], stacked)
    chosen = _choose(backend, outs[0])
    if torch.compiler.is_compiling() or type(outs[0]) is not Tensor:
        merged: tuple[Tensor, Tensor] = _op(outs, lses, sinks, stacked, backend)
        return merged
    if chosen == "torch":
        return _merge_torch(outs, lses, sinks, stacked)
    asked = (*outs, *lses) if sinks is None else (*outs, *lses, sinks)
    if torch.is_grad_enabled() and any(x.requires_grad for x in asked):
        merged = _op(outs, lses, sinks, stacked, backend)
        return merged
    return _merge_triton(outs, lses, sinks, stacked)


def merge_attentions_(
    out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Fold one more part into a running result, in place; see `merge_attentions`.

    Start from any `out` with an `lse` of ``-inf``, or from the first part. Sinks join at the end:
    ``merge_attentions([out], [lse], sinks)``.

    Parameters
    ----------
    out : Tensor, [..., Dv], floating point
        Overwritten. May be wider than the parts: float32 for parts in bfloat16 rounds them once.
    lse : Tensor, [...], floating point, natural log
        Overwritten.
    new_out : Tensor, [..., Dv], floating point
    new_lse : Tensor, [...], floating point, natural log
    backend : str, default "auto"
        As in `merge_attentions`.

    Returns
    -------
    out, lse : Tensor
        The arguments.

    Raises
    ------
    ValueError
        Shapes or devices do not fit, or a tensor requires grad while grad mode is on.
    TypeError
        Something is not a floating-point tensor.

    Examples
    --------
    >>> import torch
    >>> from flexdecode import AuxRequest, attention, merge_attentions_
    >>> q, (k, v) = torch.randn(1, 4, 1, 32), torch.randn(2, 1, 4, 600, 32)
    >>> out, lse = torch.empty(1, 4, 1, 32), torch.full((1, 4, 1), -torch.inf)
    >>> for keys, values in zip(k.split(200, 2), v.split(200, 2)):
    ...     part, aux = attention(q, keys, values, return_aux=AuxRequest(lse=True))
    ...     _ = merge_attentions_(out, lse, part, aux.lse)
    >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
    True
    """
    for name, x in (("out", out), ("lse", lse), ("new_out", new_out), ("new_lse", new_lse)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {_kind(x)}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: expected a tensor that does not require grad; merging in place has no "
                "backward pass: use merge_attentions, or torch.no_grad()"
            )
        if x.device != out.device:
            raise ValueError(f"{name}: expected device {out.device} to match out, got {x.device}")
    if new_out.shape != out.shape or out.dim() < 1:
        raise ValueError(
            f"new_out: expected shape {list(out.shape)} to match out, got {list(new_out.shape)}"
        )
    for name, x in (("lse", lse), ("new_lse", new_lse)):
        if x.shape != out.shape[:-1]:
            raise ValueError(
                f"{name}: expected shape {list(out.shape[:-1])} to match out {list(out.shape)}, "
                f"got {list(x.shape)}"
            )
    check_written("out", out)
    check_written("lse", lse)
    chosen = _choose(backend, out)
    if torch.compiler.is_compiling() or type(out) is not Tensor:
        _op_in_place(out, lse, new_out, new_lse, backend)
    else:
        _merge_in_place(out, lse, new_out, new_lse, chosen)
    return out, lse


# -- the sum itself ----


def _merge_torch(
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


def _merge_backward_torch(
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
        grad_sinks = rows.sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
    return grad_outs.to(outs[0].dtype), grad_lses.to(lses[0].dtype), grad_sinks


def _widened(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, stacked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the parts, scores of the parts and of the sink, and which of them are empty."""
    out, score = (outs[0], lses[0]) if stacked else (torch.stack([*outs]), torch.stack([*lses]))
    wide = torch.promote_types(torch.promote_types(out.dtype, score.dtype), torch.float32)
    score = score.to(wide)
    # Out of an empty part comes nothing, not even a NaN times 0; -0.0 is what adds nothing to -0.0.
    values = out.to(wide).masked_fill((score == -torch.inf).unsqueeze(-1), -0.0)
    if sinks is not None:
        sink = sinks.to(wide).unsqueeze(-1).expand(score.shape[1:])
        score = torch.cat([score, sink.unsqueeze(0)])
    return values, score, score == -torch.inf


def _merge_triton(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    stacked: bool,
) -> tuple[Tensor, Tensor]:
    from flexdecode.kernels.merge import launch_merge

    out, lse = _new_results(outs[0], lses[0], stacked)
    while not stacked and len(outs) > _MAX_PARTS:
        # A tree: each group becomes one wide part, and no group is read twice.
        wide = torch.promote_types(torch.promote_types(out.dtype, lse.dtype), torch.float32)
        groups = range(0, len(outs), _MAX_PARTS)
        states = out.new_empty((len(groups), *out.shape), dtype=wide)
        totals = lse.new_empty((len(groups), *lse.shape), dtype=wide)
        for first, state, total in zip(groups, states, totals, strict=True):
            piece = slice(first, first + _MAX_PARTS)
            launch_merge(outs[piece], lses[piece], None, state, total, stacked=False)
        outs, lses, stacked = [states], [totals], True
    launch_merge(outs, lses, sinks, out, lse, stacked=stacked)
    return out, lse


def _merge_in_place(
    out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, chosen: str
) -> None:
    if chosen == "triton":
        from flexdecode.kernels.merge import launch_merge

        target = out if out.stride(-1) == 1 else out.contiguous()
        launch_merge([target, new_out], [lse, new_lse], None, target, lse, stacked=False)
        if target is not out:
            out.copy_(target)
        return
    wide = torch.promote_types(out.dtype, new_out.dtype)
    wide_lse = torch.promote_types(lse.dtype, new_lse.dtype)
    merged = _merge_torch(
        [out.to(wide), new_out.to(wide)], [lse.to(wide_lse), new_lse.to(wide_lse)], None, False
    )
    out.copy_(merged[0])
    lse.copy_(merged[1])


def _new_results(out: Tensor, lse: Tensor, stacked: bool) -> tuple[Tensor, Tensor]:
    first = 1 if stacked else 0
    return out.new_empty(out.shape[first:]), lse.new_empty(lse.shape[first:])


def _choose(backend: str, like: Tensor) -> str:
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


# -- the same as operators that a graph can hold ----


@torch.library.custom_op(
    "flexdecode::merge",
    mutates_args=(),
    schema="(Tensor[] outs, Tensor[] lses, Tensor? sinks, bool stacked, str backend) "
    "-> (Tensor, Tensor)",
)
def _op(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    stacked: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if _choose(backend, outs[0]) == "triton":
        return _merge_triton(outs, lses, sinks, stacked)
    out, lse = _merge_torch(outs, lses, sinks, stacked)
    return out.contiguous(), lse.contiguous()


@_op.register_fake
def _(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    stacked: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _new_results(outs[0], lses[0], stacked)


@torch.library.custom_op(
    "flexdecode::merge_backward",
    mutates_args=(),
    schema="(Tensor[] outs, Tensor[] lses, Tensor? sinks, Tensor grad_out, Tensor grad_lse, "
    "bool stacked, str backend) -> (Tensor, Tensor, Tensor)",
)
def _op_backward(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor,
    stacked: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if _choose(backend, outs[0]) == "torch":
        grads = _merge_backward_torch(outs, lses, sinks, grad_out, grad_lse, stacked)
        return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()
    from flexdecode.kernels.merge import launch_merge_backward

    if not stacked and len(outs) > _MAX_PARTS:
        outs, lses, stacked = [torch.stack([*outs])], [torch.stack([*lses])], True
    grad_outs, grad_lses, grad_sinks = _new_grads(outs, lses, sinks, stacked)
    wide = torch.promote_types(torch.promote_types(outs[0].dtype, lses[0].dtype), torch.float32)
    rows = None if sinks is None else lses[0].new_empty(grad_lse.shape, dtype=wide)
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
        grad_sinks = rows.sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
    return grad_outs, grad_lses, grad_sinks


@_op_backward.register_fake
def _(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor,
    stacked: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_grads(outs, lses, sinks, stacked)


def _new_grads(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None, stacked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    count = () if stacked else (len(outs),)
    grad_outs = outs[0].new_empty((*count, *outs[0].shape))
    grad_lses = lses[0].new_empty((*count, *lses[0].shape))
    grad_sinks = lses[0].new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return grad_outs, grad_lses, grad_sinks


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    outs, lses, sinks, ctx.stacked, ctx.backend = inputs
    ctx.parts, ctx.sinks = len(outs), sinks is not None
    ctx.save_for_backward(*outs, *lses, *([] if sinks is None else [sinks]))


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
    saved = list(ctx.saved_tensors)
    sinks = saved.pop() if ctx.sinks else None
    outs, lses = saved[: ctx.parts], saved[ctx.parts :]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        grads = _merge_backward_torch(outs, lses, sinks, grad_out, grad_lse, ctx.stacked)
    else:
        grads = _op_backward(outs, lses, sinks, grad_out, grad_lse, ctx.stacked, ctx.backend)
    grad_outs, grad_lses, grad_sinks = grads
    if ctx.stacked:
        return [grad_outs], [grad_lses], None if sinks is None else grad_sinks, None, None
    return (
        list(grad_outs.unbind(0)),
        list(grad_lses.unbind(0)),
        None if sinks is None else grad_sinks,
        None,
        None,
    )


_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(
    "flexdecode::merge_",
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor new_out, Tensor new_lse, str backend) -> ()",
)
def _op_in_place(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, backend: str) -> None:
    _merge_in_place(out, lse, new_out, new_lse, _choose(backend, out))


@_op_in_place.register_fake
def _(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, backend: str) -> None:
    return None


# -- checks ----


def _listed(name: str, parts: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(parts, Tensor):
        _check_dim(name, parts)
        return parts.unbind(0)
    if not isinstance(parts, Sequence) or not all(isinstance(x, Tensor) for x in parts):
        raise TypeError(f"{name}: expected a Tensor or a sequence of them, got {_kind(parts)}")
    if not parts:
        raise ValueError(f"{name}: expected at least one part, got an empty {_kind(parts)}")
    first = parts[0]
    for x in parts[1:]:
        if x.shape != first.shape:
            raise ValueError(
                f"{name}: expected tensors of one shape, got {[list(x.shape) for x in parts]}"
            )
        if x.dtype != first.dtype:
            raise TypeError(f"{name}: expected one dtype, got {[x.dtype for x in parts]}")
        if x.device != first.device:
            raise ValueError(f"{name}: expected one device, got {[str(x.device) for x in parts]}")
    return parts


def _check_dim(name: str, parts: Tensor) -> None:
    if parts.dim() < 1 or parts.shape[0] == 0:
        raise ValueError(
            f"{name}: expected at least one part along dim 0, got shape {list(parts.shape)}"
        )


def _check_parts(outs: Sequence[Tensor], lses: Sequence[Tensor], stacked: bool) -> None:
    out, lse = outs[0], lses[0]
    for name, x in (("outs", out), ("lses", lse)):
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected floating-point tensors, got {x.dtype}")
    if lse.device != out.device:
        raise ValueError(f"lses: expected device {out.device} to match outs, got {lse.device}")
    wanted = list(out.shape[:-1])
    if out.dim() == 0 or lse.shape != out.shape[:-1] or (not stacked and len(outs) != len(lses)):
        each = "" if stacked else f"{len(outs)} tensors of "
        got = list(lse.shape) if stacked else f"{len(lses)} of {list(lse.shape)}"
        raise ValueError(
            f"lses: expected {each}shape {wanted} to match outs {list(out.shape)}, got {got}"
        )


def _check_sinks(sinks: Tensor, lse: Tensor, stacked: bool) -> None:
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks: expected a Tensor, got {type(sinks).__name__}")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks: expected a floating-point tensor, got {sinks.dtype}")
    shape = lse.shape[1:] if stacked else lse.shape
    if len(shape) < 2:
        raise ValueError(f"lses: expected [..., Hq, Lq] beside sinks, got {list(shape)} each")
    if sinks.shape != shape[-2:-1]:
        raise ValueError(
            f"sinks: expected shape [{shape[-2]}], one logit a query head, got {list(sinks.shape)}"
        )
    if sinks.device != lse.device:
        raise ValueError(f"sinks: expected device {lse.device} to match lses, got {sinks.device}")


def _kind(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{type(value).__name__} of {sorted({type(x).__name__ for x in value})}"
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
