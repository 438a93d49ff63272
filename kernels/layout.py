"""How the programs of one launch are numbered. Nothing here imports Triton."""

from dataclasses import dataclass

from flexdecode.kernels.configs import DecodeConfig
from flexdecode.kernels.sizes import ceil_div, next_power_of_2
from flexdecode.kernels.splits import fair_items

LEVEL_BITS = 12  # in which `number_items` in worklist.py counts the items of a class of lengths
MAX_ITEMS = (1 << LEVEL_BITS) - 1  # of a balanced launch


@dataclass(frozen=True)
class Layout:
    """How the programs of one launch are numbered: ``item * inner + (KV head, tile)``.

    Attributes
    ----------
    rows, heads, nQ : int
        Lists of active blocks, ``B * heads * nQ``; heads is 1 where all KV heads share a list.
    inner : int
        Programs of each item: KV heads that share a list, times tiles of its queries and heads.
    num_splits : int
        Items of each row; of a balanced launch, about the items of all rows: see `fair_items`.
    items : int
        Items of all rows at the most.
    tile_rows : int
        Real rows of a tile.
    slots : int
        Items that the device works on at a time.
    """

    rows: int
    heads: int
    nQ: int
    inner: int
    num_splits: int
    items: int
    tile_rows: int
    slots: int

    @classmethod
    def of(
        cls,
        *,
        B: int,
        Hkv: int,
        G: int,
        Lq: int,
        heads: int,
        BLOCK_Q: int,
        config: DecodeConfig,
        nQ: int | None = None,
    ) -> "Layout":
        """Number the programs of a call whose lists differ among `heads` KV heads, or 1.

        Packed queries have `nQ` tiles in all, and count as B = 1.
        """
        if nQ is None:
            nQ = ceil_div(Lq, BLOCK_Q)
        q_tiles = ceil_div(min(BLOCK_Q, Lq), config.TQ)
        inner = Hkv // heads * q_tiles * ceil_div(G, config.TG)
        rows = B * heads * nQ
        num_splits = config.num_splits
        items = rows * num_splits
        slots = max(config.processors // max(inner, 1), 1)
        if config.plan_rows:
            # Hundreds of processors with many programs on each have more than can be numbered.
            slots = min(slots, (MAX_ITEMS - rows) // 2)
            num_splits = fair_items(rows, slots)
            items = num_splits + rows
        return cls(rows, heads, nQ, inner, num_splits, items, config.TG * config.TQ, slots)

    @property
    def programs(self) -> int:
        """Programs of the launch."""
        return self.items * self.inner


def kernel_block_size(
    BLOCK_SIZE: tuple[int, int] | None, Lq: int, Lkv: int, BLOCK_N: int
) -> tuple[int, int]:
    """Return queries and keys of a block as the kernels see them, of tables with `BLOCK_SIZE`.

    A block much wider than all keys is cut down, so that it isn't walked in vain; by powers of
    two, since each width is a kernel of its own. Without tables the blocks are the units.
    """
    if BLOCK_SIZE is None:
        return max(Lq, 1), BLOCK_N
    BLOCK_Q, KV_BLOCK = BLOCK_SIZE
    KV_BLOCK = min(KV_BLOCK, max(next_power_of_2(max(Lkv, 1)), 128, BLOCK_N))
    return max(min(BLOCK_Q, Lq), 1), KV_BLOCK
