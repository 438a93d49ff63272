"""The decode kernel and the reduction against a dense float64 formula, with hand-written mods.

Where there is no GPU these run in Triton's interpreter, in a process of their own: it has to be
chosen before triton is imported.
"""

import itertools
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from flexdecode.kernels.call import BlockTables, DecodeCall, Mod
from flexdecode.kernels.configs import MANY_SPLITS, choose_config
from flexdecode.kernels.hardware import INTERPRETED, Device
from flexdecode.kernels.launch import decode
from flexdecode.kernels.loops import Stored, shared_memory_bytes
from flexdecode.kernels.sizes import split_dim
from flexdecode.kernels.splits import FEW_SPLITS, MIN_SHARE, WHOLE_KEYS, fill_of

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
RUNNABLE = INTERPRETING or DEVICE == "cuda"
needs_kernels = pytest.mark.skipif(not RUNNABLE, reason="needs a GPU or TRITON_INTERPRET=1")


@pytest.mark.skipif(RUNNABLE, reason="the cases run in this process")
def test_cases_pass_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


# -- mods: each rule as Triton and as torch --------------------------------------------------------


@triton.jit
def window_mask(b, h, q_idx, kv_idx, lane, args):
    return (kv_idx <= q_idx) & (q_idx - kv_idx < args[0])


@triton.jit
def head_mask(b, h, q_idx, kv_idx, lane, args):
    return (kv_idx % 3 != h % 3) & (kv_idx <= q_idx)


@triton.jit
def document_mask(b, h, q_idx, kv_idx, lane, args):
    width = (b * 0 + args[1]).to(tl.int32)
    row = args[0] + b * width
    mine = tl.load(row + q_idx, mask=(q_idx >= 0) & (q_idx < width), other=-1)
    return mine == tl.load(row + kv_idx, mask=kv_idx < width, other=-2)


