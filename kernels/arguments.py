"""What a call hands to the decode kernel and the reduction, in their order."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode.kernels.call import Codes, DecodeCall, Mod, dtype_of, vector_stride

if TYPE_CHECKING:
    from flexdecode.kernels.launch import Launch, Plan

NO_MOD = Mod(None)
NOT_QUANTIZED = Codes("", "", 1, None)


class Arguments:
    """The arguments of a call; calls that look like it put their own tensors in.

    Attributes
    ----------
    decode, reduce : list
    kinds : object
        Stands for what Triton compiles apart and a plan does not fix, but for the alignment of
        addresses: one object for equal kinds.
    captured : tuple of Tensor
        What the mods read.
    """

    def __init__(self, plan: "Plan", call: DecodeCall) -> None:
        tables: Any = call.tables or _NO_TABLES
        score_mod, mask_mod = call.score_mod or NO_MOD, call.mask_mod or NO_MOD
        k_codes, v_codes = call.k_codes or NOT_QUANTIZED, call.v_codes or NOT_QUANTIZED
        kv_len, stride_kv_len, length = vector_stride(call.kv_len)
        kv_start, stride_kv_start, _ = vector_stride(call.kv_start)
        q_offset, stride_q_offset, offset = vector_stride(call.q_offset)
        pages = call.page_table
        self.plan = plan
        self.partial_dtype = call.partial_dtype
        self.device = call.out.device
        self.captured = tuple(
            [x for x in (*score_mod.args, *mask_mod.args) if type(x) is not float]
        )
        bias, sinks = call.bias, call.sinks
        kinds = (
            call.q.dtype,
            call.k.dtype,
            call.v.dtype,
            call.q_scale is None,
            dtype_of(k_codes.coefficients),
            dtype_of(v_codes.coefficients),
            call.partial_dtype,
            plan.last_strides,
            dtype_of(bias),
            dtype_of(sinks),
            call.lse is None,
            call.max_scores is None,
            dtype_of(kv_len),
            dtype_of(kv_start),
            dtype_of(q_offset),
            pages is None,
            call.tiles is None,
            tables.full_kv_indices is None,
            tables.block_state is None,
            tables.kv_indices is None,
            call.out.device.index,
        )
        self.kinds = _kinds.setdefault(kinds, object())
        self._at: dict[str, int] = {}
        self._reduce_at: dict[str, int] = {}
        self.decode: list[Any] = []
        self.reduce: list[Any] = []
        put = functools.partial(_put, self.decode, self._at)
        put("q", call.q, *plan.strides_q)
        put("k", call.k, *plan.strides_k)
        put("v", call.v, *plan.strides_v)
        put("", call.q_scale, *plan.strides_q_scale)
        put("", k_codes.coefficients, *plan.strides_k_codes)
        put("", v_codes.coefficients, *plan.strides_v_codes)
        put("", bias, *plan.strides_bias)
        put("sinks", sinks)
        put("page_table", pages, 0 if pages is None else pages.stride(0))
        put("out", call.out, *plan.strides_out)
        put("lse", call.lse)
        put("max_scores", call.max_scores)
        put("scratch", None, plan.parts)
        put("kv_len", kv_len, stride_kv_len)
        put("kv_start", kv_start, stride_kv_start)
        put("", q_offset, stride_q_offset)
        put("", call.tiles)
        put("", tables.kv_num_blocks, tables.kv_indices)
        put("", tables.full_kv_num_blocks, tables.full_kv_indices)
        put("", *plan.strides_tables, *plan.columns)
        put("", tables.block_state, *plan.strides_state)
        put("", call.scale, length, offset, *plan.sizes, *plan.numbering)
        put("", score_mod.args, mask_mod.args)
        if plan.reduce is not None:
            put = functools.partial(_put, self.reduce, self._reduce_at)
            put("scratch", None, plan.parts)
            put("sinks", sinks)
            put("out", call.out, *call.out.stride()[:3])
            put("lse", call.lse)
            put("max_scores", call.max_scores)
            put("kv_len", kv_len, stride_kv_len)
            put("kv_start", kv_start, stride_kv_start)
            put("", call.tiles, tables.kv_num_blocks, tables.full_kv_num_blocks)
            put("", *plan.strides_tables, length, *plan.sizes, *plan.numbering)

    def launch(self) -> None:
        """Launch both kernels with the tensors that are in place.

        Moves the active blocks of k and v once per query tile, q and out once, and
        ``(Dv + 2) * 4`` bytes for each row and item, written and read, of rows with several items.
        """
        self._launch(self.decode, self.reduce)

    def launch_with(self, tensors: dict[str, Tensor]) -> None:
        """`launch` with other tensors of the same shapes, strides, dtypes and device; keep none."""
        decode, reduce = self.decode.copy(), self.reduce.copy()
        at, reduce_at = self._at, self._reduce_at
        for name, tensor in tensors.items():
            decode[at[name]] = tensor
            if name in reduce_at:
                reduce[reduce_at[name]] = tensor
        self._launch(decode, reduce)

    def forget(self, names: Iterable[str]) -> None:
        """Let go of tensors that `launch_with` will be given."""
        for name in names:
            self.decode[self._at[name]] = None
            if name in self._reduce_at:
                self.reduce[self._reduce_at[name]] = None

    def launches(self) -> list[tuple["Launch", tuple[Any, ...], list[Any]]]:
        """What `launch` launches, each with its key and arguments, to be compiled beforehand."""
        plan = self.plan
        scratch = _nothing(self.device, self.partial_dtype)
        key = self._with_scratch(self.decode, self.reduce, scratch)
        found = [(plan.decode, key, self.decode)]
        if plan.reduce is not None:
            found.append((plan.reduce, key, self.reduce))
        return found

    def _launch(self, decode: list[Any], reduce: list[Any]) -> None:
        plan = self.plan
        if plan.parts:
            scratch = torch.empty(plan.scratch, dtype=self.partial_dtype, device=self.device)
        else:
            scratch = _nothing(self.device, self.partial_dtype)
        key = self._with_scratch(decode, reduce, scratch)
        plan.decode(key, decode)
        if plan.reduce is not None:
            plan.reduce(key, reduce)

    def _with_scratch(
        self, decode: list[Any], reduce: list[Any], scratch: Tensor
    ) -> tuple[Any, ...]:
        """Put the buffer of partial results in its place; what tells compiled variants apart."""
        at = self._at
        decode[at["scratch"]] = scratch
        if reduce:
            reduce[self._reduce_at["scratch"]] = scratch
        return (
            self.kinds,
            decode[at["q"]].data_ptr() & 15 == 0,
            decode[at["k"]].data_ptr() & 15 == 0,
            decode[at["v"]].data_ptr() & 15 == 0,
            decode[at["out"]].data_ptr() & 15 == 0,
            *[x.data_ptr() & 15 == 0 for x in self.captured],
        )


# One object for each set of kinds: found by identity, which takes less time than comparing them.
_kinds: dict[tuple[Any, ...], object] = {}


def _put(into: list[Any], at: dict[str, int], name: str, *values: Any) -> None:
    if name:
        at[name] = len(into)
    into += values


@functools.cache
def _nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return an address that a kernel never uses."""
    return torch.zeros(1, dtype=dtype, device=device)


class _NoTables:
    kv_num_blocks = kv_indices = full_kv_num_blocks = full_kv_indices = block_state = None


_NO_TABLES = _NoTables()
