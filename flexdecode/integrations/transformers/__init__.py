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

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flexdecode.integrations.transformers.forward import attention_forward
from flexdecode.integrations.transformers.mask_creation import create_mask
from flexdecode.integrations.transformers.model_mask import ModelMask
from flexdecode.integrations.transformers.restriction import restrict

__all__ = ["ModelMask", "attention_forward", "create_mask", "register", "restrict"]


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
