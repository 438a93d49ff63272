"""`BlockMask`: its kinds, slices, algebra and checks, seen through what a call resolves it to."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

sys.path.insert(0, str(Path(__file__).parent))
from mask_oracle import dense_mask

from flexdecode import BlockMask, create_block_mask
from flexdecode.api import attention
from flexdecode.evaluate import evaluate
from flexdecode.mask_resolution import ResolvedMask
from flexdecode.mods import mask_mod
from flexdecode.problem import Problem
from flexdecode.tables import Extent, table_states

CPU = torch.device("cpu")
WINDOWS = torch.tensor([16, 32, 48, 64, 80, 96, 112, 128])
LENGTHS = torch.tensor([1, 64, 129, 300])


@mask_mod
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOWS[h])


def by_batch(b, h, q_idx, kv_idx):
    return kv_idx < LENGTHS[b]


def by_both(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < WINDOWS[h]) & (kv_idx < LENGTHS[b])


def problem(
    Lq: int,
    Lkv: int,
    B: int = 1,
    Hq: int = 1,
    Hkv: int = 1,
    kv_len: int | Tensor | None = None,
    q_offset: int | Tensor | None = None,
) -> Problem:
    kv_len = Lkv if kv_len is None else kv_len
    if q_offset is None:
        q_offset = (kv_len.clamp(0, Lkv) if isinstance(kv_len, Tensor) else kv_len) - Lq
    sizes = (B, Hq, Hkv, Hq // Hkv, Lq, Lkv, 16, 16, B)
    return Problem(*sizes, 0.25, torch.float32, CPU, kv_len, q_offset)


def allowed(resolved: ResolvedMask, call: Problem) -> Tensor:
    """What a backend makes of a resolved mask: [B, Hq, Lq, Lkv], bool."""
    offset = torch.as_tensor(resolved.q_offset).reshape(-1, 1, 1, 1)
    b = torch.arange(call.B).view(-1, 1, 1, 1)
    h = torch.arange(call.Hq).view(1, -1, 1, 1)
    i, kv_idx = torch.arange(call.Lq).view(1, 1, -1, 1), torch.arange(call.Lkv)
    shape = (call.B, call.Hq, call.Lq, call.Lkv)
    rule = torch.ones(shape, dtype=torch.bool)
    if resolved.mask is not None:
        rule = evaluate(resolved.mask, b, h, i + offset, kv_idx).expand(shape)
    states = table_states(resolved.tables)
    lists = states.shape[1]
    if lists not in (1, call.Hq):
        assert lists == call.Hkv
        states = states.repeat_interleave(call.G, dim=1)
    rows, columns = resolved.tables.BLOCK_SIZE
    states = states.repeat_interleave(rows, 2)[:, :, : call.Lq]
    states = states.repeat_interleave(columns, 3)[..., : call.Lkv]
    spread = torch.zeros((states.shape[0], states.shape[1], call.Lq, call.Lkv), dtype=torch.uint8)
    spread[..., : states.shape[-1]] = states
    inside = kv_idx < call.kv_len_rows().view(-1, 1, 1, 1)
    return ((spread == 2) | ((spread == 1) & rule)).expand(shape) & inside


def expected(mask, call: Problem, q_offset: int | Tensor | None = None) -> Tensor:
    offset = call.q_offset if q_offset is None else q_offset
    what = Extent(call.B, call.Hq, call.Lq, call.Lkv, call.kv_len, offset, (128, 128), CPU)
    return dense_mask(mask, what)


def check(mask: BlockMask, call: Problem, rule, q_offset=None, given: bool = False) -> ResolvedMask:
    resolved = mask.resolve(call, given)
    assert torch.equal(allowed(resolved, call), expected(rule, call, q_offset))
    assert resolved.tables.num_kv_blocks >= 0
    return resolved


# ---- lazy and sized ----


def test_lazy_masks_follow_every_call():
    mask = create_block_mask(by_both)
    assert mask.kind == "lazy" and mask.kv_num_blocks is None
    for kv_len in (None, 120, LENGTHS):
        for Lq in (1, 5):
            resolved = check(mask, problem(Lq, 300, 4, 8, 2, kv_len), by_both)
            assert resolved.tables.exact
            assert resolved.tables.kv_num_blocks.shape[:2] == (4, 8)


def test_fc01_the_newest_query_sits_on_the_newest_key():
    call = problem(1, 2048, kv_len=100)
    resolved = check(create_block_mask(causal), call, causal)
    assert allowed(resolved, call).sum() == 100
    first = create_block_mask(causal, Q_LEN=1, KV_LEN=2048, q_offset=0, device="cpu")
    assert allowed(first.resolve(call, False), call).sum() == 1


def test_fc02_offset_as_int_and_tensors():
    for offset in (7, torch.tensor(7), torch.tensor([7])):
        mask = create_block_mask(causal, Q_LEN=4, KV_LEN=300, q_offset=offset, device="cpu")
        assert mask.kind == "fixed"
        check(mask, problem(4, 300), causal, 7)
        assert mask.shape == (1, 1, 4, 300)
        assert int(mask.kv_num_blocks) == 1


def test_lazy_captures_are_read_at_every_call():
    limit = torch.tensor([5])

    def below(b, h, q_idx, kv_idx):
        return kv_idx < limit[0]

    mask, call = create_block_mask(below), problem(1, 300)
    assert allowed(mask.resolve(call, False), call).sum() == 5
    limit.fill_(200)
    assert allowed(mask.resolve(call, False), call).sum() == 200


def test_sized_masks_keep_their_tables_for_the_same_lengths_only():
    mask = create_block_mask(causal, Q_LEN=4, KV_LEN=300, device="cpu")
    assert mask.kind == "sized"
    same = check(mask, problem(4, 300), causal)
    assert same.tables is mask.tables
    # Room for more keys than are valid changes nothing.
    assert check(mask, problem(4, 512, kv_len=300), causal).tables is mask.tables
    for call in (
        problem(4, 301),
        problem(5, 300),
        problem(4, 300, kv_len=200),
        problem(4, 300, kv_len=torch.tensor([300])),
        problem(4, 300, q_offset=torch.tensor([296])),
    ):
        assert check(mask, call, causal).tables is not mask.tables
    moved = problem(4, 300, q_offset=0)
    assert check(mask, moved, causal, 0, given=True).tables is not mask.tables


def test_sized_masks_inherit_their_kv_len():
    mask = create_block_mask(causal, Q_LEN=1, KV_LEN=300, kv_len=130, device="cpu")
    assert mask.inherit("kv_len", None) == 130
    assert mask.inherit("kv_len", 7) == 7
    assert mask.to_dense().tolist() == [[[[1, 1, 0]]]]
    assert check(mask, problem(1, 300, kv_len=130), causal).tables is mask.tables


@pytest.mark.parametrize("pair", [(256, 2), (2009, 2000), (128, 129), (129, 128)])
def test_fc05_sized_masks_fit_other_lengths(pair):
    declared, real = pair
    mask = create_block_mask(causal, Q_LEN=declared, KV_LEN=declared, device="cpu")
    check(mask, problem(min(real, 200), real), causal)


def test_fc05_fixed_masks_are_clipped_or_refused():
    for declared, real in ((256, 2), (2009, 2000), (129, 128)):
        mask = create_block_mask(window, Q_LEN=declared, KV_LEN=declared, q_offset=0, device="cpu")
        check(mask, problem(min(real, 200), real), window, 0)
    short = create_block_mask(window, Q_LEN=1, KV_LEN=128, q_offset=5, device="cpu")
    with pytest.raises(ValueError, match=r"kv_len = 129 keys.*KV_LEN = 128"):
        short.resolve(problem(1, 129), False)
    with pytest.raises(ValueError, match=r"at least 2 query rows.*Q_LEN = 1"):
        short.resolve(problem(2, 128), False)
    # Room beyond the mask is fine as long as no key is valid there.
    check(short, problem(1, 300, kv_len=128), window, 5)


def test_fc13_a_mask_of_one_row_that_needs_more():
    call = problem(1, 300, 4, 8, 2)
    one = create_block_mask(by_batch, Q_LEN=1, KV_LEN=300, device="cpu")
    with pytest.raises(ValueError, match=r"depends on b.*B = 4.*\(1, 1\) against \(4, 8\)"):
        one.resolve(call, False)
    one = create_block_mask(by_head, B=4, Q_LEN=1, KV_LEN=300, device="cpu")
    with pytest.raises(ValueError, match=r"depends on h.*H = 8"):
        one.resolve(call, False)
    one = create_block_mask(by_batch, B=1)
    with pytest.raises(ValueError, match="depends on b"):
        one.resolve(call, False)
    full = create_block_mask(by_both, B=4, H=8, Q_LEN=1, KV_LEN=300, device="cpu")
    check(full, call, by_both)
    check(create_block_mask(by_batch), problem(1, 300, 4), by_batch)


@pytest.mark.parametrize("size", [(3, 1), (1, 3), (4, 2), (2, 4)])
def test_fc14_batch_and_heads_that_disagree(size):
    call = problem(1, 8, 2, 2, 2)
    fixed = create_block_mask(causal, *size, 1, 8, q_offset=7, device="cpu")
    for mask in (create_block_mask(causal, *size), fixed):
        with pytest.raises(ValueError, match=rf"batch 2, 2 query heads.*\({size[0]}, {size[1]}\)"):
            mask.resolve(call, False)


def test_fields_are_as_wide_as_asked():
    mask = create_block_mask(causal, 4, 8, 300, 300, device="cpu")
    assert mask.kv_num_blocks.shape == (4, 8, 3)
    assert mask.full_kv_indices.shape == (4, 8, 3, 3)
    assert mask.tables.kv_num_blocks.shape == (1, 1, 3), "stored once"


def test_agrees_with_torch_where_positions_do():
    """Same offset (0), lengths that fill their blocks: torch's own tables."""
    ours = create_block_mask(window, 2, 3, 256, 512, device="cpu", q_offset=0)
    theirs = torch_flex.create_block_mask(window, 2, 3, 256, 512, device="cpu")
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert ours.numel() == theirs.numel()
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert ours.sparsity() == pytest.approx(theirs.sparsity())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


