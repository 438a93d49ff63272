"""Masks against 0/1 pictures, rows from the top are queries; score rules against formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import masks
from flexdecode.evaluate import evaluate as graph_value
from flexdecode.trace import trace

CHUNK_PICTURE = """
    100000
    110000
    111000
    000100
    000110
    000111
"""


def evaluate(mask: Any, Lq: int, Lkv: int, *, q_offset: int = 0, b: int = 0, h: int = 0) -> Tensor:
    q_idx = q_offset + torch.arange(Lq)[:, None]
    kv_idx = torch.arange(Lkv)[None, :]
    allowed = mask(torch.tensor(b), torch.tensor(h), q_idx, kv_idx)
    assert allowed.dtype == torch.bool
    return allowed.expand(Lq, Lkv)


def assert_picture(mask: Any, picture: str, **call: int) -> None:
    rows = picture.split()
    found = evaluate(mask, len(rows), len(rows[0]), **call)
    assert ["".join(str(int(x)) for x in row) for row in found.tolist()] == rows


def test_causal() -> None:
    assert_picture(masks.causal, "1000 1100 1110 1111")


def test_causal_in_decode_sees_the_past_and_itself() -> None:
    assert_picture(masks.causal, "1111000 1111100", q_offset=3)


def test_bidirectional() -> None:
    assert_picture(masks.bidirectional, "1111 1111")


def test_sliding_window() -> None:
    assert_picture(masks.sliding_window(1), "1000 0100 0010 0001")
    assert_picture(masks.sliding_window(2), "1000 1100 0110 0011")
    assert_picture(masks.sliding_window(9), "1000 1100 1110 1111")


def test_sliding_window_of_each_sequence() -> None:
    window = masks.sliding_window(torch.tensor([1, 3]))
    assert_picture(window, "00010", q_offset=3, b=0)
    assert_picture(window, "01110", q_offset=3, b=1)


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, "len", "len+1"])
def test_fc10_last_row_sees_exactly_window_keys(length: int, window: int | str) -> None:
    width = {"len": length, "len+1": length + 1}.get(str(window), window)
    assert isinstance(width, int)
    row = evaluate(masks.sliding_window(width), 1, length, q_offset=length - 1)[0]
    keys = row.nonzero().flatten()
    assert keys.tolist() == list(range(max(0, length - width), length))
    assert len(keys) == min(width, length)


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 300, 301])
def test_fc10_decode_row_equals_prefill_row(window: int) -> None:
    mask = masks.sliding_window(window)
    prefill = evaluate(mask, 300, 300)
    for row in (0, 1, 127, 128, 299):
        assert torch.equal(evaluate(mask, 1, 300, q_offset=row)[0], prefill[row])


def test_symmetric_window() -> None:
    assert_picture(masks.symmetric_window(2), "1100 1110 0111 0011")


def test_sink_window() -> None:
    assert_picture(masks.sink_window(1, 2), "10000 11000 11100 10110 10011")
    assert_picture(masks.sink_window(0, 2), "10000 11000 01100 00110 00011")


def test_prefix_lm() -> None:
    assert_picture(masks.prefix_lm(2), "1100 1100 1110 1111")
    assert_picture(masks.prefix_lm(0), "1000 1100 1110 1111")


def test_prefix_lm_of_each_sequence() -> None:
    mask = masks.prefix_lm(torch.tensor([0, 3]))
    assert_picture(mask, "1000 1100 1110", b=0)
    assert_picture(mask, "1110 1110 1110", b=1)


@pytest.mark.parametrize(
    "prefix", [2, torch.tensor(2), torch.tensor([2])], ids=["int", "[]", "[1]"]
)
def test_one_number_serves_every_sequence(prefix: int | Tensor) -> None:
    for b in (0, 1, 5):
        assert_picture(masks.prefix_lm(prefix), "1100 1100 1110 1111", b=b)


def test_a_length_changed_in_place_is_seen() -> None:
    for length in (torch.tensor(1), torch.tensor([1]), torch.tensor([1, 1])):
        mask = masks.right_padding(length)
        assert_picture(mask, "1000")
        length.fill_(3)
        assert_picture(mask, "1110")


def test_dilated() -> None:
    assert_picture(masks.dilated(2), "10000 01000 10100 01010 10101")
    assert_picture(masks.dilated(2, window=2), "10000 01000 10100 01010 00101")
    assert_picture(masks.dilated(1), "1000 1100 1110 1111")


def test_chunked() -> None:
    assert_picture(masks.chunked(3), CHUNK_PICTURE)


def test_documents() -> None:
    ids = torch.tensor([0, 0, 1, 1, 0])
    assert_picture(masks.documents(ids), "11001 11001 00110 00110 11001")
    assert_picture(masks.causal_documents(ids), "10000 11000 00100 00110 11001")


def test_documents_of_each_sequence() -> None:
    mask = masks.documents(torch.tensor([[0, 0, 1], [0, 1, 1]]))
    assert_picture(mask, "110 110 001", b=0)
    assert_picture(mask, "100 011 011", b=1)


@pytest.mark.parametrize("start", [0, 3, 17, 130])
def test_fc12_left_padding_leaves_the_prompt(start: int) -> None:
    mask = masks.causal & masks.left_padding(torch.tensor([0, start]))
    row = evaluate(mask, 1, 200, q_offset=150, b=1)[0]
    assert row.nonzero().flatten().tolist() == list(range(start, 151))


def test_padding() -> None:
    assert_picture(masks.left_padding(1), "0111 0111")
    assert_picture(masks.right_padding(3), "1110 1110")


def test_fc22_tree_of_seven_nodes() -> None:
    # 0 -> 1, 2; 1 -> 3, 4; 2 -> 5; 5 -> 6, behind a prefix of three tokens.
    ancestors = masks.create_ancestors([-1, 0, 0, 1, 1, 2, 5])
    picture = """
        1111000000
        1111100000
        1111010000
        1111101000
        1111100100
        1111010010
        1111010011
    """
    assert_picture(masks.tree(ancestors, 3), picture, q_offset=3)
    assert_picture(masks.tree(ancestors, torch.tensor([9, 3])), picture, q_offset=3, b=1)


def test_tree_sees_nothing_behind_itself() -> None:
    mask = masks.tree(masks.create_ancestors([-1, 0]), prefix=1)
    assert_picture(mask, "11000 11100", q_offset=1)


def test_tree_of_each_sequence() -> None:
    chain = masks.create_ancestors([-1, 0, 1])
    fork = masks.create_ancestors([-1, -1, 0])
    mask = masks.tree(torch.stack([chain, fork]), torch.tensor([1, 2]))
    assert_picture(mask, "11000 11100 11110", q_offset=1, b=0)
    assert_picture(mask, "11100 11010 11101", q_offset=2, b=1)


def test_create_ancestors_of_nothing_is_empty() -> None:
    assert masks.create_ancestors([]).shape == (0, 0)


def test_selected_blocks() -> None:
    selected = torch.tensor([[[1, 0, 1], [0, 1, 0]], [[0, 0, 1], [0, 0, 0]]], dtype=torch.bool)
    mask = masks.selected_blocks(selected, 2)
    assert_picture(mask, "110011", b=0, h=0)
    assert_picture(mask, "001100", b=0, h=1)
    assert_picture(mask, "000011", b=1, h=0)
    assert_picture(mask, "000000", b=1, h=1)


def test_selected_blocks_of_key_heads() -> None:
    selected = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.bool)
    mask = masks.selected_blocks(selected, 3, group_size=4)
    for h in range(8):
        assert_picture(mask, "111000" if h < 4 else "000111", b=7, h=h)


def test_selected_blocks_shared_by_heads() -> None:
    selected = torch.tensor([[[1, 0]], [[0, 1]]], dtype=torch.bool)
    mask = masks.selected_blocks(selected, 2)
    assert_picture(mask, "1100", b=0, h=5)
    assert_picture(mask, "0011", b=1, h=5)


def test_per_head() -> None:
    mask = masks.per_head(torch.tensor([1, 0, 2]), masks.sliding_window(1), masks.causal)
    assert_picture(mask, "1000 1100 1110 1111", h=0)
    assert_picture(mask, "1000 0100 0010 0001", h=1)
    assert_picture(mask, "0000 0000 0000 0000", h=2)


def test_masks_combine_and_keep_their_names() -> None:
    mask = masks.causal & ~masks.sliding_window(2) | masks.right_padding(1)
    assert_picture(mask, "1000 1000 1000 1100")
    assert mask.__name__ == "causal_and_not_sliding_window_or_right_padding"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.sliding_window(0), ValueError, "window: expected at least 1, got 0"),
        (lambda: masks.sliding_window(1.5), TypeError, "window: expected an int, got float"),
        (lambda: masks.symmetric_window(-1), ValueError, "window: expected at least 1"),
        (lambda: masks.sink_window(-1, 2), ValueError, "sinks: expected at least 0"),
        (lambda: masks.prefix_lm(torch.ones(2)), TypeError, "prefix: expected an integer tensor"),
        (lambda: masks.prefix_lm(torch.ones(2, 2, dtype=torch.int64)), ValueError, r"\[2, 2\]"),
        (lambda: masks.dilated(0), ValueError, "dilation: expected at least 1"),
        (lambda: masks.chunked(True), TypeError, "size: expected an int, got bool"),
        (lambda: masks.documents(torch.zeros(3)), TypeError, "ids: expected an integer tensor"),
        (lambda: masks.documents(torch.tensor(3)), ValueError, r"ids: expected shape \[N\]"),
        (lambda: masks.documents([0, 1]), TypeError, "ids: expected an integer tensor, got list"),
        (lambda: masks.tree(torch.ones(2, 2), 0), TypeError, "ancestors: expected a bool tensor"),
        (lambda: masks.tree(torch.ones(2, 3).bool(), 0), ValueError, r"got \[2, 3\]"),
        (lambda: masks.create_ancestors([0]), ValueError, "parent of token 0"),
        (lambda: masks.selected_blocks(torch.ones(1, 1, 1), 2), TypeError, "selected: expected"),
        (lambda: masks.selected_blocks(torch.ones(2).bool(), 2), ValueError, "selected: expected"),
        (lambda: masks.per_head(torch.ones(2), masks.causal), TypeError, "choice: expected"),
        (lambda: masks.alibi(0), ValueError, "slopes: expected at least 1 head"),
        (lambda: masks.alibi("8"), TypeError, "slopes: expected an int or a tensor, got str"),
        (lambda: masks.softcap(0.0), ValueError, "cap: expected a positive number"),
        (lambda: masks.softcap(math.nan), ValueError, "cap: expected a positive number"),
        (lambda: masks.relative_bias(torch.ones(1, 2)), ValueError, "table: expected more buckets"),
        (
            lambda: masks.relative_bias(torch.ones(32, 2), max_distance=16),
            ValueError,
            "max_distance: expected more than 16, got 16",
        ),
    ],
)
def test_bad_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def score(mod: Any, *, q: int, Lkv: int, h: int) -> Tensor:
    out: Tensor = mod(
        torch.zeros(1, Lkv),
        torch.tensor(0),
        torch.tensor(h),
        torch.tensor([[q]]),
        torch.arange(Lkv)[None],
    )
    return out[0]


def paper_slopes(n: int) -> list[float]:
    """The recursion of the authors' own code."""

    def of_power_of_two(m: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(m) - 3)))
        return [start * start**i for i in range(m)]

    if math.log2(n).is_integer():
        return of_power_of_two(n)
    m = 2 ** math.floor(math.log2(n))
    return of_power_of_two(m) + paper_slopes(2 * m)[0::2][: n - m]


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20, 32, 71])
def test_fc46_alibi_slopes_and_sign(heads: int) -> None:
    slopes = torch.tensor(paper_slopes(heads))
    for mod in (masks.alibi(heads), masks.alibi(slopes)):
        for h in range(heads):
            bias = score(mod, q=5, Lkv=6, h=h)
            assert (bias <= 0).all()
            assert bias[5] == 0
            torch.testing.assert_close(bias, slopes[h] * torch.arange(-5.0, 1.0))


