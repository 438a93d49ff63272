"""`append_kv`: new keys and values, into the places of a cache where `attention` looks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode import checks
from flexdecode.backends import choose_backend
from flexdecode.kernels.devices import on_device
from flexdecode.quantized_tensor import QuantizedTensor
from flexdecode.stored_rows import has_scales_to_write, stored_like

__all__ = ["append_kv"]


def append_kv(
    k_cache: Tensor | QuantizedTensor,
    v_cache: Tensor | QuantizedTensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    kv_len: int | Tensor,
    kv_start: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    backend: str = "auto",
) -> None:
    """Write new keys and values behind the valid ones of each sequence, in place.

    New row ``i`` of sequence ``b`` becomes the key ``kv_idx = kv_len[b] + i``. Lengths are not
    changed: call `attention` with ``kv_len`` plus the number of new rows. Nothing waits for the
    device and no address changes, so that a CUDA graph can capture it.

    Parameters
    ----------
    k_cache : Tensor, [B or 1, Hkv, Lkv, D], or [num_pages, Hkv, page_size, D] with `page_table`
        Written. Any strides. A `QuantizedTensor` gets codes and coefficients of the new rows; where
        rows share a scale, it stays, and what it cannot hold becomes the greatest code.
    v_cache : Tensor or QuantizedTensor, like `k_cache` with head dim Dv
        Written.
    k_new : Tensor, [B, Hkv, n, D], or [1, Hkv, total, D] with `cu_seqlens`
        Any strides; converted to the dtype of the cache.
    v_new : Tensor, like `k_new` with head dim Dv
    kv_len : int or Tensor [B], int32 or int64, tokens
        Valid keys before the call.
    kv_start : Tensor [B], int32 or int64, slots, optional
        First slot of each sequence, as in `attention`.
    page_table : Tensor [B, max_pages], int32, optional
        Pages of each sequence, as in `attention`; those of the new rows must be there already.
    cu_seqlens : Tensor [B + 1], int32 or int64, rows, optional
        New rows are packed, as queries are by ``cu_seqlens_q``.
    rotary_cos, rotary_sin : Tensor, [positions, R // 2], floating point, optional
        Rotate the first R columns of each key by the angles of its ``kv_idx`` [1]_ on the way in;
        ``positions`` must reach that far. Values and queries are left alone.
    rotary_interleaved : bool, default False
        Columns ``2 i`` and ``2 i + 1`` are a pair; otherwise ``i`` and ``i + R // 2``.
    backend : str, default "auto"
        As in `attention`; ``"cpu"`` and ``"reference"`` are plain torch operations.

    Raises
    ------
    ValueError, TypeError
        Shapes, dtypes or devices do not fit.

    Notes
    -----
    A row that would lie past the end of the cache, or on page -1, is dropped. The triton backend
    rotates, quantises and writes both k and v in one launch, which moves the new rows once in and
    once out.

    References
    ----------
    .. [1] J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
       arXiv:2104.09864, 2021.

    Examples
    --------
    >>> import torch
    >>> from flexdecode import append_kv
    >>> k_cache, v_cache = torch.zeros(2, 1, 1, 4, 1)
    >>> k_new, v_new = torch.ones(2, 1, 1, 2, 1)
    >>> append_kv(k_cache, v_cache, k_new, 5 * v_new, kv_len=1)
    >>> k_cache.flatten().tolist(), v_cache.flatten().tolist()
    ([0.0, 1.0, 1.0, 0.0], [0.0, 5.0, 5.0, 0.0])
    """
    if torch.compiler.is_compiling():
        from flexdecode.compiled import append_in_graph

        append_in_graph(
            k_new,
            v_new,
            k_cache=k_cache,
            v_cache=v_cache,
            kv_len=kv_len,
            kv_start=kv_start,
            page_table=page_table,
            cu_seqlens=cu_seqlens,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            backend=backend,
        )
        return
    _check_tensors(k_cache, v_cache, k_new, v_new)
    if not isinstance(rotary_interleaved, bool):
        got = type(rotary_interleaved).__name__
        raise TypeError(f"rotary_interleaved: expected a bool, got {got}")
    device = k_cache.device
    made, _, rows, D = k_new.shape
    if cu_seqlens is not None:
        B = checks.check_cu_seqlens(cu_seqlens, device)
        if made != 1:
            raise ValueError(f"k_new: expected batch 1 with cu_seqlens, got {made}")
        checks.check_starts(cu_seqlens, rows)
    else:
        B = made
    if page_table is not None:
        page_table = checks.check_page_table(page_table, k_cache, B, kv_len)
    elif k_cache.shape[0] != B and not (k_cache.shape[0] == 1 and kv_start is not None):
        raise ValueError(
            f"k_cache: expected batch {B} to match k_new, or 1 with kv_start, got "
            f"{k_cache.shape[0]} (shape {list(k_cache.shape)})"
        )
    capacity = k_cache.shape[2] * (1 if page_table is None else page_table.shape[1])
    length = checks.check_rows("kv_len", kv_len, B, device, 0, capacity)
    if kv_start is not None:
        kv_start = checks.check_kv_start(kv_start, B, device)
    rotary = _rotary(rotary_cos, rotary_sin, D, device)
    place: dict[str, Any] = {
        "kv_len": length,
        "kv_start": kv_start,
        "page_table": page_table,
        "cu_seqlens": cu_seqlens,
    }
    with torch.no_grad():
        if choose_backend(backend, device) == "triton":
            _launch(k_cache, v_cache, k_new, v_new, place, rotary, rotary_interleaved)
            return
        if rotary is not None and isinstance(k_cache, QuantizedTensor):
            k_new = _turned(k_new, length, cu_seqlens, *rotary, rotary_interleaved)
            rotary = None
        for part, new in stored_like(k_cache, k_new):
            _write(part, new, **place, rotary=rotary, interleaved=rotary_interleaved)
        for part, new in stored_like(v_cache, v_new):
            _write(part, new, **place, rotary=None, interleaved=False)


def _launch(
    k_cache: Tensor | QuantizedTensor,
    v_cache: Tensor | QuantizedTensor,
    k_new: Tensor,
    v_new: Tensor,
    place: dict[str, Any],
    rotary: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> None:
    """Write new keys and values by one kernel."""
    from flexdecode.kernels.append import launch_append

    (k, k_codes), (v, v_codes) = _laid_out(k_cache), _laid_out(v_cache)
    if k_codes is not None:
        k_new = _readable(k_new)
    if v_codes is not None:
        v_new = _readable(v_new)
    turning: dict[str, Any] = {"rotary": rotary, "interleaved": interleaved}
    with on_device(k.device):
        launch_append(k, v, k_new, v_new, k_codes=k_codes, v_codes=v_codes, **place, **turning)


def _laid_out(cache: Tensor | QuantizedTensor) -> tuple[Tensor, Any]:
    """Return what the kernel writes to: a tensor or its units, and `Codes` where quantised."""
    if not isinstance(cache, QuantizedTensor):
        return cache, None
    found: tuple[Tensor, Any] | None = cache.kept.get("slots")
    if found is None:
        from flexdecode.kernels.call import Codes, format_of_codes

        beside, kind = cache.coefficients, ""
        if has_scales_to_write(cache):
            kind = "words" if beside is not None and beside.dtype == torch.int32 else "scales"
        elif beside is not None:
            kind = "head"
        format = format_of_codes(str(cache.format), cache.layout)
        codes = cache.codes if cache.format == "int4" else cache.codes.view(torch.uint8)
        found = codes, Codes(format, kind, cache.groups, beside)
        cache.kept["slots"] = found
    return found


def _readable(new: Tensor) -> Tensor:
    """Widen rows of a float8 type: kernels cannot load it on every device."""
    return new.float() if new.element_size() == 1 else new


def _turned(
    x: Tensor,
    kv_len: int | Tensor,
    cu_seqlens: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> Tensor:
    """Rotate new keys, [B, H, n, D] or packed; nothing waits for the device."""
    B, _, n, _ = x.shape
    place = torch.arange(n, device=x.device)
    if cu_seqlens is None:
        length = kv_len.long()[:, None] if isinstance(kv_len, Tensor) else kv_len
        kv_idx = (place + length).expand(B, n)
    else:
        starts = cu_seqlens.long()
        b = torch.searchsorted(starts[1:].contiguous(), place, right=True)
        b = b.clamp(max=len(starts) - 2)
        length = kv_len.long()[b] if isinstance(kv_len, Tensor) else kv_len
        kv_idx = (place - starts[b] + length)[None]
    kv_idx = kv_idx.flatten().clamp(0, cos.shape[0] - 1)
    rows = _rotated(x.transpose(1, 2).flatten(0, 1), kv_idx, cos, sin, interleaved)
    return rows.unflatten(0, (B, n)).transpose(1, 2)  # type: ignore[no-untyped-call,no-any-return]


def _check_tensors(k_cache: Any, v_cache: Any, k_new: Any, v_new: Any) -> None:
    given = {"k_cache": k_cache, "v_cache": v_cache, "k_new": k_new, "v_new": v_new}
    for name, x in given.items():
        packed = isinstance(x, QuantizedTensor) and name.endswith("cache")
        if not isinstance(x, Tensor) and not packed:
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name}: expected 4 dims [batch, heads, length, head dim], got {x.dim()} "
                f"(shape {list(x.shape)})"
            )
        if not packed and not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {x.dtype}")
        if x.device != k_cache.device:
            raise ValueError(
                f"{name}: expected device {k_cache.device} to match k_cache, got {x.device}"
            )
    checks.check_written("k_cache", k_cache)
    checks.check_written("v_cache", v_cache)
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: expected shape {[*k_cache.shape[:3], 'any']} to match k_cache, got "
            f"{list(v_cache.shape)}"
        )
    if v_new.shape[:3] != k_new.shape[:3]:
        raise ValueError(
            f"v_new: expected shape {[*k_new.shape[:3], 'any']} to match k_new, got "
            f"{list(v_new.shape)}"
        )
    for cache, name, new in ((k_cache, "k_new", k_new), (v_cache, "v_new", v_new)):
        if new.shape[1] != cache.shape[1] or new.shape[3] != cache.shape[3]:
            raise ValueError(
                f"{name}: expected {cache.shape[1]} heads of dim {cache.shape[3]} to match the "
                f"cache, got {new.shape[1]} of dim {new.shape[3]}"
            )


def _rotary(cos: Any, sin: Any, D: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if cos is None and sin is None:
        return None
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: expected a floating-point Tensor, got {kind}")
        if x.dim() != 2 or not 1 <= x.shape[1] <= D // 2:
            raise ValueError(
                f"{name}: expected shape [positions, R // 2] with R of at most {D}, got "
                f"{list(x.shape)}"
            )
        if x.device != device:
            raise ValueError(f"{name}: expected device {device}, got {x.device}")
    if cos.shape != sin.shape:
        raise ValueError(
            f"rotary_sin: expected shape {list(cos.shape)} to match rotary_cos, got "
            f"{list(sin.shape)}"
        )
    return cos.contiguous(), sin.contiguous()


def _write(
    cache: Tensor,
    new: Tensor,
    *,
    kv_len: int | Tensor,
    kv_start: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> None:
    """Write the rows of `new` into `cache` with torch operations."""
    made, _, rows, _ = new.shape
    device = new.device
    if cu_seqlens is None:
        b = torch.arange(made, device=device).repeat_interleave(rows)
        place = torch.arange(rows, device=device).repeat(made)
    else:
        starts = cu_seqlens.long()
        b = torch.arange(len(starts) - 1, device=device).repeat_interleave(starts.diff())
        place = torch.arange(rows, device=device) - starts[b]
    kv_idx = place + (kv_len[b].long() if isinstance(kv_len, Tensor) else kv_len)
    slot = kv_idx if kv_start is None else kv_idx + kv_start[b].long()
    capacity = cache.shape[2] * (1 if page_table is None else page_table.shape[1])
    fits = (kv_idx >= 0) & (slot >= 0) & (slot < capacity)
    first = b if cache.shape[0] > 1 else torch.zeros_like(b)
    if page_table is not None:
        size = cache.shape[2]
        entry = (slot // size).clamp(0, page_table.shape[1] - 1)
        first, slot = page_table[b, entry].long(), slot % size
        fits &= first >= 0
    values = new.transpose(1, 2).flatten(0, 1)[fits]  # [N, H, D]
    if rotary is not None:
        values = _rotated(values, kv_idx[fits], *rotary, interleaved)
    cache.transpose(1, 2)[first[fits], slot[fits]] = values.to(cache.dtype)


def _rotated(x: Tensor, kv_idx: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :].float()
    cos, sin = (table[kv_idx].float()[:, None] for table in (cos, sin))  # [N, 1, half]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined, rest), -1)
