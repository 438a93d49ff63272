"""A mask bound to one decode step: tables in fixed buffers, rewritten once for each token."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode.block_mask import BlockMask
from flexdecode.checks import check_cu_seqlens, check_starts
from flexdecode.mask_arguments import (
    check_captures,
    count,
    find_device,
    is_same,
    position,
    shown,
    token_count,
)
from flexdecode.mask_resolution import ResolvedMask, check_sharing
from flexdecode.packed import PackedQueries, tile_size
from flexdecode.tables import Extent, Tables, build_into, build_tables
from flexdecode.trace import trace

if TYPE_CHECKING:
    from flexdecode.problem import Problem

__all__ = ["BoundMask", "bind_mask"]


@dataclass(frozen=True, eq=False, repr=False)
class BoundMask(BlockMask):
    """A mask with tables in fixed buffers, made by `BlockMask.bind`.

    The buffers are a snapshot until `update`. Scores and the predicates of partial blocks read
    live values at every call; tables that are out of date are the caller's error.

    Attributes
    ----------
    kv_start, page_table : Tensor or None
        As bound.
    packed : PackedQueries or None
        Tiles of packed queries, rewritten by `update`.
    """

    kv_start: Tensor | None = None
    page_table: Tensor | None = None
    packed: PackedQueries | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: the fields, but nothing that was prepared for calls."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def update(self, kv_len: int | None = None) -> None:
        """Rewrite the tables from the tensors as they are now.

        Nothing waits for the device and no address changes, so that a graph can capture it.

        Parameters
        ----------
        kv_len : int, optional
            Valid keys from now on, where an int was bound.

        Raises
        ------
        ValueError, TypeError
            `kv_len` exceeds the capacity, or a tensor was bound.

        Examples
        --------
        >>> import torch
        >>> from flexdecode import create_block_mask
        >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 100)
        >>> kv_len = torch.tensor([10, 300])
        >>> step = mask.bind(batch=2, heads=8, q_len=1, kv_len=kv_len, kv_capacity=512)
        >>> step.to_dense()[:, 0, 0]
        tensor([[1, 0, 0, 0],
                [0, 1, 1, 0]], dtype=torch.int32)
        >>> kv_len += 100
        >>> step.update()
        >>> step.to_dense()[:, 0, 0]
        tensor([[1, 0, 0, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
        """
        if kv_len is not None and kv_len is not self.kv_len:
            if isinstance(self.kv_len, Tensor):
                raise ValueError(
                    "kv_len: expected None, a tensor was bound; change that tensor in place"
                )
            kv_len = _checked_length(kv_len, self.kv_capacity)
            object.__setattr__(self, "kv_len", kv_len)  # the one thing of a mask that moves on
        if torch.compiler.is_compiling():
            from flexdecode.compiled import update_in_graph

            update_in_graph(self)
            return
        assert self.mask_mod is not None and self.tables is not None
        device = self.tables.kv_indices.device
        with torch.no_grad():
            if self.packed is not None:
                self.packed.update()
            build_into(self.tables, trace(self.mask_mod, "mask"), _extent(self, device))

    def inherit(self, name: str, given: Any) -> Any:
        """Return argument `name` of `attention`: what was bound.

        Raises
        ------
        ValueError
            The call gives something different.
        """
        own = {
            "kv_len": self.kv_len,
            "q_offset": self.q_offset,
            "kv_start": self.kv_start,
            "page_table": self.page_table,
            "cu_seqlens_q": None if self.packed is None else self.packed.cu_seqlens,
        }.get(name)
        if given is None or (own is None and name == "q_offset"):
            return own if given is None else given
        if own is None or not is_same(own, given):
            text = "nothing" if own is None else shown(own)
            raise ValueError(
                f"{name}: expected what the block_mask is bound to ({text}), got "
                f"{shown(given)}; leave it out, or bind the mask to it"
            )
        return own

    def packed_queries(self, total_q: int) -> PackedQueries | None:
        """Tiles of the last `update`."""
        if self.packed is not None and total_q != self.packed.total:
            raise ValueError(
                f"q: expected {self.packed.total} rows, to which the block_mask is bound, got "
                f"{total_q}"
            )
        return self.packed

    def resolve(self, problem: Problem, q_offset_given: bool) -> ResolvedMask:
        """Hand out the tables of the last `update`; sizes and lengths must be those bound."""
        assert self.tables is not None and self.mask_mod is not None
        for name, got, own in (
            ("batch", problem.B, self.B),
            ("query heads", problem.Hq, self.H),
            ("query rows", problem.Lq, self.q_len),
            ("device", problem.device, self.tables.kv_indices.device),
        ):
            if got != own:
                raise ValueError(
                    f"block_mask: expected {name} {own}, which it is bound to, got {got}"
                )
        assert self.kv_len is not None and self.q_len is not None
        if isinstance(self.kv_len, int) or isinstance(problem.kv_len, int):
            if not is_same(self.kv_len, problem.kv_len):
                raise ValueError(
                    f"kv_len: expected what the block_mask is bound to ({shown(self.kv_len)}), "
                    f"got {shown(problem.kv_len)}; leave it out"
                )
        default = problem.offset
        if q_offset_given and self.q_offset is None and isinstance(self.kv_len, int):
            default = self.kv_len - self.q_len
        own_offset = default if self.q_offset is None else self.q_offset
        if q_offset_given and isinstance(own_offset, int) and own_offset != problem.q_offset:
            raise ValueError(
                f"q_offset: expected what the block_mask is bound to ({own_offset}), "
                f"got {shown(problem.q_offset)}; leave it out"
            )
        if isinstance(own_offset, Tensor):
            own_offset = own_offset.expand(problem.B)
        # Lengths on a device may have moved on since the last update: let backends clip.
        exact = isinstance(self.kv_len, int)
        tables = self.tables if exact is self.tables.exact else self._handed_out(exact)
        return ResolvedMask(trace(self.mask_mod, "mask"), tables, own_offset)

    def _handed_out(self, exact: bool) -> Tables:
        """Return the tables with another ``exact``, made once: their buffers never move."""
        tables: Tables | None = self.__dict__.get("_tables_handed_out")
        if tables is None:
            assert self.tables is not None
            tables = replace(self.tables, exact=exact)
            object.__setattr__(self, "_tables_handed_out", tables)
        return tables


def bind_mask(
    mask: BlockMask,
    *,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int | Tensor,
    kv_capacity: int | None,
    kv_start: Tensor | None,
    q_offset: int | Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    device: torch.device | str | None,
) -> BoundMask:
    """Build the tables of one decode step; see `BlockMask.bind`."""
    if mask.kind == "fixed" or mask.kind == "bound":
        raise ValueError(
            f"block_mask: expected a lazy or sized mask to bind, got one that is {mask.kind}"
        )
    assert mask.mask_mod is not None
    traced = trace(mask.mask_mod, "mask")
    given = (kv_len, q_offset, kv_start, page_table, cu_seqlens_q)
    where = find_device(device, (*given, *traced.captures))
    check_captures(traced, where)
    batch, heads, q_len = count("batch", batch), count("heads", heads), token_count("q_len", q_len)
    if kv_capacity is None:
        if isinstance(kv_len, Tensor):
            raise ValueError("kv_capacity: expected an int, since kv_len is a tensor; got None")
        kv_capacity = token_count("kv_len", kv_len)
    kv_capacity = token_count("kv_capacity", kv_capacity)
    if isinstance(kv_len, Tensor):
        _check_tensor("kv_len", kv_len, batch, where)
    else:
        kv_len = _checked_length(kv_len, kv_capacity)
    if mask.q_offset is not None:
        if q_offset is not None and not is_same(mask.q_offset, q_offset):
            raise ValueError(
                f"q_offset: expected the mask's own {shown(mask.q_offset)}, got {shown(q_offset)}"
            )
        q_offset = mask.q_offset
    if isinstance(q_offset, Tensor):
        _check_tensor("q_offset", q_offset, batch, where)
    else:
        position("q_offset", q_offset, batch, where)
    if kv_start is not None:
        if not isinstance(kv_start, Tensor):
            raise TypeError(f"kv_start: expected a Tensor, got {type(kv_start).__name__}")
        _check_tensor("kv_start", kv_start, batch, where)
        if not isinstance(kv_len, Tensor):
            raise TypeError(f"kv_len: expected a tensor [{batch}] with kv_start, got {kv_len}")
    if page_table is not None:
        if not isinstance(page_table, Tensor) or page_table.dtype != torch.int32:
            raise TypeError(f"page_table: expected an int32 tensor, got {shown(page_table)}")
        if page_table.dim() != 2 or page_table.shape[0] != batch or page_table.device != where:
            raise ValueError(
                f"page_table: expected shape [{batch}, max_pages] on {where}, got "
                f"{list(page_table.shape)} on {page_table.device}"
            )
    packed, block = None, mask.BLOCK_SIZE
    if cu_seqlens_q is not None:
        if check_cu_seqlens(cu_seqlens_q, where) != batch:
            raise ValueError(
                f"cu_seqlens_q: expected shape [{batch + 1}] for a batch of {batch}, got "
                f"{list(cu_seqlens_q.shape)}"
            )
        check_starts(cu_seqlens_q, q_len)
        block = (tile_size(block[0], q_len, batch), block[1])
        with torch.inference_mode(False), torch.no_grad():
            packed = PackedQueries.of(cu_seqlens_q, q_len, block[0])
    check_sharing(mask, traced, batch, heads)
    bound = BoundMask(
        mask.mask_mod,
        block,
        "bound",
        batch,
        heads,
        q_len,
        kv_capacity,
        kv_len,
        q_offset,
        kv_start=kv_start,
        page_table=page_table,
        packed=packed,
    )
    # Tensors made in inference mode could not be updated outside it.
    with torch.inference_mode(False), torch.no_grad():
        return replace(bound, tables=build_tables(traced, _extent(bound, where), compact=False))


def _extent(bound: BoundMask, device: torch.device) -> Extent:
    """What the tables are for: one object until an int that was bound changes, or data moves."""
    # Views stay behind where a tensor is given other data: here and in calls to be repeated.
    lengths = (bound.kv_len, bound.q_offset, bound.kv_start)
    at = [(x.data_ptr(), x.stride()) if isinstance(x, Tensor) else x for x in lengths]
    earlier: tuple[list[Any], Extent] | None = bound.__dict__.get("_extent")
    if earlier is not None and earlier[0] == at:
        return earlier[1]
    bound.__dict__.pop("_repeats", None)
    assert bound.B is not None and bound.H is not None and bound.kv_len is not None
    assert bound.q_len is not None and bound.kv_capacity is not None
    made = Extent(
        bound.B,
        bound.H,
        bound.q_len,
        bound.kv_capacity,
        bound.kv_len,
        bound.q_offset,
        bound.BLOCK_SIZE,
        device,
        kv_start=None if bound.kv_start is None else bound.kv_start.expand(bound.B),
        packed=bound.packed,
    )
    object.__setattr__(bound, "_extent", (at, made))
    return made


def _checked_length(kv_len: int, capacity: int | None) -> int:
    kv_len = token_count("kv_len", kv_len)
    if capacity is not None and kv_len > capacity:
        raise ValueError(f"kv_len: expected at most kv_capacity = {capacity}, got {kv_len}")
    return kv_len


def _check_tensor(name: str, value: Tensor, batch: int, device: torch.device) -> None:
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {value.dtype}")
    if value.dim() > 1 or (value.dim() == 1 and value.shape[0] not in (1, batch)):
        raise ValueError(
            f"{name}: expected an int or a tensor of shape [{batch}], got {list(value.shape)}"
        )
    if value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}")
