"""A good call of every public function, and values that fit none of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

import flexdecode
from flexdecode import compat, masks
from flexdecode.masks import causal

Call = tuple[Callable[..., Any], dict[str, Any]]


class Strange:
    """Fits nowhere; its text must not be evaluated or end up in code."""

    def __repr__(self) -> str:
        return "<strange>"


BAD: dict[str, Any] = {
    "None": None,
    "text": "x",
    "bytes": b"x",
    "bool": True,
    "negative": -1,
    "zero": 0,
    "huge": 1 << 70,
    "fraction": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "complex": 1j,
    "list": [1, "x"],
    "dict": {"x": 1},
    "strange": Strange(),
    "type": int,
    "complex tensor": torch.zeros(2, dtype=torch.complex64),
    "float tensor": torch.full((2, 3, 1), math.nan),
    "bool tensor": torch.zeros(7, dtype=torch.bool),
    "empty tensor": torch.zeros(0, dtype=torch.int32),
    "five dims": torch.zeros(1, 1, 1, 1, 1),
    "meta tensor": torch.zeros(2, dtype=torch.int32, device="meta"),
    "strings": ("x", "y"),
}


def zeros(*shape: int, **kind: Any) -> torch.Tensor:
    return torch.zeros(shape, **kind)


def counts(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


def plain(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def attention_arguments() -> dict[str, Any]:
    return {
        "q": zeros(2, 4, 1, 8),
        "k": zeros(2, 2, 20, 8),
        "v": zeros(2, 2, 20, 8),
        "score_mod": plain,
        "block_mask": flexdecode.create_block_mask(causal),
        "scale": 0.5,
        "kv_len": 7,
        "q_offset": 6,
        "bias": zeros(2, 4, 1, 20),
        "sinks": zeros(4),
        "return_aux": flexdecode.AuxRequest(lse=True),
        "backend": "cpu",
        "kernel_options": {},
    }


def paged_arguments() -> dict[str, Any]:
    return {
        "q": zeros(1, 4, 3, 8),
        "k": zeros(5, 2, 4, 8),
        "v": zeros(5, 2, 4, 8),
        "kv_len": counts(2) + 3,
        "kv_start": counts(2),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2, 3]),
        "backend": "cpu",
    }


def append_arguments() -> dict[str, Any]:
    return {
        "k_cache": zeros(5, 2, 4, 8),
        "v_cache": zeros(5, 2, 4, 8),
        "k_new": zeros(1, 2, 3, 8),
        "v_new": zeros(1, 2, 3, 8),
        "kv_len": counts(2),
        "kv_start": counts(2),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 2, 3]),
        "rotary_cos": zeros(20, 4),
        "rotary_sin": zeros(20, 4),
        "rotary_interleaved": False,
        "backend": "cpu",
    }


def prefixes() -> list[Any]:
    return [flexdecode.SharedPrefix(zeros(1, 2, 6, 8), zeros(1, 2, 6, 8), kv_len=6)]


def calls() -> dict[str, Call]:
    """A good call of each public function, by its name; fresh objects every time."""
    sized = flexdecode.create_block_mask(causal, 1, 1, 4, 20, "cpu")
    q, k, v = (attention_arguments()[name] for name in "qkv")
    found: dict[str, Call] = {
        "attention": (flexdecode.attention, attention_arguments()),
        "attention of pages": (flexdecode.attention, paged_arguments()),
        "explain": (
            flexdecode.explain,
            attention_arguments() | {"device_name": None, "processors": 4, "bandwidth": 1e12},
        ),
        "cascade_attention": (
            flexdecode.cascade_attention,
            {"q": q, "k": k, "v": v, "prefixes": prefixes(), "kv_len": 5, "cascade": True},
        ),
        "cascade_attention of one cache": (
            flexdecode.cascade_attention,
            {"q": q, "k": k, "v": v, "prefix_len": 5, "cascade": True},
        ),
        "explain_cascade": (
            flexdecode.explain_cascade,
            {"q": q, "k": k, "v": v, "prefix_len": 5, "device_name": None},
        ),
        "SharedPrefix": (
            lambda **prefix: flexdecode.cascade_attention(
                q, k, v, prefixes=[flexdecode.SharedPrefix(**prefix)]
            ),
            {"k": zeros(1, 2, 6, 8), "v": zeros(1, 2, 6, 8), "node": None, "kv_len": 6},
        ),
        "append_kv": (flexdecode.append_kv, append_arguments()),
        "create_block_mask": (
            flexdecode.create_block_mask,
            {
                "mask_mod": causal,
                "B": 1,
                "H": 1,
                "Q_LEN": 3,
                "KV_LEN": 9,
                "device": "cpu",
                "BLOCK_SIZE": 16,
                "q_offset": 2,
                "kv_len": 9,
            },
        ),
        "BlockMask.from_kv_blocks": (
            flexdecode.BlockMask.from_kv_blocks,
            {
                "kv_num_blocks": counts(1, 1, 1),
                "kv_indices": counts(1, 1, 1, 2),
                "full_kv_num_blocks": 0 * counts(1, 1, 1),
                "full_kv_indices": 0 * counts(1, 1, 1, 2),
                "BLOCK_SIZE": 16,
                "mask_mod": causal,
                "seq_lengths": (4, 32),
                "q_offset": 0,
            },
        ),
        "BlockMask.from_torch": (
            flexdecode.BlockMask.from_torch,
            {"block_mask": flex.create_block_mask(flex.noop_mask, 1, 1, 4, 4, "cpu")},
        ),
        "BlockMask.bind": (
            flexdecode.create_block_mask(causal).bind,
            {
                "batch": 2,
                "heads": 4,
                "q_len": 3,
                "kv_len": counts(2),
                "kv_capacity": 12,
                "kv_start": counts(2),
                "page_table": torch.zeros(2, 3, dtype=torch.int32),
                "cu_seqlens_q": torch.tensor([0, 2, 3]),
                "device": "cpu",
            },
        ),
        "BlockMask.update": (
            flexdecode.create_block_mask(causal)
            .bind(batch=1, heads=1, q_len=1, kv_len=3, kv_capacity=9, device="cpu")
            .update,
            {"kv_len": 4},
        ),
        "BlockMask.to": (sized.to, {"device": "cpu"}),
        "BlockMask.to_string": (sized.to_string, {"grid_size": (2, 2), "limit": 1}),
        "merge_attentions": (
            flexdecode.merge_attentions,
            {
                "outs": [zeros(1, 2, 3, 4)] * 2,
                "lses": [zeros(1, 2, 3)] * 2,
                "sinks": zeros(2),
                "backend": "torch",
            },
        ),
        "merge_attentions_": (
            flexdecode.merge_attentions_,
            {
                "out": zeros(1, 2, 3, 4),
                "lse": zeros(1, 2, 3),
                "new_out": zeros(1, 2, 3, 4),
                "new_lse": zeros(1, 2, 3),
                "backend": "torch",
            },
        ),
        "quantize": (
            flexdecode.quantize,
            {
                "x": zeros(1, 1, 2, 16),
                "format": "int4",
                "groups": 1,
                "layout": "separate",
                "per": "row",
                "scale_dtype": torch.int32,
                "dtype": torch.float16,
            },
        ),
        "QuantizedTensor": (
            flexdecode.QuantizedTensor,
            {
                "data": zeros(1, 1, 2, 16, dtype=torch.int8),
                "scale": zeros(1, 1, 2),
                "format": "int8",
                "groups": 1,
                "layout": "separate",
                "dtype": torch.float16,
            },
        ),
        "dequantize": (
            flexdecode.dequantize,
            {"x": flexdecode.quantize(zeros(1, 1, 2, 16), "int8"), "dtype": torch.float32},
        ),
        "mask_mod": (flexdecode.mask_mod, {"fn": causal}),
        "not_mask": (flexdecode.not_mask, {"mod": causal}),
        "show_code": (flexdecode.show_code, {"mod": causal, "flavour": "cuda"}),
        "compat.flex_attention": (
            compat.flex_attention,
            {
                "query": q,
                "key": k,
                "value": v,
                "score_mod": plain,
                "block_mask": None,
                "scale": 0.5,
                "enable_gqa": True,
                "return_lse": False,
                "kernel_options": {},
                "return_aux": None,
            },
        ),
        "compat.create_block_mask": (
            compat.create_block_mask,
            {
                "mask_mod": causal,
                "B": 1,
                "H": 1,
                "Q_LEN": 3,
                "KV_LEN": 9,
                "device": "cpu",
                "BLOCK_SIZE": 16,
            },
        ),
    }
    return found | {f"masks.{name}": call for name, call in mask_calls().items()}


def mask_calls() -> dict[str, Call]:
    """The same for what makes masks and scores."""
    ids = torch.arange(12)
    given: dict[str, dict[str, Any]] = {
        "alibi": {"slopes": 4},
        "big_bird": {"block_size": 16, "window": 3, "num_global": 1, "num_random": 1,
                     "length": 12, "seed": 0},
        "block_diffusion": {"size": 4, "start": 0},
        "causal_documents": {"ids": ids},
        "chunked": {"size": 4},
        "create_ancestors": {"parents": [-1, 0], "device": None},
        "create_parents": {"paths": [[0], [0, 1]]},
        "dilated": {"dilation": 2, "window": 5},
        "distance_penalty": {"weight": 0.5, "limit": 5},
        "document_ids": {"offsets": torch.tensor([0, 3, 12]), "length": 12},
        "documents": {"ids": ids},
        "global_window": {"num_global": 2, "window": 4},
        "head_temperature": {"temperature": torch.ones(4)},
        "image_cross_attention": {"image": ids, "tokens_per_image": 4},
        "images_in_text": {"image": ids},
        "kerple_log": {"r1": torch.ones(4), "r2": torch.ones(4)},
        "kerple_power": {"r1": torch.ones(4), "r2": torch.ones(4)},
        "left_padding": {"start": torch.tensor([0, 3])},
        "longformer": {"is_global": ids > 9, "window": 4, "dilation": 1},
        "neighborhood": {"shape": (3, 4), "window": (3, 3), "start": 0},
        "page_bounds": {"k": zeros(1, 2, 12, 8), "page_size": 4, "kv_len": None},
        "per_head": {"choice": torch.zeros(4, dtype=torch.int64)},
        "prefix_lm": {"prefix": torch.tensor([2, 3])},
        "random_sparse": {"density": 0.5, "block_size": 16, "seed": 0},
        "relative_bias": {"table": zeros(4, 32), "max_distance": 128, "bidirectional": False},
        "right_padding": {"length": torch.tensor([3, 9])},
        "sandwich": {"heads": 4, "max_distance": 64, "dim": 16, "device": None},
        "selected_blocks": {"selected": torch.ones(2, 2, 3, dtype=torch.bool), "block_size": 4,
                            "group_size": 1},
        "shared_prefix": {"prefix": 3, "ids": ids},
        "sink_window": {"sinks": 2, "window": 4},
        "sliding_tile": {"shape": (4, 4), "tile": (2, 2), "window": (1, 2), "start": 0},
        "sliding_window": {"window": 4},
        "softcap": {"cap": 5.0},
        "strided": {"stride": 3, "window": 2},
        "symmetric_window": {"window": 3},
        "tile_order": {"shape": (4, 4), "tile": (2, 2), "device": None},
        "top_pages": {"q": zeros(1, 4, 1, 8), "least": zeros(1, 2, 3, 8),
                      "greatest": zeros(1, 2, 3, 8), "count": 2, "page_size": 4, "kv_len": 12},
        "tree": {"ancestors": torch.ones(3, 3, dtype=torch.bool), "prefix": 4},
    }  # fmt: skip
    return {name: (getattr(masks, name), arguments) for name, arguments in given.items()}
