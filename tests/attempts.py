"""Attention calls drawn at random, each small enough to read: what to call, and what it must give.

A rule is Python text, so that a failing call is printed, made smaller and kept as a test.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from flexdecode import (
    AuxRequest,
    BlockMask,
    attention,
    choices,
    create_block_mask,
    dequantize,
    quantize,
)
from flexdecode.kernels import configs
from tests.cache_cases import Case
from tests.helpers import assert_within

PLACES = 64  # entries of captured tensors; positions stay below it
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4"},
    "int4 2": {"format": "int4", "groups": 2},
    "rows": {"format": "int4", "layout": "interleaved"},
    "fp8": {"format": "fp8"},
    "fp8 words": {"format": "fp8", "scale_dtype": torch.int32},
    "e5m2": {"format": "fp8_e5m2"},
    "int8": {"format": "int8"},
}


@dataclass(frozen=True)
class Attempt:
    """One call.

    Attributes
    ----------
    seed : int
        Of all numbers.
    kv_len, q_len : tuple of int
        Of each sequence.
    kind : str
        Where keys are kept, see `cache_cases`.
    k_format, v_format : str
        Of `FORMATS`; empty where tensors are plain.
    layout : {"plain", "wide", "turned", "every other"}
        Strides of q, k and v; all memory between their elements is NaN.
    mask, score : str
        Python expressions in b, h, q, k (and s) and the names of `captures`; empty for none.
    mask_kind : {"lazy", "bound", "sized", "fixed", "listed"}
        ``listed``: random tables of blocks beside the rule.
    again : str
        Where keys are kept when each sequence is attended again, alone and beside others: batch
        invariance, the same bits. Empty where that is not asked for.
    """

    seed: int = 0
    kv_len: tuple[int, ...] = (5,)
    q_len: tuple[int, ...] = (1,)
    packed: bool = False
    Hkv: int = 1
    G: int = 1
    D: int = 8
    Dv: int = 8
    dtype: str = "float32"
    kind: str = "dense"
    k_format: str = ""
    v_format: str = ""
    layout: str = "plain"
    mask: str = ""
    score: str = ""
    mask_kind: str = "lazy"
    block: tuple[int, int] = (128, 128)
    q_offset: tuple[int, ...] | None = None
    bias: bool = False
    sinks: bool = False
    splits: int | None = None
    again: str = ""

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Attempt({', '.join(changed)})"


# ---- rules ----

_NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 16, 31, -5, 100, 2**31 - 1, -(2**33)])
_SIZES = st.sampled_from([2, 3, 4, 8, 13, 64, -3])
_INTEGERS = st.one_of(
    st.sampled_from(
        "q;k;(q - k);h;(b + 1);ids[k];ids[q];ids[k - q];narrow[k];ids[q % 16];lens[b]".split(";")
    ),
    _NUMBERS.map(lambda n: f"(k * 0 + {n})"),
)
_BOOLEANS = st.sampled_from(
    "(q >= k);(q - k < 9);(k < lens[b]);(q - k < limit);flags[h % 4, k];flags[b % 4, k];(k >= 0)"
    ";(k < 0);(q % 3 == k % 3)".split(";")
)


def _texts(template: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(lambda found: template.format(*found))


@st.composite
def integers(draw: st.DrawFn, depth: int) -> str:
    """Draw the text of an integer."""
    if depth == 0:
        return draw(_INTEGERS)
    x, y, p = integers(depth - 1), integers(depth - 1), booleans(depth - 1)
    several = [
        _texts(f"({{}} {op} {{}})", x, y) for op in ("+", "-")
    ] + [_texts(f"({{}} {op} {{}})", x, _SIZES) for op in ("*", "//", "%")]  # fmt: skip
    several += [
        _texts("torch.minimum({}, {})", x, y),
        _texts("torch.maximum({}, {})", x, y),
        _texts("torch.where({}, {}, {})", p, x, y),
        _texts("({} - {}).abs()", x, y),
        _texts("torch.clamp({}, -20, 50)", x),
        _texts("(-{})", x),
        _texts("({} & 7)", x),
        _texts("({} >> 1)", x),
        _texts("ids[{} % 64 + 0 * k]", x),  # torch takes no int16 for an index
    ]
    return draw(st.one_of(integers(depth - 1), *several))


@st.composite
def booleans(draw: st.DrawFn, depth: int) -> str:
    """Draw the text of a condition."""
    if depth == 0:
        return draw(_BOOLEANS)
    x, y = integers(depth - 1), integers(depth - 1)
    p, r = booleans(depth - 1), booleans(depth - 1)
    several = [_texts(f"({{}} {op} {{}})", x, y) for op in ("<=", ">", "==", "!=")]
    several += [_texts(f"({{}} {op} {{}})", p, r) for op in ("&", "|", "^")]
    several += [_texts("(~{})", p), _texts("torch.where({}, {}, {} == 0)", p, r, x)]
    return draw(st.one_of(booleans(depth - 1), *several))


SCORES = st.one_of(
    st.sampled_from(
        [
            "",
            "s + slopes[h] * (k - q)",
            "5.0 * torch.tanh(s / 5.0)",
            "s + table[h % 3, k]",
            "torch.where(q - k < 9, s, s * 0.5)",
            "s * temperature",
        ]
    ),
    _texts("s + 0.01 * torch.clamp({}, -50, 50)", integers(1)),
    _texts("torch.where({}, s, -float('inf'))", booleans(1)),
)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    """Draw a call; simpler values come first, so that failures shrink to them."""
    B = draw(st.integers(1, 3))
    kv_len = draw(st.lists(st.integers(0, 40), min_size=B, max_size=B))
    packed = draw(st.booleans())
    if packed:
        q_len = draw(st.lists(st.integers(0, 6), min_size=B, max_size=B))
        packed = sum(q_len) > 0
    if not packed:
        q_len = [draw(st.integers(1, 5))] * B
    k_format = v_format = ""
    if draw(st.integers(0, 3)) == 3:
        k_format = draw(st.sampled_from(["", *FORMATS]))
        v_format = draw(st.sampled_from(["", *FORMATS]))
    quantized = bool(k_format or v_format)
    dims = st.sampled_from([16, 32] if quantized else [8, 1, 3, 16, 20, 31, 33])
    mask = draw(st.one_of(st.just(""), booleans(2)))
    mask_kind = "lazy"
    if mask:
        usable = ["lazy", "bound"] if packed else ["lazy", "bound", "sized", "fixed", "listed"]
        mask_kind = draw(st.sampled_from(usable))
    kinds = st.sampled_from(["dense", "padded", "packed", "gappy", "paged", "paged + start"])
    stored = st.tuples(kinds, st.integers(1, 20)).map(
        lambda found: found[0].replace("paged", f"paged {found[1]}")
    )
    kind = draw(stored)
    again = draw(stored) if draw(st.integers(0, 3)) == 3 else ""
    offset = None
    if mask_kind in ("lazy", "fixed") and draw(st.booleans()):
        offset = tuple(draw(st.lists(st.integers(-6, 20), min_size=B, max_size=B)))
    return Attempt(
        seed=draw(st.integers(0, 999)),
        kv_len=tuple(kv_len),
        q_len=tuple(q_len),
        packed=packed,
        Hkv=draw(st.integers(1, 2)),
        G=draw(st.integers(1, 3)),
        D=draw(dims),
        Dv=draw(dims),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        kind=kind,
        k_format=k_format,
        v_format=v_format,
        layout=draw(st.sampled_from(["plain", "wide", "turned", "every other"])),
        mask=mask,
        score=draw(SCORES),
        mask_kind=mask_kind,
        block=(draw(st.sampled_from([128, 1, 7, 16])), draw(st.sampled_from([128, 5, 16, 32]))),
        q_offset=offset,
        bias=draw(st.integers(0, 4)) == 4,
        sinks=draw(st.integers(0, 4)) == 4,
        splits=None if again else draw(st.sampled_from([None, 1, 3])),
        again=again,
    )


# ---- one call ----


def captures(seed: int, B: int) -> dict[str, Tensor]:
    """The tensors that rules name."""
    at = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(-3, 6, (PLACES,), generator=at),
        "narrow": torch.randint(0, 200, (PLACES,), generator=at).to(torch.int16),
        "flags": torch.rand(4, PLACES, generator=at) < 0.7,
        "lens": torch.randint(0, 40, (B,), generator=at),
        "limit": torch.randint(0, 40, (), generator=at),
        "slopes": torch.rand(16, generator=at) * 0.1,
        "table": torch.randn(3, PLACES, generator=at).to(torch.bfloat16),
        "temperature": torch.rand((), generator=at),
    }


def rule_of(text: str, names: str, values: dict[str, Any]) -> Any:
    """Make a function of rule text."""
    if not text:
        return None
    return eval(f"lambda {names}: {text}", {"torch": torch, **values})


def relaid(x: Tensor, layout: str) -> Tensor:
    """Give a tensor other strides, with NaN between its elements."""
    if layout == "wide":
        wide = x.new_full((*x.shape[:3], x.shape[3] + 3), torch.nan)
        into = wide[..., : x.shape[3]]
    elif layout == "turned":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "every other":
        wide = x.new_full((x.shape[0], 2 * x.shape[1], x.shape[2], 2 * x.shape[3]), torch.nan)
        into = wide[:, ::2, :, ::2]
    else:
        return x
    into.copy_(x)
    return into


@dataclass
class Call:
    """An attempt's tensors and the dense float64 answer, one entry a sequence; on the CPU."""

    case: Case
    values: dict[str, Tensor]  # what rules name
    shift: int  # rules see the first sequence as number `shift`
    lists: Tensor | None  # states of blocks: 0 not listed, 1 partial, 2 full
    bias: Tensor | None
    sinks: Tensor | None
    allowed: list[Tensor] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)
    lses: list[Tensor] = field(default_factory=list)
    tops: list[Tensor] = field(default_factory=list)

    def rules(self, a: Attempt, device: str = "cpu") -> tuple[Any, Any]:
        """Mask and score, as functions of tensors on a device."""
        values = {name: x.to(device) for name, x in self.values.items()}
        mask = rule_of(a.mask, "b, h, q, k", values)
        score = rule_of(a.score, "s, b, h, q, k", values)
        shift, shifted_mask, shifted_score = self.shift, mask, score
        if shift and mask is not None:
            shifted_mask = lambda b, h, q, k: mask(b + shift, h, q, k)  # noqa: E731
        if shift and score is not None:
            shifted_score = lambda s, b, h, q, k: score(s, b + shift, h, q, k)  # noqa: E731
        return shifted_mask, shifted_score


