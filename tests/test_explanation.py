"""`explain` against counts by hand, and the text that it prints."""

from __future__ import annotations

import builtins
import math
from collections import OrderedDict

import pytest
import torch

from flexdecode import BlockMask, attention, create_block_mask, explain, mask_mod, repeats
from flexdecode.kernels import configs
from flexdecode.kernels.hardware import INTERPRETED, Device
from flexdecode.masks import alibi, causal, documents, per_head, sliding_window
from flexdecode.plan import balanced_items


def inputs(B=1, Hq=4, Hkv=2, Lq=1, Lkv=1000, D=16, Dv=32, Bkv=None):
    Bkv = B if Bkv is None else Bkv
    q = torch.randn(B, Hq, Lq, D)
    return q, torch.randn(Bkv, Hkv, Lkv, D), torch.randn(Bkv, Hkv, Lkv, Dv)


def test_blocks_of_a_window():
    # The query sits on key 999 and sees keys 699 to 999: a part of block 5, 6, and the cut 7.
    report = explain(*inputs(), block_mask=create_block_mask(causal & sliding_window(301)))
    blocks = report.blocks
    assert blocks.blocks == 16 and blocks.lists == 2  # eight for each of two key heads
    assert tuple(blocks.partial) == (4, 2, 2.0, 2)
    assert tuple(blocks.full) == (2, 1, 1.0, 1)
    assert tuple(blocks.empty) == (10, 5, 5.0, 5)
    assert tuple(blocks.active) == (6, 3, 3.0, 3)
    assert blocks.share == 6 / 16
    keys = 128 + 128 + 104
    assert report.traffic.keys_values == 2 * keys * (16 + 32) * 4
    assert report.traffic.q_out == 4 * (16 + 32) * 4
    assert report.traffic.must_move == report.traffic.keys_values + report.traffic.q_out


def test_lengths_on_the_device_bound_what_is_read():
    kv_len = torch.tensor([1000, 100, 0])
    report = explain(*inputs(B=3), block_mask=create_block_mask(causal), kv_len=kv_len)
    assert tuple(report.blocks.active) == (18, 0, 3.0, 8)
    assert report.blocks.partial.total == 2 * (1 + 1)  # both cut the last block of theirs
    assert report.blocks.empty.total == 0
    assert report.traffic.keys_values == 2 * 1100 * 48 * 4


def test_values_that_are_columns_of_the_keys_move_with_them():
    q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 1, 1000, 64)
    for width, columns in ((64, 64), (48, 64), (20, 84)):  # the last falls into other pieces
        assert explain(q, k, k[..., :width]).traffic.keys_values == 1000 * columns * 4
    assert explain(q, k, k.clone()).traffic.keys_values == 1000 * 128 * 4


def test_heads_of_a_group_share_what_either_reads():
    near, far = causal & sliding_window(100), causal
    q, k, v = inputs()
    mask = create_block_mask(per_head(torch.tensor([0, 1, 0, 0]), near, far))
    blocks = explain(q, k, v, block_mask=mask).blocks
    assert tuple(blocks.active) == (9, 1, 4.5, 8)
    assert blocks.full.total == 0  # no block is full for both heads of the first group
    assert blocks.heads == "key head"


def test_keys_that_sequences_share_move_once():
    q, k, v = inputs(B=5, Bkv=1)
    assert explain(q, k, v).traffic.keys_values == 2 * 1000 * 48 * 4
    kv_len = torch.tensor([10, 20, 30, 40, 50])
    assert explain(q, k, v, kv_len=kv_len).traffic.keys_values == 2 * 50 * 48 * 4
    repeated = explain(q, k.expand(5, -1, -1, -1), v.expand(5, -1, -1, -1))
    assert repeated.traffic.keys_values == 2 * 1000 * 48 * 4


def test_rows_of_blocks_read_the_same_keys_once():
    q, k, v = inputs(Lq=300)
    report = explain(q, k, v, block_mask=create_block_mask(causal), q_offset=0)
    # Rows of blocks see 1, 2 and 3 of eight blocks; together the first three.
    assert tuple(report.blocks.active) == (12, 1, 2.0, 3)
    assert report.traffic.keys_values == 2 * 384 * 48 * 4


