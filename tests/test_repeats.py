"""Calls like an earlier one skip its checks, and nothing that a check would have told."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import (
    AuxRequest,
    api,
    attention,
    bound_mask,
    create_block_mask,
    device_tables,
    repeats,
)
from flexdecode.masks import causal, sliding_window, softcap

pytest.importorskip("triton")
from flexdecode.backends import triton as triton_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def tensors(B: int = 2, Lkv: int = 70, D: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return draw(B, 4, 1, D), draw(B, 1, Lkv, D), draw(B, 1, Lkv, D)


def call(*qkv: Tensor, **arguments: Any) -> Any:
    return attention(*qkv, **arguments, backend="triton")


def same(*qkv: Tensor, **arguments: Any) -> None:
    out = call(*qkv, **arguments)
    wanted = attention(*qkv, **arguments, backend="reference")
    tolerance = 2e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that took the ordinary way."""
    taken: list[str] = []
    prepare = api.prepare

    def counted(*arguments: Any, **words: Any) -> Any:
        taken.append(words["backend"])
        return prepare(*arguments, **words)

    monkeypatch.setattr(api, "prepare", counted)
    monkeypatch.setattr(repeats, "_without_mask", OrderedDict())
    return taken


def ways(ordinary: list[str]) -> int:
    return ordinary.count("triton")


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_other_tensors_of_the_same_shapes(ordinary: list[str], bound: bool, scored: bool) -> None:
    kv_len = torch.tensor([70, 31], device=DEVICE)
    arguments: dict[str, Any] = {"kv_len": kv_len}
    if scored:
        arguments["score_mod"] = softcap(3.0)
    if bound:
        mask = create_block_mask(causal & sliding_window(33), BLOCK_SIZE=32)
        arguments["block_mask"] = mask.bind(
            batch=2, heads=4, q_len=1, kv_len=kv_len, kv_capacity=70
        )
    for _ in range(3):
        kv_len.random_(1, 71)
        if bound:
            arguments["block_mask"].update()
        same(*tensors(), **arguments)
    assert ways(ordinary) == 1
    if not bound:
        arguments["kv_len"] = torch.tensor([5, 6], device=DEVICE)
        same(*tensors(), **arguments)
        assert ways(ordinary) == 1


def test_statistics_sinks_and_pages(ordinary: list[str]) -> None:
    for _ in range(2):
        q, k, v = tensors()
        pool = k[:, :, :64].unflatten(2, (4, 16)).transpose(1, 2).flatten(0, 1).contiguous()
        other = v[:, :, :64].unflatten(2, (4, 16)).transpose(1, 2).flatten(0, 1).contiguous()
        table = torch.arange(8, device=DEVICE, dtype=torch.int32).view(2, 4)
        given: dict[str, Any] = {"sinks": draw(4), "kv_len": torch.tensor([60, 9], device=DEVICE)}
        given["return_aux"] = AuxRequest(lse=True, max_scores=True)
        out, aux = call(q, pool, other, page_table=table, **given)
        wanted, wanted_aux = attention(q, k, v, **given, backend="reference")
        torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)
        for got, want in zip(aux, wanted_aux, strict=True):
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    assert ways(ordinary) == 1


def test_whatever_changes_takes_the_ordinary_way(ordinary: list[str]) -> None:
    given = tensors()
    same(*given)
    same(*tensors(B=3))
    same(*tensors(Lkv=71))
    same(*tensors(D=24))
    same(*(x.half() for x in given)) if DEVICE == "cuda" else None
    same(*given, scale=0.5)
    same(*given, kv_len=3)
    same(*given, kv_len=torch.tensor([3], device=DEVICE))
    same(*given, kv_len=torch.tensor([3, 4], device=DEVICE))
    same(given[0], given[1].transpose(2, 3).contiguous().transpose(2, 3), given[2])
    wanted = 10 if DEVICE == "cuda" else 9
    assert ways(ordinary) == wanted


def test_rules_are_looked_at_again(ordinary: list[str]) -> None:
    factor = 2.0
    slopes = torch.ones(4, device=DEVICE)

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * factor * slopes[h]

    width = 20

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < width

    bound = create_block_mask(window, BLOCK_SIZE=32).bind(
        batch=2, heads=4, q_len=1, kv_len=70, device=DEVICE
    )
    given = tensors()
    for _ in range(2):
        same(*given, score_mod=scaled, block_mask=bound)
    assert ways(ordinary) == 1
    slopes.mul_(0.3)  # live
    same(*given, score_mod=scaled, block_mask=bound)
    assert ways(ordinary) == 1
    factor = 0.5
    same(*given, score_mod=scaled, block_mask=bound)
    slopes = torch.full((4,), 0.1, device=DEVICE)
    same(*given, score_mod=scaled, block_mask=bound)
    width = 40
    bound.update()
    same(*given, score_mod=scaled, block_mask=bound)
    bound.update(kv_len=50)
    same(*given, score_mod=scaled, block_mask=bound)
    assert ways(ordinary) == 5


def test_a_captured_tensor_with_another_layout(ordinary: list[str]) -> None:
    table = torch.rand(2, 70, device=DEVICE)
    kept = create_block_mask(lambda b, h, q_idx, kv_idx: table[b, kv_idx] < 0.5, BLOCK_SIZE=32)
    bound = kept.bind(batch=2, heads=4, q_len=1, kv_len=70, device=DEVICE)
    given = tensors()
    same(*given, block_mask=bound)
    table.set_(torch.rand(70, 2, device=DEVICE).T)  # type: ignore[call-overload]
    bound.update()
    same(*given, block_mask=bound)


