"""Block lists as codes on the host: 0 empty, `PARTIAL` or `FULL` for every block of a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexdecode.tables import FULL, PARTIAL, Tables

__all__ = ["Codes", "Lengths", "are_fragments", "block_codes", "false_runs", "groups"]

MAX_LISTS = 64  # up to that many are looped over in any case
MIN_LIST = 1 << 16  # elements of k and v that are worth a product

_Item = TypeVar("_Item", bound=np.generic)
Codes = NDArray[np.uint8]
Lengths = NDArray[np.int64]


def block_codes(
    tables: Tables | None,
    row: int,
    *,
    lengths: Lengths,
    size: int,
    capacity: int,
    groups: tuple[int, int],
) -> Codes:
    """What each block of keys holds for one row of the tables, clipped to the lengths.

    Parameters
    ----------
    tables : Tables or None
        None lists every block as full.
    row : int
        Which query tile.
    lengths : array [B] or [1], int64, tokens
        Valid keys.
    size, capacity : int, tokens
        Keys of a block; keys of the cache.
    groups : (int, int)
        Key heads, and query heads of each.

    Returns
    -------
    array [B or 1, Hkv or 1, G or 1, blocks], uint8
        A full block that crosses a length is partial. Dimensions along which all lists are equal
        have size 1.
    """
    blocks = -(-capacity // size)
    if tables is None:
        codes: Codes = np.full((1, 1, blocks), FULL, dtype=np.uint8)
    else:
        codes = _spread(tables, row, blocks)
    if tables is None or not tables.exact:
        starts = np.arange(blocks) * size
        ends = lengths[:, None, None]
        codes = codes * (starts < ends).view(np.uint8)
        codes[(codes == FULL) & (starts + size > ends)] = PARTIAL
    heads = groups if codes.shape[1] > groups[0] else (codes.shape[1], 1)
    codes = codes.reshape(len(codes), *heads, blocks)
    if codes.size == blocks:
        return codes
    for dim in (0, 1, 2):
        if codes.shape[dim] > 1:
            first = codes.take([0], axis=dim)
            codes = first if (codes == first).all() else codes
    return codes


def _spread(tables: Tables, row: int, blocks: int) -> Codes:
    Bt, Ht = tables.kv_num_blocks.shape[:2]
    codes = np.zeros((Bt * Ht, blocks), dtype=np.uint8)
    lists = (
        (PARTIAL, tables.kv_num_blocks, tables.kv_indices),
        (FULL, tables.full_kv_num_blocks, tables.full_kv_indices),
    )
    for code, num_blocks, indices in lists:
        if num_blocks is None or indices is None:
            continue
        n = num_blocks.numpy(force=True)[:, :, row].reshape(-1)
        longest = int(n[0]) if len(n) == 1 else int(n.max(initial=0))
        if longest == 0:
            continue
        listed = indices.numpy(force=True)[:, :, row, :longest].reshape(-1, longest)
        if len(n) == 1 and tables.exact:
            codes[0, listed[0]] = code
            continue
        # Entries past the count are undefined; blocks past the cache exist in longer masks.
        valid = (np.arange(longest) < n[:, None]) & (listed >= 0) & (listed < blocks)
        which = valid.nonzero()
        codes[which[0], listed[which]] = code
    return codes.reshape(Bt, Ht, blocks)


def are_fragments(codes: Codes, block_elements: int) -> bool:
    """True where lists are many and too short to be worth a product each.

    Parameters
    ----------
    codes : array [B or 1, Hkv or 1, G or 1, blocks]
    block_elements : int
        Elements of k and v in one block of all key heads.
    """
    lists = codes.shape[0] * codes.shape[1]
    if lists <= MAX_LISTS:
        return False
    blocks = int(np.count_nonzero(codes.max(2)))
    return bool(blocks * block_elements < MIN_LIST * lists * codes.shape[1])


def groups(codes: Codes) -> Iterator[tuple[slice, slice, Codes]]:
    """Neighbouring rows whose lists are equal: batch rows, key heads, codes [1 or G, blocks].

    Parameters
    ----------
    codes : array [B or 1, Hkv or 1, G or 1, blocks]
    """
    for b0, b1, by_head in _runs(codes):
        for h0, h1, group in _runs(by_head):
            if group.any():
                yield slice(b0, b1), slice(h0, h1), group


def false_runs(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Maximal runs of False: start, stop."""
    where = (~flags).nonzero()[0].tolist()
    start = 0
    for i in range(1, len(where) + 1):
        if i == len(where) or where[i] != where[i - 1] + 1:
            yield where[start], where[i - 1] + 1
            start = i


def _runs(items: NDArray[_Item]) -> Iterator[tuple[int, int, NDArray[_Item]]]:
    """Maximal runs of equal items along the first axis: start, stop, the item."""
    n = len(items)
    if n == 0:
        return
    if n == 1:
        yield 0, 1, items[0]
        return
    changed = (items[1:] != items[:-1]).reshape(n - 1, -1).any(1)
    starts = [0, *(np.flatnonzero(changed) + 1).tolist(), n]
    for start, stop in itertools.pairwise(starts):
        yield start, stop, items[start]
