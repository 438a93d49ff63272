"""Attention over ranks: three gloo processes against the float64 formula over whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flexdecode
from flexdecode import create_block_mask
from flexdecode.distributed import Interleaved, attention, bind, locate
from flexdecode.masks import causal, sliding_window
from tests.helpers import random_inputs
from tests.ranks import BOTH, CASES, assert_matches_whole, run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes got."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), ["cpu"] * 3, "gloo")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("group", ["all", "pair"])
def test_ranks_agree_with_the_formula_over_whole_sequences(
    ranks: list[dict[str, Any]], group: str, name: str
) -> None:
    found = [rank[group][name] for rank in ranks if name in rank[group]]
    if "own heads" in name and group == "pair":
        assert not found
        return
    assert len(found) == (3 if group == "all" else 2)
    assert_matches_whole(name, found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bound", "block_mask: expected a rule, or a mask of flexdecode.distributed.bind, got"),
        ("fixed", "block_mask: expected a rule over whole sequences"),
        ("heads", "scatter_heads: expected heads in 3 equal parts, got 4 heads"),
        ("position", "kv_position: expected an int or an integer tensor, got float 0.5"),
        ("size", "size: expected an int of at least 1, got 0"),
        ("twice", "kv_position: expected None, the block_mask is bound to one; leave it out"),
        ("ranks", "q: expected the same on all ranks, got ['[1, 4, 0, 16] torch.float32', "),
    ],
)
def test_wrong_calls_say_what_is_wrong_on_every_rank(
    ranks: list[dict[str, Any]], name: str, words: str
) -> None:
    for rank in ranks:
        assert words in rank["errors"][name]


def test_tokens_are_appended_where_they_belong(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(*rank["appended"])


def test_a_right_call_passes_the_checks_of_values(ranks: list[dict[str, Any]]) -> None:
    assert [rank["errors"]["none"] for rank in ranks] == ["", "", ""]


def test_a_rank_outside_of_the_group_is_told(ranks: list[dict[str, Any]]) -> None:
    assert "group: expected a group that this rank is in" in ranks[2]["errors"]["outside"]


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("position", [None, 0, Interleaved(), Interleaved(16)], ids=str)
def test_a_group_of_one_gives_what_a_plain_call_gives(alone: None, position: Any) -> None:
    q, k, v = random_inputs(2, 4, 2, 3, 90, 16)
    call: dict[str, Any] = {
        "block_mask": create_block_mask(causal & sliding_window(30)),
        "score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx),
        "sinks": torch.randn(4),
        "return_aux": BOTH,
        "kv_len": torch.tensor([90, 41]),
    }
    out, aux = attention(q, k, v, kv_position=position, **call)
    right, right_aux = flexdecode.attention(q, k, v, **call)
    assert torch.equal(out, right)
    assert torch.equal(aux.lse, right_aux.lse)
    assert torch.equal(aux.max_scores, right_aux.max_scores)


def test_masks_keep_an_offset_of_their_own(alone: None) -> None:
    q, k, v = random_inputs(1, 4, 2, 1, 90, 16)
    mask = create_block_mask(causal, q_offset=20)
    out = attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(out, flexdecode.attention(q, k[:, :, :21], v[:, :, :21]))
    with pytest.raises(ValueError, match="q_offset: expected None, the block_mask has its own"):
        attention(q, k, v, block_mask=mask, q_offset=20)


def test_masks_of_torch_are_pointed_to_their_rule(alone: None) -> None:
    from torch.nn.attention import flex_attention

    q, k, v = random_inputs(1, 4, 2, 1, 90, 16)
    mask = flex_attention.create_block_mask(causal, None, None, 1, 90, device="cpu")
    with pytest.raises(ValueError, match=r"create_block_mask\(mask.mask_mod\) and q_offset=0"):
        attention(q, k, v, block_mask=mask)
    with pytest.raises(TypeError, match="block_mask: expected a BlockMask, got the function"):
        attention(q, k, v, block_mask=causal)


def test_a_bound_mask_wraps_a_score_rule_once(alone: None) -> None:
    from flexdecode.distributed import _bound

    q, k, v = random_inputs(1, 4, 2, 1, 90, 16)
    step = bind(create_block_mask(causal), 0, batch=1, heads=4, q_len=1, kv_len=90, q_offset=89)
    rules = [lambda s, b, h, q, kv, x=x: s * x for x in range(40)]
    for rule in rules:
        assert torch.equal(
            attention(q, k, v, block_mask=step, score_mod=rule),
            flexdecode.attention(q, k, v, score_mod=rule),
        )
    kept = _bound[step]
    assert kept.wrap(rules[-1]) is kept.wrap(rules[-1])
    assert len(kept.scores) == 16


def test_without_a_group_the_remedy_is_named() -> None:
    q, k, v = random_inputs(1, 4, 2, 1, 32, 16)
    for call in (
        lambda: attention(q, k, v),
        lambda: locate(torch.tensor([3])),
        lambda: Interleaved().local_len(3),
    ):
        with pytest.raises(ValueError, match=r"group: .* got none; call torch.distributed.init"):
            call()


def test_a_call_within_a_group_has_four_dims(alone: None) -> None:
    q, k, v = random_inputs(1, 4, 2, 1, 32, 16)
    with pytest.raises(ValueError, match=r"k: expected \[batch, heads, length, head dim\], got"):
        attention(q, k[0], v)
