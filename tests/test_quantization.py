"""Quantised tensors: layouts bit for bit, rounding, views, and messages for what does not fit."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flexdecode import QuantizedTensor, dequantize, quantize
from flexdecode.kernels.codes import decode, grain, lift

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4"},
    "int4 2 groups": {"format": "int4", "groups": 2},
    "int4 4 groups": {"format": "int4", "groups": 4},
    "int4 8 groups": {"format": "int4", "groups": 8},
    "int4 interleaved": {"format": "int4", "layout": "interleaved"},
    "int4 interleaved 4 groups": {"format": "int4", "groups": 4, "layout": "interleaved"},
    "fp8": {"format": "fp8"},
    "fp8 words": {"format": "fp8", "scale_dtype": torch.int32},
    "fp8 head": {"format": "fp8", "per": "head"},
    "fp8 tensor": {"format": "fp8", "per": "tensor"},
    "fp8_e5m2": {"format": "fp8_e5m2"},
    "int8": {"format": "int8"},
    "int8 half": {"format": "int8", "scale_dtype": torch.float16},
    "int8 head": {"format": "int8", "per": "head"},
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- layouts, from their description alone ---------------------------------------------------------


def half(bits: int) -> float:
    value: float = struct.unpack("<e", struct.pack("<H", bits))[0]
    return value


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def e4m3(byte: int) -> float:
    """Sign, four bits of exponent with bias 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_interleaved_rows_are_read_as_described(groups: int) -> None:
    D = 32
    words = torch.randint(0, 1 << 32, (groups + D // 8,), generator=torch.Generator()).tolist()
    words[:groups] = [0x3C00_3400 + 0x100_0080 * g for g in range(groups)]
    expected = []
    for d in range(D):
        nibble = words[groups + d // 8] >> (4 * (d % 8)) & 15
        word = words[d // (D // groups)]
        expected.append(nibble * half(word & 0xFFFF) + half(word >> 16))
    data = torch.tensor([signed(word) for word in words], dtype=torch.int32).view(1, 1, 1, -1)
    packed = QuantizedTensor(data, format="int4", groups=groups, layout="interleaved")
    assert packed.shape == (1, 1, 1, D)
    assert dequantize(packed, torch.float64).flatten().tolist() == expected


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_separate_rows_are_read_as_described(groups: int) -> None:
    D = 16
    row = [(40503 * c + 11111) % 65536 for c in range(D // 4)]
    words = [0xBC00_3555 + 0x40_0101 * g for g in range(groups)]
    expected = []
    for d in range(D):
        nibble = row[d % 4] >> (4 * (d // 4)) & 15
        word = words[d // (D // groups)]
        expected.append(nibble * half(word & 0xFFFF) + half(word >> 16))
    packed = QuantizedTensor(
        torch.tensor(row).to(torch.int16).view(1, 1, 1, -1),
        torch.tensor([signed(word) for word in words], dtype=torch.int32).view(1, 1, 1, -1),
        groups=groups,
    )
    assert packed.format == "int4"
    assert dequantize(packed, torch.float64).flatten().tolist() == expected


def test_fp8_words_are_read_as_described() -> None:
    codes = [b for b in range(256) if b & 127 != 127]  # all that are numbers: 254, and two zeros
    codes += [0, 0]
    words = [sum(codes[4 * w + j] << (8 * j) for j in range(4)) for w in range(64)]
    data = torch.tensor([signed(word) for word in words], dtype=torch.int32).view(1, 1, 1, 64)
    coefficients = torch.tensor([[[signed(0xC500_3800)]]], dtype=torch.int32)  # 0.5 and -5
    packed = QuantizedTensor(data, coefficients, format="fp8")
    expected = [e4m3(code) * 0.5 - 5.0 for code in codes]
    assert dequantize(packed, torch.float64).flatten().tolist() == expected
    scaled = QuantizedTensor(data, torch.tensor([[[0.1]]]), format="fp8")
    expected = [e4m3(code) * torch.tensor(0.1).double().item() for code in codes]
    assert dequantize(scaled, torch.float64).flatten().tolist() == expected


def test_scales_of_a_head_of_all_and_none() -> None:
    data = normal(2, 3, 5, 8).to(torch.float8_e4m3fn)
    by_head = dequantize(QuantizedTensor(data, torch.tensor([1.0, 2.0, 3.0])))
    assert torch.equal(by_head[:, 2], 3 * data[:, 2].bfloat16())
    assert torch.equal(dequantize(QuantizedTensor(data, torch.tensor(4.0))), 4 * data.bfloat16())
    assert torch.equal(dequantize(QuantizedTensor(data)), data.bfloat16())
    wide = data.to(torch.float8_e5m2)
    assert torch.equal(dequantize(QuantizedTensor(wide)), wide.bfloat16())


def test_what_quantize_writes_is_laid_out_as_described() -> None:
    x = torch.arange(16.0).view(1, 1, 1, 16)
    word = struct.unpack("<i", struct.pack("<ee", 1.0, 0.0))[0]  # scale 1, shift 0
    separate = quantize(x, "int4")
    assert separate.data.flatten().tolist() == [(0xC840 + 0x1111 * c) - (1 << 16) for c in range(4)]
    assert separate.scale is not None and separate.scale.tolist() == [[[[word]]]]
    rows = quantize(x, "int4", layout="interleaved")
    assert rows.data.flatten().tolist() == [word, 0x7654_3210, signed(0xFEDC_BA98)]


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_error_of_each_format(name: str, record_property: Any) -> None:
    x = normal(2, 3, 40, 128) * torch.logspace(-2, 2, 40).view(1, 1, 40, 1) + 0.5
    packed = quantize(x, **FORMATS[name])
    error = (dequantize(packed, torch.float64) - x).abs()
    scale, shift = packed.scale_and_shift()
    step = scale.double().unsqueeze(-1)
    if packed.format in ("int4", "int8"):
        # Half a step; a code at the edge also carries the rounding of a float16 scale.
        bound = step * (0.5 + (127 if packed.format == "int8" else 15) * 2**-11)
    else:
        mantissa = 2 if packed.format == "fp8_e5m2" else 3
        offset = 0.0 if shift is None else shift.double().unsqueeze(-1)
        code = (x.unflatten(-1, (1, -1)) - offset).abs()
        # Half a unit in the last place; below the normal numbers, half the smallest code.
        smallest = 2.0**-16 if packed.format == "fp8_e5m2" else 2.0**-9
        bound = torch.maximum(code * 2.0 ** -(mantissa + 1), step * smallest / 2) * 1.01
    assert bool((error.unflatten(-1, (packed.groups, -1)) <= bound + 1e-7).all())
    plain = normal(2, 3, 40, 128, seed=1)
    packed = quantize(plain, **FORMATS[name])
    found = float((dequantize(packed, torch.float64) - plain).square().mean().sqrt())
    bits = 8 * packed.nbytes / plain.numel()
    record_property("rms_error", found)
    print(f"{name}: RMS error {found:.2e} of standard normal rows, {bits:.2f} bits an element")
    assert found < {"int4": 0.12, "fp8": 0.03, "fp8_e5m2": 0.06, "int8": 0.01}[str(packed.format)]


def test_more_groups_are_more_precise() -> None:
    x = normal(1, 2, 64, 128)
    errors = [
        float((dequantize(quantize(x, "int4", groups=groups)) - x).square().mean())
        for groups in (1, 2, 4, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    rows = quantize(x, "int4", groups=4, layout="interleaved")
    assert torch.equal(dequantize(rows), dequantize(quantize(x, "int4", groups=4)))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_a_range(name: str) -> None:
    x = torch.zeros(1, 2, 5, 16)
    x[:, :, 1] = 3.14159
    x[:, :, 2] = -2.71828
    x[:, :, 3] = 6e4
    x[:, :, 4] = 1e-30
    for rows in ([0], [1, 2], [3], [4]):
        part = x[:, :, rows]
        found = dequantize(quantize(part, **FORMATS[name]))
        assert found.isfinite().all()
        tolerance = 0.3 if "e5m2" in name else 0.1  # a code of its own is within the format
        torch.testing.assert_close(found, part, rtol=tolerance, atol=1e-6)
    assert torch.equal(dequantize(quantize(x[:, :, :1], **FORMATS[name])), x[:, :, :1])


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_overflows(name: str) -> None:
    x = torch.tensor([3e38, -3e38, 1e6, 0.0] * 4).view(1, 1, 1, 16)
    assert dequantize(quantize(x, **FORMATS[name])).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_the_device(name: str) -> None:
    x = normal(2, 3, 400, 128) * torch.logspace(-4, 4, 400).view(1, 1, 400, 1)
    there, here = quantize(x.cuda(), **FORMATS[name]).to("cpu"), quantize(x, **FORMATS[name])
    assert torch.equal(there.data.view(torch.uint8), here.data.view(torch.uint8))
    if here.scale is not None:
        assert there.scale is not None and torch.equal(there.scale, here.scale)


# -- a QuantizedTensor looks like a tensor ---------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_views_share_memory(name: str) -> None:
    packed = quantize(normal(3, 2, 12, 32), **FORMATS[name])
    whole = dequantize(packed)
    part = packed[1:, :, 4:9]
    assert part.shape == (2, 2, 5, 32) and part.device == packed.device and part.dim() == 4
    assert torch.equal(dequantize(part), whole[1:, :, 4:9])
    rows = packed[torch.tensor([2, 0]), :1]
    assert torch.equal(dequantize(rows), whole[[2, 0], :1])
    packed.data.zero_()
    assert torch.equal(dequantize(part), dequantize(packed)[1:, :, 4:9])
    assert packed.numel() == whole.numel() and packed.stride(0) == packed.data.stride(0)
    assert packed.to(torch.float16).dtype == torch.float16
    assert packed.to("cpu").shape == packed.shape
    assert name.split()[0] in repr(packed)


def test_bytes() -> None:
    x = normal(1, 2, 10, 64)
    assert quantize(x, "int4").nbytes == 20 * (32 + 4)
    assert quantize(x, "int4", groups=4, layout="interleaved").nbytes == 20 * (32 + 16)
    assert quantize(x, "int8", scale_dtype=torch.float16).nbytes == 20 * (64 + 2)
    assert quantize(x, "fp8", per="tensor").nbytes == 20 * 64 + 4


def test_strided_memory() -> None:
    """A cache [B, L, H, row] is read through a view."""
    packed = quantize(normal(2, 3, 6, 16), "int4", groups=2, layout="interleaved")
    cache = packed.data.transpose(1, 2).contiguous()
    view = QuantizedTensor(
        cache.transpose(1, 2), format="int4", groups=2, layout="interleaved", dtype=torch.float32
    )
    assert torch.equal(dequantize(view), dequantize(packed))


# -- decoding in kernels ---------------------------------------------------------------------------


@triton.jit
def decode_kernel(
    units_ptr,
    out_ptr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ABOVE: tl.constexpr,
):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    tiles = decode(tl.load(units_ptr + offs), FORMAT, out_ptr.dtype.element_ty, ASSEMBLY, ABOVE)
    for j in tl.static_range(len(tiles)):
        tl.store(out_ptr + offs * len(tiles) + j, tiles[j])


@pytest.mark.skipif(not INTERPRETING and DEVICE == "cpu", reason="needs a GPU or the interpreter")
@pytest.mark.parametrize("format", ["int4_rows", "int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_is_decoded_exactly(format: str, dtype: torch.dtype) -> None:
    units = torch.arange(65536).to(torch.int16)
    out = torch.empty(65536, 4 if format == "int4_rows" else 2, dtype=dtype, device=DEVICE)
    assembly = DEVICE == "cuda" and torch.version.hip is None
    above = format == "int4_rows" and dtype == torch.bfloat16
    decode_kernel[(64,)](units.to(DEVICE), out, 1024, format, assembly, False)
    if above:
        higher = torch.empty_like(out)
        decode_kernel[(64,)](units.to(DEVICE), higher, 1024, format, assembly, True)
        assert torch.equal(higher.double(), out.double() + 136)
    codes = units.view(torch.uint8).view(65536, 2)
    if format == "int4_rows":
        expected = torch.stack(
            [codes[:, 0] & 15, codes[:, 0] >> 4, codes[:, 1] & 15, codes[:, 1] >> 4], 1
        )
        expected = expected.double() - 8
    else:
        kinds = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
        expected = codes.view(kinds[format]).double()
    kind = getattr(tl, str(dtype).removeprefix("torch."))
    grains = grain(format, kind) * lift(format, kind, assembly)
    known = expected.isfinite()
    found = out.cpu().double() * grains
    assert torch.equal(found[known], expected[known])
    assert torch.equal(found[known].signbit(), expected[known].signbit())


# -- errors ----------------------------------------------------------------------------------------

CODES = torch.zeros(2, 3, 4, 16, dtype=torch.int16)
WORDS = torch.zeros(2, 3, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: quantize([1.0], "int4"), TypeError, "x: expected a Tensor, got list"),
        (lambda: quantize(normal(4, 16), "int4"), ValueError, "x: expected a floating-point"),
        (lambda: quantize(normal(1, 1, 1, 16), "int3"), ValueError, "format: expected one of"),
        (lambda: quantize(normal(1, 1, 1, 12), "int4"), ValueError, "multiple of 8, got 12"),
        (lambda: quantize(normal(1, 1, 1, 16), "int4", groups=3), ValueError, "groups: expected"),
        (
            lambda: quantize(normal(1, 1, 1, 24), "int4", groups=8, layout="interleaved"),
            ValueError,
            "multiple of 4 elements in interleaved rows, got 8 groups of 3",
        ),
        (lambda: quantize(normal(1, 1, 1, 16), "fp8", groups=2), ValueError, "only int4 has"),
        (lambda: quantize(normal(1, 1, 1, 16), "fp8", per="column"), ValueError, "per: expected"),
        (
            lambda: quantize(normal(1, 1, 1, 16), "fp8", per="head", scale_dtype=torch.int32),
            ValueError,
            "per: expected 'row' with coefficient words, got 'head'",
        ),
        (lambda: QuantizedTensor(CODES), ValueError, "scale: expected a tensor of coefficients"),
        (lambda: QuantizedTensor(CODES[0], WORDS[0]), ValueError, "data: expected 4 dims"),
        (lambda: QuantizedTensor(CODES.int()), TypeError, "int32 words and their format="),
        (lambda: QuantizedTensor(CODES, WORDS.float()), TypeError, "scale: expected torch.int32"),
        (
            lambda: QuantizedTensor(CODES, WORDS[:, :, :3]),
            ValueError,
            r"scale: expected shape \[2, 3, 4, 1\] for int4 data \[2, 3, 4, 16\], got \[2, 3, 3\]",
        ),
        (lambda: QuantizedTensor(CODES, WORDS, groups=2), ValueError, r"expected shape \[2, 3, 4,"),
        (
            lambda: QuantizedTensor(CODES.char(), torch.ones(4)),
            ValueError,
            r"scale: expected shape \[2, 3, 4\], \[3\] or \[\] for int8",
        ),
        (
            lambda: QuantizedTensor(CODES[..., ::2], WORDS),
            ValueError,
            "data: expected contiguous rows, got a stride of 2",
        ),
        (
            lambda: QuantizedTensor(CODES, WORDS.to("meta")),
            ValueError,
            "scale: expected device cpu of data, got meta",
        ),
        (lambda: QuantizedTensor(CODES, WORDS, dtype=torch.int8), TypeError, "dtype: expected"),
        (lambda: QuantizedTensor(CODES, WORDS, format="fp8"), TypeError, "data: expected torch.fl"),
        (lambda: dequantize(CODES), TypeError, "x: expected a QuantizedTensor, got Tensor"),
        (lambda: quantize(normal(1, 1, 2, 8), "int4")[0], IndexError, "expected slices or index"),
    ],
)
def test_messages(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()
