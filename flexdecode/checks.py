"""Every check of an argument of `attention`, and its message: ``argument: expected ..., got ...``.

The checks read shapes, dtypes and devices only: no tensor operation, no synchronisation.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexdecode.quantized_tensor import QuantizedTensor

__all__ = [
    "as_int",
    "check_bias",
    "check_cu_seqlens",
    "check_grad",
    "check_kv_start",
    "check_mask",
    "check_options",
    "check_page_table",
    "check_pages",
    "check_qkv",
    "check_return_aux",
    "check_rows",
    "check_scale",
    "check_score_mod",
    "check_sinks",
    "check_starts",
    "check_written",
    "is_checking",
    "reads_values",
]

# Where os.environ looks names up, as it encodes them: for a name that is not set it raises and
# catches an error itself, which takes ten times as long, in every call.
_variables: Mapping[Any, object] = os.environ._data  # type: ignore[attr-defined]
_CHECK, _ON = os.environ.encodekey("FLEXDECODE_CHECK"), os.environ.encodevalue("1")

MAX_POSITION = 1 << 30  # positions beyond it would not stay exact in 32-bit kernels
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_POWERS = tuple(1 << n for n in range(4, 11))
_LEGAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "deterministic": (True, False, "batch_invariant"),
    "tf32": (True, False),
    "approx": (True, False),
    "partial_dtype": (torch.float32, torch.float64),
    "BLOCK_M": (8, *_POWERS),
    "BLOCK_N": _POWERS,
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5, 6, 7, 8),
}
_OPTION_NAMES = ("deterministic", "num_splits", *tuple(_LEGAL_OPTIONS)[1:])


_BIAS_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return (
        f"{type(value).__name__} {value!r}"
        if isinstance(value, (int, float, str))
        else (type(value).__name__)
    )


Operand = Tensor | QuantizedTensor


def check_qkv(q: Operand, k: Operand, v: Operand, sequences: int | None, paged: bool) -> None:
    """Raise unless q, k and v fit one another.

    Parameters
    ----------
    q, k, v : Tensor or QuantizedTensor
    sequences : int or None
        Where queries are packed.
    paged : bool
        k and v hold pages in place of sequences.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, (Tensor, QuantizedTensor)):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dims [batch, heads, length, head dim], got {x.dim()} "
                f"(shape {list(x.shape)})"
            )
    dtype = compute_dtype(q)
    if dtype not in _DTYPES:
        hint = "; codes with scales are a QuantizedTensor" if dtype.itemsize == 1 else ""
        raise TypeError(f"q: expected float16, bfloat16 or float32, got {dtype}{hint}")
    device = q.device
    B, Hq, _, D = q.shape
    Bkv, Hkv, Lkv, Dk = k.shape
    if sequences is not None:
        if B != 1:
            raise ValueError(
                f"q: expected batch 1 with cu_seqlens_q, [1, heads, total_q, head dim], got {B} "
                f"(shape {list(q.shape)})"
            )
        B = sequences
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype and not isinstance(x, QuantizedTensor):
            raise TypeError(f"{name}: expected {dtype} to match q, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: expected device {device} to match q, got {x.device}")
    if D < 1 or v.shape[3] < 1:
        name, x = ("q", q) if D < 1 else ("v", v)
        raise ValueError(f"{name}: expected a head dim of at least 1, got shape {list(x.shape)}")
    if Dk != D:
        raise ValueError(f"k: expected head dim {D} to match q, got {Dk} (shape {list(k.shape)})")
    if not paged and Bkv not in (B, 1):
        wanted = "batch 1" if B == 1 else f"batch {B} to match q, or 1"
        if sequences is not None:
            wanted = f"batch {B}, the sequences of cu_seqlens_q, or 1"
        raise ValueError(f"k: expected {wanted}, got {Bkv} (shape {list(k.shape)})")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: expected shape [{Bkv}, {Hkv}, {Lkv}, any] to match k, got {list(v.shape)}"
        )
    if Hkv < 1 or Hq % Hkv or Hq < 1:
        raise ValueError(
            f"q: expected a multiple of k's {Hkv} heads, at least one, got {Hq} heads "
            f"(q {list(q.shape)}, k {list(k.shape)})"
        )
    if paged and Lkv < 1:
        raise ValueError(f"k: expected pages of at least one slot, got shape {list(k.shape)}")
    if Lkv > MAX_POSITION or q.shape[2] > MAX_POSITION:
        raise ValueError(
            f"{'k' if Lkv > MAX_POSITION else 'q'}: expected at most 2**30 positions, "
            f"got {max(Lkv, q.shape[2])}"
        )


