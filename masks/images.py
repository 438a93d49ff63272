"""Masks of models that read images beside text."""

from __future__ import annotations

from torch import Tensor

from flexdecode.masks.arguments import at_least, id_tensor
from flexdecode.mods import MaskMod, mask_mod

__all__ = ["image_cross_attention", "images_in_text"]


def image_cross_attention(image: Tensor, tokens_per_image: int) -> MaskMod:
    """True for the keys of the image that a text token refers to (Flamingo [1]_).

    ``kv_idx // tokens_per_image == image[b, q_idx]``: the keys are the tokens of all images of a
    sequence, one image after the other, and the queries are text. The last query does not sit on
    the last key here, so give `attention` the text's position: ``q_offset=text_len - Lq``.

    Parameters
    ----------
    image : Tensor, [N] or [B, N], integer
        Number of the image that each text token sees, the last one before it; -1 for none. ``N``
        covers every text position that is asked about. May change in place.
    tokens_per_image : int >= 1, tokens
        Keys of one image.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `image` is not an integer tensor, or `tokens_per_image` not an int.
    ValueError
        `image` has neither one nor two dimensions, or `tokens_per_image` is below 1.

    References
    ----------
    .. [1] J.-B. Alayrac et al., "Flamingo: a Visual Language Model for Few-Shot Learning",
       arXiv:2204.14198, 2022.

    Examples
    --------
    Text, two images of two tokens: the first text token comes before both.

    >>> import torch
    >>> mask = image_cross_attention(torch.tensor([-1, 0, 0, 1]), 2)
    >>> mask(0, 0, torch.arange(4)[:, None], torch.arange(4)).int()
    tensor([[0, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    id_tensor("image", image)
    at_least("tokens_per_image", tokens_per_image, 1)

    @mask_mod
    def image_cross_attention(b, h, q_idx, kv_idx):
        return kv_idx // tokens_per_image == image[q_idx]

    @mask_mod
    def image_cross_attention_per_batch(b, h, q_idx, kv_idx):
        return kv_idx // tokens_per_image == image[b, q_idx]

    return image_cross_attention if image.ndim == 1 else image_cross_attention_per_batch


def images_in_text(image: Tensor) -> MaskMod:
    """True for the past, and in both directions within an image (Gemma 3 [1]_).

    ``kv_idx <= q_idx or (image[b, q_idx] == image[b, kv_idx] and image[b, q_idx] >= 0)``: the
    tokens of images stand among those of the text, in one sequence.

    Parameters
    ----------
    image : Tensor, [N] or [B, N], integer
        Number of the image that each token is part of; -1 for text. ``N`` covers every position
        that is asked about. May change in place.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `image` is not an integer tensor.
    ValueError
        `image` has neither one nor two dimensions.

    References
    ----------
    .. [1] Gemma Team, "Gemma 3 Technical Report", arXiv:2503.19786, 2025.
    """
    id_tensor("image", image)

    @mask_mod
    def images_in_text(b, h, q_idx, kv_idx):
        own = image[q_idx]
        return (kv_idx <= q_idx) | ((own == image[kv_idx]) & (own >= 0))

    @mask_mod
    def images_in_text_per_batch(b, h, q_idx, kv_idx):
        own = image[b, q_idx]
        return (kv_idx <= q_idx) | ((own == image[b, kv_idx]) & (own >= 0))

    return images_in_text if image.ndim == 1 else images_in_text_per_batch
