"""Pictures show what they are to show: their numbers are read back and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import create_block_mask, explain, masks
from tests.helpers import random_inputs

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from flexdecode import visualize  # noqa: E402


@pytest.fixture(autouse=True)
def close_figures() -> Any:
    yield
    from matplotlib import pyplot

    pyplot.close("all")


def drawn(ax: Any) -> Tensor:
    (image,) = ax.images
    return torch.as_tensor(image.get_array().filled(0))


def test_a_mask_shows_blocks_and_the_elements_of_partial_ones() -> None:
    mask = masks.causal & masks.sliding_window(9)
    ax = visualize.plot_mask(mask, 20, 30, BLOCK_SIZE=4)
    q_idx, kv_idx = torch.arange(10, 30)[:, None], torch.arange(30)
    allowed = (kv_idx <= q_idx) & (q_idx - kv_idx < 9)
    expected = torch.zeros(20, 30)
    for i in range(0, 20, 4):
        for j in range(0, 30, 4):
            block = allowed[i : i + 4, j : j + 4]
            if block.any():
                expected[i : i + 4, j : j + 4] = 1 + block.float()
            if block.all() and j + 4 <= 30:
                expected[i : i + 4, j : j + 4] = 3
    assert torch.equal(drawn(ax).float(), expected)
    assert "q_idx" in ax.get_ylabel() and "kv_idx" in ax.get_xlabel()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(
        visualize.ELEMENT_LABELS
    )


def test_heads_are_drawn_side_by_side() -> None:
    mask = masks.per_head(torch.tensor([0, 1, 1]), masks.causal, masks.sliding_window(1))
    figure = visualize.plot_heads(mask, 16, 16, [0, 2], BLOCK_SIZE=4)
    first, second = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["head 0", "head 2"]
    assert (drawn(first) == 3).sum() == 96 and (drawn(second) == 3).sum() == 0
    assert (drawn(second) == 2).sum() == 16
    figure = visualize.plot_heads(mask, 16, 16, 3, BLOCK_SIZE=4, columns=2)
    assert [ax.get_visible() for ax in figure.axes] == [True, True, True, False]


def test_scores_are_the_weights() -> None:
    q, k, _ = random_inputs(2, 4, 2, 5, 9, 16)
    mask = create_block_mask(masks.causal)
    ax = visualize.plot_scores(q, k, block_mask=mask, score_mod=masks.alibi(4), b=1, h=3)
    distance = torch.arange(4, 9)[:, None] - torch.arange(9)
    scores = q[1, 3] @ k[1, 1].T / 4 - 2**-8 * distance
    expected = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(drawn(ax).float(), expected)


def owners_by_hand(states: list[int], share: int, steps: int) -> list[int]:
    order = [i for i, s in enumerate(states) if s == 2] + [
        i for i, s in enumerate(states) if s == 1
    ]
    owners = [-1] * len(states)
    for place, block in enumerate(order):
        owners[block] = place * steps // share
    return owners


@pytest.mark.parametrize("lengths", [[4096], [4096, 700, 0, 1300]])
def test_a_plan_shows_the_share_of_every_active_block(lengths: list[int]) -> None:
    q, k, v = random_inputs(len(lengths), 8, 2, 1, 4096, 16)
    mask = create_block_mask(masks.sink_window(4, 3000))
    report = explain(q, k, v, block_mask=mask, kv_len=torch.tensor(lengths), processors=8)
    work = report.work
    steps = 128 // work.config.BLOCK_N
    for states, owners in zip(work.states[:, 0, 0], work.owners[:, 0, 0], strict=True):
        units = int((states > 0).sum()) * steps
        any_share = [owners_by_hand(states.tolist(), share, steps) for share in range(1, units + 2)]
        assert owners.tolist() in any_share
    assert sum(len(set(row.tolist()) - {-1}) for row in work.owners[:, 0, 0]) * 2 == work.busy
    assert int((work.states == 1).sum()) == report.blocks.partial.total // 2  # of two key heads
    ax = visualize.plot_plan(report)
    (mesh,) = (c for c in ax.collections if c.get_array() is not None)
    colors = torch.as_tensor(mesh.get_array()).reshape(len(lengths), -1)
    assert torch.equal(colors > 0, work.owners.reshape(len(lengths), -1) >= 0)
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"b {i}" for i in range(len(lengths))
    ]
