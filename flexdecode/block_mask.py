"""`BlockMask`: a predicate and, perhaps, tables; how it is shown, cut, combined and bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flexdecode.block_predicates import MaskRule
from flexdecode.given_tables import checked_tables, torch_arguments
from flexdecode.mask_algebra import combine, cut
from flexdecode.mask_arguments import check_captures, checked_device, position
from flexdecode.mask_resolution import ResolvedMask, resolve_mask
from flexdecode.mods import and_masks, not_mask, or_masks
from flexdecode.tables import Extent, Tables, build_tables, table_states
from flexdecode.trace import trace

if TYPE_CHECKING:
    from flexdecode.block_counts import BlockCounts
    from flexdecode.bound_mask import BoundMask
    from flexdecode.explanation import Explanation
    from flexdecode.packed import PackedQueries
    from flexdecode.problem import Problem

__all__ = ["BlockMask"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which keys each query may attend: a predicate plus, perhaps, tables of active blocks.

    Made by `create_block_mask`, `from_kv_blocks` or `from_torch`. There are four kinds:

    - *lazy*: no sizes; tables are built for every call, so they are always exact;
    - *sized*: tables were built at once, and are built again whenever a call has other lengths;
    - *fixed*: tables are authoritative and own their rows' positions (``q_offset=`` given, slices,
      `from_kv_blocks`, `from_torch`): only listed blocks contribute;
    - *bound*: tables in fixed buffers for one decode step, see `bind`.

    Masks combine with ``&``, ``|`` and ``~``, with one another and with plain functions, and are
    cut by ``mask[b, h, q_block]`` in units of blocks.

    Attributes
    ----------
    mask_mod : callable or None
        The predicate; None when trivially true.
    BLOCK_SIZE : (int, int)
        Queries and keys of a block.
    kind : "lazy", "sized", "fixed" or "bound"
    B, H : int or None
        Batch and heads; None where a call decides.
    q_len, kv_capacity : int or None
        ``Q_LEN`` and ``KV_LEN``; None where a call decides.
    kv_len : int, Tensor [B] or None
        Valid keys that the tables are for; None when all ``KV_LEN`` are.
    q_offset : int, Tensor [B] or None
        Position of the first row where the mask owns it.
    tables : Tables or None
        None in a lazy mask.
    source : "rule", "blocks" or "torch"
        Where the tables came from. A mask that is not of a rule needs its tables to be understood.
    """

    mask_mod: MaskRule | None
    BLOCK_SIZE: tuple[int, int]
    kind: Literal["lazy", "sized", "fixed", "bound"]
    B: int | None = None
    H: int | None = None
    q_len: int | None = None
    kv_capacity: int | None = None
    kv_len: int | Tensor | None = None
    q_offset: int | Tensor | None = None
    tables: Tables | None = None
    source: Literal["rule", "blocks", "torch"] = "rule"
    scattered_rows: bool = False
    # A combination with tables whose rows get their positions from the call: makes its predicate.
    rule_of_call: Callable[[Problem], MaskRule] | None = None

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskRule | None = None,
        seq_lengths: tuple[int, int] | None = None,
        *,
        q_offset: int | Tensor | None = None,
    ) -> BlockMask:
        """Make a fixed mask of given tables: only listed blocks contribute.

        Parameters
        ----------
        kv_num_blocks : Tensor, [B or 1, H, nQ], integer
            Partial blocks of each row of blocks; ``H`` is 1, key heads or query heads.
        kv_indices : Tensor, [B or 1, H, nQ, C], integer
            Their numbers in any order, each once; what follows the count is ignored. ``C`` may be
            the number of key blocks (as in torch) or any width that holds the longest list.
        full_kv_num_blocks, full_kv_indices : Tensor, optional
            The same for blocks that `mask_mod` is not asked about.
        BLOCK_SIZE : int or (int, int), default 128
            Queries and keys of a block.
        mask_mod : callable (b, h, q_idx, kv_idx) -> bool, optional
            Predicate of the partial blocks. Default: all their elements are allowed.
        seq_lengths : (int, int), optional
            ``Q_LEN`` and ``KV_LEN``. Default: as many rows as the blocks have, and any key length.
        q_offset : int or Tensor [B], optional
            Position of the first row. Default: such that the last row sits on the last key.

        Returns
        -------
        BlockMask

        Raises
        ------
        ValueError, TypeError
            Shapes, dtypes or devices do not fit; on a CPU also where a count or a block number is
            out of range, or a block is listed twice.

        Examples
        --------
        One query that may see keys 128 to 255:

        >>> import torch
        >>> one = torch.tensor([[[1]]])
        >>> mask = BlockMask.from_kv_blocks(one, one[..., None], seq_lengths=(1, 256))
        >>> mask.to_dense()
        tensor([[[[0, 1]]]], dtype=torch.int32)
        """
        tables, q_len, capacity = checked_tables(
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            BLOCK_SIZE,
            seq_lengths,
        )
        B, H, _ = tables.kv_num_blocks.shape
        if mask_mod is not None:
            trace(mask_mod, "mask")  # complain here rather than at the first call
        return cls(
            mask_mod,
            tables.BLOCK_SIZE,
            "fixed",
            B,
            H,
            q_len,
            capacity,
            q_offset=position("q_offset", q_offset, B, tables.kv_indices.device),
            tables=tables,
            source="blocks",
        )

    @classmethod
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """Take over torch's ``BlockMask``, with its rule that the first query is at position 0.

        Parameters
        ----------
        block_mask : torch.nn.attention.flex_attention.BlockMask

        Returns
        -------
        BlockMask
            Fixed, with ``q_offset`` 0; shares the tables.

        Raises
        ------
        ValueError
            The mask was sliced in torch and lost its predicate.
        """
        mask = cls.from_kv_blocks(*torch_arguments(block_mask), q_offset=0)
        return replace(mask, source="torch")

    # Tables, under torch's names.

    @property
    def kv_num_blocks(self) -> Tensor | None:
        """Partial blocks of each row: [B, H, nQ], int32; None in a lazy mask."""
        return self._table("kv_num_blocks")

    @property
    def kv_indices(self) -> Tensor | None:
        """Their block numbers: [B, H, nQ, C], int32; None in a lazy mask."""
        return self._table("kv_indices")

    @property
    def full_kv_num_blocks(self) -> Tensor | None:
        """Full blocks of each row: [B, H, nQ], int32, or None."""
        return self._table("full_kv_num_blocks")

    @property
    def full_kv_indices(self) -> Tensor | None:
        """Their block numbers: [B, H, nQ, C], int32, or None."""
        return self._table("full_kv_indices")

    def _table(self, name: str) -> Tensor | None:
        return None if self.tables is None else self._expanded(getattr(self.tables, name))

    def _expanded(self, table: Tensor | None) -> Tensor | None:
        if table is None:
            return None
        return table.expand(self.B or table.shape[0], self.H or table.shape[1], *table.shape[2:])

    @property
    def seq_lengths(self) -> tuple[int | None, int | None]:
        """``(Q_LEN, KV_LEN)``; None where a call decides."""
        if self.kv_capacity is None and self.tables is not None:
            return self.q_len, self._columns() * self.BLOCK_SIZE[1]
        return self.q_len, self.kv_capacity

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``(B, H, Q_LEN, KV_LEN)``; None where a call decides."""
        return (self.B, self.H, *self.seq_lengths)

    def _columns(self) -> int:
        """Key blocks; without lengths, as many as the tables mention."""
        tables = self._tables("shape")
        if tables.num_kv_blocks >= 0:
            return tables.num_kv_blocks
        widths = [1]
        for counts, indices in tables.pairs():
            place = torch.arange(indices.shape[-1], device=indices.device)
            listed = indices.masked_fill(place >= counts[..., None], -1)
            widths += [indices.shape[-1], int(listed.max()) + 1 if listed.numel() else 0]
        return max(widths)

    def _tables(self, wanted: str) -> Tables:
        if self.tables is None:
            raise ValueError(
                f"{wanted}: this mask is lazy, its tables are built for each call; "
                "give create_block_mask Q_LEN and KV_LEN"
            )
        return self.tables

    def _sized_tables(self, wanted: str) -> Tables:
        return replace(self._tables(wanted), num_kv_blocks=self._columns())

    def numel(self) -> int:
        """Count the elements of the dense mask."""
        self._tables("numel")
        B, H, q_len, kv_len = self.shape
        assert B is not None and H is not None and q_len is not None and kv_len is not None
        return B * H * q_len * kv_len

    def sparsity(self) -> float:
        """Percentage of blocks that are empty."""
        dense = self.to_dense()
        return 100.0 * (1.0 - dense.float().mean().item()) if dense.numel() else 0.0

    def to_dense(self) -> Tensor:
        """Show the active blocks, partial and full alike.

        Returns
        -------
        Tensor, [B, H, nQ, nKV], int32
            1 where a block is listed, else 0.
        """
        return (self._states("to_dense") > 0).to(torch.int32)

    def _states(self, wanted: str) -> Tensor:
        """State of every block: [B, H, nQ, nKV], uint8."""
        states = self._expanded(table_states(self._sized_tables(wanted)))
        assert states is not None
        return states.contiguous()

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Draw the blocks: full characters where all are active, light ones where some are.

        Parameters
        ----------
        grid_size : int or (int, int), default (20, 20)
            Most rows and columns of a picture; -1 draws every block.
        limit : int, default 4
            Most pictures: one for each head of each sequence.

        Returns
        -------
        str
        """
        from flexdecode.mask_pictures import draw_blocks

        return draw_blocks(self.to_dense, grid_size, limit)

    def plot(self, ax: Any = None, b: int = 0, h: int = 0) -> Any:
        """Draw the empty, partial and full blocks of one head of one sequence.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw. Default: a new figure.
        b, h : int, default 0
            Sequence and head.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ImportError
            matplotlib is missing; it comes with the extra ``plot``.
        ValueError
            The mask is lazy and has no tables.
        """
        from flexdecode.visualize import plot_blocks

        states = self._states("plot")[b, h]
        q_len, kv_len = self.seq_lengths
        assert q_len is not None and kv_len is not None
        return plot_blocks(states, self.BLOCK_SIZE, (q_len, kv_len), ax)

    def explain(
        self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **call: Any
    ) -> Explanation | BlockCounts:
        """Say what a call with this mask reads, or without tensors what the tables hold.

        Parameters
        ----------
        q, k, v : Tensor, optional
            As in `attention`; all or none. A lazy mask needs them.
        **call
            Further arguments of `flexdecode.explain`.

        Returns
        -------
        Explanation or BlockCounts
            Both print as a table.
        """
        from flexdecode.block_counts import count_blocks, valid_keys
        from flexdecode.explanation import explain

        if q is not None and k is not None and v is not None:
            return explain(q, k, v, block_mask=self, **call)
        if call or not (q is None and k is None and v is None):
            raise TypeError("explain: expected q, k and v, or no argument at all")
        states = self._states("explain").cpu()
        kv_len = self.seq_lengths[1] if self.kv_len is None else self.kv_len
        assert kv_len is not None
        keys = valid_keys(kv_len, states.shape[3], self.BLOCK_SIZE[1])
        return count_blocks(states, keys, self.BLOCK_SIZE, states.shape[0], states.shape[1], "head")

    def __repr__(self) -> str:
        name = getattr(self.mask_mod, "__name__", None)
        shape = tuple(size if size is not None else "any" for size in self.shape)
        text = f"BlockMask({name or 'everything'}, {self.kind}, shape={shape}"
        return text + f", BLOCK_SIZE={self.BLOCK_SIZE})"

    def __str__(self) -> str:
        if self.tables is None:
            return repr(self)
        return f"{self!r}\nsparsity {self.sparsity():.2f}%\n{self.to_string()}"

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask has no truth value: combine masks with & | ~, not with and, or, not"
        )

    def to(self, device: torch.device | str) -> BlockMask:
        """Move the tables; tensors that `mask_mod` captures stay where they are.

        Parameters
        ----------
        device : torch.device or str

        Returns
        -------
        BlockMask
        """
        device = checked_device(device)

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return replace(
            self,
            tables=None if self.tables is None else self.tables.map(move),
            kv_len=move(self.kv_len),
            q_offset=move(self.q_offset),
        )

    def __getitem__(self, index: Any) -> BlockMask:
        """Cut a fixed mask out: ``mask[b, h, q_block]``, each an int, slice, list or tensor.

        Block rows are counted in units of ``BLOCK_SIZE[0]``. Four dims stay, an int leaves one
        entry. Predicate and positions of the rows are kept.

        Raises
        ------
        IndexError
            An index is out of range.
        ValueError
            The mask has no tables, or is bound.
        """
        return cut(self, index)

    def _static_offset(self) -> int | Tensor:
        """Position of the first row when the last one sits on the last key of the mask."""
        q_len, capacity = self.seq_lengths
        assert q_len is not None and capacity is not None
        kv_len = capacity if self.kv_len is None else self.kv_len
        return kv_len - q_len

    def _with_tables(self, device: torch.device) -> BlockMask:
        """Build the tables of a mask that has lengths and a rule."""
        assert self.mask_mod is not None and self.q_len is not None
        assert self.kv_capacity is not None and self.B is not None and self.H is not None
        traced = trace(self.mask_mod, "mask")
        check_captures(traced, device)
        kv_len = self.kv_capacity if self.kv_len is None else self.kv_len
        if isinstance(kv_len, Tensor):
            kv_len = kv_len.clamp(0, self.kv_capacity)
        extent = Extent(
            self.B,
            self.H,
            self.q_len,
            self.kv_capacity,
            kv_len,
            kv_len - self.q_len if self.q_offset is None else self.q_offset,
            self.BLOCK_SIZE,
            device,
        )
        with torch.no_grad():
            return replace(self, tables=build_tables(traced, extent))

    # The algebra.

    def __and__(self, other: Any) -> BlockMask:
        return combine(and_masks, self, other) if _is_operand(other) else NotImplemented

    def __rand__(self, other: Any) -> BlockMask:
        return combine(and_masks, other, self) if _is_operand(other) else NotImplemented

    def __or__(self, other: Any) -> BlockMask:
        return combine(or_masks, self, other) if _is_operand(other) else NotImplemented

    def __ror__(self, other: Any) -> BlockMask:
        return combine(or_masks, other, self) if _is_operand(other) else NotImplemented

    def __invert__(self) -> BlockMask:
        return combine(not_mask, self)

    # Use.

    def bind(
        self,
        *,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int | Tensor,
        kv_capacity: int | None = None,
        kv_start: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> BoundMask:
        """Build tables in fixed buffers: once for each token, for use in every layer.

        The result is a snapshot until `BoundMask.update` is called, which reads the tensors given
        here again. `attention` inherits what is bound and refuses anything different.

        Parameters
        ----------
        batch, heads, q_len : int
            Of q; `heads` are query heads. With `cu_seqlens_q`, `batch` counts sequences and
            `q_len` all rows of q.
        kv_len : int or Tensor [batch], int32 or int64
            Valid keys of each sequence; a tensor is kept by reference.
        kv_capacity : int, optional
            Most keys there will ever be; required when `kv_len` is a tensor.
        q_offset : int or Tensor [batch], optional
            Position of the first row, default ``kv_len - q_len``.
        kv_start, page_table, cu_seqlens_q : Tensor, optional
            As in `attention`, kept by reference. Packed queries are cut into tiles about as long
            as a sequence has queries, which may make ``BLOCK_SIZE[0]`` smaller than the mask's.
        device : torch.device or str, optional
            Of the buffers; default that of the tensors given or captured.

        Returns
        -------
        BoundMask

        Raises
        ------
        ValueError, TypeError
            The mask is fixed, or an argument does not fit.
        """
        from flexdecode.bound_mask import bind_mask

        return bind_mask(
            self,
            batch=batch,
            heads=heads,
            q_len=q_len,
            kv_len=kv_len,
            kv_capacity=kv_capacity,
            kv_start=kv_start,
            q_offset=q_offset,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            device=device,
        )

    def packed_queries(self, total_q: int) -> PackedQueries | None:
        """Tiles of packed queries that the mask has already made.

        Raises
        ------
        ValueError
            The mask has rows of its own, which say nothing of packed queries.
        """
        if self.kind not in ("lazy", "bound"):
            raise ValueError(
                "block_mask: expected a lazy or bound mask with cu_seqlens_q, got one that is "
                f"{self.kind}; leave out Q_LEN and KV_LEN, or bind it with cu_seqlens_q"
            )
        return None

    def inherit(self, name: str, given: Any) -> Any:
        """Return argument `name` of `attention`, from the mask where the call leaves it out.

        Raises
        ------
        ValueError
            The mask is bound to something else.
        """
        if name == "kv_len" and given is None and self.kind != "fixed":
            return self.kv_len
        return given

    def resolve(self, problem: Problem, q_offset_given: bool) -> ResolvedMask:
        """Make the mask ready for one call.

        Parameters
        ----------
        problem : Problem
        q_offset_given : bool
            The call named ``q_offset``; a mask that owns its positions refuses another one.

        Returns
        -------
        ResolvedMask

        Raises
        ------
        ValueError
            Batch, heads, lengths, positions or device do not fit.
        """
        return resolve_mask(self, problem, q_offset_given)


def _is_operand(value: Any) -> bool:
    return isinstance(value, BlockMask) or callable(value)