def compute_dtype(q: Operand) -> torch.dtype:
    """What a call is computed in and returns; raises for a q whose format has no kernels."""
    if not isinstance(q, QuantizedTensor):
        return q.dtype
    if q.format != "fp8" or (q.scale is not None and q.scale.dtype == torch.int32):
        raise TypeError(
            "q: expected a tensor, or a QuantizedTensor in fp8 with float32 scales, got "
            f"{q.format}" + (" with coefficient words" if q.format == "fp8" else "")
        )
    return torch.bfloat16


def check_cu_seqlens(cu_seqlens: Any, device: torch.device) -> int:
    """Raise unless these may be starts of packed queries; return the number of sequences."""
    name = "cu_seqlens_q"
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32 and cu_seqlens.dtype != torch.int64:
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(
            f"{name}: expected shape [sequences + 1], got shape {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"{name}: expected device {device}, got {cu_seqlens.device}")
    return len(cu_seqlens) - 1


def check_starts(cu_seqlens: Tensor, total_q: int) -> None:
    """Raise unless packed queries cover their rows; where looking waits for nothing."""
    if not reads_values(cu_seqlens):
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != total_q:
        raise ValueError(
            f"cu_seqlens_q: expected to go from 0 to the {total_q} rows of q, got {starts[0]} to "
            f"{starts[-1]}"
        )
    if any(end < start for start, end in itertools.pairwise(starts)):
        raise ValueError(f"cu_seqlens_q: expected values that never fall, got {starts}")


def check_page_table(page_table: Any, k: Operand, B: int, kv_len: Any) -> Tensor:
    """The page table, its last stride 1."""
    name = "page_table"
    if not isinstance(page_table, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(page_table).__name__}")
    if page_table.dtype != torch.int32:
        raise TypeError(f"{name}: expected an int32 tensor, got {page_table.dtype}")
    if page_table.dim() != 2 or page_table.shape[0] != B:
        raise ValueError(
            f"{name}: expected shape [{B}, max_pages], got shape {list(page_table.shape)}"
        )
    if page_table.device != k.device:
        raise ValueError(f"{name}: expected device {k.device} to match k, got {page_table.device}")
    if kv_len is None:
        raise ValueError(
            f"kv_len: expected an int or a tensor of shape [{B}] with {name}, got None"
        )
    if page_table.shape[1] * k.shape[2] > MAX_POSITION:
        raise ValueError(
            f"{name}: expected at most 2**30 slots for a sequence, got {page_table.shape[1]} pages "
            f"of {k.shape[2]}"
        )
    return page_table if page_table.stride(1) == 1 else page_table.contiguous()


def check_pages(page_table: Tensor, num_pages: int, lengths: Tensor, size: int) -> None:
    """Raise where a page that is read does not exist; waits for the device.

    Parameters
    ----------
    page_table : Tensor [B, entries], int32
    num_pages : int
        Of the pool.
    lengths : Tensor [B], int64
        Slots in use, those before the first key included.
    size : int
        Slots of a page.
    """
    entry = torch.arange(page_table.shape[1], device=page_table.device)
    used = entry < -(-lengths // size)[:, None]
    wrong = used & ((page_table < 0) | (page_table >= num_pages))
    if bool(wrong.any()):
        b, at = (int(n) for n in wrong.nonzero()[0])
        raise ValueError(
            f"page_table: expected pages in [0, {num_pages}), got {int(page_table[b, at])} at "
            f"entry {at} of sequence {b}, which holds {int(lengths[b])} slots"
        )


def reads_values(x: Tensor) -> bool:
    """True where values may be looked at: on the CPU, or anywhere under FLEXDECODE_CHECK=1."""
    return x.device.type == "cpu" or is_checking()


def is_checking() -> bool:
    """True under FLEXDECODE_CHECK=1: values are checked too, which waits for the device."""
    return _variables.get(_CHECK) == _ON


def check_grad(q: Operand, k: Operand, v: Operand) -> None:
    """Raise when autograd would expect a backward pass."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        name = "q" if q.requires_grad else "k" if k.requires_grad else "v"
        raise ValueError(
            f"{name}: expected a tensor that does not require grad, got requires_grad=True; "
            "attention has no backward pass: call it under torch.no_grad()"
        )


def check_written(name: str, x: Operand) -> None:
    """Refuse to write to elements that share memory: which one it would hold is chance."""
    if any(x.stride(axis) == 0 and x.shape[axis] > 1 for axis in range(len(x.shape))):
        raise ValueError(
            f"{name}: expected memory of its own for every element, got an expanded tensor (shape "
            f"{list(x.shape)})"
        )


def check_scale(scale: float | None, D: int) -> float:
    """The factor of the dot product, ``D ** -0.5`` by default."""
    if scale is None:
        return float(D**-0.5)
    if (
        isinstance(scale, bool)
        or isinstance(scale, Tensor)
        or not hasattr(type(scale), "__float__")
    ):
        raise TypeError(f"scale: expected a number, got {_kind(scale)}")
    scale = float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return scale


def as_int(value: Any) -> int | None:
    """Give what stands for one integer, NumPy's too, as an int; None for all else, floats too."""
    if isinstance(value, (bool, Tensor)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_rows(
    name: str, value: Any, B: int, device: torch.device, lowest: int, highest: int
) -> int | Tensor:
    """A number for each sequence: an int within bounds, or a tensor as [B], left unread.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    value : int or Tensor [B], [1] or 0-dim, int32 or int64
    B : int
        Batch size.
    device : torch.device
        Where a tensor must be.
    lowest, highest : int
        Bounds of an int, inclusive.
    """
    if isinstance(value, Tensor):
        if value.dtype != torch.int32 and value.dtype != torch.int64:
            raise TypeError(f"{name}: expected an int32 or int64 tensor, got {value.dtype}")
        shape = value.shape
        if len(shape) > 1 or (len(shape) == 1 and shape[0] != B and shape[0] != 1):
            raise ValueError(
                f"{name}: expected an int or a tensor of shape [{B}], got shape {list(shape)}"
            )
        if value.device != device:
            raise ValueError(f"{name}: expected device {device} to match q, got {value.device}")
        return value if len(shape) == 1 and shape[0] == B else value.expand(B)
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name}: expected an int or an integer tensor, got {_kind(value)}")
    if not lowest <= number <= highest:
        raise ValueError(f"{name}: expected a value in [{lowest}, {highest}], got {number}")
    return number


def check_kv_start(kv_start: Any, B: int, device: torch.device) -> Tensor:
    """First slots as [B], left unread."""
    if not isinstance(kv_start, Tensor):
        raise TypeError(f"kv_start: expected an int32 or int64 tensor, got {_kind(kv_start)}")
    found = check_rows("kv_start", kv_start, B, device, 0, MAX_POSITION)
    assert isinstance(found, Tensor)
    return found


def check_bias(bias: Any, B: int, Hq: int, Lq: int, Lkv: int, device: torch.device) -> Tensor:
    """The bias tensor, detached."""
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias: expected a Tensor, got {type(bias).__name__}")
    if bias.dtype not in _BIAS_DTYPES:
        raise TypeError(
            f"bias: expected float16, bfloat16, float32 or float64, got {bias.dtype}; a boolean "
            "mask is a block_mask: "
            "create_block_mask(lambda b, h, q_idx, kv_idx: allowed[q_idx, kv_idx])"
        )
    shape = bias.shape
    if (
        len(shape) != 4
        or shape[2:] != (Lq, Lkv)
        or shape[0] not in (1, B)
        or (shape[1] not in (1, Hq))
    ):
        raise ValueError(
            f"bias: expected shape [{B} or 1, {Hq} or 1, {Lq}, {Lkv}], got {list(shape)}"
        )
    if bias.device != device:
        raise ValueError(f"bias: expected device {device} to match q, got {bias.device}")
    return bias.detach() if bias.requires_grad else bias


def check_sinks(sinks: Any, Hq: int, device: torch.device) -> Tensor:
    """The sink logits, detached."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks: expected a Tensor, got {type(sinks).__name__}")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks: expected a floating-point tensor, got {sinks.dtype}")
    if sinks.shape != (Hq,):
        raise ValueError(
            f"sinks: expected shape [{Hq}], one logit a query head, got {list(sinks.shape)}"
        )
    if sinks.device != device:
        raise ValueError(f"sinks: expected device {device} to match q, got {sinks.device}")
    return sinks.detach() if sinks.requires_grad else sinks


def check_mask(block_mask: Any) -> bool:
    """True where `block_mask` is torch's BlockMask; raises for anything but that."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(block_mask, flex.BlockMask):
        return True
    if isinstance(block_mask, Tensor):
        if block_mask.is_floating_point():
            hint = "an additive mask is a bias: attention(q, k, v, bias=...)"
        else:
            hint = "create_block_mask(lambda b, h, q_idx, kv_idx: allowed[q_idx, kv_idx])"
        raise TypeError(f"block_mask: expected a BlockMask, got {_kind(block_mask)}; {hint}")
    if callable(block_mask):
        name = getattr(block_mask, "__name__", type(block_mask).__name__)
        raise TypeError(
            f"block_mask: expected a BlockMask, got the function {name}; "
            f"pass create_block_mask({name})"
        )
    raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")


def check_score_mod(score_mod: Any) -> None:
    """Raise for what cannot be a score rule; the tracer checks what it returns."""
    if hasattr(score_mod, "kv_num_blocks"):
        raise TypeError("score_mod: expected a function, got a BlockMask; pass it as block_mask=")
    if not callable(score_mod):
        raise TypeError(
            "score_mod: expected a function (score, b, h, q_idx, kv_idx) -> score, "
            f"got {type(score_mod).__name__}"
        )


def check_return_aux(return_aux: Any) -> None:
    """Raise unless `return_aux` says which statistics are wanted."""
    if not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise TypeError(
            f"return_aux: expected AuxRequest(lse=..., max_scores=...), got {_kind(return_aux)}"
        )


def check_options(options: Any) -> dict[str, Any]:
    """`kernel_options` with every key and value known."""
    if not isinstance(options, dict):
        raise TypeError(f"kernel_options: expected a dict, got {type(options).__name__}")
    for name, value in options.items():
        if name == "num_splits":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"kernel_options['num_splits']: expected an int of at least 1, got {value!r}"
                )
            continue
        legal = _LEGAL_OPTIONS.get(name)
        if legal is None:
            raise ValueError(
                f"kernel_options: expected keys among {', '.join(_OPTION_NAMES)}, got {name!r}"
            )
        # ``1 == True``: compare kinds too, so that tf32=1 and num_warps=True are refused
        if not any(type(value) is type(good) and value == good for good in legal):
            raise ValueError(
                f"kernel_options[{name!r}]: expected one of {', '.join(map(str, legal))}, "
                f"got {value!r}"
            )
    return options
