"""Masks and score rules ready to use. Import as ``flexdecode.masks``."""

if __name__ != "flexdecode.masks":
    raise ImportError("this folder is the package flexdecode.masks: import it by that name")

from flexdecode.masks.biases import (
    alibi,
    distance_penalty,
    kerple_log,
    kerple_power,
    relative_bias,
    sandwich,
)
from flexdecode.masks.blocks import per_head, selected_blocks
from flexdecode.masks.documents import (
    causal_documents,
    document_ids,
    documents,
    left_padding,
    right_padding,
    shared_prefix,
)
from flexdecode.masks.grids import neighborhood, sliding_tile, tile_order
from flexdecode.masks.images import image_cross_attention, images_in_text
from flexdecode.masks.positions import bidirectional, block_diffusion, causal, chunked, prefix_lm
from flexdecode.masks.retrieval import page_bounds, top_pages
from flexdecode.masks.scores import head_temperature, softcap
from flexdecode.masks.sparse import big_bird, longformer, random_sparse
from flexdecode.masks.trees import create_ancestors, create_parents, tree
from flexdecode.masks.windows import (
    dilated,
    global_window,
    sink_window,
    sliding_window,
    strided,
    symmetric_window,
)

__all__ = [
    "alibi",
    "bidirectional",
    "big_bird",
    "block_diffusion",
    "causal",
    "causal_documents",
    "chunked",
    "create_ancestors",
    "create_parents",
    "dilated",
    "distance_penalty",
    "document_ids",
    "documents",
    "global_window",
    "head_temperature",
    "image_cross_attention",
    "images_in_text",
    "kerple_log",
    "kerple_power",
    "left_padding",
    "longformer",
    "neighborhood",
    "page_bounds",
    "per_head",
    "prefix_lm",
    "random_sparse",
    "relative_bias",
    "right_padding",
    "sandwich",
    "selected_blocks",
    "shared_prefix",
    "sink_window",
    "sliding_tile",
    "sliding_window",
    "softcap",
    "strided",
    "symmetric_window",
    "tile_order",
    "top_pages",
    "tree",
]
