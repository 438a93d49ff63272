"""Masks and score rules ready to use. Import as ``flexdecode.masks``."""

if __name__ != "flexdecode.masks":
    raise ImportError("this folder is the package flexdecode.masks: import it by that name")

from flexdecode.masks.blocks import per_head, selected_blocks
from flexdecode.masks.documents import causal_documents, documents, left_padding, right_padding
from flexdecode.masks.positions import (
    bidirectional,
    causal,
    chunked,
    dilated,
    prefix_lm,
    sink_window,
    sliding_window,
    symmetric_window,
)
from flexdecode.masks.scores import alibi, relative_bias, softcap
from flexdecode.masks.trees import create_ancestors, tree

__all__ = [
    "alibi",
    "bidirectional",
    "causal",
    "causal_documents",
    "chunked",
    "create_ancestors",
    "dilated",
    "documents",
    "left_padding",
    "per_head",
    "prefix_lm",
    "relative_bias",
    "right_padding",
    "selected_blocks",
    "sink_window",
    "sliding_window",
    "softcap",
    "symmetric_window",
    "tree",
]
