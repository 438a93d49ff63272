"""New keys and values land where `attention` looks for them, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import append_kv
from tests.cache_cases import KINDS, Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("reference", "triton") if DEVICE == "cuda" else ("cpu", "triton")


def grown(kind: str, packed: bool, seed: int) -> tuple[Case, dict[str, Any], list[int]]:
    """Return a case, its cache with the newest keys taken out again, and how many those are."""
    new = [2, 0, 3, 1] if packed else [3, 3, 3, 3]
    case = Case.random(seed, [20, 3, 35, 7], new, device=DEVICE, Dv=24)
    stored = case.stored(kind, seed)
    stored["kv_len"] -= torch.tensor(new, device=DEVICE)
    return case, stored, new


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_cache_is_as_if_it_had_held_them(backend: str, kind: str, packed: bool) -> None:
    case, stored, new = grown(kind, packed, 3)
    wanted = stored["k"].clone(), stored["v"].clone()
    parts: list[list[Tensor]] = [[], []]
    for x, part in zip((case.k, case.v), parts, strict=True):
        for b, count in enumerate(new):
            n = int(case.kv_len[b])
            part.append(x[b, :, n - count : n])
    rows = {"k_new": torch.cat(parts[0], 1)[None], "v_new": torch.cat(parts[1], 1)[None]}
    if packed:
        starts = torch.tensor([0, *new], dtype=torch.int32, device=DEVICE).cumsum(0)
        rows["cu_seqlens"] = starts.to(torch.int32)
    else:
        rows = {"k_new": torch.stack(parts[0]), "v_new": torch.stack(parts[1])}
    # The newest rows hold something else until they are appended.
    for x in (stored["k"], stored["v"]):
        blank = x.isnan()
        x.mul_(0).add_(7).masked_fill_(blank, torch.nan)
    before = stored["k"].clone()
    k, v = stored.pop("k"), stored.pop("v")
    append_kv(k, v, **rows, **stored, backend=backend)
    changed = (k != before) & ~before.isnan()
    assert int(changed.sum()) == sum(new) * 2 * 16
    for got, want in ((k, wanted[0]), (v, wanted[1])):
        was_old = (got == 7) | want.isnan()
        assert torch.equal(torch.where(was_old, 0, got), torch.where(was_old, 0, want))
        assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_end_or_without_a_page_are_dropped(backend: str) -> None:
    k, v = torch.zeros(2, 2, 1, 4, 3, device=DEVICE)
    new = torch.ones(2, 1, 3, 3, device=DEVICE)
    length = torch.tensor([3, 9], device=DEVICE)
    append_kv(k, v, new, new, kv_len=length, backend=backend)
    assert k.sum() == 3 and bool((k[0, 0, 3] == 1).all())
    pool, other = torch.zeros(2, 3, 1, 2, 3, device=DEVICE)
    table = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32, device=DEVICE)
    length = torch.tensor([1, 0], device=DEVICE)
    append_kv(pool, other, new, new, kv_len=length, page_table=table, backend=backend)
    assert pool[:, 0, :, 0].tolist() == [[1, 1], [1, 0], [0, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("R", [16, 10])
def test_rotary_is_the_rotation_by_the_position(backend: str, interleaved: bool, R: int) -> None:
    at = torch.Generator().manual_seed(0)
    new, other = torch.randn(2, 2, 3, 2, 16, generator=at).to(DEVICE)
    k, v = torch.zeros(2, 2, 3, 40, 16, device=DEVICE)
    rate = 10000 ** -(torch.arange(R // 2) / (R // 2))
    angle = torch.arange(40)[:, None] * rate
    length = torch.tensor([5, 30], device=DEVICE)
    append_kv(
        k,
        v,
        new,
        other,
        kv_len=length,
        rotary_cos=angle.cos().to(DEVICE),
        rotary_sin=angle.sin().to(DEVICE),
        rotary_interleaved=interleaved,
        backend=backend,
    )
    for b in range(2):
        for i in range(2):
            position = int(length[b]) + i
            assert torch.equal(v[b, :, position], other[b, :, i])
            x = new[b, :, i].double().cpu()
            first, second = (
                (torch.arange(0, R, 2), torch.arange(1, R, 2))
                if interleaved
                else (torch.arange(R // 2), torch.arange(R // 2) + R // 2)
            )
            z = torch.complex(x[:, first], x[:, second])
            z = z * torch.exp(1j * position * rate.double())
            want = x.clone()
            want[:, first], want[:, second] = z.real, z.imag
            torch.testing.assert_close(k[b, :, position].double().cpu(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_new": torch.zeros(2, 2, 1, 8)}, "k_new: expected 2 heads of dim 16"),
        ({"v_new": torch.zeros(2, 2, 2, 16)}, "v_new: expected shape"),
        ({"k_cache": torch.zeros(3, 2, 9, 16), "v_cache": torch.zeros(3, 2, 9, 16)}, "k_cache: ex"),
        ({"k_cache": torch.zeros(2, 2, 9)}, "k_cache: expected 4 dims"),
        (
            {"k_cache": torch.zeros(1, 2, 9, 16).expand(2, -1, -1, -1)},
            "k_cache: expected memory of",
        ),
        (
            {"v_cache": torch.zeros(2, 1, 9, 16).expand(-1, 2, -1, -1)},
            "v_cache: expected memory of",
        ),
        ({"kv_len": 10}, r"kv_len: expected a value in \[0, 9\], got 10"),
        ({"kv_len": torch.zeros(3, dtype=torch.int32)}, "kv_len: expected an int or a tensor"),
        ({"rotary_cos": torch.zeros(9, 8)}, "rotary_sin: expected a floating-point Tensor"),
        ({"rotary_cos": torch.zeros(9, 9), "rotary_sin": torch.zeros(9, 9)}, "rotary_cos: expect"),
        ({"v_cache": torch.zeros(2, 2, 9, 16, dtype=torch.int8)}, "v_cache: expected a floating"),
        ({"page_table": torch.zeros(2, 2)}, "page_table: expected an int32 tensor"),
        ({"cu_seqlens": torch.tensor([0, 1, 2])}, "k_new: expected batch 1 with cu_seqlens"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    k, v = torch.zeros(2, 2, 2, 9, 16)
    new = torch.zeros(2, 2, 1, 16)
    given = {"k_cache": k, "v_cache": v, "k_new": new, "v_new": new, "kv_len": 3} | change
    with pytest.raises((ValueError, TypeError), match=message):
        append_kv(**given)