@triton.jit
def key_mask(b, h, q_idx, kv_idx, lane, args):
    return (kv_idx // 32 % 2 == 0) & (kv_idx % 5 != 0)


@triton.jit
def sequence_mask(b, h, q_idx, kv_idx, lane, args):
    return b != 1


@triton.jit
def alibi_score(score, b, h, q_idx, kv_idx, lane, args):
    return score + tl.load(args[0] + h, mask=lane, other=0.0) * (kv_idx - q_idx)


@triton.jit
def sometimes_minus_infinity(score, b, h, q_idx, kv_idx, lane, args):
    return tl.where((kv_idx + h) % 2 == 0, score * args[0], float("-inf"))


def make_mask(name, B, Lkv):
    """Return a mask as (Mod, torch predicate)."""
    if name == "window":
        return Mod(window_mask, (37.0,)), lambda b, h, q, kv: (kv <= q) & (q - kv < 37)
    if name == "head":
        return Mod(head_mask), lambda b, h, q, kv: (kv % 3 != h % 3) & (kv <= q)
    if name == "key":
        return Mod(key_mask), lambda b, h, q, kv: (kv // 32 % 2 == 0) & (kv % 5 != 0)
    if name == "sequence":
        return Mod(sequence_mask), lambda b, h, q, kv: b != 1
    documents = torch.arange(Lkv).div(23, rounding_mode="floor").repeat(B, 1)
    documents = (documents + torch.arange(B)[:, None]).to(torch.int32).to(DEVICE)

    def same_document(b, h, q, kv):
        inside = (q >= 0) & (q < Lkv)
        return inside & (documents[b, q.clamp(0, Lkv - 1)] == documents[b, kv])

    return Mod(document_mask, (documents, float(Lkv))), same_document


def make_score(name, Hq):
    """Return a score rule as (Mod, torch function)."""
    if name == "alibi":
        slopes = torch.linspace(0.01, 0.2, Hq, device=DEVICE)
        return Mod(alibi_score, (slopes,)), lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    return Mod(sometimes_minus_infinity, (0.5,)), lambda s, b, h, q, kv: torch.where(
        (kv + h) % 2 == 0, s * 0.5, -math.inf
    )


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One point of the product of everything that a call may be."""

    G: int = 4
    Lq: int = 1
    dims: tuple[int, int] = (64, 64)
    num_splits: int | None = 1  # None: as many as are chosen
    plan: bool = False
    kv_len: str = "capacity"
    q_offset: str = "derived"
    mask: str = "none"
    score: str = "none"
    tables: str = "none"
    block: tuple[int, int] = (128, 128)
    bias: str = "none"
    sinks: bool = False
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    B: int = 2
    Hkv: int = 2
    Lkv: int = 200

    def __str__(self):
        default = Case()
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != getattr(default, name) or name in ("G", "Lq")
        }
        return "-".join(f"{name}={value}" for name, value in changed.items()).replace(" ", "")


FACTORS = {
    "G": (1, 2, 3, 5, 7, 8, 16, 71),
    "Lq": (1, 2, 5, 17, 130),
    "dims": ((4, 4), (8, 8), (31, 31), (64, 64), (80, 80), (96, 40), (128, 128), (192, 128)),
    "num_splits": (1, 2, 7, 20),
    "plan": (False, True),
    "kv_len": ("capacity", "int", "ragged", "broadcast"),
    "q_offset": ("derived", "int", "rows"),
    "mask": ("none", "window", "head", "document", "key", "sequence"),
    "score": ("none", "alibi", "infinity"),
    "tables": ("exact", "partial only", "fixed", "union", "none"),
    "block": ((128, 128), (16, 32), (64, 8), (7, 48), (128, 20), (1 << 20, 1 << 20)),
    "bias": ("none", "full", "broadcast"),
    "sinks": (False, True),
    "layout": ("contiguous", "token major", "strided", "shared"),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
}


def pairwise(factors, seed=0):
    """Cover every pair of factor values by a small list of cases, greedily."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }

    def newly_covered(row):
        return {pair for a, b in itertools.combinations(names, 2)
                if (pair := (a, row[a], b, row[b])) in missing}  # fmt: skip

    rows = []
    while missing:
        a, x, b, y = min(missing, key=str)
        candidates = [
            {name: rng.choice(values) for name, values in factors.items()} | {a: x, b: y}
            for _ in range(30)
        ]
        best = max(candidates, key=lambda row: len(newly_covered(row)))
        missing -= newly_covered(best)
        rows.append(best)
    return rows


def affordable(row):
    """Shorten what the interpreter would take long for, keeping every pair that it can."""
    if DEVICE == "cuda":
        return Case(**row)
    row = dict(row)
    if row["num_splits"] + row["plan"] > 1 and row["G"] * row["Lq"] > 40:
        row["Lq"] = min(row["Lq"], max(40 // row["G"], 1))
    big = row["G"] * row["Lq"] > 30
    return Case(**row, Hkv=1 if big else 2, Lkv=70 if big or row["block"][1] < 64 else 130)


CASES = [affordable(row) for row in pairwise(FACTORS)]
if INTERPRETING and not os.environ.get("FLEXDECODE_ALL_CASES"):
    CASES = CASES[::4]
CASES += [
    Case(dims=(576, 512), num_splits=2, Lkv=70, dtype=torch.bfloat16),
    Case(dims=(576, 512), G=16, Lkv=40, mask="window", tables="exact", block=(16, 32)),
    Case(kv_len="ragged", Lkv=0),
    Case(Lq=2, mask="window", tables="exact", num_splits=2, Lkv=1),
]


# -- inputs, tables and the formula ----------------------------------------------------------------


def lay_out(x, layout):
    """Give a [B, H, L, D] tensor the strides of a layout."""
    if layout == "token major":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        wide = torch.full((*x.shape[:3], 2 * x.shape[3] + 1), math.nan, dtype=x.dtype)
        wide = wide.to(x.device)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x


def classify(allowed, listed_heads, BLOCK_Q, KV_BLOCK):
    """Class of every block, [B, heads, nQ, nKV]: 0 empty, 1 partial, 2 full."""
    B, _, Lq, Lkv = allowed.shape
    grouped = allowed.view(B, listed_heads, -1, Lq, Lkv)
    rows = range(0, Lq, BLOCK_Q)
    columns = range(0, Lkv, KV_BLOCK)
    state = torch.zeros(B, listed_heads, len(rows), len(columns), dtype=torch.uint8)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = grouped[..., row : row + BLOCK_Q, column : column + KV_BLOCK].flatten(2)
            state[:, :, i, j] = block.any(-1).to(torch.uint8) + block.all(-1).to(torch.uint8)
    return state


def clipped(state, KV_BLOCK, kv_len):
    """Call no block full that reaches past the keys of its sequence."""
    ends = (torch.arange(state.shape[-1]) + 1) * KV_BLOCK
    return torch.where((ends > kv_len[:, None])[:, None, None], state.clamp(max=1), state)


def listed(chosen):
    """Turn a boolean [..., nKV] into (counts, indices); columns past the count are poison."""
    count = chosen.sum(-1, dtype=torch.int32)
    columns = max(int(count.max()), 1)
    indices = torch.full((*chosen.shape[:-1], columns), 1 << 29, dtype=torch.int32)
    for at in itertools.product(*map(range, chosen.shape[:-1])):
        found = chosen[at].nonzero().flatten().to(torch.int32)
        indices[at][: len(found)] = found
    return count.to(DEVICE), indices.to(DEVICE)


def make_tables(case, allowed, kv_len):
    """Build the tables of a case and what they allow beside the predicate (None: everything)."""
    BLOCK_Q, KV_BLOCK = case.block
    allowed, kv_len = allowed.cpu(), kv_len.cpu()
    B, Hq = allowed.shape[:2]
    if case.tables == "union":
        state = clipped(classify(allowed, Hq, BLOCK_Q, KV_BLOCK), KV_BLOCK, kv_len)
        union = state.view(B, case.Hkv, case.G, *state.shape[2:])
        full = (union == 2).all(2)
        lists = listed(union.any(2) & ~full), listed(full)
        return BlockTables(*lists[0], *lists[1], case.block, True, state.to(DEVICE)), None
    if case.tables == "fixed":
        # Authoritative tables that know nothing of kv_len: every second block, full.
        state = torch.zeros_like(classify(allowed, case.Hkv, BLOCK_Q, KV_BLOCK)[:1, :1])
        state[..., ::2] = 2
        state[..., ::4] = 1
        blocks = torch.arange(case.Lkv) // min(KV_BLOCK, 1 << 20)
        membership = (state[0, 0, 0] > 0)[blocks].to(DEVICE)
        full = (state[0, 0, 0] == 2)[blocks].to(DEVICE)
        lists = listed(state == 1), listed(state == 2)
        return BlockTables(*lists[0], *lists[1], case.block, False), (membership, full)
    state = clipped(classify(allowed, case.Hkv, BLOCK_Q, KV_BLOCK), KV_BLOCK, kv_len)
    if case.tables == "partial only":
        return BlockTables(*listed(state > 0), None, None, case.block, True), None
    lists = listed(state == 1), listed(state == 2)
    return BlockTables(*lists[0], *lists[1], case.block, True), None


def lengths_of(case):
    """Return kv_len as it is passed, and as [B]."""
    B, Lkv = case.B, case.Lkv
    if case.kv_len == "int":
        return Lkv - 3, torch.full((B,), Lkv - 3)
    if case.kv_len == "ragged":
        passed = torch.tensor([Lkv // 3, Lkv + 9, 0][:B], dtype=torch.int32)
        return passed.to(DEVICE), passed.clamp(0, Lkv).long()
    if case.kv_len == "broadcast":
        passed = torch.tensor([Lkv // 2]).to(DEVICE).expand(B)
        return passed, torch.full((B,), Lkv // 2)
    return Lkv, torch.full((B,), Lkv)


def offsets_of(case, kv_len):
    """Return q_offset as it is passed, and as [B]."""
    if case.q_offset == "int":
        return case.Lkv // 2, torch.full((case.B,), case.Lkv // 2)
    if case.q_offset == "rows":
        rows = case.Lkv // 2 - 11 * torch.arange(case.B)
        return rows.to(DEVICE), rows
    return None, kv_len - case.Lq


def run(case, device=INTERPRETED, options=None):
    """Run a case on poisoned buffers and compare it with the formula in float64."""
    torch.manual_seed(0)
    B, Hkv, G, Lq, Lkv = case.B, case.Hkv, case.G, case.Lq, case.Lkv
    D, Dv = case.dims
    Hq = Hkv * G
    Bkv = 1 if case.layout == "shared" else B
    q = torch.randn(B, Hq, Lq, D).to(DEVICE, case.dtype)
    k = torch.randn(Bkv, Hkv, Lkv, D).to(DEVICE, case.dtype)
    v = torch.randn(Bkv, Hkv, Lkv, Dv).to(DEVICE, case.dtype)
    passed_len, kv_len = lengths_of(case)
    passed_offset, q_offset = offsets_of(case, kv_len)
    kv_len, q_offset = kv_len.to(DEVICE), q_offset.to(DEVICE)

    # -- the formula ----
    b = torch.arange(B, device=DEVICE)[:, None, None, None]
    h = torch.arange(Hq, device=DEVICE)[None, :, None, None]
    q_idx = q_offset[:, None, None, None] + torch.arange(Lq, device=DEVICE)[None, None, :, None]
    kv_idx = torch.arange(Lkv, device=DEVICE)
    shape = (B, Hq, Lq, Lkv)
    allowed = (kv_idx < kv_len[:, None, None, None]).expand(shape)
    mask_mod = score_mod = bias = tables = None
    if case.tables != "none" or case.mask != "none":
        if case.mask != "none":
            mask_mod, predicate = make_mask(case.mask, B, Lkv)
            kept = torch.as_tensor(predicate(b, h, q_idx, kv_idx)).expand(shape)
        else:
            kept = torch.ones(shape, dtype=torch.bool, device=DEVICE)
        table_case = case if case.tables != "none" else replace(case, tables="partial only")
        tables, fixed = make_tables(table_case, allowed & kept, kv_len)
        if fixed is not None:
            membership, full = fixed
            kept = membership & (kept | full)
        allowed = allowed & kept
    scale = D**-0.5
    groups = torch.arange(Hq, device=DEVICE) // G
    score = q.double() @ k.double()[:, groups].mT * scale
    if case.bias != "none":
        bias = torch.randn(B, 1 if case.bias == "broadcast" else Hq, Lq, Lkv).to(DEVICE)
        bias = bias.expand(shape)
        score = score + bias
    if case.score != "none":
        score_mod, rule = make_score(case.score, Hq)
        score = rule(score, b, h, q_idx, kv_idx)
    score = torch.where(allowed, score, -math.inf)
    sinks = torch.linspace(-1, 2, Hq, device=DEVICE) if case.sinks else None
    lse = score.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    weights = torch.where(allowed, (score - lse[..., None]).exp(), 0.0).nan_to_num(0.0)
    values = v.double()[:, groups]
    expected = weights @ values
    rounded = (weights.to(case.dtype).double() @ values).to(case.dtype).double()

    # -- slots that no query may see hold NaN, and so does everything that is to be written ----
    unseen = ~allowed.view(B, Hkv, G * Lq, Lkv).any(2)
    if Bkv == 1:
        unseen = unseen.all(0, keepdim=True)
    k[unseen] = math.nan
    v[unseen] = math.nan
    out = torch.full((B, Hq, Lq, Dv), math.nan, dtype=case.dtype, device=DEVICE)
    got_lse = torch.full((B, Hq, Lq), math.nan, device=DEVICE)
    got_max = torch.full((B, Hq, Lq), math.nan, device=DEVICE)
    config = choose_config(
        B=B,
        Hkv=Hkv,
        G=G,
        Lq=Lq,
        D=D,
        Dv=Dv,
        itemsize=q.element_size(),
        keys=Lkv,
        device=device,
        BLOCK_Q=case.block[0] if tables is not None else None,
        KV_BLOCK=case.block[1] if tables is not None else None,
        options=({"num_splits": case.num_splits} if case.num_splits else {}) | (options or {}),
    )
    if case.num_splits is None:
        assert config.num_splits > max(device.processors // (B * Hkv), 1)
    if case.plan:
        config = replace(config, plan_rows=128, processors=3)
    call = DecodeCall(
        lay_out(q, case.layout),
        lay_out(k, case.layout),
        lay_out(v, case.layout),
        out,
        scale=scale,
        kv_len=passed_len,
        q_offset=passed_offset,
        lse=got_lse,
        max_scores=got_max,
        tables=tables,
        score_mod=score_mod,
        mask_mod=mask_mod,
        bias=bias,
        sinks=sinks,
    )
    decode(call, config)  # its scratch is poisoned too: conftest fills torch.empty with NaN

    precision = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[case.dtype]
    budget = 2 * (rounded - expected).abs().max().item() + precision if expected.numel() else 0
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=budget)
    torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got_max.double(), maximum(score), rtol=1e-5, atol=2e-5)
    return out


def maximum(score):
    """Return the row maximum, -inf where there are no keys."""
    return score.amax(-1) if score.shape[-1] else score.sum(-1).fill_(-math.inf)


# -- tests -----------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case):
    run(case)


@needs_kernels
@pytest.mark.parametrize(
    "case",
    [
        Case(B=5, Hkv=1, num_splits=None, Lkv=1500, dims=(32, 16), sinks=True),
        Case(B=3, Hkv=3, num_splits=None, Lkv=2000, mask="head", tables="union", score="alibi"),
        Case(B=3, Hkv=3, G=1, Lq=3, num_splits=None, Lkv=2000, kv_len="ragged", tables="exact"),
    ],
    ids=str,
)
def test_more_programs_than_processors_equal_the_formula(case):
    run(case, options={"BLOCK_N": 64} if case.tables != "none" else None)


@needs_kernels
@pytest.mark.parametrize("n", [1, 2, 3, 100])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_lse_is_the_natural_log_of_the_count(n, num_splits):
    q = torch.zeros(1, 1, 1, 16, device=DEVICE)
    k = torch.randn(1, 1, 100, 16, device=DEVICE)
    lse, out = torch.empty(1, 1, 1, device=DEVICE), torch.empty_like(q)
    launch(DecodeCall(q, k, k, out, scale=1.0, kv_len=n, lse=lse), num_splits)
    assert lse.item() == pytest.approx(math.log(n), abs=1e-6)


@needs_kernels
def test_more_splits_than_are_joined_at_once():
    Dv = 80
    q, k = torch.randn(1, 2, 1, 16, device=DEVICE), torch.randn(1, 1, 2200, 16, device=DEVICE)
    v = torch.randn(1, 1, 2200, Dv, device=DEVICE)
    out = torch.full((1, 2, 1, Dv), math.nan, device=DEVICE)
    lse, top = torch.full((2, 1, 2, 1), math.nan, device=DEVICE)
    call = DecodeCall(q, k, v, out, scale=1.0, kv_len=2200, lse=lse, max_scores=top)
    config = launch(call, 68, BLOCK_N=16)
    assert config.reduce_splits < 68
    score = q.double() @ k.double().mT
    expected = score.softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), score.logsumexp(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(top.double(), score.amax(-1), rtol=0, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_sinks_join_once_and_alone_give_zero(num_splits):
    q, k, v = torch.randn(3, 2, 4, 50, 16, device=DEVICE)
    q = q[:, :, :1]
    sinks = torch.tensor([-1.0, 0.0, 2.0, -math.inf], device=DEVICE)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 1, device=DEVICE)
    kv_len = torch.tensor([50, 0], device=DEVICE)
    launch(DecodeCall(q, k, v, out, scale=0.25, kv_len=kv_len, lse=lse, sinks=sinks), num_splits)
    score = (q[0] @ k[0].mT * 0.25).double()
    expected = torch.logaddexp(score.logsumexp(-1), sinks.double()[:, None])
    torch.testing.assert_close(lse[0].double(), expected, rtol=1e-5, atol=1e-5)
    weights = (score - expected[..., None]).exp()
    torch.testing.assert_close(out[0].double(), weights @ v[0].double(), rtol=0, atol=1e-5)
    assert (out[1] == 0).all()
    assert torch.equal(lse[1, :, 0], sinks)


@needs_kernels
def test_identical_requests_give_identical_bits():
    q = torch.randn(1, 6, 5, 32, device=DEVICE).expand(3, -1, -1, -1)
    k, v = (torch.randn(1, 2, 90, 32, device=DEVICE).expand(3, -1, -1, -1) for _ in "kv")
    out = torch.empty(3, 6, 5, 32, device=DEVICE)
    launch(DecodeCall(q, k, v, out, scale=0.2, kv_len=90), 3)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 4, 1), (2, 4, 0)])
def test_nothing_to_do_is_fine(shape):
    B, Hq, Lq = shape
    q = torch.empty(B, Hq, Lq, 16, device=DEVICE)
    k = torch.empty(B, 2, 10, 16, device=DEVICE)
    launch(DecodeCall(q, k, k, torch.empty_like(q), scale=1.0, kv_len=10), 2)


@needs_kernels
def test_more_splits_than_units_leave_no_trace():
    v = torch.randn(1, 1, 300, 16, device=DEVICE)
    q = torch.zeros(1, 1, 1, 16, device=DEVICE)
    for kv_len in (0, 1, 31, 32, 33, 64, 65, 300):
        out = torch.empty_like(q)
        launch(DecodeCall(q, torch.zeros_like(v), v, out, scale=1.0, kv_len=kv_len), 7)
        expected = v[0, 0, :kv_len].mean(0) if kv_len else torch.zeros(16, device=DEVICE)
        torch.testing.assert_close(out[0, 0, 0], expected, rtol=0, atol=1e-5)


@needs_kernels
def test_few_and_many_partial_results_are_joined():
    """A reduction that takes 64 at a time takes a few in another way."""
    v = torch.randn(1, 1, 6000, 16, device=DEVICE)
    q = torch.zeros(1, 1, 1, 16, device=DEVICE)
    for working in (1, FEW_SPLITS, FEW_SPLITS + 1, MANY_SPLITS, MANY_SPLITS + 1):
        kv_len = working * MIN_SHARE * 32 - 3  # the loop takes 32 keys at a time
        out, lse = torch.empty_like(q), torch.empty(1, 1, 1, device=DEVICE)
        call = DecodeCall(q, torch.zeros_like(v), v, out, scale=1.0, kv_len=kv_len, lse=lse)
        launch(call, max(working, FEW_SPLITS) + 1)  # one has nothing to do
        expected = v[0, 0, :kv_len].double().mean(0)
        torch.testing.assert_close(out[0, 0, 0].double(), expected, rtol=0, atol=1e-5)
        assert lse.item() == pytest.approx(math.log(kv_len), abs=1e-5)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    stride = 1 << 17  # elements between tokens: 20,000 of them pass 2**31
    memory = torch.zeros(20_000 * stride, dtype=torch.float16, device="cuda")
    k = memory.as_strided((1, 1, 20_000, 64), (0, 0, stride, 1))
    v = memory[64:].as_strided((1, 1, 20_000, 64), (0, 0, stride, 1))
    k.normal_()
    v.normal_()
    q = torch.randn(1, 4, 1, 64, dtype=torch.float16, device="cuda")
    out = torch.empty_like(q)
    launch(DecodeCall(q, k, v, out, scale=0.125, kv_len=20_000), 16)
    weights = (q.double() @ k.double().mT * 0.125).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ v.double(), rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 2])
def test_many_sequences(num_splits):
    v = torch.randn(70_000, 1, 1, 16, device="cuda")
    out = torch.empty_like(v)
    launch(DecodeCall(torch.randn_like(v), v, v, out, scale=1.0, kv_len=1), num_splits)
    assert torch.equal(out, v)


def launch(call, num_splits, **options):
    """Run a call without tables, and return what was chosen for it."""
    B, Hq, Lq, D = call.q.shape
    Hkv, keys = call.k.shape[1:3]
    config = choose_config(
        B=B,
        Hkv=Hkv,
        G=Hq // Hkv,
        Lq=Lq,
        D=D,
        Dv=call.v.shape[3],
        itemsize=call.q.element_size(),
        keys=keys,
        device=INTERPRETED,
        options={"num_splits": num_splits} | options,
    )
    decode(call, config)
    return config


# -- the choice of tiles ---------------------------------------------------------------------------


def choose(**changes):
    case = {"B": 1, "Hkv": 8, "G": 4, "Lq": 1, "D": 128, "Dv": 128, "itemsize": 2, "keys": 8192}
    return choose_config(**case | {"device": H200} | changes)


H200 = Device(processors=132, shared_memory=232448, pdl=True)
CONSUMER = Device(processors=84, shared_memory=101376)


@pytest.mark.parametrize("D", [1, 4, 16, 31, 80, 96, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("G", [1, 8, 71, 128])
@pytest.mark.parametrize("device", [H200, CONSUMER], ids=["H200", "consumer"])
def test_every_choice_fits(D, itemsize, G, device):
    for Lq in (1, 5, 130):
        config = choose(D=D, Dv=D, itemsize=itemsize, G=G, Lq=Lq, device=device)
        assert config.TG * config.TQ <= config.BLOCK_M
        needed = shared_memory_bytes(
            BLOCK_M=config.BLOCK_M,
            BLOCK_N=config.BLOCK_N,
            num_stages=config.num_stages,
            D=D,
            Dv=D,
            itemsize=itemsize,
        )
        assert needed <= device.shared_memory


def test_pieces_cover_the_head_dim():
    for D in range(1, 1025):
        first, second = split_dim(D)
        assert D <= first + second <= max(16, 2 * D)
        assert first >= second


def test_quantised_keys_are_rows_where_queries_are_few():
    stored = Stored(row_bytes=256, narrow=False, both=True)
    able = replace(H200, cuda=True)
    few = choose(stored=stored, device=able, keys=131072)
    assert few.BLOCK_M == 8 and few.max_registers > 0
    # As many programs as registers and shared memory hold at a time, and no more.
    held = 65536 // (32 * few.num_warps * few.max_registers)
    assert few.num_warps == 4 and held == 3
    assert 132 * held * 3 // 4 <= 8 * few.num_splits <= 132 * held
    wide = choose(stored=replace(stored, row_bytes=4096), device=able, keys=131072, D=256, Dv=256)
    bytes_held = (wide.num_stages - 1) * wide.BLOCK_N * 4096
    assert 8 * wide.num_splits * bytes_held <= 132 * H200.shared_memory
    assert choose(stored=stored, G=8).BLOCK_M == 8
    for other in (
        {"G": 9},
        {"Lq": 3},
        {"stored": replace(stored, both=False)},
        {"itemsize": 4},
        {"capacity": 8192},  # the same tile for any number of queries
        {"device": replace(H200, columns=16)},
    ):
        config = choose(**{"stored": stored, **other})
        assert config.BLOCK_M >= 16 and config.max_registers == 0, other
    for plain in (None, replace(stored, both=False)):
        with pytest.raises(ValueError, match=r"kernel_options\['BLOCK_M'\]: .* got 8"):
            choose(stored=plain, options={"BLOCK_M": 8})


def test_splits_fill_the_device_and_no_more():
    assert choose().num_splits == 16
    assert choose(keys=131072).num_splits == 16
    # 51 blocks, four to a share: none of the programs is left without one.
    assert choose(keys=6528, BLOCK_Q=128, KV_BLOCK=128).num_splits == 13
    assert choose(B=16).num_splits == 1
    assert choose(keys=64).num_splits == 1
    assert choose(Lq=4).num_splits == choose(Lq=1).num_splits


@pytest.mark.parametrize(("B", "splits"), [(3, 5), (12, 1), (20, 3), (24, 4), (28, 2), (48, 2)])
def test_batches_that_would_leave_processors_idle_are_split(B, splits):
    # The fastest of 1 to 6 as measured on an H200, where there are more rows than processors.
    assert choose(B=B).num_splits == splits
    assert choose(B=B, options={"num_splits": 7}).num_splits == 7
    shared = fill_of(8 * B * splits, H200.processors)
    assert shared > 0.9 and (splits == 1 or shared > fill_of(8 * B, H200.processors) + 0.05)


def test_full_waves_and_three_quarters_of_one_are_full():
    assert fill_of(99, 132) == fill_of(132, 132) == fill_of(264, 132) == fill_of(528, 132) == 1.0
    parts = [fill_of(programs, 132) for programs in range(1, 2000)]
    assert min(parts) > 0 and max(parts) == 1.0
    assert min(parts[132:]) == parts[132] == 133 / 264  # one processor has two of them


def test_many_programs_go_in_pairs():
    cuda = replace(H200, cuda=True)
    few, many = choose(B=16, device=cuda), choose(B=64, device=cuda)
    assert (few.num_stages, few.max_registers) == (4, 0)
    assert (many.num_stages, many.max_registers) == (3, 255)
    assert choose(B=64, device=cuda, options={"num_stages": 4}).num_stages == 4
    assert choose(B=64, device=cuda, options={"num_warps": 8}).max_registers == 0
    assert choose(B=64, device=cuda, lists=64, ragged=True).num_stages == 4
    assert choose(B=64).num_stages == 4  # nothing says how many programs a processor holds


@pytest.mark.parametrize("Hkv", [1, 8, 128])
def test_longer_rows_take_the_same_kernels(Hkv):
    configs = [choose(keys=2**power, Hkv=Hkv) for power in range(21)]
    changing = ("num_splits", "splits_later")
    assert len({repr(replace(c, **dict.fromkeys(changing))) for c in configs}) == 1
    several = [c.num_splits > 1 for c in configs]
    assert several == [2**power > WHOLE_KEYS and Hkv < 128 for power in range(21)]
    # A reduction that is needed later is known from the first row on.
    assert [c.splits_later for c in configs] == [Hkv < 128 and not each for each in several]


@pytest.mark.parametrize("B", [3, 10, 20, 24, 36, 48, 64])
@pytest.mark.parametrize("Hkv", [1, 8])
@pytest.mark.parametrize("D", [64, 80, 128, 512])
def test_longer_rows_of_batches_take_the_same_kernels(B, Hkv, D):
    case = {"B": B, "Hkv": Hkv, "D": D, "Dv": D, "device": replace(H200, cuda=True)}
    configs = [choose(keys=2**power, **case) for power in range(21)]
    assert max(c.num_splits for c in configs) <= FEW_SPLITS or configs[0].more_splits
    changing = ("num_splits", "splits_later")
    assert len({repr(replace(c, **dict.fromkeys(changing))) for c in configs}) == 1
    splits = [c.num_splits > 1 for c in configs]
    assert [c.splits_later for c in configs] == [any(splits) and not each for each in splits]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_splits": 0}, r"kernel_options\['num_splits'\]: expected 1 to 1024, got 0"),
        ({"BLOCK_N": 48}, r"kernel_options\['BLOCK_N'\]: expected one of \[16, .*got 48"),
        ({"BLOCK_M": 24}, r"kernel_options\['BLOCK_M'\]: expected one of \[16, .*got 24"),
        ({"num_stages": 8, "BLOCK_N": 256}, r"need \d+ bytes of shared memory, .* 232448; lower"),
    ],
)
def test_impossible_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        choose(options=options)
