"""The mask of one forward pass, made of a model's own rule, its padding and a `restrict` rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexdecode.integrations.transformers.matrices import element
from flexdecode.integrations.transformers.model_mask import NO_MATRIX, ModelMask
from flexdecode.integrations.transformers.restriction import (
    MaskFunction,
    is_restricted,
    restriction,
)
from flexdecode.mask_creation import create_block_mask
from flexdecode.mods import and_masks
from flexdecode.trace import trace

__all__ = ["create_mask"]

_IGNORE_BLOCK_MASKS = frozenset({"doge"})  # types of models whose layers then have no mask at all
_MAX_ELEMENTS = 1 << 26  # of a mask made within a graph, which evaluates them all


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | ModelMask | None = None,
    *,
    device: torch.device | str = "cpu",
    config: Any = None,
    use_vmap: bool = False,
    block_size: int | tuple[int, int] = 128,
    **_: Any,
) -> ModelMask:
    """Build the mask of one forward pass, as transformers' ``AttentionMaskInterface`` asks for it.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Sizes of the layers' queries and keys, in rows and tokens.
    q_offset : int or Tensor, 0-dim, int64
        Position of the first query. A static cache passes its live counter: the value at the time
        of this call counts.
    kv_offset : int
        Position of the first key; above 0 in a sliding layer whose window has moved.
    mask_function : callable (b, h, q_idx, kv_idx) -> bool
        The model's rule, over these positions. Default: every key.
    attention_mask : Tensor, [B, n], bool, optional
        True where a token is no padding; columns beyond ``n`` are padding.
    device : torch.device or str
        Where the tables live.
    config : transformers.PreTrainedConfig, optional
        Gives the number of query heads, for a `restrict` rule that depends on ``h``.
    use_vmap : bool
        `mask_function` takes single numbers only.
    block_size : int or (int, int), tokens
        See `create_block_mask`.

    Returns
    -------
    ModelMask

    Raises
    ------
    TypeError
        Layers of the model leave out what is not a matrix.

    Notes
    -----
    Where a compiled model makes its masks itself, their functions are out of reach: they are
    evaluated for all elements then, within the graph. Masks of more than 2**26 elements, and those
    under `restrict`, are made between two graphs.
    """
    if isinstance(attention_mask, ModelMask):  # built earlier in the same step
        return attention_mask
    if getattr(config, "model_type", None) in _IGNORE_BLOCK_MASKS:
        raise TypeError(NO_MATRIX)
    compiling = torch.compiler.is_compiling()
    if compiling and (
        use_vmap or is_restricted() or batch_size * q_length * kv_length > _MAX_ELEMENTS
    ):
        return _create_outside(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            device=device,
            config=config,
            block_size=block_size,
        )
    rules = [] if mask_function is None else [mask_function]
    if attention_mask is not None:
        rules.append(_padding_rule(attention_mask, kv_offset + kv_length))
    if compiling:
        shape = (batch_size, 1, q_length, kv_length)
        return _create_in_graph(rules, shape, q_offset, kv_offset, device, block_size)
    heads = 1
    if (extra := restriction()) is not None:
        rules.append(extra if attention_mask is None else _from_first_token(extra, attention_mask))
        if config is not None and "h" in trace(extra, "mask").graph.uses:
            heads = config.get_text_config().num_attention_heads
    rule: MaskFunction = and_masks(*rules)
    if not (isinstance(kv_offset, int) and kv_offset == 0):
        rule = _shift_keys(rule, _own(kv_offset, device))
    block_mask = create_block_mask(
        rule,
        batch_size,
        heads,
        q_length,
        kv_length,
        device=device,
        BLOCK_SIZE=block_size,
        q_offset=_own(q_offset, device),
    )
    return ModelMask(block_mask, (batch_size, heads, q_length, kv_length))


_create_outside: Callable[..., ModelMask] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    create_mask,
    reason="this mask is made outside of the graph; make it first and pass it to the model",
)


def _create_in_graph(
    rules: Sequence[MaskFunction],
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    device: torch.device | str,
    block_size: int | tuple[int, int],
) -> ModelMask:
    B, _, Lq, Lkv = shape
    b = torch.arange(B, device=device)[:, None, None, None]
    h = torch.zeros_like(b)  # no model's rule depends on it
    q_idx = (torch.arange(Lq, device=device) + q_offset)[:, None]
    kv_idx = torch.arange(Lkv, device=device) + kv_offset
    allowed = torch.ones((), dtype=torch.bool, device=device)
    for rule in rules:
        allowed = allowed & rule(b, h, q_idx, kv_idx)
    block_mask = create_block_mask(
        element(allowed.expand(shape)),
        *shape,
        device=device,
        BLOCK_SIZE=block_size,
        q_offset=0,  # the elements are indexed by row
    )
    return ModelMask(block_mask, shape)


def _own(position: int | Tensor, device: torch.device | str) -> int | Tensor:
    """Make a position constant: a static cache counts in place.

    On a GPU numbers become tensors, which a graph takes in without being recorded again.
    """
    if isinstance(position, Tensor):
        return position.clone()
    if torch.device(device).type == "cpu":
        return position
    return torch.full((), position, dtype=torch.int64, device=device)


def _padding_rule(real: Tensor, columns: int) -> MaskFunction:
    if (missing := columns - real.shape[-1]) > 0:  # a static cache has room for tokens to come
        real = torch.nn.functional.pad(real, (0, missing))

    def padding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return real[b, kv_idx]

    return padding


def _from_first_token(rule: MaskFunction, real: Tensor) -> MaskFunction:
    first = real.int().argmax(-1)  # [B], left padding of each row

    def from_first_token(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return rule(b, h, q_idx - first[b], kv_idx - first[b])

    return from_first_token


def _shift_keys(rule: MaskFunction, kv_offset: int | Tensor) -> MaskFunction:
    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return rule(b, h, q_idx, kv_idx + kv_offset)

    return shifted
