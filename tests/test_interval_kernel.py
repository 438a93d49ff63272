"""Interval programs in kernels never decide wrongly; tables made with them equal the dense mask."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import mod_cases
import test_intervals as cases
from mask_oracle import dense_states

from flexdecode import device_tables
from flexdecode.codegen import lower
from flexdecode.evaluate import evaluate
from flexdecode.extent import Extent
from flexdecode.interval_codegen import lower_intervals, print_intervals
from flexdecode.packed import PackedQueries
from flexdecode.tables import build_tables, table_states
from flexdecode.trace import Traced, trace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"
)
UNKNOWN = 3
EXAMPLES = 40 if INTERPRETED else 15  # a GPU compiles each


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Two or three programs share a chunk of a small grid; the interpreter runs them in turn."""
    if INTERPRETED:
        monkeypatch.setattr("flexdecode.kernels.interval_tables.SHARED", 24)


def moved(mask: Traced) -> Traced:
    return Traced(mask.graph, mask.params, tuple(x.to(DEVICE) for x in mask.captures))


def answers(rule, b, h, rows, block, size, kv_len, lanes=8):
    """What intervals say of a row of boxes ``size * block`` keys wide, and what is true of each."""
    import interval_kernel

    q_lo, q_hi = rows[0], rows[-1]
    mask = trace(rule, "mask")
    there = moved(mask)
    said = torch.full((lanes,), 99, dtype=torch.int32, device=DEVICE)
    interval_kernel.answers[(1,)](
        said,
        b,
        h,
        q_lo,
        q_hi,
        size,
        kv_len,
        2 * max(len(rows), block),
        lower(there, "interpret" if INTERPRETED else "cuda")[1],
        lower_intervals(there),
        block,
        lanes,
    )
    q_idx, kv_idx = torch.arange(q_lo, q_hi + 1).view(-1, 1), torch.arange(lanes * size * block)
    allowed = evaluate(mask, torch.tensor(b), torch.tensor(h), q_idx, kv_idx)
    allowed = allowed.expand(len(rows), len(kv_idx)) & (kv_idx < kv_len)
    allowed = allowed.view(len(rows), lanes, -1).transpose(0, 1).flatten(1)
    return said.cpu(), allowed.any(1).int() + allowed.all(1).int()


@settings(
    max_examples=40 if INTERPRETED else 15, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(cases.rules, st.data())
def test_random_rules_are_never_decided_wrongly(rule, data):
    first, rows = data.draw(st.integers(-20, 200)), data.draw(st.sampled_from([1, 2, 9, 40]))
    said, true = answers(
        rule,
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 3)),
        range(first, first + rows),
        data.draw(st.sampled_from([1, 3, 8, 20])),
        data.draw(st.sampled_from([1, 1, 4])),
        data.draw(st.integers(0, 170)),
    )
    wrong = (said != UNKNOWN) & (said != true)
    assert not wrong.any(), f"{print_intervals(trace(rule, 'mask'))}\n{said}\n{true}"


@pytest.mark.parametrize("name", mod_cases.masks())
def test_every_operation_is_sound(name):
    rule = mod_cases.masks()[name]
    for first, rows in ((0, 9), (25, 15), (39, 1)):
        said, true = answers(rule, 1, 2, range(first, first + rows), 5, 1, 37)
        wrong = (said != UNKNOWN) & (said != true)
        assert not wrong.any(), f"{print_intervals(trace(rule, 'mask'))}\n{said}\n{true}"


@pytest.mark.parametrize("name", cases.DECIDED)
def test_common_masks_leave_nothing_to_their_elements(name):
    unknown = total = 0
    for row in range(0, 320, 64):
        said, true = answers(cases.DECIDED[name], 2, 3, range(row, row + 32), 16, 1, 320, lanes=16)
        assert (said == true)[said != UNKNOWN].all()
        unknown, total = unknown + int((said == UNKNOWN).sum()), total + len(said)
    assert unknown <= total * 0.02


def test_a_window_decides_where_documents_would_be_read():
    """A box too wide to look at the documents is still decided by the rest of the mask."""

    def rule(b, h, q, kv):
        return (q >= kv) & (q - kv < 20) & (cases.DOCUMENTS[q] == cases.DOCUMENTS[kv])

    said, true = answers(rule, 0, 0, range(300, 310), 4, 10, 400)
    assert said.tolist() == [0] * 7 + [UNKNOWN] and true.tolist() == [0] * 7 + [1]


