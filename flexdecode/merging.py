"""Merging attention over disjoint sets of keys; plain torch, so autograd differentiates it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["merge_attentions"]


def merge_attentions(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    r"""Combine outputs over disjoint sets of keys into the output over their union.

    With ``w[n] = exp(lse[n] - lse)``::

        lse = ln sum exp(lse[n])
        out = sum w[n] * out[n]

    The operation is associative and commutative up to rounding, its neutral element is the empty
    state ``(0, -inf)``, and it is differentiable in both arguments [1]_.

    Parameters
    ----------
    outs : Tensor [N, ..., Dv], or sequence of N tensors [..., Dv], floating point
        Outputs of `attention`, one for each set of keys.
    lses : Tensor [N, ...], or sequence of N tensors [...], floating point, natural log
        The ``aux.lse`` of each; ``-inf`` where that set held no allowed key. Leave sinks out of
        all parts but one, or a sink counts more than once.

    Returns
    -------
    out : Tensor, [..., Dv], dtype of `outs`
        Zero in a row that is empty in every part.
    lse : Tensor, [...], dtype of `lses`
        ``-inf`` in such a row.

    Raises
    ------
    ValueError
        There is nothing to merge, or shapes or counts do not fit.
    TypeError
        Something is not a floating-point tensor, or dtypes differ.

    Notes
    -----
    The weights are computed in float32 (float64 for float64 inputs). A row that is not empty in
    one part only comes out bit for bit.

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
    out, lse = _stacked("outs", outs), _stacked("lses", lses)
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            f"lses: expected shape {list(out.shape[:-1])} to match outs {list(out.shape)}, "
            f"got {list(lse.shape)}"
        )
    if lse.device != out.device:
        raise ValueError(f"lses: expected device {out.device} to match outs, got {lse.device}")
    wide = torch.promote_types(torch.promote_types(out.dtype, lse.dtype), torch.float32)
    scores = lse.to(wide)
    # Constants for the gradient: shifting by them changes no result. A row that is empty
    # everywhere is shifted by 0, so that no -inf - -inf appears, forward or backward.
    top = scores.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    empty = scores == -torch.inf
    weights = (scores.masked_fill(empty, 0.0) - top).exp().masked_fill(empty, 0.0)
    total = weights.sum(0)
    nobody = empty.all(0)
    total = total.masked_fill(nobody, 1.0)
    # Out of an empty part comes nothing, not even a NaN times 0; -0.0 is what adds nothing to -0.0.
    values = out.to(wide).masked_fill(empty.unsqueeze(-1), -0.0)
    terms = (values * weights.unsqueeze(-1)).unbind(0)
    merged = functools.reduce(torch.add, terms) / total.unsqueeze(-1)
    merged = merged.masked_fill(nobody.unsqueeze(-1), 0.0)
    merged_lse = (total.log() + top).masked_fill(nobody, -torch.inf)
    return merged.to(out.dtype), merged_lse.to(lse.dtype)


def _stacked(name: str, parts: Tensor | Sequence[Tensor]) -> Tensor:
    if not isinstance(parts, Tensor):
        if not isinstance(parts, Sequence) or not all(isinstance(x, Tensor) for x in parts):
            raise TypeError(f"{name}: expected a Tensor or a sequence of them, got {_kind(parts)}")
        if parts and any(x.shape != parts[0].shape for x in parts):
            raise ValueError(
                f"{name}: expected tensors of one shape, got {[list(x.shape) for x in parts]}"
            )
        if any(x.dtype != parts[0].dtype for x in parts):
            raise TypeError(f"{name}: expected one dtype, got {[x.dtype for x in parts]}")
        parts = torch.stack(list(parts)) if parts else torch.empty(0)
    if not parts.is_floating_point():
        raise TypeError(f"{name}: expected floating-point tensors, got {parts.dtype}")
    if parts.dim() < 1 or parts.shape[0] == 0:
        raise ValueError(
            f"{name}: expected at least one part along dim 0, got shape {list(parts.shape)}"
        )
    return parts


def _kind(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{type(value).__name__} of {sorted({type(x).__name__ for x in value})}"
    return type(value).__name__
