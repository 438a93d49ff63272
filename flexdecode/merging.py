"""Merging attention over disjoint sets of keys: the calls, and what their arguments must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexdecode.checks import check_written
from flexdecode.merge_backends import choose, merge_in_place, merge_torch, merge_triton
from flexdecode.merge_operators import merge_operator, merge_operator_

__all__ = ["merge_attentions", "merge_attentions_"]


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
    chosen = choose(backend, outs[0])
    in_graph = torch.compiler.is_compiling() or type(outs[0]) is not Tensor
    if chosen == "torch" and not in_graph:
        return merge_torch(outs, lses, sinks, stacked)
    asked = (*outs, *lses) if sinks is None else (*outs, *lses, sinks)
    if in_graph or (torch.is_grad_enabled() and any(x.requires_grad for x in asked)):
        merged: tuple[Tensor, Tensor] = merge_operator(outs, lses, sinks, stacked, backend)
        return merged
    return merge_triton(outs, lses, sinks, stacked)


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
    chosen = choose(backend, out)
    if torch.compiler.is_compiling() or type(out) is not Tensor:
        merge_operator_(out, lse, new_out, new_lse, backend)
    else:
        merge_in_place(out, lse, new_out, new_lse, chosen)
    return out, lse


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
