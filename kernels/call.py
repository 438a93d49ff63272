"""What one call asks of the kernels: tensors, numbers, tables and compiled mods."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexdecode.kernels.layout import kernel_block_size
from flexdecode.kernels.sizes import split_dim


@dataclass(frozen=True, eq=False)
class Mod:
    """A user's rule as a ``@triton.jit`` function and what it reads.

    Attributes
    ----------
    fn : triton.JITFunction
        ``mask(b, h, q_idx, kv_idx, lane, args)`` or
        ``score(score, b, h, q_idx, kv_idx, lane, args)``; b is a scalar, h and q_idx are
        [BLOCK_M, 1], kv_idx is [1, BLOCK_N], all int32; lane, int1, is true where an element
        exists, and guards loads.
    args : tuple of Tensor and float
        Its captured tensors and run-time numbers.
    """

    fn: Any
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class BlockTables:
    """The active blocks of every row of query blocks; contiguous tensors.

    Attributes
    ----------
    kv_num_blocks : Tensor, [B or 1, Hkv or 1, nQ], int32
        How many partial blocks a row lists.
    kv_indices : Tensor, [B or 1, Hkv or 1, nQ, columns], int32
        Their numbers. Columns past the count are never read.
    full_kv_num_blocks, full_kv_indices : Tensor, same leading shape, int32, optional
        The same for full blocks.
    BLOCK_SIZE : (int, int)
        Queries and keys of a block; any sizes.
    exact : bool
        No full block crosses the call's ``kv_len``.
    block_state : Tensor, [B or 1, Hq, nQ, nKV], uint8, optional
        For lists that are the union over a group's heads: what the block is to each query head, 0
        empty, 1 partial, 2 full. The full list holds what is full for all of them.
    given : bool, default False
        The lists are not the kernels' own: a full block that crosses ``kv_len`` is as good as a
        partial one, and asks the mask.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    exact: bool
    block_state: Tensor | None = None
    given: bool = False

    def signature(self) -> tuple[object, ...]:
        """Return all that a plan depends on: sizes and kinds."""
        full, state = self.full_kv_indices, self.block_state
        return (
            self.kv_indices.shape,
            None if full is None else full.shape,
            self.BLOCK_SIZE,
            self.exact,
            self.given,
            None if state is None else state.shape,
        )

    def strides(self) -> tuple[int, int]:
        """Return the (sequence, head) strides of the counts, 0 along a broadcast axis."""
        sequences, heads, rows = self.kv_num_blocks.shape
        return (heads * rows if sequences > 1 else 0), (rows if heads > 1 else 0)


@dataclass(frozen=True, eq=False)
class Codes:
    """How k or v is quantised; the tensor itself holds units, int16 where attention reads them.

    Attributes
    ----------
    format : str
        "e4m3", "e5m2", "int8", "int4" or "int4_rows", see `flexdecode.kernels.codes`.
    kind : str
        Of the coefficients: "words", "scales", "head" or "".
    groups : int
        Groups of a row with coefficients of their own.
    coefficients : Tensor, [B or pages, Hkv, Lkv or page_size, groups], any strides, or None
    """

    format: str
    kind: str
    groups: int
    coefficients: Tensor | None

    def signature(self) -> tuple[object, ...]:
        """Return all that a plan depends on."""
        beside = self.coefficients
        return (
            self.format,
            self.kind,
            self.groups,
            None if beside is None else (beside.stride(), beside.dtype),
        )


