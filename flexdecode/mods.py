"""Mask and score rules: their types, and the algebra ``& | ~`` of masks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["MaskMod", "ScoreMod", "and_masks", "mask_mod", "not_mask", "or_masks"]

# score_mod(score, b, h, q_idx, kv_idx) -> score
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


class MaskMod:
    """A mask rule that can be combined: ``causal & sliding_window(64)``, ``~documents(ids)``.

    Calling it calls the function it holds, so it can be used wherever a plain
    ``mask_mod(b, h, q_idx, kv_idx) -> bool`` can. True means "may attend".

    Parameters
    ----------
    fn : callable (b, h, q_idx, kv_idx) -> bool
        The rule; see `mask_mod`.
    """

    def __init__(self, fn: Callable[[Any, Any, Any, Any], Any]) -> None:
        if not callable(fn):
            raise TypeError(f"mask_mod: expected a function, got {type(fn).__name__}")
        self.fn = fn
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Evaluate the rule."""
        return self.fn(b, h, q_idx, kv_idx)

    def __and__(self, other: Any) -> Any:
        return and_masks(self, other) if _is_rule(other) else NotImplemented

    def __rand__(self, other: Any) -> Any:
        return and_masks(other, self) if _is_rule(other) else NotImplemented

    def __or__(self, other: Any) -> Any:
        return or_masks(self, other) if _is_rule(other) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return or_masks(other, self) if _is_rule(other) else NotImplemented

    def __invert__(self) -> MaskMod:
        return not_mask(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask has no truth value: combine masks with & | ~, not with and, or, not"
        )

    def __repr__(self) -> str:
        return f"mask_mod({getattr(self, '__name__', 'mask')})"


def mask_mod(fn: Callable[[Any, Any, Any, Any], Any]) -> MaskMod:
    """Give a mask rule the operators ``&``, ``|`` and ``~``; usable as a decorator.

    Parameters
    ----------
    fn : callable (b, h, q_idx, kv_idx) -> bool
        True where query ``q_idx`` of head ``h`` in sequence ``b`` may attend to key ``kv_idx``;
        all four are integers, positions are logical tokens and ``h`` is the query head.

    Returns
    -------
    MaskMod

    Examples
    --------
    >>> @mask_mod
    ... def even_keys(b, h, q_idx, kv_idx):
    ...     return kv_idx % 2 == 0
    >>> (even_keys & (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx))(0, 0, 3, 2)
    True
    """
    return fn if isinstance(fn, MaskMod) else MaskMod(fn)


def and_masks(*mods: Callable[[Any, Any, Any, Any], Any]) -> MaskMod:
    """True where every one of `mods` is; without arguments, everywhere.

    Parameters
    ----------
    *mods : callable (b, h, q_idx, kv_idx) -> bool

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        One of `mods` is not callable.
    """
    return _combine("and_masks", mods, True, lambda x, y: x & y)


def or_masks(*mods: Callable[[Any, Any, Any, Any], Any]) -> MaskMod:
    """True where one of `mods` is; without arguments, nowhere.

    Parameters
    ----------
    *mods : callable (b, h, q_idx, kv_idx) -> bool

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        One of `mods` is not callable.
    """
    return _combine("or_masks", mods, False, lambda x, y: x | y)


def not_mask(mod: Callable[[Any, Any, Any, Any], Any]) -> MaskMod:
    """True where `mod` is not.

    Parameters
    ----------
    mod : callable (b, h, q_idx, kv_idx) -> bool

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `mod` is not callable.
    """
    rule = _rule("not_mask", mod)

    def negated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        # ``x ^ True`` negates Python bools, tensors and traced values alike; ``~True`` is -2.
        return rule(b, h, q_idx, kv_idx) ^ True

    negated.__name__ = negated.__qualname__ = f"not_{_name(mod)}"
    return MaskMod(negated)


def _is_rule(value: Any) -> bool:
    # A BlockMask is combined by its own operators, which know about tables.
    return callable(value) and not hasattr(value, "kv_num_blocks")


def _name(mod: Any) -> str:
    return str(getattr(mod, "__name__", type(mod).__name__)).strip("<>")


def _rule(where: str, mod: Any) -> Callable[[Any, Any, Any, Any], Any]:
    if not callable(mod):
        raise TypeError(
            f"{where}: expected functions (b, h, q_idx, kv_idx) -> bool, got {type(mod).__name__}"
        )
    return mod.fn if isinstance(mod, MaskMod) else mod  # the tracer keys plain functions best


def _combine(
    where: str,
    mods: tuple[Callable[[Any, Any, Any, Any], Any], ...],
    empty: bool,
    operator: Callable[[Any, Any], Any],
) -> MaskMod:
    rules = [_rule(where, mod) for mod in mods]
    if not rules:
        return MaskMod(lambda b, h, q_idx, kv_idx: (kv_idx == kv_idx) & empty)
    joined = functools.reduce(functools.partial(_join, operator), rules)
    word = where.split("_")[0]
    joined.__name__ = joined.__qualname__ = f"_{word}_".join(_name(mod) for mod in mods)
    return MaskMod(joined)


def _join(
    operator: Callable[[Any, Any], Any],
    first: Callable[[Any, Any, Any, Any], Any],
    second: Callable[[Any, Any, Any, Any], Any],
) -> Callable[[Any, Any, Any, Any], Any]:
    def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return operator(first(b, h, q_idx, kv_idx), second(b, h, q_idx, kv_idx))

    return joined
