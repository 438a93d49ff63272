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

import triton
import triton.language as tl


@triton.jit
def find_pages(
    pages,  # (this sequence's page numbers, its first slot or None)
    start_n,  # first key of the unit
    offs_n,  # [BLOCK_N]
    kv_len,  # entries of keys from here on are never read
    PAGE_SIZE: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,
):
    """Page of a unit, or of each of its keys: int32, 0 where there is no key."""
    if WHOLE_PAGES:
        return tl.load(pages[0] + start_n // PAGE_SIZE, mask=start_n < kv_len, other=0)
    else:
        keys = start_n + offs_n
        slots = keys
        if pages[1] is not None:
            slots = pages[1] + keys
        return tl.load(pages[0] + slots // PAGE_SIZE, mask=keys < kv_len, other=0)


@triton.jit
def page_rows(
    page,  # from `find_pages`
    pages,
    start_n,
    offs_n,
    stride_b,  # from page to page, in elements
    stride_n,
    PAGE_SIZE: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,
    ALIGNED: tl.constexpr,  # every unit begins with a page
):
    """Where the keys of a unit are: an offset for all, and [BLOCK_N] from there; int64."""
    if WHOLE_PAGES:
        start = page.to(tl.int64) * stride_b + (start_n % PAGE_SIZE).to(tl.int64) * stride_n
        return start, offs_n.to(tl.int64) * stride_n
    else:
        if ALIGNED:
            within = offs_n % PAGE_SIZE  # the same in every step
        elif pages[1] is None:
            within = (start_n + offs_n) % PAGE_SIZE
        else:
            within = (pages[1] + start_n + offs_n) % PAGE_SIZE
        return start_n.to(tl.int64) * 0, page.to(tl.int64) * stride_b + within.to(
            tl.int64
        ) * stride_n
