"""Appending to quantised caches: one launch, and the very bits that torch operations make.

Kernel and torch agree to the last bit, interpreted and compiled, since both do nothing but
correctly rounded float32 arithmetic in the same order. What could tell them apart, and why it does
not: a compiler may fuse a product and a sum, which the launch forbids; division of CUDA is
approximate unless asked otherwise; torch divides by a Python number exactly on a CPU and multiplies
by its reciprocal on a GPU, so that `quantize` multiplies everywhere; the least of 0.0 and -0.0 is
either, so that coefficients drop the sign of zero. Only which of the NaNs stands for a NaN is up
to the device, and even to the vector instructions of a CPU: rows with one are compared by meaning.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from torch.utils._python_dispatch import TorchDispatchMode

from flexdecode import QuantizedTensor, append_kv, dequantize, quantize
from flexdecode.kernels import append
from flexdecode.kernels.launch import Launch
from tests.backend_cases import GPU
from tests.cache_cases import KINDS, Case
from tests.test_quantized_attention import FORMATS as ATTENDED

DEVICE = "cuda" if GPU else "cpu"
FORMATS = ATTENDED | {
    "rows 2": {"format": "int4", "layout": "interleaved", "groups": 2},
    "rows 8": {"format": "int4", "layout": "interleaved", "groups": 8},
    "e5m2 words": {"format": "fp8_e5m2", "scale_dtype": torch.int32},
    "e5m2 tensor": {"format": "fp8_e5m2", "per": "tensor"},
    "int8 tensor": {"format": "int8", "per": "tensor"},
}
Stored = Tensor | QuantizedTensor


def stored(x: Tensor, name: str) -> Stored:
    options = FORMATS[name]
    return x.clone() if options is None else quantize(x, **options)


def copied(x: Stored) -> Stored:
    if isinstance(x, Tensor):
        return x.clone()
    scale = None if x.scale is None else x.scale.clone()
    return QuantizedTensor(x.data.clone(), scale, x.format, x.groups, x.layout)


def bits(x: Stored) -> list[Tensor]:
    """All memory of a cache, as bytes."""
    parts = [x] if isinstance(x, Tensor) else [x.data, x.scale]
    return [part.contiguous().view(-1).view(torch.uint8) for part in parts if part is not None]


def append_both_ways(
    caches: list[Stored], new: list[Tensor], **call: Any
) -> tuple[list[Stored], list[Stored]]:
    """Append by the kernel and by torch operations on the same device; return both caches."""
    other = [copied(x) for x in caches]
    append_kv(*caches, *new, **call, backend="triton")
    append_kv(*other, *new, **call, backend="reference")
    return caches, other


def assert_same(left: list[Stored], right: list[Stored]) -> None:
    for x, y in zip(left, right, strict=True):
        for mine, wanted in zip(bits(x), bits(y), strict=True):
            assert torch.equal(mine, wanted), f"{int((mine != wanted).sum())} bytes differ"


def angles(positions: int, half: int, dtype: torch.dtype) -> dict[str, Tensor]:
    x = torch.linspace(0, 3, positions * half, device=DEVICE).view(positions, half)
    return {"rotary_cos": x.cos().to(dtype), "rotary_sin": x.sin().to(dtype)}


# Each format once for keys and once for values, each kind of cache at least once; K and V of other
# widths, and of widths that are no power of two.
CASES = [
    ("int4", "int4", "dense", False, torch.bfloat16, 128, 128),
    ("int4 2", "rows", "padded", False, torch.float32, 24, 40),
    ("int4 4", "int4 2", "paged 16", True, torch.float16, 48, 16),
    ("int4 8", "rows 8", "gappy", True, torch.bfloat16, 24, 96),
    ("rows", "int4 8", "paged 1", False, torch.bfloat16, 8, 8),
    ("rows 2", "fp8", "paged 16 + start", True, torch.float32, 80, 31),
    ("rows 4", "fp8 words", "packed", True, torch.float16, 16, 20),
    ("rows 8", "plain", "dense", True, torch.float32, 64, 5),
    ("fp8", "int4 4", "paged 64", False, torch.bfloat16, 31, 16),
    ("fp8 words", "fp8 head", "dense", False, torch.bfloat16, 128, 3),
    ("fp8 head", "int8", "paged 16", True, torch.bfloat16, 16, 16),
    ("fp8 tensor", "e5m2", "padded", False, torch.float16, 20, 64),
    ("e5m2", "fp8 tensor", "paged 16 + start", False, torch.bfloat16, 33, 16),
    ("e5m2 words", "int8 tensor", "gappy", True, torch.float32, 24, 24),
    ("e5m2 tensor", "rows 4", "packed", False, torch.float32, 16, 48),
    ("int8", "e5m2 words", "paged 1", True, torch.float16, 40, 40),
    ("int8 half", "int8 head", "dense", True, torch.bfloat16, 17, 128),
    ("int8 head", "int8 half", "padded", False, torch.float32, 16, 9),
    ("int8 tensor", "rows 2", "paged 64", False, torch.float32, 16, 16),
    ("plain", "int4", "paged 16", True, torch.float32, 16, 32),
]


def test_every_format_and_cache_is_among_the_cases() -> None:
    for column in (0, 1):
        assert {case[column] for case in CASES} >= set(FORMATS) - {"plain", "e5m2 tensor"}
    assert {case[2] for case in CASES} == set(KINDS)


@pytest.mark.parametrize(
    ("place", "case"), list(enumerate(CASES)), ids=["-".join(map(str, case)) for case in CASES]
)
def test_bits_are_those_of_torch(place: int, case: tuple[Any, ...]) -> None:
    k_as, v_as, kind, packed, dtype, D, Dv = case
    counts = [2, 0, 1] if packed else [2, 2, 2]
    drawn = Case.random(place, [20, 3, 7], counts, Hkv=3, D=D, Dv=Dv, device=DEVICE)
    kept = drawn.stored(kind, place)
    kept["kv_len"] -= torch.tensor(counts, device=DEVICE)
    caches = [
        stored(kept.pop(name).nan_to_num(0.5), as_)
        for name, as_ in zip("kv", (k_as, v_as), strict=True)
    ]
    at = torch.Generator().manual_seed(place)
    shape = (1, 3, sum(counts)) if packed else (3, 3, 2)
    # Rows of all sizes; every other one is far from zero.
    size = torch.logspace(-3, 2, shape[2])[:, None]
    new = [
        (
            size * torch.randn(*shape, d, generator=at)
            + size * (torch.arange(shape[2]) % 2)[:, None]
        ).to(DEVICE, dtype)
        for d in (D, Dv)
    ]
    if packed:
        starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
        kept["cu_seqlens"] = starts.to(torch.int32)
    if place % 3:
        half = max(D // (2 + place % 2) // 2, 1)
        kept |= angles(40, half, dtype if place % 2 else torch.float32)
        kept["rotary_interleaved"] = place % 4 < 2
    before = [copied(x) for x in caches]
    assert_same(*append_both_ways(caches, new, **kept))
    for x, y in zip(caches, before, strict=True):
        assert not torch.equal(bits(x)[0], bits(y)[0])


# -- rows that are easy to get wrong --------------------------------------------------------------


def odd_rows(D: int) -> Tensor:
    """Constant, signed, tiny, huge, one-sided and infinite rows, [rows, D], float32."""
    at = torch.Generator().manual_seed(1)
    inf, x = torch.inf, torch.randn(D, generator=at)
    first, alternate = torch.arange(D) == 0, torch.arange(D) % 2 == 1
    rows = [
        torch.zeros(D),
        -torch.zeros(D),
        torch.where(alternate, -0.0, 0.0),
        torch.where(alternate, 0.0, -0.0),
        torch.where(first, -0.0, x.abs()),
        *(torch.full((D,), value) for value in (1.0, -2.71828, 3.14159, 6e4, 65519.0, -65520.0)),
        *(
            torch.full((D,), value)
            for value in (1e-30, -1e-30, 6e-8, -3e-8, 1e-40, 3e38, inf, -inf)
        ),
        *(x * size for size in (1e-44, 1e-40, 1e-38, 2e-36, 1e-8, 1e-5, 1e4, 1e6, 1e30, 8e37)),
        x.abs() + 1000,
        -x.abs() - 1e5,
        torch.where(first, 1e9, x),
        torch.where(first, inf, x),
        torch.where(first, -inf, x),
        # Halves between codes, and what is just beside them.
        torch.arange(D) + 0.5,
        (torch.arange(D) + 0.5).nextafter(torch.tensor(inf)),
        torch.where(first, 448.0, torch.linspace(-18, 18, D)),
        torch.where(first, -127.0, torch.arange(D) % 64 - 31.5),
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "plain"])
# The interpreter computes with NumPy, which warns of inf - inf and of overflow.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime")
def test_odd_rows(name: str) -> None:
    x = odd_rows(64).to(DEVICE)[None, :, None]  # each is a head
    blank = torch.ones_like(x).expand(-1, -1, 2, -1)
    caches: list[Stored] = [stored(blank, name) for _ in range(2)]
    assert_same(*append_both_ways(caches, [x, -x], kv_len=1))
    options = FORMATS[name]
    if options is not None and options.get("per", "row") == "row":
        mine = [caches[0][:, :, 1:]]
        assert_same(mine, [quantize(x, **options)])


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "plain"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime")
def test_rows_with_nan_are_those_of_torch(name: str) -> None:
    x = torch.randn(1, 6, 1, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[0, 1, 0, 5] = x[0, 2, 0, 31] = torch.nan
    x[0, 3, 0, 8] = -torch.nan
    x[0, 4] = torch.nan
    x[0, 5, 0, :2] = torch.tensor([torch.inf, -torch.inf])  # has no middle
    blank = torch.ones(1, 6, 2, 32, device=DEVICE)
    caches: list[Stored] = [stored(blank, name) for _ in range(2)]
    mine, wanted = append_both_ways(caches, [x, x], kv_len=1)
    for left, right in zip(mine, wanted, strict=True):
        assert isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor)
        found, expected = (dequantize(each, torch.float32) for each in (left, right))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_every_number_of_16_bits_becomes_the_code_of_torch(kind: torch.dtype) -> None:
    """Without a scale a code is a conversion: ties, the smallest codes, what is too large, NaN."""
    every = torch.arange(65536).to(torch.int16)
    new = [every.view(t).view(1, 256, 1, 256).to(DEVICE) for t in (torch.bfloat16, torch.float16)]
    data = torch.zeros(1, 256, 2, 256, dtype=torch.uint8, device=DEVICE)
    scale = torch.ones((), device=DEVICE) if kind == torch.int8 else None
    caches: list[Stored] = [QuantizedTensor(data.clone().view(kind), scale) for _ in range(2)]
    mine, wanted = append_both_ways(caches, new, kv_len=1)
    for x, left, right in zip(new, mine, wanted, strict=True):
        left, right = (bits(each)[0].view(256, 2, 256)[:, 1] for each in (left, right))
        known = ~x[0, :, 0].isnan()
        assert torch.equal(left[known], right[known])
        assert torch.equal(left[~known] & 0x7F, right[~known] & 0x7F)  # NaN of either sign


def test_rows_around_each_code_become_the_code_of_torch() -> None:
    """Float32 numbers beside the middle of neighbouring codes, on both sides and in it."""
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
        codes = codes[codes.isfinite()].unique()
        middle = (codes[1:] + codes[:-1]) / 2
        up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        x = torch.cat([middle, middle.nextafter(up), middle.nextafter(down), codes])
        x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(1, -1, 1, 64).to(DEVICE)
        data = torch.zeros(*x.shape, dtype=torch.uint8, device=DEVICE).view(kind)
        caches: list[Stored] = [QuantizedTensor(data.clone()) for _ in range(2)]
        assert_same(*append_both_ways(caches, [x, -x], kv_len=0))


# -- how it is done -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("int4", "fp8"), ("rows 4", "plain"), ("fp8 head", "int8")])
def test_one_launch_does_it_all(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Launched(Launch):
        def __call__(self, *_: Any) -> None:
            done.append(self.kernel.__name__)

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            done.append(str(func))
            return func(*args, **kwargs or {})

    monkeypatch.setattr(append, "Launch", Launched)
    caches = [stored(torch.zeros(2, 2, 8, 16, device=DEVICE), name) for name in names]
    new = torch.ones(2, 2, 1, 16, device=DEVICE)
    call = {"kv_len": torch.tensor([3, 4], device=DEVICE), **angles(8, 8, torch.float32)}
    append_kv(*caches, new, new, **call, backend="triton")  # views of the caches are kept
    assert done == ["_append_kernel"]
    with Operations():
        append_kv(*caches, new, new, **call, backend="triton")
    assert done == ["_append_kernel"] * 2


def test_views_strides_and_rows_in_float8() -> None:
    """Heads last in memory, int32 words of fp8, a layer of a larger cache, new rows as a view."""
    memory = torch.zeros(2, 3, 9, 2, 16, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.zeros(2, 3, 9, 2, device=DEVICE)
    words = quantize(torch.ones(3, 2, 9, 16, device=DEVICE), "fp8")
    k = QuantizedTensor(memory[1].transpose(1, 2), scales[1].transpose(1, 2))
    v = QuantizedTensor(words.data.view(torch.int32), words.scale, "fp8")
    new = torch.randn(2, 3, 16, 2, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    k_new, v_new = (x.permute(0, 2, 3, 1) for x in new)
    for rows in ([k_new, v_new], [x.to(torch.float8_e5m2) for x in (k_new, v_new)]):
        assert_same(*append_both_ways([k, v], rows, kv_len=torch.tensor([0, 5, 8], device=DEVICE)))
        assert not memory[0].float().any() and not scales[0].any() and scales[1].any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(2, 2, 1), (2,)])
def test_coefficients_that_rows_share_are_named(backend: str, shape: tuple[int, ...]) -> None:
    dtype = torch.float32 if len(shape) == 3 else torch.int32
    scale = torch.ones(shape, dtype=dtype, device=DEVICE)
    codes = torch.zeros(2, 2, 5, 8, dtype=torch.float8_e4m3fn, device=DEVICE)
    cache, new = QuantizedTensor(codes, scale), torch.ones(2, 2, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match="scale: expected one for each row, head or cache"):
        append_kv(cache, cache, new, new, kv_len=0, backend=backend)