def test_numbers_that_might_overflow_are_left_to_the_elements():
    huge = torch.tensor([1 << 62, -(1 << 62), 5, 1 << 61])
    for rule in (
        lambda b, h, q, kv: huge[b] + huge[h] + q > kv,
        lambda b, h, q, kv: q * (1 << 40) * (1 << 20) > kv,
        lambda b, h, q, kv: (kv + 250).to(torch.uint8) > 50,
        lambda b, h, q, kv: huge[b] * huge[b] >= kv,
    ):
        said, _ = answers(rule, 0, 3, range(100, 140), 20, 1, 160)
        assert (said == UNKNOWN).all()
    said, _ = answers(lambda b, h, q, kv: huge[b] > kv, 0, 0, range(9), 20, 1, 160)
    assert (said == 2).all(), "a mere comparison cannot overflow"


def test_nan_is_never_decided_true():
    said, true = answers(lambda b, h, q, kv: cases.REALS[kv] < 1e9, 0, 0, range(3), 20, 1, 160)
    assert ((said == UNKNOWN) | (said == true)).all()
    assert (said[2:4] == UNKNOWN).all() and said[0] == 2  # 40 to 79 are NaN


GRIDS = [
    ("window by head", 4, (20, 97, torch.tensor([97, 30]), torch.tensor([77, -10]), (16, 8))),
    ("documents", 2, (50, 140, 133, 60, (33, 9))),
    ("dilated", 64, (20, 300, 290, 0, (7, 4))),
    ("flags", 8, (60, 60, 60, 0, (16, 16))),
]


