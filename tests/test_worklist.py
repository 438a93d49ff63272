"""The balanced plan: items share all work, each has a number of its own, the host counts alike."""

from __future__ import annotations

import random

import pytest
import torch

from flexdecode.kernels.configs import PLAN_ROWS, DecodeConfig, choose_config
from flexdecode.kernels.hardware import Device
from flexdecode.kernels.layout import MAX_ITEMS, Layout
from flexdecode.kernels.loops import Stored
from flexdecode.kernels.splits import are_few
from flexdecode.plan import balanced_items, shares_of

# Blocks of a row.
LENGTHS = {
    "any": lambda draw: draw.randint(0, 200),
    "equal": lambda draw: 64,
    "about equal": lambda draw: draw.randint(160, 164),
    "none": lambda draw: 0,
    "short": lambda draw: draw.randint(0, 2),
    "long tail": lambda draw: int(20 * draw.lognormvariate(0, 2)),
    "two kinds": lambda draw: draw.choice((10, 1000)),
    "a giant": lambda draw: 0,  # see below
}
SLOTS = (1, 2, 8, 40, 66, 132, 304, 640, 304 * 8)  # the last of a large device with small programs


def layout_of(rows: int, config: DecodeConfig) -> Layout:
    return Layout.of(B=rows, Hkv=1, G=1, Lq=1, heads=1, BLOCK_Q=1, config=config)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 37, 128, 900, 1024])
def test_every_unit_has_one_item(rows: int, lengths: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs in the interpreter")
    from tests.plan_kernel import planned

    draw = random.Random(rows)
    size = next(size for size in PLAN_ROWS if size >= rows)
    for slots in (draw.choice(SLOTS), SLOTS[-1]):
        steps = draw.choice((1, 2, 8))
        blocks = torch.tensor([LENGTHS[lengths](draw) for _ in range(rows)])
        if lengths in ("any", "short", "a giant"):
            blocks[draw.randrange(rows)] = draw.choice((3000, 4_000_000))
        config = DecodeConfig(
            BLOCK_M=16, BLOCK_N=16, TG=1, TQ=1, num_splits=1, plan_rows=size, processors=slots
        )
        layout = layout_of(rows, config)
        units = blocks * steps
        items, shares, firsts = planned(blocks, steps, layout, size)
        assert torch.equal(items, balanced_items(units, layout.slots))
        assert torch.equal(shares, shares_of(units, items, steps))
        assert (items >= 1).all() and (items * shares >= units).all()
        assert items.sum() <= layout.items  # the programs that are launched
        # In order of their first items, rows follow one another without a gap.
        order = firsts.argsort()
        ends = items[order].cumsum(0)
        assert torch.equal(firsts[order], ends - items[order])
        if not are_few(rows, layout.slots):  # the longest first, but for a tenth
            in_order = shares[order].double()
            assert (in_order[1:] <= in_order[:-1] + in_order.max() / 10 + 1).all()


@pytest.mark.parametrize("device", [Device(148, 232448, cuda=True), Device(304, 65536, columns=16)])
@pytest.mark.parametrize("num_warps", [None, 1, 8])
@pytest.mark.parametrize(
    "stored", [None, Stored(64, True, both=True), Stored(64, False, both=True)]
)
def test_no_launch_has_more_items_than_can_be_numbered(
    device: Device, num_warps: int | None, stored: Stored | None
) -> None:
    for rows in (2, 33, 150, 300, 700, 900, 1024):
        config = choose_config(
            B=rows,
            Hkv=1,
            G=4,
            Lq=1,
            D=32,
            Dv=32,
            itemsize=2,
            keys=131072,
            device=device,
            lists=rows,
            ragged=True,
            stored=stored,
            options={} if num_warps is None else {"num_warps": num_warps},
        )
        layout = layout_of(rows, config)
        assert config.plan_rows >= rows
        assert rows <= layout.num_splits + rows == layout.items <= MAX_ITEMS