def test_from_torch_starts_at_position_zero():
    theirs = torch_flex.create_block_mask(window, 1, 1, 200, 300, device="cpu")
    mask = BlockMask.from_torch(theirs)
    check(mask, problem(200, 300), window, 0)
    with pytest.raises(ValueError, match="q_offset: expected the block_mask's own 0, got 5"):
        mask.resolve(problem(200, 300, q_offset=5), True)
    with pytest.raises(ValueError, match="lost it"):
        BlockMask.from_torch(theirs[:, :, 0])
    everything = torch_flex.create_block_mask(torch_flex.noop_mask, 1, 1, 256, 256, device="cpu")
    assert BlockMask.from_torch(everything).mask_mod is None
    one = torch_flex.create_block_mask(by_batch, 1, 1, 1, 300, device="cpu")
    with pytest.raises(ValueError, match="depends on b"):
        BlockMask.from_torch(one).resolve(problem(1, 300, 4), False)


# ---- fixed ----


def test_fc08_tables_are_authoritative():
    one = torch.tensor([[[1]]])
    for indices in (one[..., None], torch.tensor([[[[1, 0]]]])):
        for rule in (None, lambda b, h, q_idx, kv_idx: kv_idx >= 0):
            mask = BlockMask.from_kv_blocks(one, indices, mask_mod=rule)
            call = problem(1, 256)
            found = allowed(mask.resolve(call, False), call)[0, 0, 0]
            assert not found[:128].any() and found[128:].all()


