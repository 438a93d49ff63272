"""Quantised tensors: how int4, fp8 and int8 lie in memory, and what they stand for.

Every format stores *codes*, small integers or floats, and coefficients:
``x = code * scale + shift``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "QuantizedTensor",
    "as_tensor",
    "dequantize",
    "has_scales_to_write",
    "quantize",
    "row_bytes",
    "stored_like",
    "with_scales",
]

GROUPS = (1, 2, 4, 8)
FORMATS = ("int4", "fp8", "fp8_e5m2", "int8")
_FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_LARGEST = {"fp8": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
_FLOAT16_MAX = 65504.0
_COMPUTE = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Keys, values or queries in a compact format; `attention` takes it where it takes a tensor.

    It wraps memory that belongs to the caller: nothing is copied, and what is written there later
    counts. Indexing it along the first three axes gives views.

    Parameters
    ----------
    data : Tensor, [B, H, L, n], any strides over B, H and L, contiguous rows
        ``B`` may count pages and ``L`` the slots of a page. A row holds

        - int4, ``layout="separate"``: int16, ``n = D / 4``; element ``c + j * D / 4`` is in bits
          4 j to 4 j + 3 of word c, so that unpacking a row gives its four quarters as they are.
        - int4, ``layout="interleaved"``: int32, ``n = groups + D / 8``: first the coefficient
          words, then value words; element ``8 w + j`` is in bits 4 j to 4 j + 3 of word w.
        - fp8: float8_e4m3fn, ``n = D``, or int32, ``n = D / 4``: element ``4 w + j`` is in bits
          8 j to 8 j + 7 of word w. fp8_e5m2: the same with float8_e5m2.
        - int8: int8, ``n = D``.
    scale : Tensor, optional
        Coefficients. int32 words hold two float16, the scale in the low half and the shift in the
        high half; float32 and float16 are scales without a shift.

        - int4, separate: int32 words [B, H, L, groups]; group g covers elements
          ``g * D / groups`` and on. [B, H, L] will do for one group. None when interleaved.
        - fp8: int32 words or float32, one for each row [B, H, L], for each head [H], or one for
          all, []; None stands for 1.
        - int8: float32 or float16 [B, H, L], [H] or [].
    format : {"int4", "fp8", "fp8_e5m2", "int8"}, optional
        Default: what the dtype of `data` says; int32 needs it.
    groups : {1, 2, 4, 8}, default 1
        Groups of a row with coefficients of their own, int4 only.
    layout : {"separate", "interleaved"}, default "separate"
        int4 only.
    dtype : torch.dtype, default bfloat16
        What `dequantize` gives, float16, bfloat16 or float32.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or device that does not fit the format.

    Notes
    -----
    The interleaved int4 rows, and coefficient words, are those of the split-K decoding kernel of
    xformers and MSLK.

    Examples
    --------
    >>> import torch
    >>> from flexdecode import dequantize, quantize
    >>> k = torch.randn(2, 4, 100, 64)
    >>> packed = quantize(k, "int4", groups=2)
    >>> packed.shape, packed.data.shape, packed.scale.shape
    (torch.Size([2, 4, 100, 64]), torch.Size([2, 4, 100, 16]), torch.Size([2, 4, 100, 2]))
    >>> packed[:, :, :10].shape
    torch.Size([2, 4, 10, 64])
    >>> bool((dequantize(packed) - k).abs().max() < 0.3)
    True
    """

    data: Tensor
    scale: Tensor | None = None
    format: str | None = None
    groups: int = 1
    layout: str = "separate"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _check_kinds(self)
        object.__setattr__(self, "format", self.format or _format_of(self.data))
        _check_data(self)
        _check_scale(self)

    # -- what makes it look like a tensor ----

    @functools.cached_property
    def shape(self) -> torch.Size:
        """Logical shape, [B, H, L, D]."""
        return torch.Size((*self.data.shape[:3], _elements(self)))

    @property
    def device(self) -> torch.device:
        """Where the data are."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and coefficients, each stored once."""
        coefficients = 0 if self.scale is None else self.scale.numel() * self.scale.element_size()
        return self.data.numel() * self.data.element_size() + coefficients

    @property
    def requires_grad(self) -> bool:
        """False: codes have no gradient."""
        return False

    def dim(self) -> int:
        """Return 4."""
        return 4

    def numel(self) -> int:
        """Count the logical elements."""
        return self.shape.numel()

    def stride(self, axis: int) -> int:
        """Stride of the codes along batch, heads or length; 0 where expanded."""
        return self.data.stride(axis)

    def to(self, target: torch.device | str | torch.dtype) -> QuantizedTensor:
        """Move to a device, or change what `dequantize` gives."""
        if isinstance(target, torch.dtype):
            return replace(self, dtype=target)
        scale = None if self.scale is None else self.scale.to(target)
        return replace(self, data=self.data.to(target), scale=scale)

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """View part of it: slices or index tensors along the first three axes."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 3 or not all(isinstance(i, (slice, Tensor)) for i in index):
            raise IndexError(
                "QuantizedTensor: expected slices or index tensors along batch, heads and length, "
                f"got {index}; rows stay whole"
            )
        scale = self.scale
        if scale is not None and scale.dim() == 1:
            scale = scale.view(1, -1, 1)
        if scale is not None and scale.dim() > 1:
            for axis, i in enumerate(index):
                if scale.shape[axis] > 1 or self.data.shape[axis] == 1:
                    scale = scale[(slice(None),) * axis + (i,)]
        data = self.data
        for axis, i in enumerate(index):
            data = data[(slice(None),) * axis + (i,)]
        return replace(self, data=data, scale=scale)

    def __repr__(self) -> str:
        kind = f"{self.format}, groups={self.groups}, {self.layout}"
        kind = kind if self.format == "int4" else str(self.format)
        return f"QuantizedTensor({list(self.shape)}, {kind}, dtype={self.dtype})"

    # -- what backends read ----

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        """What a backend has worked out about this tensor's memory, for its next call."""
        return {}

    @functools.cached_property
    def codes(self) -> Tensor:
        """Rows of codes alone, a view: int16 [B, H, L, D/4] for int4, float8 or int8 [..., D]."""
        if self.layout == "interleaved":
            return self.data.view(torch.int16)[..., 2 * self.groups :]
        if self.data.dtype == torch.int32:
            return self.data.view(_FLOAT8[str(self.format)])
        return self.data

    @functools.cached_property
    def coefficients(self) -> Tensor | None:
        """Coefficients [B, H, L, groups], a view, stride 0 where one serves many; or None."""
        shape = self.data.shape[:3]
        if self.layout == "interleaved":
            return self.data[..., : self.groups]
        scale = self.scale
        if scale is None:
            return None
        if scale.dim() == 1:
            scale = scale.view(1, -1, 1)
        if scale.dim() < 4:
            scale = scale.unsqueeze(-1) if scale.dim() else scale.view(1, 1, 1, 1)
        return scale.expand(*shape, self.groups)

    def scale_and_shift(self) -> tuple[Tensor, Tensor | None]:
        """Coefficients as float32, [B, H, L, groups] or ones; no shift where none is stored."""
        found = self.coefficients
        if found is None:
            return torch.ones(1, 1, 1, 1, device=self.device), None
        return _split(found)

    @property
    def by_row(self) -> bool:
        """True where rows have coefficients of their own, rather than heads or the whole."""
        found = self.coefficients
        if found is None or found.dtype == torch.int32:
            return found is not None
        if found.numel() == 0:  # no rows: a kernel must not read what there is none of
            return True
        return any(found.shape[axis] > 1 and found.stride(axis) != 0 for axis in (0, 2))

    def gathered(self, take: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """Dequantise what ``take`` picks from rows, in float32, or float64 where that is asked for.

        Parameters
        ----------
        take : callable Tensor [B, H, L, n] -> Tensor [..., n]
            Any indexing that leaves rows whole.
        dtype : torch.dtype
            Of the result.
        """
        codes = self.codes
        # Bytes, since torch does not index every float8 type everywhere.
        codes = take(codes.view(torch.uint8)).view(codes.dtype)
        found = self.coefficients
        return _from_codes(self, codes, None if found is None else take(found), dtype)


def dequantize(x: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute what a quantised tensor stands for.

    Parameters
    ----------
    x : QuantizedTensor, [B, H, L, D]
    dtype : torch.dtype, default ``x.dtype``
        Of the result. Codes times scale plus shift are computed in float32, or float64 when that
        is asked for, and rounded once.

    Returns
    -------
    Tensor, [B, H, L, D], contiguous

    Raises
    ------
    TypeError
        `x` is something else.
    """
    if not isinstance(x, QuantizedTensor):
        raise TypeError(f"x: expected a QuantizedTensor, got {type(x).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point torch.dtype, got {dtype!r}")
    return _from_codes(x, x.codes, x.coefficients, x.dtype if dtype is None else dtype)


def _from_codes(
    x: QuantizedTensor, codes: Tensor, coefficients: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantise codes [..., n] with coefficients [..., groups] in the format of `x`."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    if x.format == "int4":
        codes = _unpack_nibbles(codes, x.layout)
    out = _by_group(codes.to(work), x.groups)
    if coefficients is not None:
        scale, shift = _split(coefficients)
        out = out * scale.to(work).unsqueeze(-1)
        if shift is not None:
            out = out + shift.to(work).unsqueeze(-1)
    found: Tensor = out.flatten(-2).to(dtype)
    return found


def with_scales(name: str, x: Any) -> Any:
    """Take a float8 tensor for a QuantizedTensor without scales; anything else stays itself."""
    if not isinstance(x, Tensor) or x.dtype not in _FLOAT8.values():
        return x
    if x.dim() != 4 or (x.stride(3) != 1 and x.shape[3] > 1):
        raise ValueError(
            f"{name}: expected a float8 tensor [batch, heads, length, head dim] of contiguous "
            f"rows, got shape {list(x.shape)}, strides {list(x.stride())}"
        )
    return QuantizedTensor(x)


def as_tensor(x: Tensor | QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise what is quantised; a tensor stays itself."""
    return dequantize(x, dtype) if isinstance(x, QuantizedTensor) else x


def row_bytes(x: Tensor | QuantizedTensor) -> int:
    """Bytes of a row of a head, coefficients of its own included."""
    if not isinstance(x, QuantizedTensor):
        return x.shape[3] * x.element_size()
    found = x.coefficients
    own = found.shape[3] * found.element_size() if found is not None and x.by_row else 0
    return x.codes.shape[3] * x.codes.element_size() + own


def has_scales_to_write(cache: QuantizedTensor) -> bool:
    """True where each row has coefficients of its own; those of heads or the whole are given.

    Raises
    ------
    ValueError
        Some rows share coefficients, but not all of a head.
    """
    scale = cache.scale
    if cache.layout == "interleaved":
        return True
    if scale is None or not (cache.by_row or scale.dtype == torch.int32):
        return False
    if scale.dim() < 3 or scale.shape[2] != cache.shape[2]:
        raise ValueError(
            f"scale: expected one for each row, head or cache to append to, got shape "
            f"{list(scale.shape)}"
        )
    return True


def stored_like(cache: Tensor | QuantizedTensor, new: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split new rows into what each part of a cache's memory is to hold.

    Parameters
    ----------
    cache : Tensor or QuantizedTensor, [B, H, L, D]
    new : Tensor, [n, H, rows, D]

    Returns
    -------
    list of (Tensor [B, H, L, d], Tensor [n, H, rows, d])
        Views of the cache, and rows of the same kind: codes and coefficients, or the rows
        themselves.
    """
    if not isinstance(cache, QuantizedTensor):
        return [(cache, new)]
    format, scale = str(cache.format), cache.scale
    if cache.layout == "interleaved":
        packed = _quantize_int4(new.float(), cache.groups, cache.layout, cache.dtype)
        return [(cache.data, packed.data)]
    codes = cache.codes
    if has_scales_to_write(cache):
        assert scale is not None
        if format == "int4":
            packed = _quantize_int4(new.float(), cache.groups, cache.layout, cache.dtype)
            made, words = packed.data, packed.scale
        else:
            made, words = _quantize_bytes(new.float(), format, "row", scale.dtype)
        assert words is not None
        if scale.dim() == 3:
            scale = scale.unsqueeze(-1)
        words = words.view(*new.shape[:3], scale.shape[3])
        return [(_as_bytes(codes), _as_bytes(made)), (scale, words)]
    wide = torch.ones((), device=new.device) if scale is None else scale.float()
    wide = wide.view(1, -1, 1, 1) if wide.dim() else wide
    return [(_as_bytes(codes), _as_bytes(_round_to_codes(new.float(), wide, format)))]


def _as_bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.int16 else codes.view(torch.uint8)


def quantize(
    x: Tensor,
    format: str,
    *,
    groups: int = 1,
    layout: str = "separate",
    per: str = "row",
    scale_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Store a tensor in fewer bits, each element rounded to the nearest code.

    Parameters
    ----------
    x : Tensor, [B, H, L, D], floating point
        Finite. ``B`` may count pages.
    format : {"int4", "fp8", "fp8_e5m2", "int8"}
        See `QuantizedTensor`. int4 takes a scale and a shift from the least and the greatest
        element of a group; int8 and fp8 a scale from the greatest magnitude.
    groups : {1, 2, 4, 8}, default 1
        Groups of a row, int4 only.
    layout : {"separate", "interleaved"}, default "separate"
        int4 only; separate is the fast one.
    per : {"row", "head", "tensor"}, default "row"
        What shares a scale, fp8 and int8 only. A row is one token of one head.
    scale_dtype : torch.dtype, optional
        fp8: float32 (default), or int32 for words of a float16 scale and shift, with `per` "row".
        int8: float32 (default) or float16. int4: int32.
    dtype : torch.dtype, default that of `x`
        What `dequantize` gives.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    TypeError, ValueError
        `x` or an option does not fit the format; the message names it.

    Examples
    --------
    >>> import torch
    >>> from flexdecode import dequantize, quantize
    >>> x = torch.linspace(-1, 1, 16).view(1, 1, 1, 16)
    >>> torch.allclose(dequantize(quantize(x, "int4")), x, atol=1e-3)  # 16 levels, 16 elements
    True
    >>> quantize(x, "fp8", per="tensor").scale.shape
    torch.Size([])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a Tensor, got {type(x).__name__}")
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(
            f"x: expected a floating-point tensor [B, H, L, D], got {x.dtype} {list(x.shape)}"
        )
    _check_option("format", format, FORMATS)
    _check_option("per", per, ("row", "head", "tensor"))
    _check_option("groups", groups, GROUPS)
    if dtype is None:
        dtype = x.dtype if x.dtype in _COMPUTE else torch.float32
    _check_option("dtype", dtype, _COMPUTE)
    kinds: dict[str, tuple[torch.dtype, ...]] = {
        "int4": (torch.int32,),
        "int8": (torch.float32, torch.float16),
    }
    if scale_dtype is None:
        scale_dtype = torch.int32 if format == "int4" else torch.float32
    _check_option("scale_dtype", scale_dtype, kinds.get(format, (torch.float32, torch.int32)))
    if per != "row" and scale_dtype == torch.int32:
        raise ValueError(f"per: expected 'row' with coefficient words, got {per!r}")
    with torch.no_grad():
        x = x.detach().float()
        if format == "int4":
            return _quantize_int4(x, groups, layout, dtype)
        _check_int4_only(format, groups, layout)
        data, scale = _quantize_bytes(x, format, per, scale_dtype)
    return QuantizedTensor(data, scale, format=format, dtype=dtype)


def _quantize_int4(x: Tensor, groups: int, layout: str, dtype: torch.dtype) -> QuantizedTensor:
    _check_option("layout", layout, ("separate", "interleaved"))
    _check_groups(x.shape[3], groups, layout)
    grouped = _by_group(x, groups)
    # The shift is rounded down, so that no element lies below it and a constant group is scale 15.
    shift = _round_down(grouped.amin(-1))
    scale = _to_half((grouped.amax(-1) - shift.float()) * (1 / 15))
    codes = _nearest(grouped - shift.float().unsqueeze(-1), scale.float().unsqueeze(-1), 0, 15)
    codes = codes.flatten(-2).short()
    words = _pack_halves(scale, shift)
    if layout == "separate":
        return QuantizedTensor(
            _pack_nibbles(*codes.chunk(4, dim=-1)), words, groups=groups, dtype=dtype
        )
    halves = _pack_nibbles(*[codes[..., j::4] for j in range(4)])
    data = torch.cat([words, halves.view(torch.int32)], dim=-1)
    return QuantizedTensor(data, None, "int4", groups, "interleaved", dtype)


def _quantize_bytes(
    x: Tensor, format: str, per: str, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Quantise to one byte an element: codes, and scales [B, H, L], [H] or []."""
    largest = _LARGEST[format]
    shift = None
    if scale_dtype == torch.int32:
        # The middle of a row's range costs nothing and halves the range that one-sided rows need.
        shift = _to_half((x.amin(-1) + x.amax(-1)) / 2)
        x = x - shift.float().unsqueeze(-1)
    axes = {"row": (3,), "head": (0, 2, 3), "tensor": (0, 1, 2, 3)}[per]
    if x.numel() == 0 and per != "row":  # no greatest element; any scale will do
        scale = x.new_zeros(x.shape[1:2] if per == "head" else ())
    else:
        scale = x.abs().amax(axes) * (1 / largest)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    stored = scale if scale_dtype == torch.float32 else _to_half(scale)
    wide = stored.float()
    wide = wide.view(1, -1, 1, 1) if per == "head" else wide.unsqueeze(-1) if per == "row" else wide
    codes = _round_to_codes(x, wide, format)
    return codes, stored if shift is None else _pack_halves(stored, shift)


def _round_to_codes(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """Divide by the scale and round to the nearest code of one byte."""
    if format == "int8":
        return _nearest(x, scale, -127, 127).to(torch.int8)
    largest = _LARGEST[format]
    return _ratio(x, scale).clamp(-largest, largest).to(_FLOAT8[format])


# -- arithmetic. Kernels make the same bits (`flexdecode.kernels.quantize_rows`). To divide by a
# number would not: on some devices torch multiplies by its reciprocal. ----


def _by_group(x: Tensor, groups: int) -> Tensor:
    """View rows [..., D] as [..., groups, D / groups]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _ratio(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, 0 where the scale is 0."""
    return torch.where(scale > 0, x / scale, 0.0)


def _nearest(x: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    return _ratio(x, scale).round().clamp(least, most)


def _to_half(x: Tensor) -> Tensor:
    """Round to the nearest finite float16; zero has no sign, as minima may find either."""
    return (x.clamp(-_FLOAT16_MAX, _FLOAT16_MAX) + 0.0).half()


def _round_down(x: Tensor) -> Tensor:
    """Round to the greatest finite float16 that is not above x."""
    near = _to_half(x)
    bits = near.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, torch.where(bits == 0, -32767, bits + 1))
    return torch.where((near.float() > x) & (near > -_FLOAT16_MAX), below.view(torch.half), near)


def _pack_halves(scale: Tensor, shift: Tensor) -> Tensor:
    """Make coefficient words: the scale's bits in the low half, the shift's in the high half."""
    low = scale.contiguous().view(torch.int16).int() & 0xFFFF
    return low | (shift.contiguous().view(torch.int16).int() << 16)


def _split(words: Tensor) -> tuple[Tensor, Tensor | None]:
    """Read coefficients: scales and, of words, shifts; float32."""
    if words.dtype != torch.int32:
        return words.float(), None
    low = words << 16 >> 16
    return low.short().view(torch.half).float(), (words >> 16).short().view(torch.half).float()


def _pack_nibbles(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Make int16 words of int16 numbers 0 to 15, the first in the lowest bits."""
    return (a | (b << 4) | (c << 8) | (d << 12)).contiguous()


def _unpack_nibbles(packed: Tensor, layout: str) -> Tensor:
    """Return int4 codes in the order of the elements, int16."""
    places = [(packed >> (4 * j)) & 15 for j in range(4)]
    if layout == "separate":
        return torch.cat(places, dim=-1)
    return torch.stack(places, dim=-1).flatten(-2)


# -- checks: ``argument: expected ..., got ...`` ----


def _check_option(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    # A tensor has no truth value, and ``1 == True``: compare kinds too.
    if not any(type(value) is type(good) and value == good for good in legal):
        names = ", ".join(repr(x) if isinstance(x, str) else str(x) for x in legal)
        raise ValueError(f"{name}: expected {'one of ' * (len(legal) > 1)}{names}, got {value!r}")


def _check_int4_only(format: str, groups: int, layout: str) -> None:
    if groups != 1:
        raise ValueError(f"groups: expected 1 for {format}, got {groups}; only int4 has groups")
    if layout != "separate":
        raise ValueError(f"layout: expected 'separate' for {format}, got {layout!r}")


def _check_groups(D: int, groups: int, layout: str) -> None:
    _check_option("groups", groups, GROUPS)
    if D % 8 or D < 8:
        raise ValueError(f"int4: expected a head dim that is a multiple of 8, got {D}")
    if D % (4 * groups) and layout == "interleaved":
        raise ValueError(
            "groups: expected groups of a multiple of 4 elements in interleaved rows, got "
            f"{groups} groups of {D // groups}"
        )


def _check_kinds(x: QuantizedTensor) -> None:
    for name, value in (("data", x.data), ("scale", x.scale)):
        if not isinstance(value, Tensor) and (name == "data" or value is not None):
            raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")
    if x.dtype not in _COMPUTE:
        raise TypeError(f"dtype: expected float16, bfloat16 or float32, got {x.dtype}")
    if x.format is not None:
        _check_option("format", x.format, FORMATS)
    _check_option("layout", x.layout, ("separate", "interleaved"))
    _check_option("groups", x.groups, GROUPS)


def _format_of(data: Tensor) -> str:
    found = {torch.int16: "int4", torch.int8: "int8", **{d: f for f, d in _FLOAT8.items()}}
    if data.dtype not in found:
        raise TypeError(
            "data: expected int16 (int4), int8, float8_e4m3fn or float8_e5m2, or int32 words and "
            f"their format=, got {data.dtype}"
        )
    return found[data.dtype]


def _elements(x: QuantizedTensor) -> int:
    """Head dim: elements of a row."""
    width = x.data.shape[3]
    if x.format == "int4":
        return (width - x.groups) * 8 if x.layout == "interleaved" else width * 4
    return width * 4 if x.data.dtype == torch.int32 else width


def _check_data(x: QuantizedTensor) -> None:
    data, format = x.data, str(x.format)
    if data.dim() != 4:
        raise ValueError(
            f"data: expected 4 dims [batch, heads, length, row], got {data.dim()} "
            f"(shape {list(data.shape)})"
        )
    legal: tuple[torch.dtype, ...] = (torch.int8,)
    if format == "int4":
        legal = (torch.int32 if x.layout == "interleaved" else torch.int16,)
    elif format != "int8":
        legal = (_FLOAT8[format], torch.int32)
    if data.dtype not in legal:
        wanted = " or ".join(map(str, legal))
        raise TypeError(f"data: expected {wanted} for {format}, {x.layout}, got {data.dtype}")
    if data.stride(3) != 1 and data.shape[3] > 1:
        raise ValueError(f"data: expected contiguous rows, got a stride of {data.stride(3)}")
    if format != "int4":
        _check_int4_only(format, x.groups, x.layout)
    else:
        _check_groups(_elements(x), x.groups, x.layout)


def _check_scale(x: QuantizedTensor) -> None:
    scale, format = x.scale, str(x.format)
    if x.layout == "interleaved":
        if scale is not None:
            raise ValueError("scale: expected None, interleaved rows hold their coefficients")
        return
    if scale is None:
        if format in ("int4", "int8"):
            raise ValueError(f"scale: expected a tensor of coefficients for {format}, got None")
        return
    legal: tuple[torch.dtype, ...] = (torch.int32, torch.float32)
    if format == "int4":
        legal = (torch.int32,)
    elif format == "int8":
        legal = (torch.float32, torch.float16)
    if scale.dtype not in legal:
        wanted = " or ".join(map(str, legal))
        raise TypeError(f"scale: expected {wanted} for {format}, got {scale.dtype}")
    if scale.device != x.data.device:
        raise ValueError(f"scale: expected device {x.data.device} of data, got {scale.device}")
    B, H, L = x.data.shape[:3]
    shape = tuple(scale.shape)
    whole = len(shape) in (3, 4) and all(
        n in ((size,) if format == "int4" else (size, 1))
        for n, size in zip(shape, (B, H, L), strict=False)
    )
    whole = whole and (shape[3:] == (x.groups,) or (len(shape) == 3 and x.groups == 1))
    if not whole and (format == "int4" or shape not in ((), (H,))):
        rows = f"[{B}, {H}, {L}" + (f", {x.groups}]" if format == "int4" else "]")
        wanted = rows if format == "int4" else f"{rows}, [{H}] or []"
        raise ValueError(
            f"scale: expected shape {wanted} for {format} data {list(x.data.shape)}, "
            f"got {list(shape)}"
        )
