"""Attention over quantised keys and values against float64 on what the cache stands for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import (
    AuxRequest,
    QuantizedTensor,
    append_kv,
    attention,
    create_block_mask,
    dequantize,
    explain,
    quantize,
)
from flexdecode.kernels.hardware import INTERPRETED
from tests.backend_cases import BACKENDS, GPU, Backend, every_backend
from tests.helpers import assert_matches, assert_within, dense_attention, random_inputs

DEVICE = "cuda" if GPU else "cpu"
TRITON = BACKENDS[-1]
WORDS = torch.int32
SLACK = 2.0 if GPU else 3.0  # the interpreter cuts bfloat16 off where hardware rounds
FORMATS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "int4": {"format": "int4"},
    "int4 2": {"format": "int4", "groups": 2},
    "int4 4": {"format": "int4", "groups": 4},
    "int4 8": {"format": "int4", "groups": 8},
    "rows": {"format": "int4", "layout": "interleaved"},
    "rows 4": {"format": "int4", "layout": "interleaved", "groups": 4},
    "fp8": {"format": "fp8"},
    "fp8 words": {"format": "fp8", "scale_dtype": WORDS},
    "fp8 head": {"format": "fp8", "per": "head"},
    "fp8 tensor": {"format": "fp8", "per": "tensor"},
    "e5m2": {"format": "fp8_e5m2"},
    "int8": {"format": "int8"},
    "int8 half": {"format": "int8", "scale_dtype": torch.float16},
    "int8 head": {"format": "int8", "per": "head"},
}
Stored = Tensor | QuantizedTensor
DOCS = torch.arange(200) // 29
BLOCKS = torch.rand(4, 8, generator=torch.Generator().manual_seed(5)) < 0.5


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window_and_sinks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 40) | (kv_idx < 3))


def rules(device: str) -> dict[str, Callable[..., Any]]:
    docs, blocks = DOCS.to(device), BLOCKS.to(device)

    def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return docs[q_idx] == docs[kv_idx]

    def random_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return blocks[(b + h) % 4, kv_idx // 32]

    return {
        "causal": causal,
        "window and sinks": window_and_sinks,
        "documents": documents,
        "random blocks": random_blocks,
    }


def stored(x: Tensor, name: str) -> Stored:
    options = FORMATS[name]
    return x if options is None else quantize(x, **options)


def meaning(x: Stored) -> Tensor:
    return dequantize(x, torch.float64) if isinstance(x, QuantizedTensor) else x.double()


def poison(x: Stored, slots: Any) -> None:
    """Fill slots with codes and coefficients that read as NaN, where the format has them."""
    if isinstance(x, Tensor):
        x[slots] = torch.nan
        return
    x.data.view(torch.uint8)[slots] = 0xFF
    if x.scale is not None and x.scale.dim() > 2:
        x.scale.view(torch.int16 if x.scale.dtype == torch.float16 else torch.int32)[slots] = -1


def paged(x: Tensor, table: Tensor, size: int) -> Tensor:
    """Cut rows [B, H, L, D] into pages [pages, H, size, D] as a table says."""
    B, H, _, D = x.shape
    pages = x.new_zeros(int(table.max()) + 2, H, size, D)
    for b in range(B):
        for n, part in enumerate(x[b].split(size, dim=1)):
            pages[table[b, n], :, : part.shape[1]] = part
    return pages


# Every format once as K and once as V, every mask with both kinds of cache, types and dims mixed.
CASES = [
    ("int4", "int4", "causal", 0, torch.bfloat16, 32),
    ("int4 2", "rows", "window and sinks", 16, torch.bfloat16, 32),
    ("int4 4", "int4 2", "documents", 0, torch.float16, 48),
    ("int4 8", "fp8", "random blocks", 32, torch.bfloat16, 32),
    ("rows", "int4 4", "random blocks", 0, torch.bfloat16, 24),
    ("rows 4", "int4 8", "causal", 64, torch.float32, 32),
    ("fp8", "rows 4", "documents", 16, torch.float16, 32),
    ("fp8 words", "fp8 head", "window and sinks", 0, torch.bfloat16, 16),
    ("fp8 head", "fp8 words", "causal", 8, torch.bfloat16, 80),
    ("fp8 tensor", "int8", "documents", 32, torch.float32, 16),
    ("e5m2", "fp8 tensor", "random blocks", 0, torch.float16, 32),
    ("int8", "e5m2", "window and sinks", 128, torch.float16, 32),
    ("int8 half", "plain", "random blocks", 16, torch.bfloat16, 16),
    ("plain", "int8 half", "documents", 0, torch.bfloat16, 32),
    ("int8 head", "int8 head", "causal", 0, torch.bfloat16, 16),
]


@pytest.mark.parametrize(
    ("backend", "k_as", "v_as", "mask", "page", "dtype", "D"),
    [
        pytest.param(backend, *case, id=f"{backend}-{'-'.join(map(str, case))}")
        for backend in BACKENDS
        for n, case in enumerate(CASES)
        if backend.name != "reference" or n % 5 == 0
    ],
)
def test_formats(
    backend: Backend, k_as: str, v_as: str, mask: str, page: int, dtype: torch.dtype, D: int
) -> None:
    seed = sum(map(ord, k_as + v_as + mask))
    Lq = 1 + seed % 3
    B, Hq, Hkv, L = 2, 4, 2, 131 if page > 32 else 75
    q, k, v = random_inputs(B, Hq, Hkv, Lq, L, D, dtype=dtype, device=backend.device, seed=seed)
    short = 2 * L // 3
    kv_len = torch.tensor([L, short], device=backend.device)
    k[1, :, short:] = v[1, :, short:] = 0.0
    rule = rules(backend.device)[mask]
    call: dict[str, Any] = {"kv_len": kv_len}
    if page:
        entries = -(-L // page)
        at = torch.Generator().manual_seed(seed)
        table = torch.randperm(B * entries, generator=at).view(B, entries)
        cache = [stored(paged(x, table, page), name) for x, name in ((k, k_as), (v, v_as))]
        call["page_table"] = table.to(backend.device, torch.int32)
        rows = [meaning(x)[table].transpose(1, 2).flatten(2, 3)[:, :, :L] for x in cache]
        for x in cache:
            poison(x, slice(B * entries, None))
    else:
        cache = [stored(x.clone(), name) for x, name in ((k, k_as), (v, v_as))]
        rows = [meaning(x) for x in cache]
        for x in cache:
            poison(x, (1, slice(None), slice(short, None)))
    out = attention(q, *cache, block_mask=create_block_mask(rule), backend=backend.name, **call)
    assert out.dtype == dtype
    # Codes of e5m2 are multiplied in bfloat16, three bits less than float16.
    slack = 8 * SLACK if v_as == "e5m2" and dtype == torch.float16 else SLACK
    assert_matches(out, q, *rows, mask=rule, kv_len=kv_len, slack=slack)


@every_backend
@pytest.mark.parametrize("format", [name for name, kwargs in FORMATS.items() if kwargs])
def test_a_sequence_without_keys(backend: Backend, format: str) -> None:
    """A kernel that reads the scale of a head finds no memory where there are no rows."""
    q, keys = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 0, 32)
    q, keys = q.to(backend.device), keys.to(backend.device)
    cache = quantize(keys, **FORMATS[format] or {})
    assert dequantize(cache).shape == keys.shape
    sinks = torch.ones(4, device=backend.device)
    out, aux = attention(
        q, cache, cache, sinks=sinks, return_aux=AuxRequest(lse=True), backend=backend.name
    )
    assert not out.any()
    torch.testing.assert_close(aux.lse, torch.ones_like(aux.lse))


@every_backend
def test_mods_see_dequantised_scores(backend: Backend) -> None:
    q, k, v = random_inputs(1, 4, 2, 2, 70, 32, dtype=torch.bfloat16, device=backend.device)
    cache = quantize(k, "fp8", scale_dtype=WORDS), quantize(v, "int4", groups=4)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3.0 * torch.tanh(score / 3.0) - 0.1 * (q_idx - kv_idx)

    out = attention(q, *cache, score_mod=score_mod, backend=backend.name)
    assert_matches(out, q, *map(meaning, cache), score_mod=score_mod, slack=SLACK)


@every_backend
@pytest.mark.parametrize("per", ["row", "head", "tensor"])
def test_quantised_queries(backend: Backend, per: str) -> None:
    q, k, v = random_inputs(2, 4, 2, 3, 70, 32, device=backend.device)
    cache = quantize(k, "fp8"), quantize(v, "int8")
    packed = quantize(q * torch.tensor([1.0, 30.0, 0.1], device=q.device)[:, None], "fp8", per=per)
    out = attention(packed, *cache, backend=backend.name)
    assert out.dtype == torch.bfloat16
    exact = dense_attention(meaning(packed), *map(meaning, cache)).out
    assert_within(out, exact, 2**-6 * float(exact.abs().max()))


@pytest.mark.parametrize(("k_as", "v_as"), [("fp8", "fp8 tensor"), ("fp8 head", "int4")])
def test_products_in_fp8(k_as: str, v_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, weights and values in e4m3, where tiles of many rows have instructions."""
    module = importlib.import_module("flexdecode.backends.triton")
    if not GPU:
        able = dataclasses.replace(INTERPRETED, fp8_rows=16)
        monkeypatch.setattr(module, "device_of", lambda device: able)
    Lq = 16 if GPU else 3
    q, k, v = random_inputs(1, 8, 2, Lq, 90, 32, device=DEVICE)
    packed, cache = quantize(q, "fp8"), (stored(k, k_as), stored(v, v_as))
    mask = create_block_mask(window_and_sinks)
    out = attention(packed, *cache, block_mask=mask, backend="triton")
    exact = dense_attention(meaning(packed), *map(meaning, cache), mask=window_and_sinks).out
    # e4m3 has three bits behind the leading one: weights are off by up to 2**-4.
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (0.05 if v_as.startswith("fp8") else 0.01)


