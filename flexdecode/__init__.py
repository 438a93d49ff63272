"""Decode attention whose mask and score rule are ordinary Python functions."""

from flexdecode.api import AuxOutput, AuxRequest, attention
from flexdecode.block_mask import BlockMask, create_block_mask
from flexdecode.codegen import show_code
from flexdecode.compilation import compile_count
from flexdecode.explanation import Explanation, explain
from flexdecode.merging import merge_attentions
from flexdecode.mods import and_masks, mask_mod, not_mask, or_masks

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Explanation",
    "and_masks",
    "attention",
    "compile_count",
    "create_block_mask",
    "explain",
    "mask_mod",
    "merge_attentions",
    "not_mask",
    "or_masks",
    "show_code",
]
