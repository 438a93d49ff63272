"""Masks against 0/1 pictures, rows from the top are queries, and against loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import masks

CHUNK_PICTURE = """
    100000
    110000
    111000
    000100
    000110
    000111
"""


IDS = torch.tensor([[0, 0, 1], [0, 1, 1]])


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
    mask = masks.documents(IDS)
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


def test_global_window() -> None:
    assert_picture(masks.global_window(1, 2), "11111 11100 11110 10111 10011")
    assert_picture(masks.global_window(0, 1), "100 010 001")


def test_strided() -> None:
    assert_picture(masks.strided(3), "10000 11000 11100 11110 01111")
    assert_picture(masks.strided(3, window=2), "1001011", q_offset=6)


def test_block_diffusion() -> None:
    assert_picture(masks.block_diffusion(2), "1100 1100 1111 1111")
    assert_picture(masks.block_diffusion(3, 1), "10000 11110 11110 11110 11111")


def test_block_diffusion_of_each_sequence() -> None:
    mask = masks.block_diffusion(2, torch.tensor([0, 3]))
    assert_picture(mask, "111100 111100", q_offset=2, b=0)
    assert_picture(mask, "111110 111110", q_offset=3, b=1)


def test_document_ids() -> None:
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert masks.document_ids(offsets, 7).tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert masks.document_ids(offsets, 0).tolist() == []


def test_shared_prefix() -> None:
    mask = masks.shared_prefix(2, torch.tensor([0, 0, 5, 5, 7, 7]))
    assert_picture(mask, "100000 110000 111000 111100 110010 110011")


def test_image_cross_attention() -> None:
    mask = masks.image_cross_attention(torch.tensor([[-1, 0, 1, 1], [0, 0, 0, -1]]), 3)
    assert_picture(mask, "000000 111000 000111 000111", b=0)
    assert_picture(mask, "111000 111000 111000 000000", b=1)


def test_images_in_text() -> None:
    mask = masks.images_in_text(torch.tensor([-1, 0, 0, -1, 1, 1]))
    assert_picture(mask, "100000 111000 111000 111100 111111 111111")


def test_create_ancestors_of_tensors() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 2, 3, 4, 5]])
    expected = [masks.create_ancestors(row.tolist()) for row in parents]
    assert torch.equal(masks.create_ancestors(parents), torch.stack(expected))
    assert torch.equal(masks.create_ancestors(parents[0]), expected[0])


def test_create_parents_of_a_medusa_tree() -> None:
    paths = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0)]
    parents = masks.create_parents(paths)
    # Root; (0), (1); (0 0), (0 1), (1 0); (0 0 0).
    assert parents == [-1, 0, 0, 1, 1, 2, 3]
    mask = masks.tree(masks.create_ancestors(parents), 0)
    assert_picture(mask, "1000000 1100000 1010000 1101000 1100100 1010010 1101001")


def test_a_tree_changed_in_place_is_seen() -> None:
    ancestors = masks.create_ancestors([-1, 0])
    mask = masks.tree(ancestors, 1)
    assert_picture(mask, "110 111", q_offset=1)
    ancestors.copy_(masks.create_ancestors([-1, -1]))
    assert_picture(mask, "110 101", q_offset=1)


def grid_neighbors(shape: tuple[int, ...], window: tuple[int, ...]) -> Tensor:
    """Whether each cell sees each other one, worked out cell by cell."""
    cells = list(itertools.product(*map(range, shape)))
    seen = torch.zeros(len(cells), len(cells), dtype=torch.bool)
    for i, j in itertools.product(range(len(cells)), repeat=2):
        firsts = [
            min(max(x - w // 2, 0), n - w) for x, w, n in zip(cells[i], window, shape, strict=True)
        ]
        seen[i, j] = all(f <= y < f + w for f, y, w in zip(firsts, cells[j], window, strict=True))
    return seen


@pytest.mark.parametrize(
    ("shape", "window"),
    [((7,), (3,)), ((7,), (4,)), ((5, 4), (3, 1)), ((4, 5), (2, 5)), ((3, 3, 4), (1, 3, 3))],
)
def test_neighborhood(shape: tuple[int, ...], window: tuple[int, ...]) -> None:
    expected = grid_neighbors(shape, window)
    n = len(expected)
    assert (expected.sum(1) == torch.tensor(window).prod()).all()
    assert torch.equal(evaluate(masks.neighborhood(shape, window), n, n), expected)
    # Behind three other tokens, and in front of two.
    found = evaluate(masks.neighborhood(shape, window, start=3), n + 5, n + 5)
    assert torch.equal(found, torch.nn.functional.pad(expected, (3, 2, 3, 2)))


@pytest.mark.parametrize(
    ("shape", "tile", "window"),
    [((8,), (2,), (3,)), ((4, 6), (2, 2), (1, 3)), ((2, 4, 4), (1, 2, 2), (2, 1, 2))],
)
def test_sliding_tile(shape: Any, tile: Any, window: Any) -> None:
    tiles = tuple(n // side for n, side in zip(shape, tile, strict=True))
    of_tiles = grid_neighbors(tiles, window)
    cells = list(itertools.product(*map(range, shape)))
    number = {t: i for i, t in enumerate(itertools.product(*map(range, tiles)))}
    own = [number[tuple(x // s for x, s in zip(cell, tile, strict=True))] for cell in cells]
    order = masks.tile_order(shape, tile)
    sorted_tiles = torch.tensor(own)[order]
    assert sorted_tiles.tolist() == sorted(own)
    found = evaluate(masks.sliding_tile(shape, tile, window), len(cells), len(cells))
    assert torch.equal(found, of_tiles[sorted_tiles][:, sorted_tiles])


def test_longformer() -> None:
    mask = masks.longformer(torch.tensor([1, 0, 0, 0, 0, 0]).bool(), 3)
    assert_picture(mask, "111111 111000 111100 101110 100111 100011")
    mask = masks.longformer(torch.zeros(2, 6).bool(), 2, dilation=2)
    assert_picture(mask, "101000 010100 101010 010101 001010 000101", b=1)


@pytest.mark.parametrize("length", [None, 40, torch.tensor([40, 23])], ids=str)
def test_big_bird(length: Any) -> None:
    mask = masks.big_bird(4, window=3, num_global=1, num_random=2, length=length)
    for b, h in ((0, 0), (1, 3)):
        found = evaluate(mask, 40, 40, b=b, h=h)
        blocks = found.reshape(10, 4, 10, 4)
        assert torch.equal(blocks.all((1, 3)), blocks.any((1, 3)))  # whole blocks
        seen = blocks[:, 0, :, 0]
        i, j = torch.arange(10)[:, None], torch.arange(10)
        certain = (abs(i - j) <= 1) | (i < 1) | (j < 1)
        assert (seen | ~certain).all()
        drawn = seen & ~certain
        assert (drawn.sum(1) <= 2).all() and drawn.any()
        among = {"None": i, "40": torch.tensor(9)}.get(str(length), torch.tensor([9, 5])[b])
        assert not (drawn & (j > among)).any()
    assert not torch.equal(evaluate(mask, 40, 40, h=0), evaluate(mask, 40, 40, h=1))


def test_random_sparse_keeps_its_share() -> None:
    for density in (0.0, 0.1, 0.5, 1.0):
        found = evaluate(masks.random_sparse(density, block_size=1), 300, 300, h=2)
        assert abs(found.float().mean().item() - density) < 0.01
    blocks = evaluate(masks.random_sparse(0.5, block_size=5), 30, 30).reshape(6, 5, 6, 5)
    assert torch.equal(blocks.all((1, 3)), blocks.any((1, 3)))


def test_random_sparse_of_heads_and_seeds_is_independent() -> None:
    def draw(seed: int, h: int) -> Tensor:
        return evaluate(masks.random_sparse(0.5, block_size=1, seed=seed), 200, 200, h=h)

    first = draw(0, 0)
    assert torch.equal(first, draw(0, 0))
    for other in (draw(0, 1), draw(1, 0), first.t(), first.roll(1, 0), first.roll(1, 1)):
        assert abs((first == other).float().mean().item() - 0.5) < 0.02


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
        (lambda: masks.global_window(-1, 2), ValueError, "num_global: expected at least 0"),
        (lambda: masks.strided(3, window=0), ValueError, "window: expected at least 1"),
        (lambda: masks.block_diffusion(0), ValueError, "size: expected at least 1"),
        (lambda: masks.document_ids(torch.ones(3), 2), TypeError, "offsets: expected an integer"),
        (lambda: masks.document_ids(IDS, 2), ValueError, r"offsets: expected shape \[N\]"),
        (lambda: masks.shared_prefix(-1, IDS), ValueError, "prefix: expected at least 0"),
        (lambda: masks.images_in_text(torch.ones(3)), TypeError, "image: expected an integer"),
        (lambda: masks.image_cross_attention(IDS, 0), ValueError, "tokens_per_image: expected"),
        (lambda: masks.create_ancestors(torch.ones(3)), TypeError, "parents: expected an integer"),
        (lambda: masks.create_parents([()]), ValueError, r"paths: .* got \(\) again"),
        (lambda: masks.create_parents([(0,), (0,)]), ValueError, r"got \(0,\) again"),
        (lambda: masks.create_parents([(1, 0)]), ValueError, r"the parent of \(1, 0\), got none"),
        (lambda: masks.neighborhood((), ()), ValueError, "shape: expected 1 to 3 sizes, got 0"),
        (lambda: masks.neighborhood((3,), (1, 1)), ValueError, "window: expected 1 sizes"),
        (lambda: masks.neighborhood((3, 4), (1, 5)), ValueError, r"window: .* got \[1, 5\]"),
        (lambda: masks.sliding_tile((6,), (4,), (1,)), ValueError, "tile: expected divisors"),
        (lambda: masks.sliding_tile((6,), (2,), (4,)), ValueError, "window: expected at most"),
        (lambda: masks.tile_order((6,), (7,)), ValueError, "tile: expected at most"),
        (lambda: masks.longformer(IDS, 3), TypeError, "is_global: expected a bool tensor"),
        (lambda: masks.longformer(IDS[None] > 0, 3), ValueError, "is_global: expected shape"),
        (lambda: masks.big_bird(window=0), ValueError, "window: expected at least 1"),
        (lambda: masks.random_sparse(1.5), ValueError, "density: expected a number from 0 to 1"),
        (lambda: masks.random_sparse("1"), TypeError, "density: expected a number, got str"),
    ],
)
def test_bad_arguments_are_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
