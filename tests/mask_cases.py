"""One or more of every mask and score rule of `flexdecode.masks`, for 2 sequences and 4 heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode import masks

LENGTH = 24  # positions that the captured tensors cover


def create_masks(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the masks by name; the first word is the name of the function under test."""

    def tensor(*values: Any) -> Tensor:
        return torch.tensor(values, device=device)

    generator = torch.Generator().manual_seed(0)
    selected = (torch.rand(2, 2, 8, generator=generator) > 0.5).to(device)
    ids = torch.randint(0, 3, (2, LENGTH), generator=generator).to(device)
    is_global = (torch.rand(2, LENGTH, generator=generator) < 0.1).to(device)
    image = tensor(*[-1] * 4, *[0] * 5, *[-1] * 3, *[1] * 6, *[-1] * 6)
    drafts = masks.create_ancestors([-1, 0, 0, 1], device)
    return {
        "causal": masks.causal,
        "bidirectional": masks.bidirectional,
        "sliding_window": masks.sliding_window(5),
        "sliding_window of sequences": masks.sliding_window(tensor(3, 7)),
        "sliding_window shared": masks.sliding_window(tensor(4)),
        "symmetric_window": masks.symmetric_window(4),
        "sink_window": masks.sink_window(2, 4),
        "global_window": masks.global_window(2, 4),
        "prefix_lm": masks.prefix_lm(5),
        "prefix_lm of sequences": masks.prefix_lm(tensor(5, 2)),
        "dilated": masks.dilated(3),
        "dilated window": masks.dilated(3, window=2),
        "strided": masks.strided(5),
        "strided window": masks.strided(5, window=2),
        "chunked": masks.chunked(5),
        "block_diffusion": masks.block_diffusion(4),
        "block_diffusion of sequences": masks.block_diffusion(4, tensor(5, 2)),
        "documents": masks.documents(ids[0]),
        "documents of offsets": masks.documents(masks.document_ids(tensor(0, 5, 11, 20), LENGTH)),
        "causal_documents": masks.causal_documents(ids),
        "shared_prefix": masks.shared_prefix(5, ids[0]),
        "shared_prefix of sequences": masks.shared_prefix(tensor(5, 2), ids),
        "left_padding": masks.left_padding(tensor(0, 3)),
        "right_padding": masks.right_padding(9),
        "image_cross_attention": masks.image_cross_attention(image, 8),
        "image_cross_attention of sequences": masks.image_cross_attention(
            torch.stack([image, image.flip(0)]), 8
        ),
        "images_in_text": masks.images_in_text(image),
        "images_in_text of sequences": masks.images_in_text(torch.stack([image, image.flip(0)])),
        "tree": masks.tree(drafts, 7),
        "tree of sequences": masks.tree(torch.stack([drafts, drafts.t()]), tensor(7, 3)),
        "neighborhood 1-D": masks.neighborhood((20,), (5,), start=2),
        "neighborhood 2-D": masks.neighborhood((4, 6), (3, 3)),
        "neighborhood 3-D": masks.neighborhood((2, 3, 4), (1, 3, 2), start=tensor(0, 0)),
        "sliding_tile": masks.sliding_tile((4, 6), (2, 2), (1, 3)),
        "longformer": masks.longformer(is_global[0], 5),
        "longformer dilated": masks.longformer(is_global, 5, dilation=2),
        "big_bird": masks.big_bird(3, num_random=2),
        "big_bird of a length": masks.big_bird(3, window=1, length=LENGTH, seed=7),
        "random_sparse": masks.random_sparse(0.4, block_size=2),
        "random_sparse elements": masks.random_sparse(0.4, block_size=1, seed=3),
        "selected_blocks": masks.selected_blocks(selected, 3, group_size=2),
        "selected_blocks shared": masks.selected_blocks(selected[:1, :1], 3),
        "per_head": masks.per_head(tensor(0, 1, 0, 2), masks.causal, masks.sliding_window(2)),
        "combined": masks.causal & ~masks.sink_window(1, 3) | masks.right_padding(2),
    }


def create_scores(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the score rules by name."""
    positive = torch.tensor([0.5, 0.25, 1.5, 1.0], device=device)
    table = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).to(device)
    return {
        "alibi": masks.alibi(12),
        "alibi of slopes": masks.alibi(positive),
        "distance_penalty": masks.distance_penalty(0.5),
        "distance_penalty of heads": masks.distance_penalty(positive, limit=6),
        "head_temperature": masks.head_temperature(positive),
        "kerple_log": masks.kerple_log(positive, positive.flip(0)),
        "kerple_power": masks.kerple_power(positive, positive.flip(0)),
        "relative_bias": masks.relative_bias(table),
        "relative_bias bidirectional": masks.relative_bias(table, bidirectional=True),
        "sandwich": masks.sandwich(4, max_distance=16, device=device),
        "softcap": masks.softcap(30),
    }
