"""`attention` where things go wrong: empty rows, poison, exact statistics, precision, layouts."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from flexdecode import AuxRequest, BlockMask, attention, create_block_mask
from flexdecode.masks import causal, documents, sliding_window
from tests.backend_cases import BACKENDS, BOTH, Backend, check, every_backend
from tests.helpers import assert_within, dense_attention, random_inputs

CPU = BACKENDS[0]
POISON = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.finfo(torch.float32).max])


@every_backend
@pytest.mark.parametrize("masked", [False, True])
def test_fc32_zero_sizes(backend: Backend, masked: bool) -> None:
    block_mask = create_block_mask(causal) if masked else None
    for B, Lq, Lkv in [(0, 1, 10), (2, 0, 10), (2, 3, 0), (0, 0, 0)]:
        q, k, v = (x.to(backend.device) for x in random_inputs(B, 4, 2, Lq, Lkv, 16, 8))
        out, aux = attention(q, k, v, block_mask=block_mask, return_aux=BOTH, backend=backend.name)
        assert out.shape == (B, 4, Lq, 8)
        assert aux.lse.shape == aux.max_scores.shape == (B, 4, Lq)
        assert (out == 0).all()
        assert (aux.lse == -torch.inf).all()
        assert (aux.max_scores == -torch.inf).all()


def nothing(b, h, q_idx, kv_idx):  # no tile at all
    return kv_idx < 0


def never(table):  # tiles that look alive, none of whose elements is
    return lambda b, h, q_idx, kv_idx: table[kv_idx] & (q_idx < 0)


def one_row_of_many(b, h, q_idx, kv_idx):
    return q_idx != 298


def late(b, h, q_idx, kv_idx):  # row 299 has its first key two blocks after its neighbours
    return (q_idx < 299) | (kv_idx >= 290)


@every_backend
@pytest.mark.parametrize("rule", [nothing, never, one_row_of_many, late], ids=lambda f: f.__name__)
def test_fc33_fully_masked_rows(backend: Backend, rule: Any) -> None:
    q, k, v = random_inputs(2, 2, 1, 4, 300, 16)
    if rule is never:
        rule = never(torch.ones(300, dtype=torch.bool, device=backend.device))
    for size in (16, 128):
        out, aux = check(backend, q, k, v, mask=rule, BLOCK_SIZE=size)
        empty = aux.lse == -torch.inf
        assert (out[empty] == 0).all()
        assert not out.isnan().any()


@every_backend
@pytest.mark.parametrize("splits", [None, 1, 7])
def test_fc34_lse_is_natural_and_exact(backend: Backend, splits: int | None) -> None:
    k, v = (x.to(backend.device) for x in random_inputs(1, 2, 2, 1, 100, 16)[1:])
    q = torch.zeros(1, 2, 1, 16, device=backend.device)
    options = None if splits is None else {"num_splits": splits}
    for n, grad in ((1, True), (2, False), (3, False), (100, False), (100, True)):
        with torch.set_grad_enabled(grad):
            _, aux = attention(
                q, k, v, kv_len=n, return_aux=BOTH, backend=backend.name, kernel_options=options
            )
        exact = torch.full_like(aux.lse, math.log(n))
        torch.testing.assert_close(aux.lse, exact, rtol=2e-7, atol=0)
        assert (aux.max_scores == 0).all()


@every_backend
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy, interpreting
def test_fc38_unused_slots_change_no_bit(backend: Backend) -> None:
    """Unused slots hold NaN, infinities and the largest number in turn."""
    poison = POISON.repeat(32)[:, None]
    kv_len = torch.tensor([32, 64, 96, 48])
    holes = torch.zeros(128, dtype=torch.long)
    holes[40:60] = 1
    q, k, v = random_inputs(4, 2, 1, 3, 128, 16)
    starts = (kv_len - 3)[:, None]
    for mask, used in (
        (None, torch.arange(128) < kv_len[:, None]),
        (
            sliding_window(10),
            (torch.arange(128) < kv_len[:, None]) & (torch.arange(128) > starts - 10),
        ),
        (documents(holes.to(backend.device)), None),
    ):
        if used is None:  # the rows of a sequence see what the documents of any row see
            rows = starts + torch.arange(3)
            used = (holes[rows][:, :, None] == holes).any(1) & (torch.arange(128) < kv_len[:, None])
        clean, dirty = [], []
        for x in (k, v):
            unused = ~used[:, None, :, None].expand(x.shape)
            clean.append(x.masked_fill(unused, 0.0))
            dirty.append(torch.where(unused, poison, x))
        for size in (16, 128):
            right, right_aux = check(backend, q, *clean, mask=mask, BLOCK_SIZE=size, kv_len=kv_len)
            found, aux = attention(
                *(x.to(backend.device) for x in (q, *dirty)),
                block_mask=None if mask is None else create_block_mask(mask, BLOCK_SIZE=size),
                kv_len=kv_len.to(backend.device),
                return_aux=BOTH,
                backend=backend.name,
            )
            assert torch.equal(found, right)
            assert torch.equal(aux.lse, right_aux.lse)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fc38_a_shared_cache_keeps_rows_apart(backend: Backend, dtype: torch.dtype) -> None:
    """What one sequence may see, another may not, in one and the same slot."""
    q, k, v = random_inputs(2, 4, 2, 1, 100, 16, Bkv=1, dtype=dtype)
    check(backend, q, k, v, mask=causal, kv_len=torch.tensor([100, 50]), slack=2.0)
    v[:, :, 50:] = torch.nan
    for lengths in ([100, 50], [50, 100]):
        out = attention(
            *(x.to(backend.device) for x in (q, k, v)),
            kv_len=torch.tensor(lengths, device=backend.device),
            backend=backend.name,
        )
        short = lengths.index(50)
        assert not out[short].isnan().any()
        assert out[1 - short].isnan().all()


@every_backend
def test_fc43_float32_is_float32(backend: Backend) -> None:
    q, k, v = random_inputs(2, 4, 2, 2, 512, 64)
    out, _ = check(backend, q, k, v, mask=causal)
    exact = dense_attention(q, k, v, mask=causal).out
    assert (out.cpu().double() - exact).abs().max() < 1e-5


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fc44_scores_are_float32_inside_the_mod(backend: Backend, dtype: torch.dtype) -> None:
    q, k, v = random_inputs(1, 2, 1, 1, 1025, 32, dtype=dtype)
    rule = lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx)  # noqa: E731
    out, aux = attention(
        *(x.to(backend.device) for x in (q, k, v)),
        score_mod=rule,
        return_aux=BOTH,
        backend=backend.name,
    )
    exact = dense_attention(q, k, v, score_mod=rule)
    ulp = torch.finfo(dtype).eps * exact.out.abs().max().item()
    assert_within(out, exact.out, 2 * ulp)
    assert_within(aux.lse, exact.lse, 5e-4, "lse")  # of about 1000


@every_backend
@pytest.mark.parametrize("splits", [1, 7])
def test_fc47_a_sink_joins_once(backend: Backend, splits: int) -> None:
    q, k, v = random_inputs(2, 4, 2, 2, 300, 16)
    sinks = torch.tensor([0.5, -1.0, 3.0, -torch.inf])
    options = {"num_splits": splits}
    mask = sliding_window(100)  # the first splits may be empty
    out, aux = check(backend, q, k, v, mask=mask, sinks=sinks, kernel_options=options)
    plain, plain_aux = check(backend, q, k, v, mask=mask, kernel_options=options)
    lse, column = plain_aux.lse.cpu().double(), sinks.double().view(1, 4, 1)
    expected = plain.cpu() * (lse - torch.logaddexp(lse, column)).exp().unsqueeze(-1)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(aux.max_scores, plain_aux.max_scores)

    empty, empty_aux = check(backend, q, k, v, mask=nothing, sinks=sinks)
    assert (empty == 0).all()
    assert torch.equal(empty_aux.lse.cpu().float(), sinks.view(1, 4, 1).expand(2, 4, 2))


@every_backend
@pytest.mark.parametrize("splits", [2, 7])
def test_a_bias_of_any_strides_joins_every_split(backend: Backend, splits: int) -> None:
    q, k, v = random_inputs(2, 4, 2, 3, 300, 16)
    draw = torch.randn(2, 4, 3, 600, generator=torch.Generator().manual_seed(1))
    whole = draw[..., :300]
    kinds = {
        "keys first": whole.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        "every other key": draw[..., ::2],
        "one for all heads and rows": whole[:, :1, :1].expand(2, 4, 3, 300),
        "one for all keys": whole[:1, :, :, :1].expand(1, 4, 3, 300),
    }
    chosen = list(kinds.values())
    for bias in chosen[splits % 2 :: 2] if backend.slow else chosen:
        # The window leaves the first splits without work.
        check(
            backend,
            q,
            k,
            v,
            mask=causal & sliding_window(90),
            bias=bias,
            sinks=torch.tensor([0.5, -1.0, 3.0, -torch.inf]),
            kernel_options={"num_splits": splits},
        )


@every_backend
def test_fc51_seventy_thousand_sequences_of_one_key(backend: Backend) -> None:
    B = 70_000 if not backend.slow else 6  # the limit is the hardware's, not the interpreter's
    q, k, v = (x.to(backend.device) for x in random_inputs(B, 1, 1, 1, 1, 16))
    assert torch.equal(attention(q, k, v, backend=backend.name), v)
    kv_len = torch.arange(B, device=backend.device) % 2
    for block_mask in (None, create_block_mask(causal)):
        out = attention(q, k, v, kv_len=kv_len, block_mask=block_mask, backend=backend.name)
        assert torch.equal(out, v * kv_len.view(B, 1, 1, 1))


@every_backend
def test_fc55_scalars_and_parameters_as_captures(backend: Backend) -> None:
    q, k, v = (x.to(backend.device) for x in random_inputs(1, 2, 1, 1, 50, 16))
    temperature = torch.tensor(0.5, device=backend.device)
    slopes = torch.nn.Parameter(torch.tensor([0.1, 0.2], device=backend.device))
    unused = torch.nn.Parameter(torch.zeros(3))

    def rule(score, b, h, q_idx, kv_idx):
        _ = unused
        return score * temperature + slopes[h] * (kv_idx - q_idx)

    for value in (0.5, 2.0):
        temperature.fill_(value)
        with torch.no_grad():
            expected = dense_attention(q, k, v, score_mod=rule).out
        out = attention(q, k, v, score_mod=rule, backend=backend.name)
        assert not out.requires_grad
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


LAYOUTS = {
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last_dim": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "step": lambda x: torch.stack([x, -x], 4)[..., 0],
    "reversed_batch": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "slice_of_cache": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
}


@every_backend
@pytest.mark.parametrize("kv_len", [None, torch.tensor([100, 60, 3])], ids=["whole", "ragged"])
def test_fc67_any_strides(backend: Backend, kv_len: torch.Tensor | None) -> None:
    q, k, v = random_inputs(3, 4, 2, 2, 100, 16)
    right, _ = check(backend, q, k, v, mask=causal, kv_len=kv_len)
    for layout in LAYOUTS.values():
        changed = [layout(x) for x in (q, k, v)]
        assert not changed[1].is_contiguous()
        found, _ = check(backend, *changed, mask=causal, kv_len=kv_len)
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
        assert found.is_contiguous()


@every_backend
def test_fc67_expanded_heads_are_grouped_heads(backend: Backend) -> None:
    q, k, v = random_inputs(2, 6, 1, 2, 100, 16)
    right, _ = check(backend, q, k, v, mask=causal)
    found, _ = check(backend, q, k.expand(-1, 6, -1, -1), v.expand(-1, 6, -1, -1), mask=causal)
    assert torch.equal(found, right)
    one_k, one_v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    check(backend, q, one_k, one_v, mask=causal)
    bias = torch.randn(1, 1, 1, 100).expand(2, 6, 2, 100)
    check(backend, q, k, v, bias=bias)


@every_backend
def test_fc68_autocast_changes_nothing(backend: Backend) -> None:
    q, k, v = (x.to(backend.device) for x in random_inputs(1, 4, 2, 2, 100, 16))
    right = attention(q, k, v, backend=backend.name)
    with torch.autocast(backend.device, torch.bfloat16):
        assert torch.equal(attention(q, k, v, backend=backend.name), right)


@every_backend
def test_fc75_batch_size_may_change(backend: Backend) -> None:
    limit = torch.tensor([5, 50, 17, 100], device=backend.device)

    def mine(b, h, q_idx, kv_idx):
        return kv_idx < limit[b]

    q, k, v = random_inputs(4, 2, 2, 1, 100, 16)
    for B in (1, 4, 2):
        check(backend, q[:B], k[:B], v[:B], mask=mine)


@every_backend
def test_minus_infinity_from_a_rule_is_a_masked_key(backend: Backend) -> None:
    q, k, v = random_inputs(1, 2, 1, 2, 100, 16)

    def past_only(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx <= q_idx - 98, score, -float("inf"))

    out, _ = check(backend, q, k, v, score_mod=past_only)
    assert (out[:, :, 0] != 0).any()
    out, aux = attention(
        *(x.to(backend.device) for x in (q, k, v)),
        bias=torch.full((1, 1, 2, 100), -torch.inf, device=backend.device),
        return_aux=BOTH,
        backend=backend.name,
    )
    assert (out == 0).all()
    assert (aux.lse == -torch.inf).all()


@every_backend
def test_torch_block_mask_starts_at_position_zero(backend: Backend) -> None:
    from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

    q, k, v = random_inputs(1, 2, 2, 5, 300, 16)
    mask = torch_block_mask(lambda b, h, q, kv: q >= kv, None, None, 5, 300, device=backend.device)
    rule = lambda score, b, h, q_idx, kv_idx: score + 0.1 * (kv_idx - q_idx)  # noqa: E731
    out = attention(
        *(x.to(backend.device) for x in (q, k, v)),
        block_mask=mask,
        score_mod=rule,
        backend=backend.name,
    )
    expected = dense_attention(q, k, v, mask=causal, score_mod=rule, q_offset=0).out
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_fc48_batch_invariant_rows_on_the_cpu() -> None:
    """A row's bits depend on no other row, nor on the capacity or the kinds of blocks."""
    q, k, v = random_inputs(3, 8, 2, 4, 300, 24)
    kv_len = torch.tensor([300, 129, 77])
    keep = torch.ones(300, dtype=torch.bool)
    rules = [
        causal,
        sliding_window(150),
        lambda b, h, q_idx, kv_idx: keep[kv_idx] & (kv_idx <= q_idx),
    ]
    options = {"deterministic": "batch_invariant"}

    def run(b: slice, rows: slice, capacity: int, rule: Any) -> torch.Tensor:
        lengths = kv_len[b]
        return attention(
            q[b, :, rows],
            k[b, :, :capacity],
            v[b, :, :capacity],
            kv_len=lengths,
            q_offset=lengths - 4 + rows.start,
            block_mask=create_block_mask(rule),
            kernel_options=options,
            backend="cpu",
        )

    for rule in rules:
        check(CPU, q, k, v, mask=rule, kv_len=kv_len, kernel_options=options)
        whole = run(slice(0, 3), slice(0, 4), 300, rule)
        for b in range(3):
            one = slice(b, b + 1)
            for i in range(4):
                for capacity in (300, int(kv_len[b])):
                    row = run(one, slice(i, i + 1), capacity, rule)
                    assert torch.equal(row, whole[one, :, i : i + 1])
    assert torch.equal(
        run(slice(0, 3), slice(0, 4), 300, rules[0]), run(slice(0, 3), slice(0, 4), 300, rules[2])
    )


