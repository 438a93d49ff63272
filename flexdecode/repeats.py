"""Calls like an earlier one: found by shapes and identities, and made without its checks.

A model calls `attention` in every layer of every step with tensors of the same shapes and the same
mask; checking them and laying out arguments would take longer than a short kernel. Only what a
shape or an identity vouches for is skipped: rules are looked at again, since what they close over
may have changed, and everything unusual takes the ordinary way.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode import checks, choices
from flexdecode.bound_mask import BoundMask
from flexdecode.trace import trace

if TYPE_CHECKING:
    from flexdecode.block_mask import BlockMask
    from flexdecode.problem import Request, Result
    from flexdecode.trace import Traced

__all__ = ["Signature", "remember", "run_again", "sign"]

_MAX_REPEATS = 256  # of calls without a mask; a bound mask holds its own

_NUMBERS = (NoneType, float)
_VALUES = (int, bool, str, torch.dtype)
_BOUND = frozenset(("kv_len", "kv_start", "page_table"))  # what a bound mask brings itself

Signature = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """A call that was made, beside the tensors that each call brings."""

    run: Callable[[dict[str, Tensor]], Result | None]
    score_mod: weakref.ref[Any] | None
    score: Traced | None
    mask: Traced | None
    kv_len: int | Tensor | None  # of the mask

    def holds(self, score_mod: Any, block_mask: BlockMask | None) -> bool:
        """True while rules and lengths are what they were."""
        if isinstance(block_mask, BoundMask) and (
            self.kv_len is not block_mask.kv_len or _traced(block_mask) is not self.mask
        ):
            return False
        if self.score_mod is None:
            return score_mod is None
        found = self.score_mod()
        return found is score_mod and trace(found, "score") is self.score


_without_mask: OrderedDict[Signature, Repeat] = OrderedDict()


def sign(
    tensors: dict[str, Any],
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    return_aux: Any,
    backend: str,
    kernel_options: dict[str, Any] | None,
) -> Signature | None:
    """All that the checks of a call look at, or None for a call that has to take the ordinary way.

    Two calls with equal signatures, whose rules hold still, pass or fail the same checks.

    Parameters
    ----------
    tensors : dict of str to Tensor
        ``q``, ``k``, ``v``, and those of the other arguments that were given.
    """
    if block_mask is not None and type(block_mask) is not BoundMask:
        return None
    if type(scale) not in _NUMBERS or type(backend) is not str:
        return None
    options: tuple[Any, ...] = ()
    if kernel_options is not None:
        if type(kernel_options) is not dict:
            return None
        for name, value in kernel_options.items():
            if type(value) not in _VALUES:
                return None
            options += (name, type(value), value)  # 1 == True
    wanted = None
    if return_aux is not None:
        wanted = getattr(return_aux, "lse", None), getattr(return_aux, "max_scores", None)
        if type(wanted[0]) is not bool or type(wanted[1]) is not bool:
            return None
    parts: list[Any] = []
    for name, x in tensors.items():
        if type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled()):
            return None
        if name in _BOUND and block_mask is not None and x is not getattr(block_mask, name):
            return None
        parts += (name, x.shape, x.stride(), x.dtype, x.get_device())
    device = parts[4]  # of q
    if checks.is_checking() or (device >= 0 and device != torch.accelerator.current_device_index()):
        return None
    latent = tensors["k"].data_ptr() == tensors["v"].data_ptr()  # may be read once
    parts += (latent, id(score_mod), scale, wanted, backend, options, choices.generation)
    return tuple(parts)


def run_again(
    signature: Signature, tensors: dict[str, Any], score_mod: Any, block_mask: BlockMask | None
) -> Result | None:
    """Make a call like an earlier one, or return None."""
    kept = _without_mask if block_mask is None else block_mask.__dict__.get("_repeats")
    repeat = None if kept is None else kept.get(signature)
    if repeat is None or not repeat.holds(score_mod, block_mask):
        return None
    return repeat.run(tensors)


def remember(
    signature: Signature,
    tensors: dict[str, Any],
    score_mod: Any,
    block_mask: BlockMask | None,
    request: Request,
    result: Result,
) -> None:
    """Keep a call, if one like it can be made with nothing but other tensors."""
    if result.repeatable is None:
        return
    problem = request.problem
    used = {
        "q": request.q,
        "k": request.k,
        "v": request.v,
        "kv_len": problem.kv_len,
        "kv_start": problem.kv_start,
        "page_table": problem.page_table,
        "sinks": request.sinks,
    }
    if any(used[name] is not x for name, x in tensors.items()):
        return  # the kernels saw something made from it
    if block_mask is None and isinstance(problem.kv_len, Tensor) and "kv_len" not in tensors:
        return  # lengths that were worked out from what kv_start held
    score = reference = mask = None
    if score_mod is not None:
        score = trace(score_mod, "score")
        if score is not request.score or (score.captures and block_mask is None):
            return  # traced at every call; or nobody but this would keep the tensors alive
        try:
            reference = weakref.ref(score_mod)
        except TypeError:
            return
    kept = _without_mask
    if isinstance(block_mask, BoundMask):
        assert request.resolved is not None
        mask = _traced(block_mask)
        if mask is not request.resolved.mask:
            return
        kept = block_mask.__dict__.setdefault("_repeats", OrderedDict())
    own = None if block_mask is None else block_mask.kv_len
    kept[signature] = Repeat(result.repeatable, reference, score, mask, own)
    while len(kept) > _MAX_REPEATS:
        kept.popitem(last=False)


def _traced(block_mask: BoundMask) -> Traced:
    assert block_mask.mask_mod is not None
    return trace(block_mask.mask_mod, "mask")
