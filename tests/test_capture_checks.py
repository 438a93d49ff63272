"""FLEXDECODE_CHECK=1: an allowed key whose captured element does not exist is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexdecode import BlockMask, attention, create_block_mask
from flexdecode.masks import causal, documents, sliding_window
from tests.backend_cases import Backend, check, every_backend
from tests.helpers import random_inputs


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXDECODE_CHECK", "1")


def call(backend: Backend, Lq: int = 1, Lkv: int = 128, B: int = 1, **options: Any) -> None:
    q, k, v = (x.to(backend.device) for x in random_inputs(B, 2, 1, Lq, Lkv, 8))
    attention(q, k, v, backend=backend.name, **options)


@every_backend
def test_a_table_one_short(backend: Backend) -> None:
    table = torch.zeros(127, device=backend.device)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[kv_idx]

    wanted = (
        r"score_mod: expected an index of the captured tensor table in \[0, 127\) on axis 0 where "
        r"a key is allowed, got 127 at b = 0, h = 0, q_idx = 127, kv_idx = 127\n"
        r"  at .*test_capture_checks.py:\d+: def biased"
    )
    with pytest.raises(ValueError, match=wanted):
        call(backend, score_mod=biased)
    call(backend, score_mod=biased, kv_len=127)
    keep = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < 127)
    call(backend, score_mod=biased, block_mask=keep)
    call(backend, score_mod=biased, Lkv=127)


@every_backend
def test_ids_that_end_before_the_keys_do(backend: Backend) -> None:
    """The whole last block reads zeros, and would count as full."""
    ids = torch.zeros(128, dtype=torch.int64, device=backend.device)
    with pytest.raises(ValueError, match=r"mask_mod: .* tensor ids .*got 128 at .*kv_idx = 128"):
        call(backend, 1, 256, block_mask=create_block_mask(documents(ids)), q_offset=3)
    call(backend, 1, 256, block_mask=create_block_mask(documents(ids)), kv_len=128)
    bound = create_block_mask(documents(ids)).bind(
        batch=1, heads=2, q_len=1, kv_len=256, q_offset=3, device=backend.device
    )
    with pytest.raises(ValueError, match="captured tensor ids"):
        call(backend, 1, 256, block_mask=bound)


@every_backend
def test_the_axis_and_the_sequence_are_named(backend: Backend) -> None:
    table = torch.zeros(2, 4, 90, device=backend.device)
    kv_len = torch.tensor([90, 20, 91], device=backend.device)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[b % 2, h, kv_idx]

    with pytest.raises(ValueError, match=r"\[0, 90\) on axis 2 .*got 90 at b = 2, h = 0, q_idx ="):
        call(backend, B=3, score_mod=biased, kv_len=kv_len)
    kv_len.clamp_(max=90)
    call(backend, B=3, score_mod=biased, kv_len=kv_len)


TABLE = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) < 0.5


@every_backend
@pytest.mark.parametrize("form", range(6))
def test_lanes_that_do_not_depend_on_what_is_missing(backend: Backend, form: int) -> None:
    tree = TABLE.to(backend.device)
    n = 60
    weights = torch.zeros(4, device=backend.device)
    masks = [
        lambda b, h, q, k: (k < n) | tree[q - n, k - n],
        lambda b, h, q, k: tree[q - n, k - n] | (k < n),
        lambda b, h, q, k: torch.where(k < n, k <= q, tree[q - n, k - n]),
        lambda b, h, q, k: (k >= n) & tree[q - n, k - n],
        lambda b, h, q, k: ~((k >= n) & ~tree[q - n, k - n]),
        lambda b, h, q, k: k <= q,
    ]

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(k < n, score, score + weights[k - n])

    call(backend, 4, 64, block_mask=create_block_mask(masks[form]), score_mod=biased)


@every_backend
@pytest.mark.parametrize("form", range(4))
def test_lanes_that_do(backend: Backend, form: int) -> None:
    table = torch.ones(60, dtype=torch.bool, device=backend.device)
    places = torch.arange(60, device=backend.device)
    masks = [
        lambda b, h, q, k: (k < 10) | ~table[k],
        lambda b, h, q, k: torch.where(table[k], k < 3, k >= 0),
        lambda b, h, q, k: places[places[k]] <= q,
        lambda b, h, q, k: (places[k] * 2 + 1).abs() > 0,
    ]
    with pytest.raises(ValueError, match=r"captured tensor (table|places) in .*got 60 at"):
        call(backend, 1, 64, block_mask=create_block_mask(masks[form]))


@every_backend
def test_packed_queries_and_pages(backend: Backend) -> None:
    bias = torch.zeros(30, device=backend.device)
    rule = lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx]  # noqa: E731
    q = torch.zeros(1, 2, 5, 8, device=backend.device)
    pool = torch.zeros(8, 1, 16, 8, device=backend.device)
    options: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 2, 2, 5], device=backend.device),
        "page_table": torch.zeros(3, 4, dtype=torch.int32, device=backend.device),
        "block_mask": create_block_mask(causal & sliding_window(31)),
        "backend": backend.name,
    }
    lengths = torch.tensor([30, 60, 31], device=backend.device)
    with pytest.raises(ValueError, match=r"tensor bias in \[0, 30\).*got 30 at b = 2, h = 0, q_id"):
        attention(q, pool, pool, score_mod=rule, kv_len=lengths, **options)
    lengths[2] = 30
    attention(q, pool, pool, score_mod=rule, kv_len=lengths, **options)


@every_backend
def test_full_blocks_that_the_caller_lists_ask_no_rule(backend: Backend) -> None:
    ids = torch.zeros(4, dtype=torch.int64, device=backend.device)
    one = torch.ones(1, 1, 1, dtype=torch.int32, device=backend.device)
    rule = documents(ids)
    full = BlockMask.from_kv_blocks(0 * one, one[..., None], one, one[..., None], mask_mod=rule)
    call(backend, 1, 256, block_mask=full)
    partial = BlockMask.from_kv_blocks(one, one[..., None], mask_mod=rule)
    with pytest.raises(ValueError, match="captured tensor ids"):
        call(backend, 1, 256, block_mask=partial)


@every_backend
def test_indices_from_scores_are_left_alone(backend: Backend) -> None:
    steps = torch.zeros(3, device=backend.device)

    def stepped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + steps[torch.floor(score).to(torch.int64)]

    call(backend, score_mod=stepped)

    def branching(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(score > 100, steps[kv_idx], score)

    with pytest.raises(ValueError, match="captured tensor steps"):
        call(backend, score_mod=branching)


@every_backend
def test_ordinary_calls_pass(backend: Backend) -> None:
    q, k, v = random_inputs(2, 4, 2, 3, 100, 8)
    ids = (torch.arange(100) // 30).to(backend.device)
    check(backend, q, k, v, mask=documents(ids), kv_len=torch.tensor([100, 40]))


def test_nothing_is_checked_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXDECODE_CHECK")
    table = torch.zeros(3)
    q, k, v = random_inputs(1, 2, 1, 1, 10, 8)
    attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + table[kv_idx])