def test_from_kv_blocks_positions():
    one = torch.tensor([[[1]]])
    mask = BlockMask.from_kv_blocks(one, one[..., None], mask_mod=window)
    for kv_len in (256, 200, torch.tensor([200])):
        call = problem(1, 256, kv_len=kv_len)
        offset = int(torch.as_tensor(kv_len)) - 1
        assert int(torch.as_tensor(mask.resolve(call, False).q_offset)) == offset
    with pytest.raises(ValueError, match="q_offset"):
        mask.resolve(problem(1, 256, q_offset=3), True)
    mask.resolve(problem(1, 256, q_offset=255), True)
    own = BlockMask.from_kv_blocks(one, one[..., None], mask_mod=window, q_offset=3)
    assert own.resolve(problem(1, 256), False).q_offset == 3
    # Cut at the end, rows keep the positions that the mask's own lengths give them.
    square = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 0], [0, 1]]]]), seq_lengths=(256, 256)
    )
    assert square.resolve(problem(2, 2), False).q_offset == 0
    assert square.resolve(problem(256, 256), False).q_offset == 0


def test_from_kv_blocks_lists_of_any_order_and_width():
    counts = torch.tensor([[[2]], [[1]]])
    indices = torch.tensor([[[[9, 3]]], [[[0, 77]]]])
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(1, 10))
    assert mask.shape == (2, 1, 1, 100)
    assert mask.to_dense()[:, 0, 0].nonzero().tolist() == [[0, 3], [0, 9], [1, 0]]
    call = problem(1, 95, 2, kv_len=torch.tensor([95, 4]))
    found = allowed(mask.resolve(call, False), call)[:, 0, 0]
    assert found[0].nonzero().flatten().tolist() == [*range(30, 40), *range(90, 95)]
    assert found[1].nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_from_kv_blocks_lists_by_key_head():
    counts, indices = torch.ones(1, 2, 1), torch.tensor([[[[0]], [[1]]]])
    mask = BlockMask.from_kv_blocks(counts.int(), indices, mask_mod=by_head)
    call = problem(1, 256, 1, 8, 2)
    found = allowed(mask.resolve(call, False), call)
    rule = expected(by_head, call)
    assert torch.equal(found[:, :4, :, :128], rule[:, :4, :, :128])
    assert not found[:, :4, :, 128:].any() and not found[:, 4:, :, :128].any()