@every_backend
def test_float8_tensors(backend: Backend) -> None:
    q, k, v = random_inputs(2, 4, 2, 1, 40, 16, dtype=torch.bfloat16, device=backend.device)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e5m2)
    out = attention(q, k, v, kv_len=33, backend=backend.name)
    assert_matches(out, q, k.double(), v.double(), kv_len=33, slack=SLACK)
    # one sequence and one head expanded to many are read once
    wide = k[:1, :1].expand(2, 4, -1, -1), v[:1, :1].expand(2, 4, -1, -1)
    out = attention(q, *wide, backend=backend.name)
    assert_matches(out, q, *(x.double() for x in wide), slack=SLACK)


@every_backend
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_smallest_numbers(backend: Backend, kind: torch.dtype) -> None:
    """Codes without a leading one, which products must not take for zero."""
    q, k, v = random_inputs(2, 4, 2, 1, 40, 32, dtype=torch.bfloat16, device=backend.device)
    tiny = float(torch.finfo(kind).smallest_normal) / 4
    k, v = ((x.clamp(-3, 3) * tiny).to(kind) for x in (k, v))
    out = attention(q / tiny, k, v, backend=backend.name).double()
    exact = dense_attention(q / tiny, k.double(), v.double()).out
    assert (out - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("format", ["int4", "rows", "fp8 words"])
def test_one_token_after_another_in_slots(format: str) -> None:
    """Starts of sequences in one long cache, splits, and partial results in float64."""
    q, k, v = random_inputs(2, 4, 2, 1, 130, 32, Bkv=1, dtype=torch.bfloat16, device=DEVICE, seed=4)
    cache = stored(k, format), stored(v, format)
    start, length = torch.tensor([3, 61], device=DEVICE), torch.tensor([50, 69], device=DEVICE)
    for options in ({"num_splits": 3}, {"num_splits": 2, "partial_dtype": torch.float64}):
        out = attention(
            q, *cache, kv_start=start, kv_len=length, backend="triton", kernel_options=options
        )
        for b in range(2):
            there = slice(int(start[b]), int(start[b] + length[b]))
            rows = [meaning(x)[:, :, there] for x in cache]
            assert_matches(out[b : b + 1], q[b : b + 1], *rows, slack=SLACK)


def test_many_rows_in_a_tile() -> None:
    q, k, v = random_inputs(1, 4, 1, 20, 60, 32, dtype=torch.bfloat16, device=DEVICE)
    cache = stored(k, "int4 2"), stored(v, "fp8 words")
    mask = create_block_mask(causal, BLOCK_SIZE=32)
    out = attention(q, *cache, block_mask=mask, backend="triton")
    assert_matches(out, q, *map(meaning, cache), mask=causal, slack=SLACK)


def test_explain_counts_stored_bytes() -> None:
    q, k, v = random_inputs(1, 4, 2, 1, 256, 64, dtype=torch.bfloat16)
    whole = explain(q, k, v).traffic.keys_values
    assert (
        explain(q, quantize(k, "int4"), quantize(v, "int4")).traffic.keys_values
        == whole * 36 // 128
    )
    assert explain(q, k.to(torch.float8_e4m3fn), v).traffic.keys_values == whole * 3 // 4


def test_messages() -> None:
    q, k, v = random_inputs(1, 4, 2, 1, 16, 16, dtype=torch.bfloat16, device=DEVICE)
    packed = quantize(k, "int8")
    with pytest.raises(TypeError, match=r"q: expected a tensor, or a QuantizedTensor in fp8 with"):
        attention(quantize(q, "int8"), packed, v)
    with pytest.raises(TypeError, match=r"with float32 scales, got fp8 with coefficient words"):
        attention(quantize(q, "fp8", scale_dtype=WORDS), packed, v)
    with pytest.raises(TypeError, match=r"codes with scales are a QuantizedTensor"):
        attention(q.to(torch.float8_e4m3fn), packed, v)
    with pytest.raises(ValueError, match=r"k: expected head dim 16 to match q, got 8"):
        attention(q, quantize(k[..., :8], "int8"), v)
    with pytest.raises(ValueError, match=r"v: expected shape \[1, 2, 16, any\]"):
        attention(q, packed, quantize(v[:, :, :9], "int4"))
    with pytest.raises(ValueError, match=r"k: expected device .* to match q, got meta"):
        attention(q, packed.to("meta"), v)
    with pytest.raises(ValueError, match=r"k: expected a float8 tensor .* of contiguous rows"):
        attention(q, k.to(torch.float8_e4m3fn).transpose(2, 3), v)
    odd = k[..., :15].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"k: expected an even head dim and even strides for fp8"):
        attention(q[..., :15], odd, v, backend="triton")