def test_fc42_softcap_is_in_natural_units() -> None:
    x = torch.tensor([-1000.0, -1.0, 0.0, 1.0, 1000.0])
    torch.testing.assert_close(masks.softcap(30)(x, 0, 0, 0, 0), 30 * torch.tanh(x / 30))


def t5_bucket(relative: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """Bucket of key minus query, as the paper's code computes it, a number at a time."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    growth = math.log(distance / exact) / math.log(max_distance / exact)
    return bucket + min(exact + int(growth * (num_buckets - exact)), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_bias_follows_the_buckets_of_t5(bidirectional: bool) -> None:
    table = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    mod = masks.relative_bias(table, bidirectional=bidirectional)
    for q in (0, 150, 299):
        buckets = [t5_bucket(kv - q, bidirectional, 32, 128) for kv in range(300)]
        assert torch.equal(score(mod, q=q, Lkv=300, h=2), table[buckets, 2])


def test_relative_bias_changed_in_place_is_seen() -> None:
    table = torch.zeros(32, 1)
    mod = masks.relative_bias(table)
    table.fill_(2.0)
    assert (score(mod, q=3, Lkv=4, h=0) == 2.0).all()


SELECTED = torch.rand(2, 2, 8, generator=torch.Generator().manual_seed(0)) > 0.5
IDS = torch.randint(0, 3, (2, 24), generator=torch.Generator().manual_seed(0))
CHOICE = torch.tensor([0, 1, 0, 2])
TREE = masks.create_ancestors([-1, 0, 0, 1])
MASKS = [
    masks.causal,
    masks.bidirectional,
    masks.sliding_window(5),
    masks.sliding_window(torch.tensor([3, 7])),
    masks.sliding_window(torch.tensor([4])),
    masks.symmetric_window(4),
    masks.sink_window(2, 4),
    masks.prefix_lm(5),
    masks.prefix_lm(torch.tensor([5, 2])),
    masks.dilated(3),
    masks.dilated(3, window=2),
    masks.chunked(5),
    masks.documents(IDS[0]),
    masks.causal_documents(IDS),
    masks.left_padding(torch.tensor([0, 3])),
    masks.right_padding(9),
    masks.tree(TREE, 7),
    masks.tree(torch.stack([TREE, TREE.t()]), torch.tensor([7, 3])),
    masks.selected_blocks(SELECTED, 3, group_size=2),
    masks.selected_blocks(SELECTED[:1, :1], 3),
    masks.per_head(CHOICE, masks.causal, masks.sliding_window(2)),
    masks.causal & ~masks.sink_window(1, 3) | masks.right_padding(2),
]
SCORES = [
    masks.alibi(12),
    masks.alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    masks.softcap(30),
    masks.relative_bias(torch.randn(32, 4)),
    masks.relative_bias(torch.randn(32, 4), bidirectional=True),
]


def indices() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    return b, h, torch.arange(24)[:, None], torch.arange(24)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_traced_mask_equals_eager(mask: Any) -> None:
    found = graph_value(trace(mask, "mask"), *indices())
    assert torch.equal(found.expand(2, 4, 24, 24), mask(*indices()).expand(2, 4, 24, 24))


@pytest.mark.parametrize("mod", SCORES, ids=lambda mod: mod.__name__)
def test_traced_score_rule_equals_eager(mod: Any) -> None:
    scores = torch.randn(2, 4, 24, 24)
    found = graph_value(trace(mod, "score"), *indices(), scores)
    torch.testing.assert_close(found.expand_as(scores), mod(scores, *indices()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (masks.sliding_window(1), masks.sliding_window(4096)),
        (masks.sink_window(0, 1), masks.sink_window(16, 2)),
        (masks.tree(TREE, 0), masks.tree(TREE[:1, :1], 500)),
    ],
    ids=["sliding_window", "sink_window", "tree"],
)
def test_fc58_another_number_is_the_same_kernel(first: Any, second: Any) -> None:
    assert trace(first, "mask").graph.key == trace(second, "mask").graph.key


def test_fc58_another_number_is_the_same_score_rule() -> None:
    for first, second in ((masks.alibi(8), masks.alibi(71)), (masks.softcap(1), masks.softcap(50))):
        assert trace(first, "score").graph.key == trace(second, "score").graph.key
