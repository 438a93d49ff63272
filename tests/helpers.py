"""Inputs, a dense oracle that shares no code with the library, and error budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MaskRule = Callable[[Any, Any, Any, Any], Any]
ScoreRule = Callable[[Any, Any, Any, Any, Any], Any]


@dataclass(frozen=True)
class Dense:
    """Result of `dense_attention`: [B, Hq, Lq, Dv], and twice [B, Hq, Lq]."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def random_inputs(
    B: int,
    Hq: int,
    Hkv: int,
    Lq: int,
    Lkv: int,
    D: int,
    Dv: int | None = None,
    *,
    Bkv: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make q [B, Hq, Lq, D], k [Bkv, Hkv, Lkv, D], v [Bkv, Hkv, Lkv, Dv], standard normal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    Bkv = B if Bkv is None else Bkv
    return (
        normal(B, Hq, Lq, D),
        normal(Bkv, Hkv, Lkv, D),
        normal(Bkv, Hkv, Lkv, D if Dv is None else Dv),
    )


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskRule | None = None,
    score_mod: ScoreRule | None = None,
    scale: float | None = None,
    kv_len: int | Tensor | None = None,
    q_offset: int | Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    rounded: bool = False,
) -> Dense:
    """Evaluate the contract literally, over all scores at once.

    Parameters
    ----------
    q, k, v : Tensor, [B, Hq, Lq, D], [B or 1, Hkv, Lkv, D], [B or 1, Hkv, Lkv, Dv]
        `k` and `v` may hold anything where no query may look.
    mask, score_mod : callable, optional
        Called eagerly with int64 tensors that broadcast to [B, Hq, Lq, Lkv]; positions stay inside
        ``[0, kv_len)``, so captures need no room beyond it.
    kv_len, q_offset : int or Tensor [B], optional
        Defaults ``Lkv`` and ``kv_len - Lq``.
    bias : Tensor, [B or 1, Hq or 1, Lq, Lkv], optional
    sinks : Tensor, [Hq], optional
    rounded : bool, default False
        False computes in float64. True is the low-precision run that `budget` measures: scores and
        softmax in float32, probabilities and output rounded to q's dtype.
    """
    B, Hq, Lq, D = q.shape
    Hkv, Lkv = k.shape[1:3]
    device, dtype = q.device, torch.float32 if rounded else torch.float64
    scale = D**-0.5 if scale is None else scale
    lengths = _column(Lkv if kv_len is None else kv_len, B, device).clamp(0, Lkv)
    offsets = lengths - Lq if q_offset is None else _column(q_offset, B, device)

    b = torch.arange(B, device=device)[:, None, None, None]
    h = torch.arange(Hq, device=device)[None, :, None, None]
    q_idx = offsets + torch.arange(Lq, device=device)[None, None, :, None]
    slots = torch.arange(Lkv, device=device)[None, None, None, :]
    kv_idx = torch.minimum(slots, (lengths - 1).clamp(min=0))
    shape = (B, Hq, Lq, Lkv)

    allowed = (slots < lengths).expand(shape)
    if mask is not None:
        allowed = allowed & torch.as_tensor(mask(b, h, q_idx, kv_idx), device=device)

    heads = torch.arange(Hq, device=device) // (Hq // Hkv)
    keys = k.to(dtype).expand(B, -1, -1, -1)[:, heads]
    values = v.to(dtype).expand(B, -1, -1, -1)[:, heads]
    scores = scale * (q.to(dtype) @ keys.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.to(dtype)
    if score_mod is not None:
        scores = score_mod(scores, b, h, q_idx, kv_idx).expand(shape)
    scores = torch.where(allowed, scores, -torch.inf)

    no_key = scores.new_full((B, Hq, Lq, 1), -torch.inf)
    max_scores = torch.cat([scores, no_key], dim=-1).amax(dim=-1)
    logits = (
        scores
        if sinks is None
        else torch.cat([scores, sinks.to(dtype)[None, :, None, None].expand(B, Hq, Lq, 1)], dim=-1)
    )
    lse = torch.cat([logits, no_key], dim=-1).logsumexp(dim=-1)
    weights = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    if rounded:
        weights = weights.to(q.dtype).to(dtype)

    # Zero times NaN is NaN: values that no row of the head may see are taken out by hand.
    values = torch.where(allowed.any(dim=2)[..., None], values, 0.0)
    out = weights @ values
    return Dense(out.to(q.dtype) if rounded else out, lse, max_scores)


def budget(exact: Tensor, rounded: Tensor) -> float:
    """Largest absolute error allowed: twice that of the low-precision run, at least a few ulp.

    The floor is for results that the low-precision run happens to hit: 2e-6 (about 16 units in the
    last place of float32) of the largest finite magnitude, and never less than 2e-6.
    """
    finite = exact.isfinite()
    if not finite.any():
        return 2e-6
    error = (rounded.double() - exact.double())[finite].abs().max().item()
    return max(2 * error, 2e-6 * max(1.0, exact[finite].abs().max().item()))


def assert_within(found: Tensor, exact: Tensor, allowed_error: float, what: str = "out") -> None:
    """Fail unless `found` is that close to `exact`, and infinite exactly where `exact` is."""
    found, exact = found.detach().double().cpu(), exact.double().cpu()
    assert found.shape == exact.shape, f"{what}: shape {found.shape}, expected {exact.shape}"
    finite = exact.isfinite()
    assert torch.equal(found[~finite], exact[~finite]), f"{what}: differs where not finite"
    error = (found - exact)[finite].abs()
    assert not error.isnan().any(), f"{what}: {int(error.isnan().sum())} NaN"
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= allowed_error, f"{what}: error {worst:.3g}, allowed {allowed_error:.3g}"


def assert_matches(
    found: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lse: Tensor | None = None,
    max_scores: Tensor | None = None,
    slack: float = 1.0,
    **call: Any,
) -> None:
    """Compare one attention call with the oracle, within a budget taken from the data.

    Parameters
    ----------
    found : Tensor, [B, Hq, Lq, Dv]
        The output to check; `lse` and `max_scores`, [B, Hq, Lq], are checked when given.
    slack : float, default 1.0
        Multiplies the budget, for approximations that the library documents.
    **call
        Further arguments of `dense_attention`.
    """
    exact = dense_attention(q, k, v, **call)
    rounded = dense_attention(q, k, v, **call, rounded=True)
    for what, tensor in (("out", found), ("lse", lse), ("max_scores", max_scores)):
        if tensor is not None:
            right, low = getattr(exact, what), getattr(rounded, what)
            assert_within(tensor, right, slack * budget(right, low), what)


def _column(value: int | Tensor, B: int, device: torch.device) -> Tensor:
    """[B, 1, 1, 1], int64, of one number for all sequences or one for each."""
    return torch.as_tensor(value, device=device).long().reshape(-1).expand(B)[:, None, None, None]
