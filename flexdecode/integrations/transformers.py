"""Hugging Face transformers: run every attention layer of a model through `flexdecode.attention`.

After ``register()`` any model that uses transformers' attention interface can be built with
``attn_implementation="flexdecode"``; nothing in the model changes. The rule a model wants (causal,
sliding, chunked, packed, padded) reaches the kernel as a `BlockMask`, made once per kind of layer
and forward pass::

    from flexdecode.integrations.transformers import register, restrict
    from flexdecode.masks import sink_window

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flexdecode")
    model.generate(**inputs)                         # the model's own mask

    with restrict(sink_window(4, 1024)):             # ... and a rule of one's own on top
        model.generate(**inputs)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from flexdecode.api import AuxRequest, attention
from flexdecode.block_mask import BlockMask
from flexdecode.mask_creation import create_block_mask
from flexdecode.mods import ScoreMod, and_masks
from flexdecode.trace import trace

__all__ = ["ModelMask", "attention_forward", "create_mask", "register", "restrict"]

MaskFunction = Callable[[Any, Any, Any, Any], Any]

_restriction: contextvars.ContextVar[MaskFunction | None] = contextvars.ContextVar(
    "flexdecode_restriction", default=None
)
_restricted: list[MaskFunction] = []  # in force anywhere: what a compiled model can ask


def register(
    name: str = "flexdecode",
    *,
    block_size: int | tuple[int, int] = 128,
    backend: str = "auto",
    kernel_options: Mapping[str, Any] | None = None,
) -> None:
    """Make ``attn_implementation=name`` known to transformers.

    Call it before the model is built, or before ``model.set_attn_implementation(name)``. Calling
    it again replaces the settings.

    Parameters
    ----------
    name : str
        What to pass as ``attn_implementation``. transformers looks for its own back ends by
        substring, so it may not contain "flash", "sdpa", "flex_attention", "paged|" or "/".
    block_size : int or (int, int), tokens
        ``BLOCK_SIZE`` of the masks, see `create_block_mask`.
    backend : str
        See `attention`.
    kernel_options : mapping, optional
        See `attention`.

    Raises
    ------
    ImportError
        transformers is missing or older than version 5.
    ValueError
        `name` would be taken for one of transformers' own back ends.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    taken = [s for s in ("flash", "sdpa", "flex_attention", "paged|", "/") if s in name]
    if taken or name == "eager":
        raise ValueError(
            f"name: expected a name of its own, got {name!r}, which transformers reads as one of "
            "its own back ends"
        )

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return attention_forward(*args, **kwargs, backend=backend, kernel_options=kernel_options)

    def mask(*args: Any, **kwargs: Any) -> ModelMask:
        return create_mask(*args, **kwargs, block_size=block_size)

    AttentionInterface.register(name, forward)
    # Without a mask function of the same name transformers passes no mask at all.
    AttentionMaskInterface.register(name, mask)


@contextlib.contextmanager
def restrict(mask_mod: MaskFunction) -> Iterator[None]:
    """Within this context, also apply `mask_mod` in every layer of every registered model.

    A key is attended where the model's own mask and `mask_mod` both allow it.

    Parameters
    ----------
    mask_mod : callable (b, h, q_idx, kv_idx) -> bool
        Positions are logical: token 0 is the first real token of row ``b``, wherever left padding
        puts it. ``h`` is the query head. Layers that keep only a window of keys in their cache
        cannot show it older ones. Layers for which a model makes no mask, as in some vision
        towers, stay as they are.

    Raises
    ------
    TypeError
        `mask_mod` is not callable.
    ValueError
        A causal layer is given a matrix as its mask, which says nothing of positions.
    """
    rule = and_masks(mask_mod)  # refuses what is not callable
    outer = _restriction.get()
    token = _restriction.set(rule if outer is None else and_masks(outer, rule))
    _restricted.append(rule)
    try:
        yield
    finally:
        _restricted.remove(rule)
        _restriction.reset(token)


