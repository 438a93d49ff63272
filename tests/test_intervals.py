"""Interval evaluation never decides wrongly, and decides what the common masks need."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from mask_oracle import dense_states

from flexdecode import block_states as states_module
from flexdecode.block_elements import evaluated_states
from flexdecode.block_states import PARTIAL, block_states, block_strips
from flexdecode.evaluate import evaluate
from flexdecode.extent import Extent
from flexdecode.interval_values import Boxes, Range, Truth
from flexdecode.intervals import BlockAnalysis
from flexdecode.range_tables import RangeTable
from flexdecode.tables import build_tables, table_states
from flexdecode.trace import trace

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(5)
DOCUMENTS = (torch.rand(400, generator=GENERATOR) < 0.02).cumsum(0)
NOISE = torch.randint(-20, 400, (300,), generator=GENERATOR)
SMALL = torch.randint(-3, 4, (5, 60), generator=GENERATOR, dtype=torch.int8)
FLAGS = torch.rand((4, 4, 50, 70), generator=GENERATOR) < 0.9
SLOPES = torch.rand(4, generator=GENERATOR)
REALS = torch.randn(350, generator=GENERATOR)
REALS[40:80] = torch.nan
REALS[200] = torch.inf
GRID = torch.where(torch.rand((9, 12), generator=GENERATOR) < 0.2, torch.nan, 1.5)
HALVES = torch.randn(60, generator=GENERATOR).half()
START = torch.tensor([0, 3, 17, 130], dtype=torch.int32)
PREFIX = torch.tensor(33)


@pytest.fixture(autouse=True)
def search_from_the_top(monkeypatch):
    """Intervals even for few elements, in as many levels as there can be."""
    monkeypatch.setattr(states_module, "_is_small", lambda mask, extent: False)
    monkeypatch.setattr(states_module, "_FIRST_SQUARES", 4)


def by_elements(mask, what: Extent) -> Tensor:
    return evaluated_states(mask, what.for_mask(mask))


def undecided(monkeypatch, rule, what: Extent) -> int:
    """How many blocks had to be looked at, after checking that the states are right."""
    looked_at = []

    def watched(mask, squares, numbers):
        looked_at.append(len(numbers))
        return original(mask, squares, numbers)

    original = states_module._by_elements
    monkeypatch.setattr(states_module, "_by_elements", watched)
    mask = trace(rule, "mask")
    assert torch.equal(block_states(mask, what), by_elements(mask, what))
    monkeypatch.setattr(states_module, "_by_elements", original)
    return sum(looked_at)


DECIDED = {
    "causal": lambda b, h, q, kv: q >= kv,
    "difference": lambda b, h, q, kv: q - kv >= 0,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 64),
    "wide window": lambda b, h, q, kv: (q - kv).abs() <= 70,
    "window by head": lambda b, h, q, kv: (q - kv < 32 * (h + 1)) & (kv <= q),
    "sink": lambda b, h, q, kv: (q >= kv) & ((q - kv < 64) | (kv < 4)),
    "chunks": lambda b, h, q, kv: q // 50 == kv // 50,
    "two shifts": lambda b, h, q, kv: (q >> 6) == (kv >> 6),
    "documents": lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv],
    "left padding": lambda b, h, q, kv: kv >= START[b],
    "cancelling": lambda b, h, q, kv: (q - kv) + kv * 2 - q >= 40,
    "dilated": lambda b, h, q, kv: (q - kv) % 3 == 0,
    "prefix": lambda b, h, q, kv: kv < PREFIX,
    "limit": lambda b, h, q, kv: kv.float() < 100.0,
    "clamped": lambda b, h, q, kv: torch.minimum(q, torch.clamp(kv, min=30)) > 50,
    "not": lambda b, h, q, kv: ~(q < kv) & (h > 0),
}


@pytest.mark.parametrize("name", DECIDED)
def test_common_masks_are_decided_by_their_corners(monkeypatch, name):
    """Nearly no block is left to its elements, whether its answer is yes, no or both."""
    what = Extent(4, 4, 320, 320, 320, 0, (32, 16), CPU)
    total = block_states(trace(DECIDED[name], "mask"), what).numel()
    assert undecided(monkeypatch, DECIDED[name], what) <= total * 0.02


def test_corners_decide_conjunctions_with_one_mixed_part(monkeypatch):
    def rule(b, h, q, kv):
        return (q >= kv) & (DOCUMENTS[q] == DOCUMENTS[kv]) & (q - kv < 200)

    what = Extent(1, 1, 400, 400, 400, 0, (8, 8), CPU)
    mask = trace(rule, "mask")
    mixed = int((block_states(mask, what) == PARTIAL).sum())
    assert undecided(monkeypatch, rule, what) < mixed / 4


@pytest.mark.parametrize("name", DECIDED)
@pytest.mark.parametrize("block", [(1, 24), (16, 16), (64, 7), (7, 64), (500, 500)], ids=str)
def test_equals_dense(name, block):
    lengths = torch.tensor([0, 1, 200, 297])
    for Lq, kv_len, q_offset in ((1, 297, 296), (40, 250, 210), (130, lengths, lengths - 130)):
        what = Extent(4, 4, Lq, 297, kv_len, q_offset, block, CPU)
        mask = trace(DECIDED[name], "mask")
        states = block_states(mask, what)
        assert torch.equal(states, by_elements(mask, what))
        if name not in ("documents", "clamped"):  # eager torch knows no clamped reads
            expanded = states.expand(4, 4, *states.shape[2:])
            assert torch.equal(expanded, dense_states(DECIDED[name], what))


# ---- random expressions ----

Rule = Callable[[Any, Any, Any, Any], Any]
INTEGERS: list[Rule] = [
    lambda b, h, q, kv: q,
    lambda b, h, q, kv: kv,
    lambda b, h, q, kv: q - kv,
    lambda b, h, q, kv: b,
    lambda b, h, q, kv: h,
    lambda b, h, q, kv: DOCUMENTS[q],
    lambda b, h, q, kv: DOCUMENTS[kv],
    lambda b, h, q, kv: NOISE[kv - 5],
    lambda b, h, q, kv: NOISE[q // 3],
    lambda b, h, q, kv: SMALL[b, kv // 4],
    lambda b, h, q, kv: SMALL[q % 5, kv // 4],
    lambda b, h, q, kv: SMALL[b][q],
    lambda b, h, q, kv: START[b],
    lambda b, h, q, kv: PREFIX,
]
FLOATS: list[Rule] = [
    lambda b, h, q, kv: SLOPES[h],
    lambda b, h, q, kv: REALS[kv],
    lambda b, h, q, kv: REALS[q],
    lambda b, h, q, kv: GRID[q // 16, kv // 16],
    lambda b, h, q, kv: GRID[kv // 8, b],
    lambda b, h, q, kv: HALVES[kv],
    lambda b, h, q, kv: q.float(),
    lambda b, h, q, kv: kv / 3,
    lambda b, h, q, kv: (q - kv) * SLOPES[h],
]
UNARY_INT = [
    lambda x: -x,
    lambda x: abs(x),
    lambda x: x // 7,
    lambda x: x % 13,
    lambda x: x % -5,
    lambda x: x // -4,
    lambda x: x & 31,
    lambda x: x >> 2,
    lambda x: x << 3,
    lambda x: x * -3,
    lambda x: x + 100,
    lambda x: ~x,
    lambda x: x**2,
    lambda x: x.to(torch.int8),
    lambda x: x.to(torch.int32) * 5,
    lambda x: (x * 0.3).to(torch.int64),
    lambda x: (x % 3 == 0).to(torch.int64),
    lambda x: x.to(torch.bool).to(torch.int16) * 9,
    lambda x: x | 5,
    lambda x: 2 ** torch.clamp(x, 0, 9),
    lambda x: x.to(torch.uint8),
    lambda x: torch.clamp(x, -10, 50),
]
BINARY_INT = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: x // y,
    lambda x, y: x % y,
    lambda x, y: torch.minimum(x, y),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: x & y,
    lambda x, y: x | y,
    lambda x, y: x ^ y,
    lambda x, y: NOISE[x + y],
]
UNARY_FLOAT = [
    lambda x: -x,
    lambda x: abs(x),
    lambda x: x * 0.5 - 2,
    lambda x: torch.exp(x * 0.01),
    lambda x: torch.sqrt(x),
    lambda x: torch.tanh(x),
    lambda x: torch.log(abs(x) + 1),
    lambda x: torch.floor(x),
    lambda x: torch.sin(x),
    lambda x: 1 / x,
]
BINARY_FLOAT = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: x / y,
    lambda x, y: torch.minimum(x, y),
    lambda x, y: torch.maximum(x, y),
]
COMPARE = [
    lambda x, y: x < y,
    lambda x, y: x <= y,
    lambda x, y: x == y,
    lambda x, y: x != y,
    lambda x, y: x > y,
    lambda x, y: x >= y,
]
LOGIC = [
    lambda x, y: x & y,
    lambda x, y: x | y,
    lambda x, y: x ^ y,
    lambda x, y: x & ~y,
    lambda x, y: x == y,
]


def unary(function, x: Rule) -> Rule:
    return lambda b, h, q, kv: function(x(b, h, q, kv))


def binary(function, x: Rule, y: Rule) -> Rule:
    return lambda b, h, q, kv: function(x(b, h, q, kv), y(b, h, q, kv))


def chosen(condition: Rule, x: Rule, y: Rule) -> Rule:
    return lambda b, h, q, kv: torch.where(condition(b, h, q, kv), x(b, h, q, kv), y(b, h, q, kv))


def number(value) -> Rule:
    return lambda b, h, q, kv: q * 0 + value


integers = st.recursive(
    st.sampled_from(INTEGERS) | st.integers(-40, 300).map(number),
    lambda inner: (
        st.builds(unary, st.sampled_from(UNARY_INT), inner)
        | st.builds(binary, st.sampled_from(BINARY_INT), inner, inner)
    ),
    max_leaves=4,
)
floats = st.recursive(
    st.sampled_from(FLOATS) | st.floats(-4, 300, width=32).map(number),
    lambda inner: (
        st.builds(unary, st.sampled_from(UNARY_FLOAT), inner)
        | st.builds(binary, st.sampled_from(BINARY_FLOAT), inner, inner)
    ),
    max_leaves=3,
)
flags = st.sampled_from(
    [
        lambda b, h, q, kv: FLAGS[b, h, q, kv],
        lambda b, h, q, kv: FLAGS[0, h, q % 50, kv % 70],
        lambda b, h, q, kv: SMALL[b, kv] > 0,
    ]
)
comparisons = st.builds(binary, st.sampled_from(COMPARE), integers, integers) | st.builds(
    binary, st.sampled_from(COMPARE), floats, floats
)
rules = st.recursive(
    comparisons | flags,
    lambda inner: (
        st.builds(binary, st.sampled_from(LOGIC), inner, inner)
        | st.builds(chosen, inner, inner, inner)
        | st.builds(
            binary,
            st.sampled_from(COMPARE),
            st.builds(chosen, inner, integers, integers),
            integers,
        )
    ),
    max_leaves=4,
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules, st.data())
def test_random_rules_equal_their_elements(rule, data):
    Lq, Lkv = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 160))
    block = data.draw(st.tuples(st.sampled_from([1, 2, 5, 16, 33, 128]), st.integers(1, 50)))
    kv_len: int | Tensor = data.draw(st.integers(0, Lkv))
    q_offset: int | Tensor = data.draw(st.integers(-20, 200))
    if data.draw(st.booleans()):
        kv_len = torch.tensor([data.draw(st.integers(0, Lkv)) for _ in range(3)])
    if data.draw(st.booleans()):
        q_offset = torch.tensor([data.draw(st.integers(-20, 200)) for _ in range(3)])
    what = Extent(3, 2, Lq, Lkv, kv_len, q_offset, block, CPU)
    mask = trace(rule, "mask")
    assert torch.equal(block_states(mask, what), by_elements(mask, what)), str(mask)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules, st.data())
def test_what_is_said_of_every_node_is_true(rule, data):
    """Bounds, witnesses, gaps and dependence, against the values in a few boxes."""
    mask = trace(rule, "mask")
    corners = [data.draw(st.integers(-20, 200)), data.draw(st.integers(0, 200))]
    sizes = data.draw(st.tuples(st.sampled_from([1, 2, 9, 40]), st.sampled_from([1, 3, 20, 70])))
    zero, three = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    q_lo, kv_lo = zero + corners[0] + 11 * three, zero + corners[1] + 17 * three
    q_hi = q_lo if sizes[0] == 1 else q_lo + sizes[0] - 1
    kv_hi = kv_lo if sizes[1] == 1 else kv_lo + sizes[1] - 1
    where = Boxes(three, zero + data.draw(st.integers(0, 1)), q_lo, q_hi, kv_lo, kv_hi)
    said = BlockAnalysis(mask, CPU).values(where)
    q = q_lo.view(3, 1, 1) + torch.arange(sizes[0]).view(1, -1, 1)
    kv = kv_lo.view(3, 1, 1) + torch.arange(sizes[1]).view(1, 1, -1)
    shape = (3, *sizes)
    for i, node in enumerate(mask.graph.nodes):
        until = dataclasses.replace(mask.graph, nodes=mask.graph.nodes[: i + 1])
        part = dataclasses.replace(mask, graph=until)
        value = evaluate(part, where.b.view(3, 1, 1), where.h.view(3, 1, 1), q, kv).expand(shape)
        check_node(said[node], value, f"{node.op} in\n{mask}")


def check_node(said: Truth | Range, value: Tensor, what: str) -> None:
    flat = value.flatten(1)
    if isinstance(said, Truth):
        some, every = flat.any(1), flat.all(1)
        assert not (said.must & ~every).any(), f"must: {what}"
        assert not (some & ~said.may).any(), f"may: {what}"
        assert not (said.seen & ~some).any(), f"seen: {what}"
        assert not (said.unseen & every).any(), f"unseen: {what}"
        return
    nan = flat.isnan()
    assert said.nan or not nan.any()
    if flat.is_floating_point():
        flat = flat.double()
        least = flat.masked_fill(nan, torch.inf).amin(1)
        most = flat.masked_fill(nan, -torch.inf).amax(1)
    else:
        least, most = flat.long().amin(1), flat.long().amax(1)
    real = ~nan.all(1)
    assert not ((said.lo > least) & real).any(), f"lo: {what}"
    assert not ((said.hi < most) & real).any(), f"hi: {what}"
    assert said.low <= said.lo.min() and said.high >= said.hi.max()
    attained = torch.as_tensor(said.attained) & real
    assert not (((said.lo != least) | (said.hi != most)) & attained).any(), f"attained: {what}"
    if said.covers:
        for row, lo, hi, ends in zip(
            flat, *(x.expand(3) for x in (said.lo, said.hi, attained)), strict=True
        ):
            assert not ends or set(range(int(lo), int(hi) + 1)) == set(row.tolist()), (
                f"covers: {what}"
            )
    # A position that the value does not depend on changes nothing.
    if "q_idx" not in said.depends:
        assert torch.equal(value.nan_to_num(), value[:, :1].expand_as(value).nan_to_num())
    if "kv_idx" not in said.depends:
        assert torch.equal(value.nan_to_num(), value[:, :, :1].expand_as(value).nan_to_num())


# ---- what they are made of ----


def boxes(q: tuple[int, int], kv: tuple[int, int]) -> Boxes:
    zero = torch.zeros(1, dtype=torch.int64)
    ends = [zero + end for end in (*q, *kv)]
    return Boxes(zero, zero, *ends)


def test_overflow_is_unknown():
    """What would leave int64 on the way is left to the elements."""
    rules = [
        lambda b, h, q, kv: q * (1 << 40) * (1 << 40) >= 0,
        lambda b, h, q, kv: (q + (1 << 62)) + (1 << 62) >= 0,
        lambda b, h, q, kv: (q + 100).to(torch.uint8) > 50,
        lambda b, h, q, kv: -(q.to(torch.int8)) * 127 < 5,
    ]
    for rule in rules:
        truth = BlockAnalysis(trace(rule, "mask"), CPU)(boxes((0, 200), (0, 200)))
        assert not truth.must.any() and truth.may.all()


def test_nan_is_never_decided_true():
    def rule(b, h, q, kv):
        return REALS[kv] < 1000.0

    analysis = BlockAnalysis(trace(rule, "mask"), CPU)
    assert not analysis(boxes((0, 0), (40, 79))).may.any(), "all of them are NaN"
    truth = analysis(boxes((0, 0), (30, 50)))
    assert not truth.must.any() and truth.may.all() and truth.seen.all()


@pytest.mark.parametrize("N", [1, 2, 15, 16, 17, 31, 33, 100, 257])
@pytest.mark.parametrize("most", [1 << 21, 0])
def test_range_tables(monkeypatch, N, most):
    monkeypatch.setattr("flexdecode.range_tables._MOST", most)
    values = torch.randint(-50, 50, (3, N), generator=GENERATOR, dtype=torch.int32)
    table = RangeTable(values)
    first, last = torch.triu_indices(N, N)
    for row in range(3):
        low, high = table.bounds(torch.tensor(row), first, last)
        for i, j, least, most_ in zip(*(x.tolist() for x in (first, last, low, high)), strict=True):
            if table.exact:
                part = values[row, i : j + 1]
                assert least == int(part.min()) and most_ == int(part.max())
            else:
                part = values[row, i // 64 * 64 : (j // 64 + 1) * 64]
                assert least == int(part.min()) and most_ == int(part.max())


def test_strips_are_the_grid_cut_up(monkeypatch):
    monkeypatch.setattr(states_module, "_STRIP_BLOCKS", 400)
    for name in ("window", "documents", "left padding", "window by head"):
        mask = trace(DECIDED[name], "mask")
        what = Extent(4, 4, 300, 350, torch.tensor([350, 20, 0, 200]), 50, (16, 8), CPU)
        whole = block_states(mask, what)
        built = torch.zeros_like(whole)
        for strip in block_strips(mask, what):
            rows, columns = strip.states.shape[2:]
            row, column = strip.first_row, strip.first_column
            built[:, :, row : row + rows, column : column + columns] = strip.states
        assert torch.equal(built, whole)
        compact = build_tables(mask, what, compact=True)
        assert torch.equal(table_states(compact), whole)
        assert compact.kv_indices.shape[-1] == int(compact.kv_num_blocks.max())