@pytest.mark.parametrize(
    ("shape", "entries"),
    [
        ((1, 1, 1, 1000), 360),
        ((2, 1, 1, 1000), 720),
        ((1, 4, 1, 1000), 4 * 360),
        ((2, 4, 1, 1000), 8 * 360),
    ],
)
def test_bias_is_read_for_active_blocks(shape, entries):
    q, k, v = inputs(B=2)
    mask = create_block_mask(causal & sliding_window(301))
    report = explain(q, k, v, block_mask=mask, bias=torch.zeros(shape))
    assert report.traffic.bias == entries * 4


def test_bias_of_several_queries_and_broadcast_keys():
    q, k, v = inputs(Lq=3)
    assert explain(q, k, v, bias=torch.zeros(1, 1, 3, 1000)).traffic.bias == 3 * 1000 * 4
    assert explain(q, k, v, bias=torch.zeros(1, 4, 3, 1).expand(1, 4, 3, 1000)).traffic.bias == 48


def packed(queries, kv_len):
    q, k, v = inputs(B=len(queries), Lkv=100)
    total = sum(queries)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(1, 4, total, 16)
    return (q, k, v), {"cu_seqlens_q": starts, "kv_len": torch.tensor(kv_len)}


@pytest.mark.parametrize("masked", [False, True])
def test_packed_queries_are_counted_by_tile(masked):
    qkv, call = packed([1, 2, 3], [90, 5, 40])  # three tiles of up to four queries
    if masked:
        call["block_mask"] = create_block_mask(causal, BLOCK_SIZE=32)
    # Without tables, blocks are the steps of the loop: 32 keys too.
    report = explain(*qkv, **call, bias=torch.zeros(1, 4, 6, 100))
    blocks, traffic = report.blocks, report.traffic
    assert blocks.BLOCK_SIZE == (4, 32) and blocks.lists == 3 * 2
    assert tuple(blocks.active) == (2 * (3 + 1 + 2), 1, 2.0, 3)
    assert tuple(blocks.full) == (2 * (2 + 0 + 1), 0, 1.0, 2)
    assert blocks.empty.total == 0
    assert traffic.keys_values == 2 * (90 + 5 + 40) * (16 + 32) * 4
    assert traffic.bias == 4 * (1 * 90 + 2 * 5 + 3 * 40) * 4
    assert traffic.q_out == 4 * 6 * (16 + 32) * 4
    assert report.work.busy == 6 and report.intervals is None
    assert report.work.busiest == 3.0 and report.work.mean == 2.0
    one_row = explain(*qkv, **call, bias=torch.zeros(1, 1, 1, 100).expand(1, 1, 6, 100))
    assert one_row.traffic.bias == 90 * 4
    assert str(report)


def test_tiles_of_a_packed_sequence_read_its_keys_once():
    qkv, call = packed([1, 0, 9], [90, 5, 40])  # one tile and three, of four queries at most
    mask = create_block_mask(causal & sliding_window(20), BLOCK_SIZE=32)
    report = explain(*qkv, **call, block_mask=mask)
    assert report.blocks.lists == 4 * 2
    # Queries 31 to 39 see keys 12 to 39; the tile of query 39 alone sees keys 20 and on.
    assert tuple(report.blocks.active) == (2 * (1 + 2 + 2 + 2), 1, 14 / 8, 2)
    assert report.traffic.keys_values == 2 * ((90 - 64) + 40) * (16 + 32) * 4
    assert report.traffic.q_out == 4 * 10 * (16 + 32) * 4


def test_captures_count_whole_and_the_mask_only_where_it_is_asked():
    q, k, v = inputs()
    ids = torch.zeros(1000, dtype=torch.int32)
    one = create_block_mask(documents(ids))
    report = explain(q, k, v, block_mask=one, score_mod=alibi(torch.rand(4)))
    assert report.traffic.captures == 4 * 4 + 1000 * 4
    whole = explain(q, k, v, block_mask=one, kv_len=896, score_mod=alibi(torch.rand(4)))
    assert whole.blocks.partial.total == 0
    assert whole.traffic.captures == 4 * 4