def prepare(a: Attempt) -> Call:
    """Draw an attempt's numbers and work out what it must give."""
    call = _drawn(a)
    _expect_all(a, call)
    return call


def _drawn(a: Attempt) -> Call:
    case = Case.random(
        a.seed, list(a.kv_len), list(a.q_len), Hkv=a.Hkv, G=a.G, D=a.D, Dv=a.Dv,
        dtype=getattr(torch, a.dtype),
    )  # fmt: skip
    for name, kept in (("k", a.k_format), ("v", a.v_format)):
        if kept:
            setattr(case, name, dequantize(quantize(getattr(case, name), **FORMATS[kept]),
                                           torch.float32))  # fmt: skip
    at = torch.Generator().manual_seed(a.seed + 1)
    Hq, total = a.Hkv * a.G, sum(a.q_len) if a.packed else a.q_len[0]
    states = None
    if a.mask_kind == "listed":
        columns = -(-max(*a.kv_len, 1) // a.block[1])
        heads = (1, a.Hkv, Hq)[a.seed % 3]
        shape = (len(a.kv_len), heads, -(-total // a.block[0]), columns)
        states = torch.randint(0, 3, shape, generator=at)
    slots = max(*a.kv_len, 1)
    bias = torch.randn(1, Hq, total, slots, generator=at) if a.bias else None
    sinks = torch.randn(Hq, generator=at) if a.sinks else None
    return Call(case, captures(a.seed, len(a.kv_len)), 0, states, bias, sinks)


def _first_row(a: Attempt, b: int) -> int:
    """First row of a sequence in q."""
    return sum(a.q_len[:b]) if a.packed else 0


def _expect_all(a: Attempt, call: Call) -> None:
    mask, score = call.rules(a)
    for b in range(len(a.kv_len)):
        _expect(a, call, b, _first_row(a, b), mask, score)


def elsewhere(a: Attempt, call: Call, b: int, alone: bool) -> tuple[Attempt, Call, int]:
    """Put sequence b into another cache, alone or beside others; return its place there too."""
    place, lengths, counts = b, list(a.kv_len), list(a.q_len)
    if alone:
        place, lengths, counts = 0, [lengths[b]], [counts[b]]
    for other in range(len(lengths)):
        if other != place:
            lengths[other] = (7 * lengths[other] + 11) % 41
            counts[other] = (counts[other] + 3) % 7 if a.packed else counts[other]
    new = dataclasses.replace(
        a,
        seed=a.seed + 3,  # lists of blocks have as many heads
        kv_len=tuple(lengths),
        q_len=tuple(counts),
        kind=a.again,
        layout="plain",
        q_offset=a.q_offset if a.q_offset is None or not alone else (a.q_offset[b],),
    )
    made = _drawn(new)
    n, rows = lengths[place], counts[place]
    made.case.q[place] = call.case.q[b]
    for x, old in ((made.case.k, call.case.k), (made.case.v, call.case.v)):
        x[place, :, :n] = old[b, :, :n]
    made.values, made.sinks = call.values, call.sinks
    made.shift = call.shift + (b if alone else 0)
    if made.lists is not None and call.lists is not None:
        columns = -(-n // a.block[1])
        made.lists[place, ..., :columns] = call.lists[b, ..., :columns]
    if made.bias is not None and call.bias is not None:
        to, origin = _first_row(new, place), _first_row(a, b)
        made.bias[:, :, to : to + rows, :n] = call.bias[:, :, origin : origin + rows, :n]
    _expect_all(new, made)
    return new, made, place


def _expect(a: Attempt, call: Call, b: int, row: int, mask: Any, score: Any) -> None:
    case = call.case
    n, Lq, Hq = a.kv_len[b], a.q_len[b], a.Hkv * a.G
    q, k, v = (x.double() for x in (case.q[b], case.k[b, :, :n], case.v[b, :, :n]))
    k, v = k.repeat_interleave(a.G, 0), v.repeat_interleave(a.G, 0)
    s = (q @ k.transpose(1, 2)) * a.D**-0.5
    first = n - Lq if a.q_offset is None else a.q_offset[b]
    j = torch.arange(n).view(1, 1, n)
    i = torch.arange(Lq).view(1, Lq, 1)
    place = (
        torch.full((1, 1, 1), b),
        torch.arange(Hq).view(Hq, 1, 1),
        first + i,
        j,
    )
    if call.bias is not None:
        s = s + call.bias[0, :, row : row + Lq, :n].double()
    if score is not None:
        s = torch.as_tensor(score(s, *place)).double().expand(Hq, Lq, n)
    allowed = torch.ones(Hq, Lq, n, dtype=torch.bool)
    if mask is not None:
        allowed = torch.as_tensor(mask(*place)).expand(Hq, Lq, n)
    if call.lists is not None:
        state = call.lists[b].repeat_interleave(Hq // call.lists.shape[1], 0)
        state = state[:, (i // a.block[0]).view(-1)][:, :, (j // a.block[1]).view(-1)]
        crosses = (j // a.block[1] + 1) * a.block[1] > n
        allowed = ((state == 1) & allowed) | ((state == 2) & (allowed | ~crosses))
    s = s.masked_fill(~allowed, -torch.inf)
    none = s.new_full((Hq, Lq, 1), -torch.inf)
    top = torch.cat([s, none], -1).amax(-1)
    lse = torch.cat([s, none], -1).logsumexp(-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.double()[:, None])
    weights = (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    call.allowed.append(allowed)
    call.outs.append(weights @ v)
    call.lses.append(lse)
    call.tops.append(top)


def arguments(a: Attempt, call: Call, device: str) -> dict[str, Any]:
    """The arguments of `attention`; whatever no query may see is NaN."""
    case = call.case
    seen = Case([], case.k.clone(), case.v.clone(), case.kv_len)
    for b, allowed in enumerate(call.allowed):
        unseen = ~allowed.reshape(a.Hkv, a.G * a.q_len[b], a.kv_len[b]).any(1)
        for x in (seen.k, seen.v):
            x[b, :, : a.kv_len[b]].masked_fill_(unseen[..., None], torch.nan)
    found = {**case.queries(a.packed), **seen.stored(a.kind, a.seed)}
    for name, kept in (("k", a.k_format), ("v", a.v_format)):
        if kept:
            found[name] = _stored(found[name], FORMATS[kept])
        else:
            found[name] = found[name].to(found["q"].dtype)
    found = {name: x.to(device) for name, x in found.items()}
    for name, kept in (("q", ""), ("k", a.k_format), ("v", a.v_format)):
        if not kept:
            found[name] = relaid(found[name], a.layout)
    capacity = found["k"].shape[2]
    if "page_table" in found:
        capacity *= found["page_table"].shape[1]
    if call.bias is not None:
        wide = call.bias.new_full((*call.bias.shape[:3], capacity), torch.nan)
        used = min(call.bias.shape[3], capacity)
        wide[..., :used] = call.bias[..., :used]
        found["bias"] = wide.to(device)
    if call.sinks is not None:
        found["sinks"] = call.sinks.to(device)
    mask, score = call.rules(a, device)
    if score is not None:
        found["score_mod"] = score
    offset = None
    if a.q_offset is not None:
        offset = torch.tensor(a.q_offset, device=device)
    if a.mask_kind == "lazy" and offset is not None:
        found["q_offset"] = offset
    if mask is not None:
        found["block_mask"] = _mask(a, call, mask, found, capacity, offset, device)
    return found


def _stored(x: Tensor, options: dict[str, Any]) -> Any:
    """Quantise a cache whose unused slots are NaN: codes and coefficients that read as NaN."""
    unused = x.isnan().any(-1)
    kept = quantize(x.float().masked_fill(unused[..., None], 0.0), **options)
    kept.data.view(torch.uint8)[unused] = 0xFF
    if kept.scale is not None:
        words = torch.int16 if kept.scale.dtype == torch.float16 else torch.int32
        kept.scale.view(words)[unused] = -1
    return kept


def _mask(
    a: Attempt,
    call: Call,
    rule: Any,
    found: dict[str, Any],
    capacity: int,
    offset: Any,
    device: str,
) -> BlockMask:
    B, Hq, Lq = len(a.kv_len), a.Hkv * a.G, found["q"].shape[2]
    if a.mask_kind == "listed":
        assert call.lists is not None
        tables = []
        for state in (1, 2):
            chosen = call.lists == state
            order = chosen.to(torch.int8).argsort(-1, descending=True)
            counts = chosen.sum(-1)
            places = torch.arange(chosen.shape[-1])
            # Past the counts: anything.
            order = order.masked_fill(places >= counts[..., None], 1 << 20)
            tables += [counts.int().to(device), order.int().to(device)]
        size = (Lq, chosen.shape[-1] * a.block[1])
        return BlockMask.from_kv_blocks(*tables, a.block, rule, size)
    sizes: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    if a.mask_kind in ("sized", "fixed"):
        sizes = (B, Hq, Lq, max(*a.kv_len, 1))
        if a.mask_kind == "fixed":
            default = found["kv_len"] - Lq
            options = {"q_offset": default if offset is None else offset}
    mask = create_block_mask(rule, *sizes, device=device, BLOCK_SIZE=a.block, **options)
    if a.mask_kind == "bound":
        names = ("kv_len", "kv_start", "page_table", "cu_seqlens_q")
        data = {name: found[name] for name in names if name in found}
        return mask.bind(batch=B, heads=Hq, q_len=Lq, kv_capacity=capacity, **data)
    return mask


def _rows(a: Attempt, call: Call, backend: str, device: str) -> list[tuple[Tensor, ...]]:
    """Make a call: output, LSE and greatest score of each sequence."""
    options: dict[str, Any] = {"approx": False}
    if a.splits is not None:
        options |= {"num_splits": a.splits, "BLOCK_N": 16}
    with pytest.MonkeyPatch.context() as patch:
        if a.again:
            options |= {"deterministic": "batch_invariant", "BLOCK_N": 16}
            patch.setattr(configs, "SPAN", 16)  # several splits, of as few keys as there are
            patch.setattr(choices, "generation", -16)  # plans of their own
        out, aux = attention(
            **arguments(a, call, device),
            backend=backend,
            return_aux=AuxRequest(lse=True, max_scores=True),
            kernel_options=options,
        )
    results = (out, aux.lse, aux.max_scores)
    return list(zip(*(call.case.rows(x, a.packed) for x in results), strict=True))


def check(attempt: Attempt, backend: str, device: str = "cpu") -> None:
    """Make a call on a backend, and compare it with the dense formula in float64."""
    a = attempt
    call = prepare(a)
    found = _rows(a, call, backend, device)
    exact = a.dtype == "float32" and not (a.k_format or a.v_format)
    for b, (mine, lse, top) in enumerate(found):
        finite = [x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0
                  for x in (call.outs[b], call.lses[b], call.tops[b])]  # fmt: skip
        values = call.case.v[b].abs().max().item()
        unit = 1e-5 if exact else 2e-2
        scores = 1.0 + max(finite[1:])
        assert_within(mine, call.outs[b], unit * (1 + values) * scores, f"out of sequence {b}")
        assert_within(lse, call.lses[b], unit * scores, f"lse of sequence {b}")
        assert_within(top, call.tops[b], unit * scores, f"max_scores of sequence {b}")
    if a.again and backend != "reference":  # which is float64, and promises no bits
        for b, alone in itertools.product(range(len(found)), (True, False)):
            new, made, place = elsewhere(a, call, b, alone)
            again = _rows(new, made, backend, device)[place]
            for name, x, y in zip(("out", "lse", "max_scores"), found[b], again, strict=True):
                assert torch.equal(x, y), (
                    f"{name} of sequence {b} has other bits {'alone' if alone else 'beside others'}"
                )


def as_test(attempt: Attempt, backend: str) -> str:
    """Text of a test that makes this one call."""
    return "\n".join(
        [
            "from tests.attempts import Attempt, check",
            "",
            "",
            f"def test_found_by_fuzzing_on_{backend}() -> None:",
            f'    check({attempt}, "{backend}")',
        ]
    )