def format_of_codes(format: str, layout: str) -> str:
    """Return what kernels call a format and layout of `flexdecode.QuantizedTensor`."""
    if layout == "interleaved":
        return "int4_rows"
    return {"fp8": "e4m3", "fp8_e5m2": "e5m2"}.get(format, format)


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """One attention call. Everything has been checked, and all tensors are on one device.

    Attributes
    ----------
    q : Tensor, [B, Hq, Lq, D]
    k, v : Tensor, [B or 1, Hkv, Lkv, D] and [B or 1, Hkv, Lkv, Dv]
        Any strides; int16 units where quantised. With `page_table`, [pages, Hkv, page_size, D]
        and [pages, Hkv, page_size, Dv].
    out : Tensor, [B, Hq, Lq, Dv]
        Written; the last stride is 1.
    lse, max_scores : Tensor, [B, Hq, Lq], float32, contiguous, optional
        Written: natural log; -inf for a row that may attend to nothing.
    scale : float
    kv_len : int, or Tensor [B] of int32 or int64
        Clamped by the kernel to what the cache holds from `kv_start` on.
    q_offset : int, or Tensor [B] of int32 or int64, or None
        Position of query row 0; None stands for ``kv_len - Lq``.
    kv_start : Tensor [B] of int32 or int64, optional
        First slot of each sequence.
    page_table : Tensor, [B, entries], int32, last stride 1, optional
        Entries of keys past ``kv_len`` are never read.
    tiles : Tensor, [5, nQ], int32, contiguous, optional
        Queries are packed: q is [1, Hq, Lq, D], and this says which of its rows are whose; see
        `flexdecode.kernels.query_tiles`. Tables then have one row of blocks for each.
    BLOCK_Q : int, optional
        Queries of a tile, with `tiles`.
    tables : BlockTables, optional
        Without them every key is allowed, and a mask_mod is asked for the cut last block only:
        pass tables with a mask_mod.
    score_mod, mask_mod : Mod, optional
    bias : Tensor, [B, Hq, Lq, Lkv], float, any strides (0 where broadcast), optional
    sinks : Tensor, [Hq], float, contiguous, optional
    tf32 : bool
        Let float32 inputs use TF32 matrix instructions.
    k_codes, v_codes : Codes, optional
        How k and v are quantised.
    q_format : str
        "e4m3" where q holds codes, as uint8; or "".
    q_scale : Tensor, [B, Hq, Lq], float32, any strides, optional
        Multiplies rows of such a q.
    assembly : bool
        CUDA instructions may be written out: neither HIP nor the interpreter runs this.
    fp8_rows : int
        Least rows of a tile whose matrix instructions take e4m3; 0 where none do.
    partial_dtype : torch.dtype
        Of the partial results of splits, and of joining them: float32 or float64.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scale: float
    kv_len: int | Tensor
    q_offset: int | Tensor | None = None
    kv_start: Tensor | None = None
    page_table: Tensor | None = None
    tiles: Tensor | None = None
    BLOCK_Q: int = 0
    lse: Tensor | None = None
    max_scores: Tensor | None = None
    tables: BlockTables | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    tf32: bool = False
    k_codes: Codes | None = None
    v_codes: Codes | None = None
    q_format: str = ""
    q_scale: Tensor | None = None
    assembly: bool = False
    fp8_rows: int = 0
    partial_dtype: torch.dtype = torch.float32

    def is_float8(self, BLOCK_M: int) -> bool:
        """True where scores are products of e4m3 numbers; a shift would need sums of q."""
        k = self.k_codes
        if k is None or k.format != "e4m3" or k.kind == "words" or self.q_format != "e4m3":
            return False
        return 0 < self.fp8_rows <= BLOCK_M

    @property
    def page_size(self) -> int:
        """Slots of a page, or 0."""
        return 0 if self.page_table is None else self.k.shape[2]

    @property
    def capacity(self) -> int:
        """Slots that a sequence can reach."""
        if self.page_table is None:
            return self.k.shape[2]
        return self.page_table.shape[1] * self.k.shape[2]

    @property
    def v_in_k(self) -> bool:
        """Values are the first columns of the keys, and lie in the kernels' pieces of those."""
        return is_within(self.v, self.k) and self.k_codes is None and self.v_codes is None

    def block_size(self, BLOCK_N: int) -> tuple[int, int]:
        """Return queries and keys of a block as the kernels see them."""
        BLOCK_SIZE = None if self.tables is None else self.tables.BLOCK_SIZE
        Lq, capacity = self.q.shape[2], self.capacity
        BLOCK_Q, KV_BLOCK = kernel_block_size(BLOCK_SIZE, Lq, capacity, BLOCK_N)
        return (BLOCK_Q if self.tiles is None else self.BLOCK_Q), KV_BLOCK


def is_within(v: Tensor, k: Tensor) -> bool:
    """True where v is the first columns of k, cut so that both fall into the same pieces."""
    if v.data_ptr() != k.data_ptr() or v.stride() != k.stride() or v.dtype != k.dtype:
        return False
    if v.shape[:3] != k.shape[:3] or v.shape[3] > k.shape[3]:
        return False
    pieces, own = split_dim(k.shape[3]), split_dim(v.shape[3])
    return own[0] == pieces[0] and own[1] in (0, pieces[1])


def vector_stride(vector: int | Tensor | None) -> tuple[Tensor | None, int, int]:
    """Split a number that may be a tensor [B] into (tensor, its stride, int) for a kernel."""
    if isinstance(vector, Tensor):
        return vector, vector.stride(0) if vector.shape[0] > 1 else 0, 0
    return None, 0, vector or 0


def dtype_of(x: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a tensor that may not be there."""
    return None if x is None else x.dtype