def test_splits_and_programs_are_those_of_the_device():
    q, k, v = inputs(Lkv=4096, D=64, Dv=64)
    report = explain(q, k, v, device_name="H200", processors=20)
    # Two key heads on twenty processors: ten splits of 128 steps of 32 keys.
    assert report.work.config.num_splits == 10 and report.work.config.BLOCK_N == 32
    assert report.work.programs == report.work.busy == 20
    assert report.work.busiest == 13 and report.work.mean == 12.8
    assert report.blocks.BLOCK_SIZE == (1, 32)
    assert report.traffic.partials == 4 * 10 * (64 + 2) * 4 * 2
    one = explain(q, k, v, kernel_options={"num_splits": 1})
    assert one.work.programs == 2 and one.work.busiest == 128 and one.traffic.partials == 0


def test_blocks_of_several_steps_are_counted_as_blocks():
    q, k, v = inputs(Lkv=4096, D=64, Dv=64)
    mask = create_block_mask(causal)
    report = explain(q, k, v, block_mask=mask, processors=8)
    assert report.work.config.num_splits == 4
    assert report.work.busiest == report.work.mean == 8  # a quarter of 32 blocks


def test_ragged_lists_get_balanced_shares():
    q, k, v = inputs(B=32, Lkv=16384, D=16, Dv=16)
    lengths = torch.tensor([16384] + [1000] * 31)
    report = explain(q, k, v, kv_len=lengths, device_name="H100")
    assert report.work.balanced and "balanced shares" in str(report)
    steps = -(-lengths // report.work.config.BLOCK_N)
    items = balanced_items(steps, 66)
    assert report.work.busy == 2 * int(items.sum()) <= report.work.programs
    assert report.work.busiest < int(steps.max()) / 8
    assert report.work.mean == int(steps.sum()) / int(items.sum())


@pytest.mark.parametrize(("Lkv", "columns", "balanced"), [(9000, 71, False), (20000, 71, True)])
def test_lists_are_balanced_where_they_are_known_to_be_shorter_than_the_cache(
    Lkv, columns, balanced
):
    indices = torch.arange(columns, dtype=torch.int32).expand(1, 2, 1, columns)
    counts = torch.tensor([[[columns], [1]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, seq_lengths=(1, Lkv))
    report = explain(*inputs(Lkv=Lkv), block_mask=mask, device_name="H200")
    assert report.work.balanced == balanced


PLANNED = [
    ({"B": 3, "Lkv": 700}, None, [700, 3, 0]),
    ({"B": 3, "Lq": 3}, 128, [1000, 1, 640]),
    ({"Hq": 8, "Lq": 20}, (8, 64), None),
    ({"B": 2, "Lkv": 100, "D": 40}, 256, None),
    ({"queries": [1, 0, 9]}, 32, [90, 5, 40]),
    ({"queries": [1, 1, 1]}, None, [90, 0, 40]),
]


@pytest.mark.parametrize(
    ("sizes", "block_size", "kv_len", "balanced"),
    [
        *((*case, False) for case in PLANNED),
        *((*case, True) for case in PLANNED if case[2] is not None),  # else all are as long
    ],
)
def test_the_plan_is_the_one_that_the_backend_makes(
    sizes, block_size, kv_len, balanced, monkeypatch
):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs in the interpreter")
    from flexdecode import explanation
    from flexdecode.backends import triton as backend

    made = []
    run = backend.decode

    def decode(call, config):
        plan, arguments = run(call, config)
        made.append((plan, arguments.decode[arguments._at["scratch"]]))
        return plan, arguments

    small = explanation.Target("interpreter", INTERPRETED)
    monkeypatch.setitem(explanation._KNOWN, "interpreter", small)
    monkeypatch.setattr(backend, "decode", decode)
    monkeypatch.setattr(backend, "_plans", {})
    monkeypatch.setattr(repeats, "_without_mask", OrderedDict())
    if balanced:
        monkeypatch.setattr(configs, "PLAN_KEYS", 64)
    if "queries" in sizes:
        (q, k, v), call = packed(sizes["queries"], kv_len)
    else:
        (q, k, v), call = inputs(**sizes), {}
    if kv_len is not None:
        call["kv_len"] = torch.tensor(kv_len)
    if block_size is not None:
        heads = torch.arange(q.shape[1]) % 2
        rule = per_head(heads, causal, causal & sliding_window(90))
        call["block_mask"] = create_block_mask(rule, BLOCK_SIZE=block_size)
    attention(q, k, v, backend="triton", **call)
    report = explain(q, k, v, device_name="interpreter", **call)
    ((plan, scratch),) = made
    assert report.work.balanced == balanced
    assert report.work.config == plan.config
    assert report.work.programs == plan.layout.programs >= report.work.busy
    # Buffers hold NaN before, and programs that share a row leave their sums.
    sums = scratch[plan.parts * (v.shape[3] + 1) :]
    written = int((~sums.isnan()).sum()) if plan.parts else 0
    assert report.traffic.partials == written * (v.shape[3] + 2) * 4 * 2


def test_roofline_follows_the_bandwidth():
    q, k, v = inputs()
    report = explain(q, k, v, bandwidth=1e9)
    assert report.roofline_us == pytest.approx(report.traffic.must_move / 1e3)
    assert explain(q, k, v, device_name="A100").bandwidth == 2.039e12
    assert "at 2.04 TB/s" in str(explain(q, k, v, device_name="A100"))


def test_what_intervals_cannot_decide_is_named():
    table = torch.arange(1000) // 300

    @mask_mod
    def odd(b, h, q_idx, kv_idx):
        return table[(kv_idx * kv_idx) % 1000] == table[q_idx]

    report = explain(*inputs(), block_mask=create_block_mask(causal & odd)).intervals
    assert report is not None
    assert (report.blocks, report.undecided) == (8, 8)
    (part,) = report.parts
    assert part.expression == "table[(kv_idx * kv_idx) % 1000] == table[q_idx]"
    assert part.captures == ("table",) and part.blocks == 8


def test_positions_and_sorted_documents_are_decided():
    report = explain(*inputs(), block_mask=create_block_mask(causal & sliding_window(301)))
    assert report.intervals is not None
    assert (report.intervals.blocks, report.intervals.undecided) == (8, 0)
    given = create_block_mask(causal, 1, 1, 1, 1000, device="cpu")
    copied = type(given).from_kv_blocks(
        given.kv_num_blocks, given.kv_indices, BLOCK_SIZE=128, seq_lengths=(1, 1000)
    )
    assert explain(*inputs(), block_mask=copied).intervals is None  # nobody knows the rule


def test_masks_of_torch_are_explained():
    from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

    def rule(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx

    mask = torch_block_mask(rule, None, None, 300, 300, device="cpu")
    report = explain(*inputs(Lq=300, Lkv=300), block_mask=mask)
    assert report.blocks.active.total == 2 * 6


def test_text_is_an_aligned_table():
    report = explain(
        *inputs(), block_mask=create_block_mask(causal & sliding_window(301)), device_name="H200"
    )
    assert str(report) == (
        "call       q [1, 4, 1, 16], k [1, 2, 1000, 16], v [1, 2, 1000, 32], float32\n"
        "device     H200: 132 processors\n"
        "blocks     of 1 x 128        total    least     mean     most  of a list\n"
        "             active              6        3      3.0        3\n"
        "             partial             4        2      2.0        2\n"
        "             full                2        1      1.0        1\n"
        "             empty              10        5      5.0        5\n"
        "             37.5% of 16 blocks are read; 2 lists, for each sequence, row of blocks and "
        "key head\n"
        "intervals  decide 8 of 8 blocks without their elements\n"
        f"plan       {report.work.config.num_splits} splits of each list, tiles of 16 rows "
        "(2 heads x 1 queries) and 32 keys, 8 warps, 3 stages\n"
        f"programs   {report.work.programs}, 12 with work; busiest 0.5 blocks, mean 0.5\n"
        "bytes              139,008 must move\n"
        "                   138,240   K and V of active blocks\n"
        "                       768   q and out\n"
        "                     6,528 partial results besides, written and read\n"
        "roofline   0.0 us at 4.80 TB/s"
    )


def test_mask_explains_itself_with_and_without_tensors():
    mask = create_block_mask(causal, 1, 1, 300, 300, device="cpu")
    counts = mask.explain()
    assert (counts.active.total, counts.partial.total, counts.full.total) == (6, 3, 3)
    assert "66.7% of 9 blocks are read; 3 lists" in str(counts)
    q, k, v = inputs(Lq=300, Lkv=300)
    assert mask.explain(q, k, v).blocks.active.total == 12
    bound = create_block_mask(causal).bind(batch=2, heads=4, q_len=1, kv_len=200)
    assert bound.explain().active.total == 16
    with pytest.raises(ValueError, match="this mask is lazy"):
        create_block_mask(causal).explain()
    with pytest.raises(TypeError, match="q, k and v, or no argument"):
        mask.explain(q)


def test_arguments_are_checked_as_in_attention():
    q, k, v = inputs()
    for wrong in ({"kv_len": 2000}, {"score_mod": 3}, {"bias": torch.zeros(3)}, {"backend": "x"}):
        with pytest.raises((TypeError, ValueError)) as expected:
            attention(q, k, v, **wrong)
        with pytest.raises(type(expected.value)) as got:
            explain(q, k, v, **wrong)
        assert str(got.value) == str(expected.value)
    with pytest.raises(ValueError, match="device_name: expected one of A100, H100, H200"):
        explain(q, k, v, device_name="abacus")
    with pytest.raises(ValueError, match="processors: expected an int of at least 1, got 0"):
        explain(q, k, v, processors=0)
    with pytest.raises(ValueError, match="bandwidth: expected bytes/s above 0"):
        explain(q, k, v, bandwidth=-1.0)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Lq": 0}, {"Lkv": 0}])
def test_nothing_is_explained_too(sizes):
    report = explain(*inputs(**sizes), block_mask=create_block_mask(causal))
    assert report.blocks.active.total == report.traffic.keys_values == report.work.busy == 0
    assert str(report)


def test_a_device_that_is_not_here_is_said_to_be_assumed():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    report = explain(*inputs())
    assert report.target.assumed and "assumed, since there is no GPU" in str(report)
    assert report.target.device == Device(132, 232448, pdl=True, arch="cuda:90")


def test_plot_draws_tokens():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    mask = create_block_mask(causal & sliding_window(200), 1, 2, 300, 500, device="cpu")
    ax = Figure().subplots()
    assert mask.plot(ax, h=1) is ax
    (mesh,) = ax.collections
    assert mesh.get_array().tolist() == mask._states("plot")[0, 1].tolist()
    corners = mesh.get_coordinates()
    assert corners[0, :, 0].tolist() == [0, 128, 256, 384, 500]
    assert corners[:, 0, 1].tolist() == [0, 128, 256, 300]
    assert ax.get_ylim() == (300, 0)  # row 0 on top
    assert "tokens" in ax.get_xlabel() and "tokens" in ax.get_ylabel()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "empty: skipped",
        "partial: the mask is applied",
        "full: no mask needed",
    ]


def test_missing_matplotlib_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    mask = create_block_mask(causal, 1, 1, 300, 300, device="cpu")
    with pytest.raises(ImportError, match=r"flexdecode\[plot\]"):
        mask.plot()
    with pytest.raises(ValueError, match="this mask is lazy"):
        create_block_mask(causal).plot()


def test_share_of_nothing_is_zero():
    assert not math.isnan(explain(*inputs(Lkv=0)).blocks.share)


def test_fixed_positions_of_batch_invariant_calls() -> None:
    """Every 1,024 keys have a program, up to the last key; only listed blocks are work."""
    q, k = torch.zeros(2, 8, 1, 64), torch.zeros(2, 2, 9000, 64)
    report = explain(
        q,
        k,
        k,
        block_mask=create_block_mask(causal & sliding_window(1000)),
        kv_len=torch.tensor([9000, 30]),
        kernel_options={"deterministic": "batch_invariant"},
    )
    assert report.work.config.num_splits == 9 and report.work.config.span == 1024
    # Nine programs and one for each of two key heads; keys 8000 to 9000 are in blocks 62 to 70.
    assert report.work.busy == 2 * (9 + 1)
    assert report.work.busiest == 7.0
    assert report.work.owners[0, 0, 0, [61, 62, 63, 64, 70]].tolist() == [-1, 7, 7, 8, 8]
    assert "9 splits after every 1024 keys" in str(report)
