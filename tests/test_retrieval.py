"""Pages are chosen by what their keys can score at most."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexdecode import BlockMask, attention, create_block_mask, masks
from tests.helpers import assert_matches, random_inputs

B, HQ, HKV, LKV, D, PAGE = 2, 4, 2, 90, 16, 16
LENGTHS = torch.tensor([90, 40])


def inputs(Lq: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = random_inputs(B, HQ, HKV, Lq, LKV, D)
    k[1, :, 40:] = torch.nan  # what no sequence holds must not matter
    return q, k, v


def test_page_bounds() -> None:
    _, k, _ = inputs()
    least, greatest = masks.page_bounds(k, PAGE, LENGTHS)
    assert least.shape == greatest.shape == (B, HKV, 6, D)
    for b, length in enumerate(LENGTHS.tolist()):
        for page in range(6):
            keys = k[b, :, page * PAGE : min(page * PAGE + PAGE, length)]
            if keys.shape[1]:
                assert torch.equal(least[b, :, page], keys.amin(1))
                assert torch.equal(greatest[b, :, page], keys.amax(1))
            else:
                assert (least[b, :, page] == torch.inf).all()
                assert (greatest[b, :, page] == -torch.inf).all()


def chosen(q: Tensor, k: Tensor, count: int) -> list[list[set[int]]]:
    """Pages for each sequence and key head, one bound at a time."""
    found: list[list[set[int]]] = []
    for b, length in enumerate(LENGTHS.tolist()):
        found.append([])
        pages = -(-length // PAGE)
        for head in range(HKV):
            bounds = []
            for page in range(pages):
                keys = k[b, head, page * PAGE : min(page * PAGE + PAGE, length)]
                rows = q[b, head * HQ // HKV : (head + 1) * HQ // HKV].reshape(-1, D)
                best = torch.maximum(rows * keys.amin(0), rows * keys.amax(0)).sum(-1).max()
                bounds.append(best.item() if page < pages - 1 else float("inf"))
            found[b].append(set(sorted(range(pages), key=lambda p: -bounds[p])[:count]))
    return found


@pytest.mark.parametrize("count", [1, 2, 4, 6, 50])
@pytest.mark.parametrize("Lq", [1, 3])
def test_top_pages(count: int, Lq: int) -> None:
    q, k, _ = inputs(Lq)
    bounds = masks.page_bounds(k, PAGE, LENGTHS)
    num, pages = masks.top_pages(q, *bounds, count, page_size=PAGE, kv_len=LENGTHS)
    assert num.dtype == pages.dtype == torch.int32
    assert num.shape == (B, HKV, 1) and pages.shape == (B, HKV, 1, min(count, 6))
    for b, heads in enumerate(chosen(q, k, count)):
        for head, expected in enumerate(heads):
            listed = pages[b, head, 0, : num[b, head, 0]].tolist()
            assert listed == sorted(expected)


def test_attention_reads_the_chosen_pages_and_a_window() -> None:
    q, k, v = inputs()
    bounds = masks.page_bounds(k, PAGE, LENGTHS)
    tables = masks.top_pages(q, *bounds, 3, page_size=PAGE, kv_len=LENGTHS)
    pages = BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=(1, PAGE))
    selected = torch.zeros(B, HKV, 6, dtype=torch.bool)
    for b, heads in enumerate(chosen(q, k, 3)):
        for head, numbers in enumerate(heads):
            selected[b, head, list(numbers)] = True
    rule = masks.selected_blocks(selected, PAGE, group_size=HQ // HKV)
    out = attention(q, k, v, block_mask=pages, kv_len=LENGTHS)
    assert_matches(out, q, k, v, mask=rule, kv_len=LENGTHS)

    window = masks.sliding_window(20)
    both = pages | create_block_mask(window, BLOCK_SIZE=(1, PAGE))
    out = attention(q, k, v, block_mask=both, kv_len=LENGTHS)
    assert_matches(out, q, k, v, mask=rule | window, kv_len=LENGTHS)


def test_bad_arguments_are_named() -> None:
    q, k, _ = inputs()
    least, greatest = masks.page_bounds(k, PAGE)
    with pytest.raises(ValueError, match="page_size: expected at least 1"):
        masks.page_bounds(k, 0)
    with pytest.raises(ValueError, match=r"k: expected shape \[B, Hkv, Lkv, D\]"):
        masks.page_bounds(k[0], PAGE)
    with pytest.raises(ValueError, match="count: expected at least 1"):
        masks.top_pages(q, least, greatest, 0, page_size=PAGE, kv_len=LKV)
    with pytest.raises(ValueError, match="least, greatest: expected shape"):
        masks.top_pages(q, least, greatest[:, :, :2], 1, page_size=PAGE, kv_len=LKV)