def test_what_has_to_be_refused_still_is(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    table = torch.arange(70, device=DEVICE, dtype=torch.int32).view(2, 35)
    pool = draw(70, 2, 2, 16)
    given = {"page_table": table, "kv_len": torch.tensor([70, 70], device=DEVICE)}
    bound = create_block_mask(causal).bind(batch=2, heads=4, q_len=1, kv_len=70, device=DEVICE)
    for _ in range(2):
        call(q, k, v)
        call(q, k, v, block_mask=bound)
        call(q, pool, pool, **given)
    with pytest.raises(ValueError, match="q: expected a tensor that does not require grad"):
        call(q.clone().requires_grad_(), k, v)
    with pytest.raises(ValueError, match="block_mask: expected batch 2"):
        call(q[:1], k[:1], v[:1], block_mask=bound)
    with pytest.raises(ValueError, match="kv_len: expected what the block_mask is bound to"):
        call(q, k, v, block_mask=bound, kv_len=69)
    with pytest.raises(ValueError, match="kernel_options"):
        call(q, k, v, kernel_options={"fast": True})
    monkeypatch.setenv("FLEXDECODE_CHECK", "1")
    table[1, 3] = 99
    with pytest.raises(ValueError, match="page_table: expected pages in"):
        call(q, pool, pool, **given)


def use_and_forget() -> list[weakref.ref[Any]]:
    table = torch.rand(70, device=DEVICE)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[kv_idx]

    bound = create_block_mask(causal).bind(batch=2, heads=4, q_len=1, kv_len=70, device=DEVICE)
    given = tensors()
    for _ in range(2):
        call(*given, score_mod=biased)
        call(*given, score_mod=biased, block_mask=bound)
        call(*given)
    return [weakref.ref(x) for x in (*given, table, bound)]


def test_nothing_is_kept_alive() -> None:
    kept = use_and_forget()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 5


def test_tables_made_from_others_are_made_anew() -> None:
    """Lists by query head are united for the kernels, and those of given tables copied."""
    kv_len = torch.tensor([70, 31], device=DEVICE)
    rule = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 9 * (h + 1))
    bound = rule.bind(batch=2, heads=4, q_len=1, kv_len=kv_len, kv_capacity=70)
    options = {"deterministic": "batch_invariant"}
    for lengths in ([70, 31], [9, 60], [64, 5]):
        kv_len.copy_(torch.tensor(lengths))
        bound.update()
        given = tensors()
        same(*given, block_mask=bound)
        same(*given, block_mask=bound, kernel_options=options)


def test_default_lengths_follow_the_starts() -> None:
    """Without kv_len, the keys of a sequence reach from its start to the end of the cache."""
    given = tensors()
    kv_start = torch.tensor([3, 40], device=DEVICE)
    for starts in ([3, 40], [60, 0], [69, 25]):
        kv_start.copy_(torch.tensor(starts))
        same(*given, kv_start=kv_start)
        same(*given, kv_start=torch.tensor(starts[::-1], device=DEVICE))


@pytest.mark.parametrize("name", ["kv_len", "kv_start", "q_offset"])
def test_lengths_of_a_bound_mask_may_be_given_other_data(ordinary: list[str], name: str) -> None:
    lengths = {"kv_len": [60, 50], "kv_start": [0, 10], "q_offset": [50, 40]}
    other = {"kv_len": [20, 60], "kv_start": [9, 3], "q_offset": [21, 33]}
    given = {each: torch.tensor(values, device=DEVICE) for each, values in lengths.items()}

    def bind() -> Any:
        mask = create_block_mask(causal & sliding_window(13), BLOCK_SIZE=16)
        return mask.bind(batch=2, heads=4, q_len=1, kv_capacity=70, **given)

    step, qkv = bind(), tensors()
    for _ in range(2):
        step.update()
        before = call(*qkv, block_mask=step)
    assert ways(ordinary) == 1
    given[name].data = torch.tensor(other[name], device=DEVICE)
    step.update()
    out = call(*qkv, block_mask=step)
    torch.testing.assert_close(out, attention(*qkv, block_mask=bind(), backend="reference"))
    assert not torch.equal(out, before)


def test_nothing_is_kept_that_a_graph_writes_in_its_replays(monkeypatch):
    """Lists united while a graph is captured hold nothing yet when an eager call follows."""
    widths = torch.tensor([5, 40, 9, 70], device=DEVICE)
    q, k, v = tensors(B=1)
    rule = create_block_mask(lambda b, h, q, kv: q - kv < widths[h], BLOCK_SIZE=(1, 16))

    def build(mask, extent, **options):  # as on a GPU
        return device_tables.build_device_tables(mask, extent.for_kernels(mask))

    monkeypatch.setattr(bound_mask, "build_tables", build)
    mask = rule.bind(batch=1, heads=4, q_len=1, kv_len=70, device=torch.device(DEVICE))
    kernels = device_tables._kernels()

    def captured(lists):
        for counts in (lists.kv_num_blocks, lists.full_kv_num_blocks):
            counts.zero_()
        return []

    with monkeypatch.context() as graph:
        for module in (triton_backend, device_tables):
            graph.setattr(module, "is_capturing", lambda device: True)
        graph.setattr(kernels, "launch_compact", captured)
        assert not call(q, k, v, block_mask=mask).any()
        assert not call(q, k, v, block_mask=mask).any()
    same(q, k, v, block_mask=mask)
    same(q, k, v, block_mask=mask)
