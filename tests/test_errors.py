"""Bad input to `attention`: which error, and what its message names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flexdecode import AuxRequest, attention, backends, create_block_mask
from flexdecode.masks import alibi, causal

B, Hq, Hkv, Lq, Lkv, D = 2, 8, 2, 3, 100, 16


def zeros(*shape: int, **kind: Any) -> torch.Tensor:
    return torch.zeros(shape, **kind)


GOOD: dict[str, Any] = {
    "q": zeros(B, Hq, Lq, D),
    "k": zeros(B, Hkv, Lkv, D),
    "v": zeros(B, Hkv, Lkv, D),
}


def call(**changes: Any) -> Any:
    arguments = {**GOOD, **changes}
    return attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_the_good_call_is_good() -> None:
    assert call().shape == (B, Hq, Lq, D)


SHAPES_AND_KINDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # q, k, v
    ({"q": np.zeros((B, Hq, Lq, D))}, TypeError, "q: expected a Tensor, got ndarray"),
    ({"k": None}, TypeError, "k: expected a Tensor, got NoneType"),
    ({"v": [1.0]}, TypeError, "v: expected a Tensor, got list"),
    ({"q": zeros(B, Hq, D)}, ValueError, r"q: expected 4 dims .*got 3 \(shape \[2, 8, 16\]\)"),
    ({"k": zeros(Hkv, Lkv, D)}, ValueError, "k: expected 4 dims"),
    ({"v": zeros(1, B, Hkv, Lkv, D)}, ValueError, "v: expected 4 dims .*got 5"),
    ({"q": zeros(B, Hq, Lq, D).double()}, TypeError, "q: expected float16, .*got torch.float64"),
    ({"q": zeros(B, Hq, Lq, D).int()}, TypeError, "q: expected float16, .*got torch.int32"),
    ({"k": GOOD["k"].half()}, TypeError, "k: expected torch.float32 to match q, got torch.float16"),
    ({"v": GOOD["v"].bfloat16()}, TypeError, "v: expected torch.float32 to match q"),
    (
        {"k": zeros(B, Hkv, Lkv, 8)},
        ValueError,
        r"k: expected head dim 16 to match q, got 8 \(shape \[2, 2, 100, 8\]\)",
    ),
    ({"q": zeros(B, Hq, Lq, 0), "k": zeros(B, Hkv, Lkv, 0)}, ValueError, "q: .*head dim of at lea"),
    ({"v": zeros(B, Hkv, Lkv, 0)}, ValueError, "v: expected a head dim of at least 1"),
    (
        {"k": zeros(3, Hkv, Lkv, D), "v": zeros(3, Hkv, Lkv, D)},
        ValueError,
        "k: expected batch 2 to match q, or 1, got 3",
    ),
    ({"q": zeros(1, Hq, Lq, D)}, ValueError, "k: expected batch 1, got 2"),
    ({"v": zeros(1, Hkv, Lkv, D)}, ValueError, r"v: expected shape \[2, 2, 100, any\] to match k"),
    ({"v": zeros(B, 1, Lkv, D)}, ValueError, r"v: expected shape .*got \[2, 1, 100, 16\]"),
    ({"v": zeros(B, Hkv, 99, D)}, ValueError, r"v: expected shape .*got \[2, 2, 99, 16\]"),
    ({"q": zeros(B, 7, Lq, D)}, ValueError, "q: expected a multiple of k's 2 heads.*got 7"),
    ({"q": zeros(B, 1, Lq, D)}, ValueError, "q: expected a multiple of k's 2 heads.*got 1"),
    ({"q": zeros(B, 0, Lq, D)}, ValueError, "q: expected a multiple of k's 2 heads"),
    (
        {"k": zeros(B, 0, Lkv, D), "v": zeros(B, 0, Lkv, D)},
        ValueError,
        "q: expected a multiple of k's 0 heads",
    ),
    ({"k": GOOD["k"].to("meta")}, ValueError, "k: expected device cpu to match q, got meta"),
    # scale
    ({"scale": "1"}, TypeError, "scale: expected a number, got str '1'"),
    ({"scale": torch.tensor(1.0)}, TypeError, "scale: expected a number, got a torch.float32 tens"),
    ({"scale": float("nan")}, ValueError, "scale: expected a finite number, got nan"),
    # lengths and positions
    ({"kv_len": -1}, ValueError, r"kv_len: expected a value in \[0, 100\], got -1"),
    ({"kv_len": 101}, ValueError, r"kv_len: expected a value in \[0, 100\], got 101"),
    ({"kv_len": 2.0}, TypeError, "kv_len: expected an int or an integer tensor, got float 2.0"),
    ({"kv_len": True}, TypeError, "kv_len: expected an int or an integer tensor"),
    (
        {"kv_len": np.array([3, 2])},
        TypeError,
        "kv_len: expected an int or an integer tensor, got nd",
    ),
    (
        {"kv_len": np.array(2.5)},
        TypeError,
        "kv_len: expected an int or an integer tensor, got ndarr",
    ),
    ({"kv_len": [5, 6]}, TypeError, "kv_len: expected an int or an integer tensor, got list"),
    ({"kv_len": zeros(B)}, TypeError, "kv_len: expected an int32 or int64 tensor, got torch.floa"),
    (
        {"kv_len": zeros(3, dtype=torch.int64)},
        ValueError,
        r"kv_len: expected an int or a tensor of shape \[2\], got shape \[3\]",
    ),
    ({"kv_len": zeros(2, 1, dtype=torch.int64)}, ValueError, r"kv_len: .*got shape \[2, 1\]"),
    ({"kv_len": zeros(2, dtype=torch.int32, device="meta")}, ValueError, "kv_len: expected device"),
    ({"q_offset": 0.5}, TypeError, "q_offset: expected an int or an integer tensor"),
    ({"q_offset": 1 << 31}, ValueError, "q_offset: expected a value in"),
    ({"q_offset": zeros(5, dtype=torch.int64)}, ValueError, r"q_offset: .*shape \[2\], got shape"),
    # bias and sinks
    ({"bias": 1.0}, TypeError, "bias: expected a Tensor, got float"),
    (
        {"bias": zeros(B, Hq, Lq, Lkv, dtype=torch.bool)},
        TypeError,
        "bias: expected float16, .* got torch.bool; a boolean mask is a block_mask",
    ),
    ({"bias": zeros(Lq, Lkv)}, ValueError, r"bias: expected shape \[2 or 1, 8 or 1, 3, 100\], got"),
    ({"bias": zeros(B, Hkv, Lq, Lkv)}, ValueError, "bias: expected shape"),
    ({"bias": zeros(B, Hq, 1, Lkv)}, ValueError, "bias: expected shape"),
    ({"bias": zeros(B, Hq, Lq, 99)}, ValueError, "bias: expected shape"),
    ({"bias": zeros(B, Hq, Lq, Lkv, device="meta")}, ValueError, "bias: expected device cpu"),
    ({"sinks": 0.0}, TypeError, "sinks: expected a Tensor, got float"),
    ({"sinks": zeros(Hkv)}, ValueError, r"sinks: expected shape \[8\].*got \[2\]"),
    ({"sinks": zeros(Hq, dtype=torch.int64)}, TypeError, "sinks: expected a floating-point tensor"),
    ({"sinks": zeros(Hq, device="meta")}, ValueError, "sinks: expected device cpu"),
    # the rest
    ({"return_aux": True}, TypeError, "return_aux: expected AuxRequest"),
    ({"backend": "cuda"}, ValueError, "backend: expected one of auto, triton, cpu, reference, got"),
    ({"backend": None}, ValueError, "backend: expected one of"),
]


@pytest.mark.parametrize(("changes", "error", "message"), SHAPES_AND_KINDS)
def test_shapes_and_kinds(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


def test_triton_takes_cpu_tensors_only_when_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend: expected 'auto', 'cpu' or 'reference' for tens"):
        call(backend="triton")


@pytest.mark.gpu
def test_devices() -> None:
    gpu = {name: x.cuda() for name, x in GOOD.items()}
    with pytest.raises(ValueError, match="backend: expected 'auto', 'triton' or 'reference'"):
        call(**gpu, backend="cpu")
    with pytest.raises(ValueError, match="k: expected device cuda:0 to match q, got cpu"):
        call(**{**gpu, "k": GOOD["k"]})
    with pytest.raises(ValueError, match="kv_len: expected device cuda:0 to match q, got cpu"):
        call(**gpu, kv_len=torch.tensor([3, 4]))


OPTIONS: list[tuple[Any, type[Exception], str]] = [
    ("fast", TypeError, "kernel_options: expected a dict, got str"),
    ({"BLOCK_K": 64}, ValueError, "kernel_options: expected keys among deterministic, .*'BLOCK_K'"),
    ({"BLOCK_N": 48}, ValueError, r"kernel_options\['BLOCK_N'\]: expected one of 16, 32, .*got 48"),
    ({"BLOCK_M": "64"}, ValueError, r"kernel_options\['BLOCK_M'\]"),
    ({"num_warps": 3}, ValueError, r"kernel_options\['num_warps'\]: .* got 3"),
    ({"num_warps": True}, ValueError, r"kernel_options\['num_warps'\]"),
    ({"num_stages": 0}, ValueError, r"kernel_options\['num_stages'\]"),
    ({"num_splits": 0}, ValueError, r"kernel_options\['num_splits'\]: expected an int of at least"),
    ({"num_splits": 2.0}, ValueError, r"kernel_options\['num_splits'\]"),
    ({"tf32": 1}, ValueError, r"kernel_options\['tf32'\]: expected one of True, False, got 1"),
    ({"deterministic": "yes"}, ValueError, r"kernel_options\['deterministic'\].*batch_invariant"),
    ({"partial_dtype": torch.float16}, ValueError, r"kernel_options\['partial_dtype'\]"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_fc70_options_name_what_is_legal(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(kernel_options=options)


def test_known_options_are_taken() -> None:
    call(kernel_options={})
    call(
        kernel_options={
            "deterministic": True,
            "num_splits": 3,
            "tf32": False,
            "approx": True,
            "partial_dtype": torch.float64,
            "BLOCK_M": 16,
            "BLOCK_N": 64,
            "num_warps": 4,
            "num_stages": 2,
        }
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_backward_pass(name: str) -> None:
    leaf = GOOD[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"{name}: .*call it under torch.no_grad\(\)"):
        call(**{name: leaf})
    with torch.no_grad():
        assert not call(**{name: leaf}).requires_grad
    with torch.inference_mode():
        call(**{name: leaf})


def test_sinks_and_bias_are_detached() -> None:
    sinks = torch.nn.Parameter(zeros(Hq))
    bias = torch.nn.Parameter(zeros(1, 1, Lq, Lkv))
    assert not call(sinks=sinks, bias=bias).requires_grad


# Masks and mods.


def boolean(score, b, h, q_idx, kv_idx):
    return score > 0


def branching(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx if q_idx > 3 else kv_idx > 0


def branching_score(score, b, h, q_idx, kv_idx):
    if score > 0:
        return score
    return score * 2


def reading(b, h, q_idx, kv_idx):
    return kv_idx.item() > 3


def unknown(score, b, h, q_idx, kv_idx):
    return torch.linalg.det(score)


def nothing_returned(score, b, h, q_idx, kv_idx):
    score + 1


def numbers(b, h, q_idx, kv_idx):
    return q_idx - kv_idx


TABLE = zeros(Lkv, Lkv)


def a_row(score, b, h, q_idx, kv_idx):
    return TABLE[q_idx]


MODS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: call(block_mask=causal), TypeError, r"block_mask: .*create_block_mask\(causal\)"),
    (
        lambda: call(block_mask=lambda b, h, q, kv: q >= kv),
        TypeError,
        "block_mask: expected a BlockMask, got the function <lambda>",
    ),
    (
        lambda: call(block_mask=zeros(Lq, Lkv, dtype=torch.bool)),
        TypeError,
        r"block_mask: .*a torch.bool tensor of shape \[3, 100\]; create_block_mask",
    ),
    (
        lambda: call(block_mask=zeros(Lq, Lkv)),
        TypeError,
        "block_mask: .*an additive mask is a bias",
    ),
    (lambda: call(block_mask=3), TypeError, "block_mask: expected a BlockMask, got int"),
    (lambda: call(score_mod=causal), TypeError, "score_mod: .*mask_mod"),
    (lambda: call(score_mod=branching), TypeError, "score_mod: .*mask_mod"),
    (
        lambda: call(score_mod=boolean),
        TypeError,
        "score_mod boolean returned bool.*create_block_ma",
    ),
    (
        lambda: call(score_mod=create_block_mask(causal)),
        TypeError,
        "score_mod: expected a function, got a BlockMask; pass it as block_mask=",
    ),
    (lambda: call(score_mod=2.0), TypeError, "score_mod: expected a function"),
    (
        lambda: call(score_mod=nothing_returned),
        TypeError,
        "score_mod nothing_returned returned Non",
    ),
    (lambda: call(score_mod=a_row), TypeError, r"a_row returned a tensor of shape"),
    (lambda: call(score_mod=unknown), TypeError, "det"),
    (lambda: call(score_mod=branching_score), TypeError, "where"),
    (lambda: call(block_mask=create_block_mask(branching)), TypeError, "where"),
    (lambda: call(block_mask=create_block_mask(reading)), TypeError, "item"),
    (
        lambda: call(block_mask=create_block_mask(numbers)),
        TypeError,
        "mask_mod numbers returned int",
    ),
    (lambda: call(block_mask=create_block_mask(alibi(8))), TypeError, "mask_mod: .*score_mod"),
]


@pytest.mark.parametrize(("bad_call", "error", "message"), MODS)
def test_fc56_misused_mods(
    bad_call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bad_call()


def by_batch(b, h, q_idx, kv_idx):
    return kv_idx >= b


@pytest.mark.parametrize("batch_heads", [(3, 1), (1, 3), (4, 2), (2, 4)])
def test_fc14_masks_of_other_sizes(batch_heads: tuple[int, int]) -> None:
    block_mask = create_block_mask(causal, *batch_heads, Lq, Lkv, device="cpu")
    with pytest.raises(ValueError, match=rf"block_mask: .*\({batch_heads[0]}, {batch_heads[1]}\)"):
        call(block_mask=block_mask)


@pytest.mark.parametrize("batch_heads", [(1, 1), (B, 1), (1, Hkv), (B, Hq)])
def test_masks_of_fitting_sizes(batch_heads: tuple[int, int]) -> None:
    call(block_mask=create_block_mask(causal, *batch_heads, Lq, Lkv, device="cpu"))


def test_fc13_one_list_cannot_serve_rows_that_differ() -> None:
    block_mask = create_block_mask(by_batch, None, None, Lq, Lkv, device="cpu")
    with pytest.raises(ValueError, match="block_mask: its mask_mod depends on b"):
        call(block_mask=block_mask)


def test_a_mask_that_owns_its_offset_refuses_another() -> None:
    block_mask = create_block_mask(causal, None, None, Lq, Lkv, device="cpu", q_offset=5)
    call(block_mask=block_mask)
    call(block_mask=block_mask, q_offset=5)
    with pytest.raises(ValueError, match="q_offset: expected the block_mask's own 5, got 6"):
        call(block_mask=block_mask, q_offset=6)


def test_nothing_runs_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails leaves no trace: no table built, no backend entered."""
    loaded = {name: lambda request: pytest.fail("a backend ran") for name in backends.BACKENDS}
    monkeypatch.setattr(backends, "_loaded", loaded)
    for changes, _, _ in SHAPES_AND_KINDS:
        with contextlib.suppress(ValueError, TypeError):
            call(**changes)
    with pytest.raises(pytest.fail.Exception):
        call()


def test_aux_request_of_torch_is_taken() -> None:
    from torch.nn.attention.flex_attention import AuxRequest as TorchAuxRequest

    _, aux = call(return_aux=TorchAuxRequest(lse=True))
    assert aux.max_scores is None
    _, aux = call(return_aux=AuxRequest())
    assert aux == (None, None)