@pytest.mark.parametrize(("name", "lanes", "grid"), GRIDS, ids=[name for name, *_ in GRIDS])
def test_states_equal_dense(name, lanes, grid):
    """Chunks and blocks by intervals, the rest by elements; some rows alone and all of them."""
    from flexdecode.kernels.call import Mod
    from flexdecode.kernels.interval_tables import launch_intervals

    flags = torch.rand(70, generator=torch.Generator().manual_seed(1)) < 0.5
    rules = cases.DECIDED | {"flags": lambda b, h, q, kv: flags[kv] & (q != kv)}
    Lq, Lkv, kv_len, q_offset, block = grid
    mask = moved(trace(rules[name], "mask"))
    cpu = Extent(2, 2, Lq, Lkv, kv_len, q_offset, block, torch.device("cpu"))
    lengths = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in (kv_len, q_offset)]
    what = Extent(2, 2, Lq, Lkv, *lengths, block, DEVICE).for_kernels(mask)
    true = dense_states(rules[name], cpu)[: what.B, : what.H]
    shape = (what.B, what.H, *what.num_blocks())
    rows = what.B * what.H * shape[2]
    for first, stop in ((0, rows), (rows // 2, rows - 1)):
        state = torch.full((stop - first, shape[3]), 77, dtype=torch.uint8, device=DEVICE)
        launch_intervals(
            Mod(*lower(mask, "interpret" if INTERPRETED else "cuda")),
            lower_intervals(mask),
            state,
            shape=shape,
            first_row=first,
            kv_len=what.kv_len,
            q_offset=what.q_offset,
            Lq=Lq,
            Lkv=Lkv,
            BLOCK_SIZE=block,
            lanes=lanes,
        )
        assert torch.equal(state.cpu(), true.flatten(0, 2)[first:stop])


def window_by_head(b, h, q, kv):
    return (q - kv < 4 * (h + 1)) & (kv <= q)


def an_extent(Lq=20, Lkv=48, kv_len=41, heads=2):
    return Extent(1, heads, Lq, Lkv, kv_len, None, (8, 8), DEVICE)


@pytest.fixture
def always_intervals(monkeypatch):
    monkeypatch.setattr(device_tables, "_MANY_ELEMENTS", 0)
    monkeypatch.setattr(device_tables, "_TALL_BLOCK", 1)


def test_tables_by_intervals(always_intervals):
    mask = trace(window_by_head, "mask")
    tables = device_tables.build_device_tables(mask, an_extent().for_kernels(mask))
    cpu = dataclasses.replace(an_extent(), device=torch.device("cpu"))
    assert torch.equal(table_states(tables).cpu(), table_states(build_tables(mask, cpu)))


def test_packed_queries_and_starts(always_intervals):
    """Rows of blocks are tiles of sequences; a sequence has as many keys as its start leaves."""
    cu = torch.tensor([0, 9, 9, 13], device=DEVICE)
    lengths = torch.tensor([41, 7, 60], device=DEVICE)
    mask = trace(lambda b, h, q, kv: (q >= kv) & (q - kv < 10 * (b + 1)), "mask")
    what = Extent(
        3,
        1,
        13,
        48,
        lengths,
        None,
        (8, 8),
        DEVICE,
        kv_start=torch.tensor([0, 0, 17], device=DEVICE),
        packed=PackedQueries.of(cu, 13, 8),
    )
    tables = device_tables.build_device_tables(mask, what.for_kernels(mask))
    states = table_states(tables).cpu()
    allowed = torch.zeros(3, 16, 48, dtype=torch.bool)
    for tile, (b, q_len, first, rows) in enumerate(((0, 9, 0, 8), (0, 9, 8, 1), (2, 4, 0, 4))):
        kv_len = min(int(lengths[b]), 48 - (0, 0, 17)[b])
        q, kv = torch.arange(first, first + rows)[:, None] + kv_len - q_len, torch.arange(48)
        allowed[tile, :rows] = (q >= kv) & (q - kv < 10 * (b + 1)) & (kv < kv_len)
        allowed[tile, rows:] = allowed[tile, :1]
    blocks = allowed.view(3, 16, 6, 8)
    assert torch.equal(states[0, 0, :3], (blocks.any(3).any(1).int() + blocks.all(3).all(1)).byte())
    assert states.shape == (1, 1, 5, 6) and not states[0, 0, 3:].any()


@pytest.mark.parametrize("strip", [1 << 20, 13])
def test_compact_tables_on_the_device(monkeypatch, strip):
    """Lists as wide as their longest row, from states of all rows, or of two rows at a time."""
    monkeypatch.setattr(device_tables, "_STRIP_STATES", strip)
    mask = trace(window_by_head, "mask")
    tables = device_tables.build_compact_device_tables(mask, an_extent().for_kernels(mask))
    cpu = dataclasses.replace(an_extent(), device=torch.device("cpu"))
    expected = build_tables(mask, cpu, compact=True)
    assert torch.equal(table_states(tables).cpu(), table_states(expected))
    for got, wanted in zip(tables.tensors, expected.tensors, strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_blocks_wider_than_a_program_are_refused():
    mask = trace(window_by_head, "mask")
    what = Extent(1, 1, 8, 20000, 20000, 0, (8, 10000), DEVICE).for_kernels(mask)
    for build in (device_tables.build_device_tables, device_tables.build_compact_device_tables):
        with pytest.raises(ValueError, match="BLOCK_SIZE: expected at most 8192 keys"):
            build(mask, what)


def test_compact_tables_of_nothing():
    mask = trace(window_by_head, "mask")
    for Lq, Lkv in ((0, 48), (20, 0)):
        what = an_extent(Lq, Lkv, min(Lkv, 41)).for_kernels(mask)
        tables = device_tables.build_compact_device_tables(mask, what)
        assert tables.kv_num_blocks.shape == (1, 2, -(-Lq // 8)) and not tables.kv_num_blocks.any()
        assert tables.kv_indices.shape[-1] == tables.full_kv_indices.shape[-1] == 0


@pytest.mark.parametrize("intervals", [False, True])
def test_an_update_with_a_union_takes_two_launches(monkeypatch, intervals):
    """Lists of heads and of their groups come out of one launch, after that of the states."""
    from flexdecode.kernels import tables as kernels

    monkeypatch.setattr(device_tables, "_gains_by_intervals", lambda extent: intervals)
    monkeypatch.setattr(kernels, "WHOLE_ROW", 64)
    monkeypatch.setattr(kernels, "TILE", 16)
    kv_len = torch.tensor([30], device=DEVICE)
    mask = trace(window_by_head, "mask")
    what = an_extent(Lq=9, kv_len=kv_len, heads=4).for_kernels(mask)
    tables = device_tables.build_device_tables(mask, what)
    union = device_tables.unite_heads(tables, 2)
    launches = []
    monkeypatch.setattr(kernels, "_compact_kernel", Counting(kernels._compact_kernel, launches))
    kv_len.fill_(41)
    device_tables.update_device_tables(mask, what, tables)
    assert launches == [((4 + 2) * what.num_blocks()[0], 1, 1)]
    fresh = device_tables.build_device_tables(mask, what)
    expected = device_tables.unite_heads(fresh, 2)
    for name in ("kv", "full_kv"):
        counts, wanted = (getattr(u, f"{name}_num_blocks") for u in (union, expected))
        assert torch.equal(counts, wanted) and counts.shape[1] == 2
        listed = torch.arange(what.num_blocks()[1], device=DEVICE) < counts[..., None]
        indices, wanted = (getattr(u, f"{name}_indices") for u in (union, expected))
        assert torch.equal(indices[listed], wanted[listed])


def test_a_repeated_update_makes_the_launches_of_the_last(monkeypatch):
    """Live values are seen; other numbers, extents or united lists are launched anew."""
    prepared = []
    fill = device_tables._fill
    monkeypatch.setattr(
        device_tables, "_fill", lambda *given: (prepared.append(1), fill(*given))[1]
    )
    kv_len = torch.tensor([30], device=DEVICE)
    widths = torch.tensor([3, 20], device=DEVICE)

    def by_head(size):
        return trace(lambda b, h, q, kv: (q >= kv) & (q - kv < widths[h] + size), "mask")

    mask, what = by_head(0), an_extent(Lq=9, kv_len=kv_len)
    tables = device_tables.build_device_tables(mask, what.for_kernels(mask))

    def update(mask, extent, new):
        """Update, and compare with tables built afresh; `new`: by launches made anew."""
        prepared.clear()
        device_tables.update_device_tables(mask, extent.for_kernels(mask), tables)
        assert len(prepared) == new
        fresh = device_tables.build_device_tables(mask, extent.for_kernels(mask))
        assert torch.equal(table_states(tables), table_states(fresh))
        for heads, union in tables.unions.items():
            wanted = device_tables.unite_heads(fresh, heads)
            assert torch.equal(union.kv_num_blocks, wanted.kv_num_blocks)

    update(mask, what, new=1)
    update(mask, what, new=0)
    kv_len.fill_(41)
    widths += 5
    update(mask, what, new=0)
    device_tables.unite_heads(tables, 1)
    update(mask, what, new=1)
    widths -= 4
    update(mask, what, new=0)
    update(by_head(7), what, new=1)
    update(mask, what, new=1)
    update(mask, dataclasses.replace(what, kv_len=20), new=1)
    assert int(tables.kv_num_blocks.sum()) > 0


def test_an_update_follows_a_rule_that_takes_another_way():
    """Neither way has arguments, by which the launches could be told apart."""
    way = "back"

    def rule(b, h, q, kv):
        return q >= kv if way == "back" else q < kv

    what = an_extent(Lq=9, kv_len=torch.tensor([30], device=DEVICE), heads=1)
    mask = trace(rule, "mask")
    what = what.for_kernels(mask)
    tables = device_tables.build_device_tables(mask, what)
    for way in ("back", "back", "ahead", "ahead", "back"):
        mask = trace(rule, "mask")
        assert what.for_kernels(mask) is what.for_kernels(trace(rule, "mask"))
        device_tables.update_device_tables(mask, what, tables)
        fresh = device_tables.build_device_tables(mask, what)
        assert torch.equal(table_states(tables), table_states(fresh)), way


def test_lists_are_united_on_the_device_of_the_tables(monkeypatch):
    what = an_extent(Lq=9, kv_len=30, heads=4)
    widths = torch.tensor([3, 9, 20, 40], device=DEVICE)
    mask = trace(lambda b, h, q, kv: q - kv < widths[h], "mask")
    tables = device_tables.build_device_tables(mask, what.for_kernels(mask))
    current = []

    @contextlib.contextmanager
    def on_device(device):
        current.append(device)
        yield
        current.pop()

    compact = device_tables._kernels().launch_compact
    monkeypatch.setattr(device_tables, "on_device", on_device)
    launched = []
    monkeypatch.setattr(
        device_tables._kernels(),
        "launch_compact",
        lambda *given: (launched.append(current[:]), compact(*given))[1],
    )
    device_tables.unite_heads(tables, 2)
    assert launched == [[tables.kv_indices.device]]


class Counting:
    """A kernel that notes its grids."""

    def __init__(self, kernel, grids):
        self.kernel, self.grids = kernel, grids

    def run(self, *arguments, grid, warmup, **options):
        if not warmup:
            self.grids.append(grid)
        return self.kernel.run(*arguments, grid=grid, warmup=warmup, **options)


def test_equal_structure_is_one_program():
    windows = [lambda b, h, q, kv, w=w: (q >= kv) & (q - kv < w) for w in (3, 1 << 20)]
    programs = {lower_intervals(trace(window, "mask")) for window in windows}
    assert len(programs) == 1
