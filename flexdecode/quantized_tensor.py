"""`QuantizedTensor`: how int4, fp8 and int8 lie in memory.

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

from flexdecode.codes import FLOAT8, numbers_of, split_words

__all__ = [
    "COMPUTE",
    "FORMATS",
    "GROUPS",
    "LAYOUTS",
    "QuantizedTensor",
    "check_groups",
    "check_int4_only",
    "check_option",
]

GROUPS = (1, 2, 4, 8)
FORMATS = ("int4", "fp8", "fp8_e5m2", "int8")
LAYOUTS = ("separate", "interleaved")
COMPUTE = (torch.float16, torch.bfloat16, torch.float32)


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
            return self.data.view(FLOAT8[str(self.format)])
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
        return split_words(found)

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
        found = None if found is None else take(found)
        return numbers_of(codes, found, str(self.format), self.groups, self.layout, dtype)


# -- checks: ``argument: expected ..., got ...`` ----


def check_option(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of the legal ones."""
    # A tensor has no truth value, and ``1 == True``: compare kinds too.
    if not any(type(value) is type(good) and value == good for good in legal):
        names = ", ".join(repr(x) if isinstance(x, str) else str(x) for x in legal)
        raise ValueError(f"{name}: expected {'one of ' * (len(legal) > 1)}{names}, got {value!r}")


def check_int4_only(format: str, groups: int, layout: str) -> None:
    """Raise unless `groups` and `layout` are the defaults."""
    if groups != 1:
        raise ValueError(f"groups: expected 1 for {format}, got {groups}; only int4 has groups")
    if layout != "separate":
        raise ValueError(f"layout: expected 'separate' for {format}, got {layout!r}")


def check_groups(D: int, groups: int, layout: str) -> None:
    """Raise unless int4 rows of D elements can have so many groups."""
    check_option("groups", groups, GROUPS)
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
    if x.dtype not in COMPUTE:
        raise TypeError(f"dtype: expected float16, bfloat16 or float32, got {x.dtype}")
    if x.format is not None:
        check_option("format", x.format, FORMATS)
    check_option("layout", x.layout, LAYOUTS)
    check_option("groups", x.groups, GROUPS)


def _format_of(data: Tensor) -> str:
    found = {torch.int16: "int4", torch.int8: "int8", **{d: f for f, d in FLOAT8.items()}}
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
        legal = (FLOAT8[format], torch.int32)
    if data.dtype not in legal:
        wanted = " or ".join(map(str, legal))
        raise TypeError(f"data: expected {wanted} for {format}, {x.layout}, got {data.dtype}")
    if data.stride(3) != 1 and data.shape[3] > 1:
        raise ValueError(f"data: expected contiguous rows, got a stride of {data.stride(3)}")
    if format != "int4":
        check_int4_only(format, x.groups, x.layout)
    else:
        check_groups(_elements(x), x.groups, x.layout)


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
