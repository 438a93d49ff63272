"""What holds for every mask and score rule: traced, in decoding, by blocks, in `attention`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import block_states as states_module
from flexdecode import create_block_mask, masks
from flexdecode.evaluate import evaluate
from flexdecode.tables import Extent, block_states, table_states
from flexdecode.trace import trace
from tests.backend_cases import BACKENDS, check
from tests.helpers import random_inputs
from tests.mask_cases import LENGTH, create_masks, create_scores
from tests.mask_oracle import dense_states

CPU = torch.device("cpu")
MASKS, SCORES = create_masks(), create_scores()
TREE = masks.create_ancestors([-1, 0, 0, 1])
every_mask = pytest.mark.parametrize("name", MASKS)
every_score = pytest.mark.parametrize("name", SCORES)


def indices() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    return b, h, torch.arange(LENGTH)[:, None], torch.arange(LENGTH)


def dense(name: str) -> Tensor:
    return MASKS[name](*indices()).expand(2, 4, LENGTH, LENGTH)


def test_every_rule_is_a_case() -> None:
    makers = {"create_ancestors", "create_parents", "document_ids", "page_bounds", "tile_order"}
    cases = {name.split()[0] for name in (*MASKS, *SCORES)}
    assert set(masks.__all__) - makers - {"top_pages"} == cases - {"combined"}


@every_mask
def test_a_mask_joins_a_plain_function(name: str) -> None:
    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx % 2 == 0

    expected = dense(name) & (torch.arange(LENGTH) % 2 == 0)
    assert torch.equal((MASKS[name] & even)(*indices()).expand_as(expected), expected)


@every_mask
def test_traced_mask_equals_eager(name: str) -> None:
    found = evaluate(trace(MASKS[name], "mask"), *indices())
    assert torch.equal(found.expand(2, 4, LENGTH, LENGTH), dense(name))


@every_score
def test_traced_score_rule_equals_eager(name: str) -> None:
    scores = torch.randn(2, 4, LENGTH, LENGTH)
    found = evaluate(trace(SCORES[name], "score"), *indices(), scores)
    torch.testing.assert_close(found.expand_as(scores), SCORES[name](scores, *indices()))


@every_mask
def test_decode_row_equals_prefill_row(name: str) -> None:
    """Alone, at its own position, with the keys that exist by then or with more."""
    prefill, (b, h, _, kv_idx) = dense(name), indices()
    for row in (0, 1, 7, 12, LENGTH - 1):
        alone = MASKS[name](b, h, torch.tensor([[row]]), kv_idx).expand(2, 4, 1, LENGTH)
        assert torch.equal(alone[:, :, 0], prefill[:, :, row])
        mask = create_block_mask(MASKS[name], 2, 4, 1, LENGTH, BLOCK_SIZE=(1, 1), q_offset=row)
        assert mask.tables is not None
        table = table_states(mask.tables).expand(2, 4, 1, LENGTH) > 0
        assert torch.equal(table[:, :, 0], prefill[:, :, row])


@every_mask
@pytest.mark.parametrize(
    "what",
    [
        Extent(2, 4, LENGTH, LENGTH, LENGTH, 0, (4, 4), CPU),
        Extent(2, 4, 5, LENGTH, torch.tensor([LENGTH, 14]), torch.tensor([19, 9]), (2, 3), CPU),
    ],
    ids=["prefill", "ragged"],
)
def test_blocks_are_classified_exactly(
    name: str, what: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By intervals from the top, however few the elements are."""
    monkeypatch.setattr(states_module, "_is_small", lambda mask, extent: False)
    monkeypatch.setattr(states_module, "_FIRST_SQUARES", 4)
    found = block_states(trace(MASKS[name], "mask"), what)
    expected = dense_states(MASKS[name], what)
    assert torch.equal(found.expand_as(expected), expected)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.name != "reference"], ids=str)
@every_mask
def test_attention_under_every_mask(name: str, backend: Any) -> None:
    if backend.slow and not name.replace(" 2-D", "").isidentifier():
        pytest.skip("variants of a mask are not interpreted")
    q, k, v = random_inputs(2, 4, 2, 3, LENGTH, 16)
    kv_len = torch.tensor([LENGTH, 15])
    mask = create_masks(backend.device)[name]
    check(backend, q, k, v, mask=mask, BLOCK_SIZE=(3, 16), kv_len=kv_len)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.name != "reference"], ids=str)
@every_score
def test_attention_under_every_score_rule(name: str, backend: Any) -> None:
    q, k, v = random_inputs(2, 4, 2, 1, LENGTH, 16)
    rule = create_scores(backend.device)[name]
    check(backend, q, k, v, score_mod=rule, kv_len=torch.tensor([LENGTH, 15]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (masks.sliding_window(1), masks.sliding_window(4096)),
        (masks.sink_window(0, 1), masks.sink_window(16, 2)),
        (masks.global_window(0, 1), masks.global_window(9, 700)),
        (masks.strided(1), masks.strided(128, window=7)),
        (masks.block_diffusion(1), masks.block_diffusion(32, 500)),
        (masks.tree(TREE, 0), masks.tree(TREE[:1, :1], 500)),
        (masks.neighborhood((4, 6), (3, 3)), masks.neighborhood((64, 64), (7, 9), start=1)),
        (
            masks.sliding_tile((4, 4, 4), (2, 2, 2), (1, 1, 1)),
            masks.sliding_tile((30, 48, 80), (6, 8, 8), (3, 5, 1)),
        ),
        (masks.big_bird(64), masks.big_bird(16, window=5, num_global=2, seed=9)),
        (masks.random_sparse(0.5), masks.random_sparse(1, block_size=1, seed=9)),
    ],
    ids=lambda mask: mask.__name__,
)
def test_fc58_another_number_is_the_same_kernel(first: Any, second: Any) -> None:
    assert trace(first, "mask").graph.key == trace(second, "mask").graph.key


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (masks.alibi(8), masks.alibi(71)),
        (masks.softcap(1), masks.softcap(50)),
        (masks.distance_penalty(1), masks.distance_penalty(0.1, limit=7)),
        (masks.sandwich(8, max_distance=3), masks.sandwich(12, max_distance=5, dim=4)),
    ],
    ids=lambda mod: mod.__name__,
)
def test_fc58_another_number_is_the_same_score_rule(first: Any, second: Any) -> None:
    assert trace(first, "score").graph.key == trace(second, "score").graph.key