class ModelMask(TorchBlockMask):
    """The mask of one forward pass, shared by all layers of one kind.

    With a static cache, ``generate`` builds the mask and hands it back to the model, which leaves
    alone only tensors and instances of torch's ``BlockMask`` with four dimensions: that is the
    reason for the base class. The tables are flexdecode's; torch's own are not there.

    ``mask[:, :, rows]`` is the mask of these rows: some models compute the last layers of a prompt
    for its last token alone.

    Parameters
    ----------
    block_mask : flexdecode.BlockMask
        Fixed to the positions of this pass.
    shape : (B, H, Lq, Lkv)
        Elements that the mask stands for.
    """

    def __init__(self, block_mask: BlockMask, shape: tuple[int, int, int, int]) -> None:
        self.block_mask = block_mask
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Lq, Lkv), in elements."""
        return self._shape

    def to(self, device: torch.device | str) -> ModelMask:
        """Copy to another device."""
        if isinstance(device, torch.dtype):
            raise TypeError(_NO_MATRIX)
        return ModelMask(self.block_mask.to(device), self._shape)

    def __getitem__(self, index: Any) -> ModelMask:
        rest = list(index) if isinstance(index, tuple) else [index]
        rows = rest.pop(2) if len(rest) > 2 else None
        if not isinstance(rows, slice) or any(other != slice(None) for other in rest):
            raise TypeError(_NO_MATRIX)
        B, H, Lq, Lkv = self._shape
        start, stop, step = rows.indices(Lq)
        if step != 1:
            raise ValueError(f"mask[:, :, rows]: expected rows in a row, got a step of {step}")
        mask, Lq = self.block_mask, max(0, stop - start)
        assert mask.mask_mod is not None and mask.tables is not None and mask.q_offset is not None
        part = create_block_mask(
            mask.mask_mod,
            B,
            H,
            Lq,
            Lkv,
            device=mask.tables.kv_num_blocks.device,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            q_offset=mask.q_offset + start,
        )
        return ModelMask(part, (B, H, Lq, Lkv))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'ModelMask' object has no attribute {name!r}: {_NO_MATRIX}")

    def __radd__(self, other: Any) -> Any:  # scores + mask
        raise TypeError(_NO_MATRIX)

    def __repr__(self) -> str:
        return f"ModelMask({self.block_mask!r})"

    __str__ = __repr__


_IGNORE_BLOCK_MASKS = frozenset({"doge"})  # types of models whose layers then have no mask at all
_NO_MATRIX = (
    "layers of this model read their mask as a matrix, and flexdecode's masks are block masks; use "
    "another attn_implementation for this model"
)


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
        raise TypeError(_NO_MATRIX)
    if torch.compiler.is_compiling():
        make = _create_in_graph
        elements = batch_size * q_length * kv_length
        if use_vmap or len(_restricted) > 0 or elements > _MAX_ELEMENTS:
            make = _create_outside
        return make(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            device,
            config,
            block_size,
        )
    rules = [] if mask_function is None else [mask_function]
    if attention_mask is not None:
        rules.append(_padding_rule(attention_mask, kv_offset + kv_length))
    heads = 1
    if (extra := _restriction.get()) is not None:
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


_MAX_ELEMENTS = 1 << 26


def _create_in_graph(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction | None,
    attention_mask: Tensor | None,
    device: torch.device | str,
    _: Any,
    block_size: int | tuple[int, int],
) -> ModelMask:
    rules = [] if mask_function is None else [mask_function]
    if attention_mask is not None:
        rules.append(_padding_rule(attention_mask, kv_offset + kv_length))
    b = torch.arange(batch_size, device=device)[:, None, None, None]
    h = torch.zeros_like(b)  # no model's rule depends on it
    q_idx = (torch.arange(q_length, device=device) + q_offset)[:, None]
    kv_idx = torch.arange(kv_length, device=device) + kv_offset
    allowed = torch.ones((), dtype=torch.bool, device=device)
    for rule in rules:
        allowed = allowed & rule(b, h, q_idx, kv_idx)
    shape = (batch_size, 1, q_length, kv_length)
    block_mask = create_block_mask(
        _element(allowed.expand(shape)),
        *shape,
        device=device,
        BLOCK_SIZE=block_size,
        q_offset=0,  # the elements are indexed by row
    )
    return ModelMask(block_mask, shape)


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="this mask is made outside of the graph; make it first and pass it to the model"
)
def _create_outside(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: MaskFunction | None,
    attention_mask: Tensor | None,
    device: torch.device | str,
    config: Any,
    block_size: int | tuple[int, int],
) -> ModelMask:
    return create_mask(
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


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    backend: str = "auto",
    kernel_options: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers' ``AttentionInterface`` asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer.
    query : Tensor, [B, Hq, Lq, D]
        Queries, rotated.
    key, value : Tensor, [B, Hkv, Lkv, D] and [B, Hkv, Lkv, Dv]
        The layer's cache, heads not repeated.
    attention_mask : ModelMask, or Tensor [B or 1, Hq or 1, Lq or 1, Lkv or more], or None
        From `create_mask`, or a user's own: bool (True: attend) or float, added to the scores
        after `softcap`.
    scaling : float, default ``D ** -0.5``
        Multiplies the dot products.
    dropout : float
        Must be 0.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``, before the mask.
    s_aux : Tensor, [Hq], optional
        Attention sinks, logits.
    sinks : Tensor, [B or 1, Hq or 1, Lq or 1, 1], optional
        The same for each query.
    position_bias : Tensor, [B or 1, Hq or 1, Lq or 1, Lkv], optional
        Added to the scaled scores.
    is_causal : bool, optional
        Overrides ``module.is_causal``; only asked where there is no mask.
    indices, block_indices : Tensor, optional
        Keys that the layer selects for itself: must be None.
    backend, kernel_options
        See `attention`.

    Returns
    -------
    out : Tensor, [B, Lq, Hq, Dv], contiguous
    weights : None
        They are never formed.

    Raises
    ------
    ValueError
        Dropout is asked for, a causal layer comes without a mask (continuous batching, or a name
        that was registered without its mask function), the mask is of other sizes, or the layer
        selects keys in a way of its own.
    """
    if dropout > 0:
        raise ValueError(
            f"dropout: expected 0, got {dropout}: attention is forward only, call model.eval()"
        )
    if attention_mask is None and (
        getattr(module, "is_causal", False) if is_causal is None else is_causal
    ):
        raise ValueError(
            "attention_mask: expected a mask in a causal layer, got None (continuous batching is "
            "not supported; register() installs the mask function)"
        )
    if indices is not None or block_indices is not None:
        raise ValueError(
            "indices, block_indices: expected None, got a selection of keys, which is for kernels "
            "of this model's own; use another attn_implementation for it"
        )
    # Rules are partials of functions and not closures, so that a compiled model can hold them.
    score_mod: ScoreMod | None = None if softcap is None else functools.partial(_capped, softcap)
    block_mask: BlockMask | None = None
    q_offset: int | None = None
    if position_bias is not None:
        position_bias = _fitting("position_bias", position_bias, query, key)
    if isinstance(attention_mask, ModelMask):
        if attention_mask.shape[2:] != (query.shape[2], key.shape[2]):
            raise ValueError(
                f"attention_mask: expected {query.shape[2]} queries and {key.shape[2]} keys, got a "
                f"mask of {attention_mask.shape[2]} and {attention_mask.shape[3]}: this layer "
                "attends to other keys than the model's mask is for; use another "
                "attn_implementation for it"
            )
        block_mask = attention_mask.block_mask  # owns its offset
    elif isinstance(attention_mask, Tensor):
        if getattr(module, "is_causal", False) and _is_restricted():
            raise ValueError(
                "attention_mask: expected the model's own mask under restrict, got a matrix, which "
                "does not say which positions its rows are of; put the rule into the matrix"
            )
        q_offset = 0  # a given matrix is indexed by row
        matrix = _fitting("attention_mask", attention_mask, query, key)
        if matrix.dtype == torch.bool:
            block_mask = create_block_mask(_element(matrix))
        elif softcap is not None:
            whole = matrix.expand(query.shape[0], query.shape[1], -1, -1)
            score_mod = functools.partial(_capped_and_added, softcap, whole)
        else:
            position_bias = matrix if position_bias is None else position_bias + matrix
    result = attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scaling,
        q_offset=q_offset,
        bias=position_bias,
        sinks=s_aux,
        return_aux=None if sinks is None else AuxRequest(lse=True),
        backend=backend,
        kernel_options=None if kernel_options is None else dict(kernel_options),
    )
    if sinks is None:
        assert isinstance(result, Tensor)  # no auxiliary outputs were asked for
        out = result
    else:
        assert isinstance(result, tuple) and result[1].lse is not None
        share = torch.sigmoid(result[1].lse[..., None] - sinks.float())  # of all mass, the keys'
        out = (result[0].float() * share).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def _is_restricted() -> bool:
    if torch.compiler.is_compiling():
        return len(_restricted) > 0
    return _restriction.get() is not None