def test_from_kv_blocks_says_what_is_wrong():
    counts, indices = torch.tensor([[[1]]]), torch.tensor([[[[1, 0]]]])
    make = BlockMask.from_kv_blocks
    with pytest.raises(ValueError, match=r"kv_num_blocks: expected shape \[B, H, nQ\]"):
        make(counts[0], indices)
    with pytest.raises(ValueError, match="kv_indices: expected first dims"):
        make(counts, indices.expand(2, 1, 1, 2))
    with pytest.raises(TypeError, match=r"kv_indices: expected an integer tensor.*float32"):
        make(counts, indices.float())
    with pytest.raises(TypeError, match="kv_num_blocks: expected a Tensor, got list"):
        make([[[1]]], indices)
    with pytest.raises(TypeError, match="full_kv_indices: expected a Tensor, got NoneType"):
        make(counts, indices, counts)
    with pytest.raises(ValueError, match=r"counts in \[0, 2\].*got 3"):
        make(counts + 2, indices)
    with pytest.raises(ValueError, match="got -1"):
        make(counts, indices - 2)
    with pytest.raises(ValueError, match=r"numbers in \[0, 2\), got 5"):
        make(counts, indices + 4, seq_lengths=(1, 256))
    with pytest.raises(ValueError, match="each block once in a row, got 1 twice"):
        make(counts + 1, torch.ones_like(indices))
    with pytest.raises(ValueError, match="each block once in a row, got 1 twice"):
        make(counts, indices, counts, indices)
    with pytest.raises(ValueError, match="seq_lengths: expected 1 blocks of 128 queries"):
        make(counts, indices, seq_lengths=(129, 256))
    with pytest.raises(ValueError, match="BLOCK_SIZE"):
        make(counts, indices, BLOCK_SIZE=0)


def test_create_block_mask_says_what_is_wrong():
    with pytest.raises(TypeError, match="mask_mod: expected a function"):
        create_block_mask(torch.ones(3, 3))
    with pytest.raises(TypeError, match="got BlockMask"):
        create_block_mask(create_block_mask(causal))
    with pytest.raises(ValueError, match="Q_LEN, KV_LEN: expected both or neither"):
        create_block_mask(causal, Q_LEN=5)
    with pytest.raises(ValueError, match="kv_len: expected Q_LEN and KV_LEN"):
        create_block_mask(causal, kv_len=5)
    with pytest.raises(ValueError, match=r"kv_len: expected a value in \[0, KV_LEN = 300\]"):
        create_block_mask(causal, Q_LEN=1, KV_LEN=300, kv_len=301, device="cpu")
    with pytest.raises(TypeError, match="B: expected an int, got float"):
        create_block_mask(causal, B=1.0)
    with pytest.raises(ValueError, match="H: expected a size of at least 0"):
        create_block_mask(causal, H=-1)
    with pytest.raises(TypeError, match="q_offset: expected an int32 or int64 tensor"):
        create_block_mask(causal, Q_LEN=1, KV_LEN=300, q_offset=torch.tensor(1.0), device="cpu")
    with pytest.raises(ValueError, match=r"q_offset: .*shape \[2\], got shape \[3\]"):
        offset = torch.tensor([1, 2, 3])
        create_block_mask(causal, 2, Q_LEN=1, KV_LEN=300, q_offset=offset, device="cpu")


def test_create_block_mask_names_the_remedy():
    sizes = {"Q_LEN": 5, "KV_LEN": 300, "device": "cpu"}
    for changed, message in (
        ({"Q_LEN": -5}, "Q_LEN: expected a size of at least 0, got -5"),
        ({"KV_LEN": 1 << 31}, r"KV_LEN: expected at most 2\*\*30 tokens, got 2147483648"),
        ({"KV_LEN": 300.0}, "KV_LEN: expected an int, got float"),
        ({"BLOCK_SIZE": 0}, "BLOCK_SIZE: expected sizes of at least 1, got 0"),
        ({"BLOCK_SIZE": (128, -1)}, "BLOCK_SIZE: expected a size of at least 0, got -1"),
        ({"BLOCK_SIZE": 64.0}, "BLOCK_SIZE: expected an int, got float"),
        ({"BLOCK_SIZE": (1, 2, 3)}, r"BLOCK_SIZE: expected an int or \(q, kv\)"),
        ({"BLOCK_SIZE": 1 << 40}, r"BLOCK_SIZE: expected at most 2\*\*30 tokens"),
        ({"device": "tpu"}, "device: expected a torch.device or its name, like 'cpu' or 'cuda'"),
        ({"device": 3.5}, "device: expected a torch.device or its name, .*got 3.5"),
        ({"device": "cuda:99"}, "device: expected .*got 'cuda:99'"),
        ({"q_offset": 1 << 40}, r"q_offset: expected a value in \[-2\*\*30, 2\*\*30\]"),
        ({"q_offset": 0.5}, "q_offset: expected an int or an integer tensor, got float"),
        ({"q_offset": np.array(0.5)}, "q_offset: expected an int or an integer tensor, got nda"),
        ({"Q_LEN": np.array(4.5)}, "Q_LEN: expected an int, got ndarray"),
    ):
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            create_block_mask(causal, **(sizes | changed))
        assert "\n" not in str(raised.value)
    for rule, message in (
        (lambda b, h, q, k: (q - k).float(), "returned float32, expected bool .*: compare, or use"),
        (lambda b, h, q, k: q - k, "returned int64, expected bool"),
        (lambda b, h, q, k: LENGTHS > 3, r"returned a tensor of shape \[4\].*: index captured"),
        (lambda b, h, q, k: None, "returned NoneType, expected mask_mod"),
        (lambda b, h, q, k: k < LENGTHS[b].item(), r"\.item\(\).*: use it as it is"),
        (lambda q, k: q >= k, r"expected mask_mod\(b, h, q_idx, kv_idx\) -> bool, got"),
        (torch.ones(3, 3), r"got Tensor; a function can index it: lambda .*dense\[q_idx, kv_idx\]"),
    ):
        with pytest.raises(TypeError, match=message):
            create_block_mask(rule, **sizes)


