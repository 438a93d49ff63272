"""Decode attention whose mask and score rule are ordinary Python functions."""

from flexdecode.api import AuxOutput, AuxRequest, attention
from flexdecode.appending import append_kv
from flexdecode.block_mask import BlockMask
from flexdecode.cascade import (
    CascadeExplanation,
    SharedPrefix,
    cascade_attention,
    explain_cascade,
)
from flexdecode.codegen import show_code
from flexdecode.compilation import compile_count
from flexdecode.explanation import Explanation, explain
from flexdecode.mask_creation import create_block_mask
from flexdecode.merging import merge_attentions, merge_attentions_
from flexdecode.mods import and_masks, mask_mod, not_mask, or_masks
from flexdecode.quantization import dequantize, quantize
from flexdecode.quantized_tensor import QuantizedTensor

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "CascadeExplanation",
    "Explanation",
    "QuantizedTensor",
    "SharedPrefix",
    "and_masks",
    "append_kv",
    "attention",
    "cascade_attention",
    "compile_count",
    "create_block_mask",
    "dequantize",
    "explain",
    "explain_cascade",
    "mask_mod",
    "merge_attentions",
    "merge_attentions_",
    "not_mask",
    "or_masks",
    "quantize",
    "show_code",
]