def test_aux_holds_what_was_asked_for() -> None:
    q, k, v = random_inputs(1, 2, 2, 1, 10, 16)
    out, aux = attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert aux.max_scores is None
    assert torch.equal(out, attention(q, k, v))
    _, aux = attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    assert aux.max_scores is not None


def test_defaults_of_torch_are_left_alone() -> None:
    """Neither the default dtype nor grad mode nor inference mode matters."""
    q, k, v = random_inputs(1, 2, 2, 1, 100, 16)
    right = attention(q, k, v, block_mask=create_block_mask(causal))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(attention(q, k, v, block_mask=create_block_mask(causal)), right)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v, block_mask=create_block_mask(causal)), right)


def test_long_contexts_stay_within_bounded_memory() -> None:
    """Scores of 512 rows by 65,536 keys would be 128 MiB; a piece holds 16 MiB."""
    code = """
import resource, torch
from flexdecode import attention, create_block_mask
from flexdecode.masks import causal
q, k = torch.randn(1, 8, 64, 8), torch.randn(1, 1, 65536, 8)
small = attention(q[:, :, :2], k, k, block_mask=create_block_mask(causal))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention(q, k, k, block_mask=create_block_mask(causal))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100


@every_backend
def test_a_given_full_block_that_crosses_the_length_asks_the_rule(backend: Backend) -> None:
    """Queries at 32 and 33 of 34 keys; the last block is listed as full and is not under causal."""
    q, k, v = (x.to(backend.device) for x in random_inputs(2, 4, 2, 2, 34, 8))

    def table(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=backend.device)

    for heads in (1, 2, 4):  # one list, one for each key head, one for each query head
        mask = BlockMask.from_kv_blocks(
            table([[[0]] * heads] * 2),
            table([[[[0]]] * heads] * 2),
            table([[[2]] * heads] * 2),
            table([[[[0, 2]]] * heads] * 2),
            (2, 16),
            lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
            (2, 34),
        )
        out = attention(q, k, v, block_mask=mask, backend=backend.name)
        expected = attention(q, k, v, block_mask=mask, backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        shown = dense_attention(
            q.cpu(), k.cpu(), v.cpu(), mask=lambda b, h, i, j: (i >= j) & ((j < 16) | (j >= 32))
        )
        torch.testing.assert_close(expected.cpu().double(), shown.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("D", "Dv"), [(36, 32), (80, 64), (80, 72), (32, 32), (24, 9), (80, 16)])
def test_values_within_the_keys(D: int, Dv: int) -> None:
    """A latent cache: values are the first columns of the keys, whether read once or twice."""
    backend = BACKENDS[-1]
    at = torch.Generator().manual_seed(D + Dv)
    q = torch.randn(2, 4, 2, D, generator=at).to(backend.device)
    k = torch.randn(2, 1, 100, D, generator=at).to(backend.device)
    kv_len = torch.tensor([100, 41], device=backend.device)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx % 7 != h))
    within = k[..., :Dv]
    for block_mask in (None, mask):
        arguments: dict[str, Any] = {"kv_len": kv_len, "block_mask": block_mask}
        wanted = attention(q, k, within, **arguments, backend="reference")
        for v in (within, within.contiguous(), *([within] if block_mask is not None else [])):
            out = attention(q, k, v, **arguments, backend=backend.name)
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)