def _fitting(name: str, matrix: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """View a matrix as ``[B or 1, Hq or 1, Lq, Lkv]``; a static cache's may have more columns."""
    B, Hq, Lq, Lkv = *query.shape[:3], key.shape[2]
    shape = tuple(matrix.shape)
    if (
        len(shape) != 4
        or shape[0] not in (1, B)
        or shape[1] not in (1, Hq)
        or shape[2] not in (1, Lq)
        or shape[3] < Lkv
    ):
        raise ValueError(
            f"{name}: expected shape [{B} or 1, {Hq} or 1, {Lq} or 1, {Lkv} or more], got "
            f"{list(shape)}"
        )
    return matrix[..., :Lkv].expand(-1, -1, Lq, -1)


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


def _capped(cap: float, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return cap * torch.tanh(score / cap)


def _capped_and_added(
    cap: float, matrix: Tensor, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any
) -> Any:
    return cap * torch.tanh(score / cap) + matrix[b, h, q_idx, kv_idx]


def _element(matrix: Tensor) -> MaskFunction:
    """Read ``matrix [B or 1, H or 1, Lq, Lkv]``, where a size of 1 stands for all."""
    B, H = matrix.shape[:2]
    if B == 1 and H == 1:
        return functools.partial(_in_plane, matrix[0, 0])
    if H == 1:
        return functools.partial(_in_rows, matrix[:, 0])
    if B == 1:
        return functools.partial(_in_heads, matrix[0])
    return functools.partial(_in_all, matrix)


def _in_plane(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[q_idx, kv_idx]


def _in_rows(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[b, q_idx, kv_idx]


def _in_heads(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[h, q_idx, kv_idx]


def _in_all(allowed: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return allowed[b, h, q_idx, kv_idx]