@every_backend
@pytest.mark.parametrize(
    ("k_as", "v_as", "page"),
    [("int4 2", "fp8", 0), ("rows", "fp8 head", 8), ("fp8 words", "int8", 0), ("plain", "int4", 8)],
)
def test_new_rows_are_quantised_on_the_way_in(
    backend: Backend, k_as: str, v_as: str, page: int
) -> None:
    B, Hkv, L, D, n = 2, 2, 24, 16, 3
    device = backend.device
    _, k, v = random_inputs(B, Hkv, Hkv, 1, L, D, device=device)
    new_k, new_v = (0.5 * x[:, :, :n] + 0.1 for x in (v, k))
    kv_len = torch.tensor([5, L - 1], device=device)  # two of the last rows do not fit
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], device=device, dtype=torch.int32)
    angles = torch.linspace(0, 1, 40 * 4, device=device).view(40, 4)
    call: dict[str, Any] = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    caches, dense = [], []
    for x, name in ((k, k_as), (v, v_as)):
        rows = stored(paged(x, table.cpu(), page) if page else x.clone(), name)
        caches.append(rows)
        found = meaning(rows)
        dense.append(found[table.long()].transpose(1, 2).flatten(2, 3) if page else found)
    if page:
        call["page_table"] = table
    append_kv(*caches, new_k, new_v, kv_len=kv_len, backend=backend.name, **call)
    append_kv(
        *dense,
        new_k,
        new_v,
        kv_len=kv_len,
        backend="reference",
        **({name: x for name, x in call.items() if name != "page_table"}),
    )
    for rows, right, name in zip(caches, dense, (k_as, v_as), strict=True):
        found = meaning(rows)
        if page:
            found = found[table.long()].transpose(1, 2).flatten(2, 3)
        assert ((found - right).abs() <= 0.07 * right.abs() + 0.12 * ("plain" != name)).all()
        kept = torch.arange(L, device=device) < kv_len[:, None]
        kept |= torch.arange(L, device=device) >= kv_len[:, None] + n
        assert torch.equal(found.transpose(1, 2)[kept], right.transpose(1, 2)[kept])
