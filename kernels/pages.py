# mypy: allow-untyped-defs, allow-untyped-decorators
"""Where the keys of a unit are when a cache is made of pages.

A sequence's key number i is in slot ``kv_start + i``, slot s on entry ``s // PAGE_SIZE`` of the
sequence's row of the page table, at ``s % PAGE_SIZE`` of that page (PagedAttention [1]_). Pages and
sparse blocks are independent. Where no unit crosses into another page, one number serves a whole
unit; otherwise every key looks its own up.

References
----------
.. [1] W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
   PagedAttention", SOSP 2023.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Pages(NamedTuple):
    """Where a sequence's keys are."""

    numbers: tl.tensor  # of its pages, int32
    first_slot: tl.tensor | None
    SIZE: tl.constexpr  # keys of a page; 0: there are no pages, keys follow one another
    UNITS: tl.constexpr  # see `lie_of_units`


class Unit(NamedTuple):
    """Keys that are worked on together."""

    page: tl.tensor | None  # from `find_pages`
    start_n: tl.tensor  # its first key
    offs_n: tl.tensor  # [BLOCK_N]


@triton.constexpr_function
def lie_of_units(PAGE_SIZE, KV_BLOCK, BLOCK_N, ANYWHERE):
    """How units lie on pages: "inside" one each, from the "start" of one on, or anyhow, ""."""
    if PAGE_SIZE == 0 or KV_BLOCK % BLOCK_N != 0 or ANYWHERE:
        return ""
    if PAGE_SIZE % BLOCK_N == 0:
        return "inside"
    return "start" if BLOCK_N % PAGE_SIZE == 0 else ""


@triton.jit
def find_pages(
    pages,
    start_n,  # first key of the unit
    offs_n,  # [BLOCK_N]
    kv_len,  # entries of keys from here on are never read
):
    """Page of a unit, or of each of its keys: int32, 0 where there is no key."""
    if pages.UNITS == "inside":
        return tl.load(pages.numbers + start_n // pages.SIZE, mask=start_n < kv_len, other=0)
    else:
        keys = start_n + offs_n
        slots = keys
        if pages.first_slot is not None:
            slots = pages.first_slot + keys
        return tl.load(pages.numbers + slots // pages.SIZE, mask=keys < kv_len, other=0)


@triton.jit
def key_rows(
    pages,
    at,
    stride_b,  # from page to page, in elements
    stride_n,
):
    """Where the keys of a unit are: an offset for all, and [BLOCK_N] from there; int64."""
    start_n, offs_n = at.start_n, at.offs_n
    if pages.SIZE == 0:
        return start_n.to(tl.int64) * stride_n, offs_n.to(tl.int64) * stride_n
    elif pages.UNITS == "inside":
        start = at.page.to(tl.int64) * stride_b + (start_n % pages.SIZE).to(tl.int64) * stride_n
        return start, offs_n.to(tl.int64) * stride_n
    else:
        if pages.UNITS == "start":
            within = offs_n % pages.SIZE  # the same in every step
        elif pages.first_slot is None:
            within = (start_n + offs_n) % pages.SIZE
        else:
            within = (pages.first_slot + start_n + offs_n) % pages.SIZE
        rows = at.page.to(tl.int64) * stride_b + within.to(tl.int64) * stride_n
        return start_n.to(tl.int64) * 0, rows