def test_bind_names_the_remedy():
    sizes = {"batch": 2, "heads": 4, "q_len": 1, "kv_len": 5, "kv_capacity": 10}
    for changed, message in (
        *(({name: -1}, f"{name}: expected a size of at least 0, got -1") for name in sizes),
        *(({name: 1.5}, f"{name}: expected an int, got float") for name in sizes),
        ({"kv_len": 11}, "kv_len: expected at most kv_capacity = 10, got 11"),
        ({"kv_capacity": 1 << 31}, r"kv_capacity: expected at most 2\*\*30 tokens"),
        ({"device": "tpu"}, "device: expected a torch.device or its name"),
        ({"q_offset": 0.5}, "q_offset: expected an int or an integer tensor, got float"),
        ({"kv_len": torch.tensor([1.0, 2.0])}, "kv_len: expected an int32 or int64 tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            create_block_mask(causal).bind(**({"device": "cpu"} | sizes | changed))
        assert "\n" not in str(raised.value)
    bound = create_block_mask(causal).bind(**sizes, device="cpu")
    for value in (11, -1, 1.5, torch.tensor(3)):
        with pytest.raises((ValueError, TypeError), match="kv_len: expected"):
            bound.update(value)


def test_masks_have_no_truth_value():
    mask = create_block_mask(causal)
    with pytest.raises(TypeError, match="combine masks with"):
        bool(mask)
    with pytest.raises(TypeError, match="combine masks with"):
        assert mask and causal


def test_lazy_masks_have_no_picture():
    mask = create_block_mask(causal)
    assert mask.shape == (None, None, None, None)
    for ask in (mask.to_dense, mask.sparsity, mask.to_string, mask.numel, lambda: mask[0]):
        with pytest.raises(ValueError, match="lazy"):
            ask()
    assert "lazy" in str(mask)


def test_to_string():
    mask = create_block_mask(causal, 1, 2, 300, 300, device="cpu")
    triangle = "██    \n████  \n██████"
    assert mask.to_string() == f"(0, 0)\n{triangle}\n(0, 1)\n{triangle}"
    assert mask.to_string(grid_size=1, limit=1).startswith("(0, 0)\n░░\n...")
    assert "sized" in str(mask) and "██" in str(mask)


# ---- slices ----


@pytest.mark.parametrize("r", [0, 127, 128, 129, 299])
def test_fc03_a_slice_is_the_same_rows(r):
    mask = create_block_mask(window, Q_LEN=300, KV_LEN=300, device="cpu")
    whole = expected(window, problem(300, 300))
    i = r // 128
    part = mask[:, :, i]
    assert part.kind == "fixed" and part.q_offset == 128 * i
    rows = min(128, 300 - 128 * i)
    assert part.shape == (1, 1, rows, 300)
    call = problem(rows, 300)
    found = allowed(part.resolve(call, False), call)
    assert torch.equal(found[:, :, r - 128 * i], whole[:, :, r])


def indices_of(i: int) -> list:
    return [i, slice(i, i + 1), torch.tensor([i]), torch.tensor(i), [i], i - 4]


def test_fc04_int_slice_and_tensor_give_the_same_mask():
    """On every axis, and the dims stay."""
    mask = create_block_mask(by_both, 4, 4, 512, 300, device="cpu", q_offset=0)
    for axis in range(3):
        for i in range(4):
            for index in indices_of(i):
                cut = [slice(None)] * 3
                cut[axis] = index
                part = mask[tuple(cut)]
                sizes = [4, 4, 4]
                sizes[axis] = 1
                assert list(part.kv_num_blocks.shape) == sizes
                narrowed = mask.to_dense().narrow(axis, i, 1)
                assert torch.equal(part.to_dense(), narrowed)
                B, Hq, Lq = part.shape[:3]
                call = problem(Lq, 300, B, Hq, Hq)
                whole = expected(by_both, problem(512, 300, 4, 4, 4), 0)
                if axis == 2:
                    wanted = whole[:, :, 128 * i : 128 * i + Lq]
                else:
                    wanted = whole.narrow(axis, i, 1)
                assert torch.equal(allowed(part.resolve(call, False), call), wanted)


def test_slices_with_ranges_steps_and_picks():
    mask = create_block_mask(by_both, 4, 4, 500, 300, device="cpu")
    whole = expected(by_both, problem(500, 300, 4, 4, 4))
    part = mask[1:3, [3, 0], 1:]
    assert part.shape == (2, 2, 372, 300) and part.q_offset == 300 - 500 + 128
    call = problem(372, 300, 2, 2, 2)
    wanted = whole[1:3][:, [3, 0]][:, :, 128:]
    assert torch.equal(allowed(part.resolve(call, False), call), wanted)
    assert not part.resolve(call, False).scattered_rows

    rows = mask[:, :, torch.tensor([2, 0])]
    assert rows.shape == (4, 4, 256, 300)
    call = problem(256, 300, 4, 4, 4)
    resolved = rows.resolve(call, False)
    wanted = torch.cat([whole[:, :, 256:384], whole[:, :, :128]], dim=2)
    assert torch.equal(allowed(resolved, call), wanted)
    assert resolved.scattered_rows, "q_offset + i is not a position here"

    again = mask[1:][1:, 1:2]
    call = problem(500, 300, 2, 1, 1)
    assert torch.equal(allowed(again.resolve(call, False), call), whole[2:, 1:2])


def test_slices_keep_offsets_per_sequence():
    offsets = torch.tensor([0, 100, 200])
    mask = create_block_mask(window, 3, 1, 256, 500, device="cpu", q_offset=offsets)
    part = mask[1:, :, 1]
    assert part.q_offset.tolist() == [228, 328]
    check(part, problem(128, 500, 2), window, part.q_offset)
    by_length = create_block_mask(
        window, 3, 1, 256, 500, device="cpu", kv_len=torch.tensor([256, 300, 500])
    )
    assert by_length[:, :, 1].q_offset.tolist() == [128, 172, 372]


def test_slices_out_of_range():
    mask = create_block_mask(causal, 2, 1, 300, 300, device="cpu")
    with pytest.raises(IndexError, match="index 2: 3 is out of range for size 3"):
        mask[:, :, 3]
    with pytest.raises(IndexError, match="at most 3"):
        mask[0, 0, 0, 0]
    with pytest.raises(TypeError, match="index 0"):
        mask[1.5]
    assert len(list(mask)) == 2, "iteration ends"


def test_a_shared_row_stays_shared():
    """Index 0 of a dim of size 1 says nothing about b or h."""
    one = torch.tensor([[[3]]])
    mask = BlockMask.from_kv_blocks(one, torch.tensor([[[[0, 1, 2]]]]), mask_mod=by_batch)
    call = problem(1, 300, 4)
    assert torch.equal(allowed(mask[0].resolve(call, False), call), expected(by_batch, call))


def test_fc06_a_crop_is_the_crop_of_the_dense_mask():
    """Mask 256 x 257 cropped to 101 x 129, with garbage past the counts."""
    mask = create_block_mask(window, Q_LEN=256, KV_LEN=257, q_offset=150, device="cpu")
    tables = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    for counts, indices in (tables[:2], tables[2:]):
        place = torch.arange(indices.shape[-1])
        indices.masked_fill_(place >= counts[..., None], 1 << 20)
    whole = expected(window, problem(256, 257), 150)
    call = problem(101, 129)
    resolved = mask.resolve(call, False)
    assert not resolved.tables.exact, "a full block may cross the new end"
    assert torch.equal(allowed(resolved, call), whole[:, :, :101, :129])
    assert torch.equal(mask[:, :, :1].to_dense(), mask.to_dense()[:, :, :1])


# ---- algebra ----


def odd(b, h, q_idx, kv_idx):
    return kv_idx % 2 == 1


COMBINATIONS = [
    (lambda x: x & odd, lambda c, o: c & o),
    (lambda x: odd & x, lambda c, o: c & o),
    (lambda x: x | odd, lambda c, o: c | o),
    (lambda x: odd | x, lambda c, o: c | o),
    (lambda x: ~x, lambda c, o: ~c),
    (lambda x: ~(x & odd), lambda c, o: ~(c & o)),
    (lambda x: x & create_block_mask(odd), lambda c, o: c & o),
    (lambda x: create_block_mask(odd) | x, lambda c, o: c | o),
    (lambda x: x & mask_mod(odd), lambda c, o: c & o),
    (lambda x: mask_mod(odd) | x, lambda c, o: c | o),
]


@pytest.mark.parametrize("combine, dense", COMBINATIONS)
@pytest.mark.parametrize("kind", ["lazy", "sized", "fixed"])
def test_algebra_of_predicates(kind, combine, dense):
    sizes = {} if kind == "lazy" else {"Q_LEN": 40, "KV_LEN": 300, "device": "cpu"}
    if kind == "fixed":
        sizes["q_offset"] = 77
    mask = combine(create_block_mask(window, **sizes))
    assert mask.kind == kind
    call = problem(40, 300, q_offset=77 if kind == "fixed" else None)
    wanted = dense(expected(window, call), expected(odd, call))
    assert torch.equal(allowed(mask.resolve(call, False), call), wanted)


@pytest.mark.parametrize("combine, dense", COMBINATIONS)
@pytest.mark.parametrize("lengths", [None, (1, 300)])
@pytest.mark.parametrize("rule", [None, window])
def test_algebra_of_tables(combine, dense, lengths, rule):
    """A table becomes membership first; by key head too, and at the positions of the call."""
    counts = torch.tensor([[[1], [2]]])
    indices = torch.tensor([[[[1, 0]], [[2, 0]]]])
    full = torch.tensor([[[0], [1]]]), torch.tensor([[[[0]], [[1]]]])
    mask = BlockMask.from_kv_blocks(counts, indices, *full, mask_mod=rule, seq_lengths=lengths)
    both = combine(mask)
    for call in (problem(1, 300, 1, 4, 2), problem(1, 300, 2, 2, 2, torch.tensor([300, 150]))):
        alone = allowed(mask.resolve(call, False), call)
        inside = torch.arange(300) < call.kv_len_rows().view(-1, 1, 1, 1)
        wanted = dense(alone, expected(odd, call)) & inside
        assert torch.equal(allowed(both.resolve(call, False), call), wanted)


def test_algebra_of_tables_that_own_their_positions():
    square = torch_flex.create_block_mask(window, 1, 1, 256, 256, device="cpu")
    mask = BlockMask.from_torch(square) | odd
    assert mask.kind == "fixed" and mask.to_dense().shape == (1, 1, 2, 2)
    call = problem(256, 256)
    wanted = expected(window, call, 0) | expected(odd, call, 0)
    assert torch.equal(allowed(mask.resolve(call, False), call), wanted)
    part = mask[:, :, 1]
    call = problem(128, 256)
    assert torch.equal(allowed(part.resolve(call, False), call), wanted[:, :, 128:])


def test_algebra_of_two_block_masks():
    first = create_block_mask(window, 4, 1, 40, 300, device="cpu")
    second = create_block_mask(by_head, 1, 8, 40, 300, device="cpu")
    both = first & second
    assert both.shape == (4, 8, 40, 300) and both.kind == "sized"
    call = problem(40, 300, 4, 8, 2)
    wanted = expected(window, call) & expected(by_head, call)
    assert torch.equal(allowed(both.resolve(call, False), call), wanted)
    with pytest.raises(ValueError, match="equal lengths"):
        first & create_block_mask(odd, Q_LEN=41, KV_LEN=300, device="cpu")
    with pytest.raises(ValueError, match="equal B"):
        first & create_block_mask(odd, B=3)
    with pytest.raises(ValueError, match="equal q_offset"):
        at = [create_block_mask(odd, Q_LEN=1, KV_LEN=9, q_offset=i, device="cpu") for i in (0, 1)]
        at[0] & at[1]
    with pytest.raises(TypeError):
        first & 3


# ---- bound ----


def test_bound_tables_follow_updates_in_place():
    kv_len = torch.tensor([10, 130, 0, 300])
    mask = create_block_mask(by_both)
    step = mask.bind(batch=4, heads=8, q_len=1, kv_len=kv_len, kv_capacity=512)
    assert step.kind == "bound" and step.shape == (4, 8, 1, 512)
    addresses = [table.data_ptr() for table in step.tables.tensors]
    for advance in (0, 1, 100, 112):
        kv_len += advance
        step.update()
        call = problem(1, 512, 4, 8, 2, step.inherit("kv_len", None))
        check(step, call, by_both)
    assert [table.data_ptr() for table in step.tables.tensors] == addresses


@pytest.mark.parametrize("name", ["kv_len", "kv_start", "q_offset"])
def test_bound_tensors_may_be_given_other_data(name):
    """As `torch.nn.Module.to` does, and code that swaps buffers."""

    def bind():
        return create_block_mask(window).bind(batch=2, heads=2, q_len=1, kv_capacity=512, **lengths)

    lengths = {
        "kv_len": torch.tensor([200, 300]),
        "kv_start": torch.tensor([0, 10]),
        "q_offset": torch.tensor([150, 200]),
    }
    other = {"kv_len": [20, 500], "kv_start": [450, 400], "q_offset": [400, 0]}
    step = bind()
    step.update()
    before = step.to_dense()
    lengths[name].data = torch.tensor(other[name])
    step.update()
    assert torch.equal(step.to_dense(), bind().to_dense())
    assert not torch.equal(step.to_dense(), before)


def test_bound_ints_move_on():
    step = create_block_mask(window).bind(
        batch=1, heads=2, q_len=2, kv_len=5, kv_capacity=300, device="cpu"
    )
    for kv_len in (6, 299, 300):
        step.update(kv_len)
        assert step.inherit("kv_len", None) == kv_len
        assert check(step, problem(2, 300, 1, 2, 1, kv_len), window).tables.exact
    with pytest.raises(ValueError, match="at most kv_capacity = 300, got 301"):
        step.update(301)


def test_bound_masks_work_across_inference_mode():
    kv_len = torch.tensor([5])
    with torch.inference_mode():
        step = create_block_mask(window).bind(
            batch=1, heads=1, q_len=1, kv_len=kv_len, kv_capacity=64
        )
    kv_len += 1
    step.update()
    with torch.inference_mode():
        step.update()


def test_bound_masks_refuse_something_different():
    kv_len = torch.tensor([5, 6])
    step = create_block_mask(window).bind(
        batch=2, heads=4, q_len=1, kv_len=kv_len, kv_capacity=64, q_offset=9
    )
    assert step.inherit("kv_len", kv_len) is kv_len
    assert step.inherit("q_offset", None) == 9
    for name, other in (("kv_len", 64), ("kv_len", torch.tensor([5, 7])), ("q_offset", 8)):
        with pytest.raises(ValueError, match=f"{name}: expected what the block_mask is bound to"):
            step.inherit(name, other)
    with pytest.raises(ValueError, match=r"page_table: .*nothing"):
        step.inherit("page_table", torch.zeros(2, 2))
    for wrong, word in (
        (problem(1, 64, 3, 4, 2, torch.tensor([5, 6, 7])), "batch 2"),
        (problem(1, 64, 2, 8, 2, kv_len), "query heads 4"),
        (problem(2, 64, 2, 4, 2, kv_len), "query rows 1"),
    ):
        with pytest.raises(ValueError, match=f"block_mask: expected {word}"):
            step.resolve(wrong, False)
    with pytest.raises(ValueError, match="a tensor was bound"):
        step.update(7)
    with pytest.raises(ValueError, match="before bind"):
        step & odd
    with pytest.raises(ValueError, match="before bind"):
        step[0]


def test_bind_says_what_is_wrong():
    mask = create_block_mask(window)
    sizes = {"batch": 2, "heads": 4, "q_len": 1}
    with pytest.raises(ValueError, match="kv_capacity: expected an int, since kv_len is a tensor"):
        mask.bind(**sizes, kv_len=torch.tensor([5, 6]))
    with pytest.raises(ValueError, match=r"kv_len: .*shape \[2\], got \[3\]"):
        mask.bind(**sizes, kv_len=torch.tensor([5, 6, 7]), kv_capacity=9)
    with pytest.raises(TypeError, match="kv_len: expected an int32 or int64 tensor"):
        mask.bind(**sizes, kv_len=torch.tensor([5.0, 6.0]), kv_capacity=9)
    with pytest.raises(ValueError, match="expected a lazy or sized mask"):
        mask_at = create_block_mask(window, Q_LEN=1, KV_LEN=9, q_offset=0, device="cpu")
        mask_at.bind(**sizes, kv_len=9)
    one = create_block_mask(by_batch, B=1)
    with pytest.raises(ValueError, match="depends on b"):
        one.bind(**sizes, kv_len=9, device="cpu")
    vector = torch.zeros(2, dtype=torch.int32)
    for name, value, message in (
        ("kv_start", vector, r"kv_len: expected a tensor \[2\] with kv_start"),
        ("kv_start", 3, "kv_start: expected a Tensor, got int"),
        ("page_table", vector, r"page_table: expected shape \[2, max_pages\]"),
        ("page_table", vector.float(), "page_table: expected an int32 tensor"),
        ("cu_seqlens_q", vector, r"cu_seqlens_q: expected shape \[3\] for a batch of 2"),
        ("cu_seqlens_q", vector.float(), "cu_seqlens_q: expected an int32 or int64 tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            mask.bind(**sizes, kv_len=9, device="cpu", **{name: value})


# ---- devices ----


def test_captures_elsewhere_are_refused():
    table = torch.ones(300, dtype=torch.bool, device="meta")
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: table[kv_idx])
    with pytest.raises(ValueError, match="captured tensor table on cpu, got meta"):
        mask.resolve(problem(1, 300), False)


def test_to_moves_the_tables():
    mask = create_block_mask(causal, Q_LEN=4, KV_LEN=300, q_offset=torch.tensor([1]), device="cpu")
    there = mask.to("meta")
    assert there.kv_indices.device.type == "meta" and there.q_offset.device.type == "meta"
    with pytest.raises(ValueError, match="expected tables on cpu"):
        there.resolve(problem(4, 300), False)


def test_tables_and_a_function_at_the_length_of_one_sequence():
    """A length that is a tensor of one element, also where it makes the tables' positions."""
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(one, one[..., None], BLOCK_SIZE=(1, 8), mask_mod=causal)
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8)
    even = mask & (lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    out = attention(q, k, v, block_mask=even, kv_len=torch.tensor([13]))
    torch.testing.assert_close(out, attention(q, k[:, :, 8:13:2], v[:, :, 8:13:2]))
