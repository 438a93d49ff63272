"""What a call reads and who reads it, counted on the host from its lengths and tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexdecode.block_counts import BlockCounts
from flexdecode.kernels.call import is_within
from flexdecode.kernels.configs import DecodeConfig
from flexdecode.kernels.layout import Layout, kernel_block_size
from flexdecode.kernels.sizes import ceil_div
from flexdecode.plan import Lists, Planned, balanced_items, block_owners, shares_of
from flexdecode.problem import Problem, Request
from flexdecode.quantization import row_bytes
from flexdecode.tables import FULL, PARTIAL, table_states

__all__ = ["Rows", "Traffic", "Work", "count_traffic", "count_work", "listed_states"]


@dataclass(frozen=True)
class Traffic:
    """Bytes between memory and chip.

    Attributes
    ----------
    keys_values : int
        Valid keys of active blocks, and their values, once for each key head that reads them;
        values that are columns of the keys are read with those.
    bias : int
        Entries for those keys.
    captures : int
        Captured tensors of the rules, each whole; a rule may read less.
    q_out : int
        Queries and outputs.
    partials : int
        What splits leave and the reduction reads. Not a must: other splits need other bytes.
    """

    keys_values: int
    bias: int
    captures: int
    q_out: int
    partials: int

    @property
    def must_move(self) -> int:
        """All but the partial results."""
        return self.keys_values + self.bias + self.captures + self.q_out


@dataclass(frozen=True)
class Work:
    """Who works on what.

    Attributes
    ----------
    config : DecodeConfig
        Tiles, splits, warps and stages.
    origin : str
        What chose them: "rules", "kernel_options", or where the measured choice comes from.
    programs : int
        Programs of the launch.
    busy : int
        Those that have a block to work on.
    busiest, mean : float, blocks
        Work of the busiest program, and of the mean one among the busy.
    states : Tensor, [B, heads, nQ, columns], uint8
        Each block as listed: 0 not, 1 partial, 2 full. ``heads`` is 1 or the number of key heads.
        Tiles of packed queries count as sequences of one row of blocks.
    owners : Tensor, [B, heads, nQ, columns], int64
        Number of the share of its list that begins the block; -1 where it is not listed.
    """

    config: DecodeConfig
    origin: str
    programs: int
    busy: int
    busiest: float
    mean: float
    states: Tensor = field(repr=False, compare=False)
    owners: Tensor = field(repr=False, compare=False)

    @property
    def balanced(self) -> bool:
        """True where shares are balanced over lists of unequal length."""
        return self.config.plan_rows > 0


def _on_host(value: Tensor) -> Tensor:
    return value.detach().cpu().long()


@dataclass(frozen=True)
class Rows:
    """What has lists: sequences, or tiles of packed queries, each like a sequence of its own.

    Attributes
    ----------
    B, Lq, BLOCK_Q : int
        How many there are, queries of each at the most, queries of a row of blocks without tables.
    kv_len : Tensor, [B], int64, on the CPU
        Valid keys.
    tiles : Tensor, [5, B], int64, or None
        See `flexdecode.packed.PackedQueries`, without the unused ones.
    used : Tensor, [num_tiles], bool, or None
    """

    B: int
    Lq: int
    BLOCK_Q: int
    kv_len: Tensor
    tiles: Tensor | None = None
    used: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem) -> Rows:
        """Read the rows of a problem from where its tensors are."""
        kv_len = _on_host(problem.kv_len_rows())
        packed = problem.packed
        if packed is None:
            return cls(problem.B, problem.Lq, max(problem.Lq, 1), kv_len)
        tiles = _on_host(packed.tiles)
        used = tiles[0] >= 0
        tiles = tiles[:, used]
        size = packed.BLOCK_Q
        return cls(tiles.shape[1], size, size, kv_len[tiles[0]], tiles, used)

    def queries(self, nQ: int, BLOCK_Q: int) -> Tensor:
        """Queries of each row of blocks, of which the last may have fewer: [B or 1, nQ], int64."""
        if self.tiles is not None:
            return self.tiles[2, :, None]
        return (self.Lq - torch.arange(nQ) * BLOCK_Q).clamp(0, BLOCK_Q)[None]

    def by_sequence(self, slots: Tensor, sequences: int) -> Tensor:
        """Join what tiles of one sequence read, [B or 1, heads, columns]: each key counts once."""
        if self.tiles is None:
            return slots
        slots = slots.expand(self.B, -1, -1)
        joined = slots.new_zeros(sequences, *slots.shape[1:])
        whose = self.tiles[0][:, None, None].expand_as(slots)
        return joined.scatter_reduce_(0, whose, slots, "amax")


def listed_states(request: Request, BLOCK_SIZE: tuple[int, int], rows: Rows) -> Tensor:
    """State of each block for each key head, as listed: [B or 1, Hkv or 1, nQ, columns], uint8."""
    problem = request.problem
    columns = ceil_div(problem.Lkv, BLOCK_SIZE[1])
    if request.resolved is None:
        nQ = ceil_div(rows.Lq, BLOCK_SIZE[0])
        return torch.full((1, 1, nQ, columns), FULL, dtype=torch.uint8)
    states = table_states(request.resolved.tables).cpu()
    if rows.used is not None:
        states = states.transpose(0, 2)[rows.used]
    states = pad(states, (0, max(columns - states.shape[3], 0)))
    if states.shape[1] in (1, problem.Hkv):
        return states
    group = states.view(states.shape[0], problem.Hkv, -1, *states.shape[2:])
    return group.amax(2).clamp(max=PARTIAL) + (group.amin(2) == FULL)


def count_work(
    problem: Problem,
    planned: Planned,
    lists: Lists | None,
    each: Rows,
    states: Tensor,
    keys: Tensor,
) -> tuple[Work, int]:
    """Who works on what, and how many partial results of a row that makes."""
    config = planned.config
    BLOCK_SIZE = None if lists is None else lists.BLOCK_SIZE
    BLOCK_Q, KV_BLOCK = kernel_block_size(BLOCK_SIZE, problem.Lq, problem.Lkv, config.BLOCK_N)
    heads = problem.Hkv if lists is not None and lists.heads > 1 else 1
    packed = problem.packed
    if packed is not None:
        BLOCK_Q = packed.BLOCK_Q
    layout = Layout.of(
        B=problem.q_batch,
        Hkv=problem.Hkv,
        G=problem.G,
        Lq=problem.Lq,
        heads=heads,
        BLOCK_Q=BLOCK_Q,
        config=config,
        nQ=None if packed is None else packed.num_tiles,
    )
    steps = ceil_div(KV_BLOCK, config.BLOCK_N)
    listed = states > 0
    if lists is None:
        listed = listed & (keys > 0)[:, None, None, :]
    lists_of = (each.B, heads, layout.nQ if packed is None else 1)
    units = (listed.sum(-1) * steps).expand(lists_of).reshape(-1)
    if config.plan_rows:
        items = balanced_items(units, layout.slots)
    else:
        items = torch.full_like(units, config.num_splits)
    share = shares_of(units, items, steps)
    working = -(-units // share)
    busiest = torch.minimum(share, units)
    states = (states * listed).expand(*lists_of, -1)
    if config.span:  # cut at fixed positions: every one that a key lies before has a program
        size = BLOCK_SIZE[1] if BLOCK_SIZE is not None else KV_BLOCK
        owners = torch.arange(states.shape[3]) // (config.span // size)
        owners = torch.where(states > 0, owners, -1)
        counts = torch.nn.functional.one_hot(owners + 1, config.num_splits + 1)[..., 1:]
        busiest = counts.sum(3).amax(-1).reshape(-1) * steps
        working = (-(-keys.sum(1) // config.span)).clamp(min=1)
        working = working[:, None, None].expand(lists_of).reshape(-1)
    else:
        owners = block_owners(states, share.view(lists_of), steps)
    queries = each.queries(layout.nQ, BLOCK_Q)[:, None].expand(lists_of).reshape(-1)
    tiles = -(-queries // config.TQ) * (problem.Hkv // heads * ceil_div(problem.G, config.TG))
    busy = int((working * tiles).sum())
    mean = float((units * tiles).sum()) / (busy * steps) if busy else 0.0
    rows = queries * (problem.Hkv // heads * problem.G)
    parts = int((working * rows)[working > 1].sum())
    most = float(busiest.max()) / steps if busy else 0.0
    return Work(config, planned.origin, layout.programs, busy, most, mean, states, owners), parts


def count_traffic(
    request: Request, rows: Rows, states: Tensor, keys: Tensor, blocks: BlockCounts, parts: int
) -> Traffic:
    """Bytes between memory and chip, where a row has `parts` partial results in all."""
    problem, q, k, v = request.problem, request.q, request.k, request.v
    read = (states > 0) * keys[:, None, None, :]  # [B or 1, Hkv or 1, nQ, columns], keys
    read = read.expand(rows.B, -1, -1, -1) if problem.Bkv > 1 else read
    slots = rows.by_sequence(read.amax(2) if read.shape[2] else read.sum(2), problem.B)
    if problem.Bkv == 1 and problem.kv_start is None and slots.shape[0]:
        slots = slots.amax(0, keepdim=True)  # sequences share the slots
    slots = slots.expand(-1, problem.Hkv, -1)
    a_slot = row_bytes(k)
    if not (isinstance(k, Tensor) and isinstance(v, Tensor) and is_within(v, k)):
        a_slot += row_bytes(v)
    out_row = problem.Dv * problem.dtype.itemsize
    q_out = problem.q_batch * problem.Hq * problem.Lq * (row_bytes(q) + out_row)
    captured = list(request.score.captures) if request.score is not None else []
    mask = None if request.resolved is None else request.resolved.mask
    if mask is not None and blocks.partial.total:
        captured += mask.captures
    if not blocks.active.total:
        captured = []
    whole = {(x.data_ptr(), x.shape): x.numel() * x.element_size() for x in captured}
    return Traffic(
        keys_values=int(slots.sum()) * a_slot,
        bias=_bias_bytes(request, rows, states, keys, blocks.BLOCK_SIZE[0]),
        captures=sum(whole.values()),
        q_out=q_out,
        partials=parts * (problem.Dv + 2) * 4 * 2,
    )


def _bias_bytes(request: Request, rows: Rows, states: Tensor, keys: Tensor, BLOCK_Q: int) -> int:
    """Bytes of the entries for the keys of active blocks; what is broadcast counts once."""
    bias, problem = request.bias, request.problem
    if bias is None or bias.numel() == 0:
        return 0
    by_sequence, by_head, by_row, by_key = (
        size > 1 and stride != 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )
    by_sequence = by_row if problem.packed is not None else by_sequence  # tiles have other rows
    read = (states > 0) * (keys if by_key else keys.clamp(max=1))[:, None, None, :]
    read = read.expand(rows.B, problem.Hkv, -1, -1)
    if not by_key:
        read = read.amax(3, keepdim=True)
    if not by_sequence:
        read = read.amax(0, keepdim=True)
    if not by_head:
        read = read.amax(1, keepdim=True)
    if by_row:
        read = read * rows.queries(states.shape[2], BLOCK_Q)[:, None, :, None]
    else:
        read = read.amax(2)
    return int(read.sum()) * (problem.G if by_head else 1) * bias.element_size()
