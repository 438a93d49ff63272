"""The cases: sizes, lengths, masks and score rules that every provider is asked for."""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

__all__ = ["BLOCK", "CASES", "GROUPS", "Case", "Mask", "select"]

BLOCK = 128  # keys of a block of the "blocks" masks
KIB = 1024


@dataclass(frozen=True)
class Mask:
    """Which keys may be seen.

    Attributes
    ----------
    kind : "causal", "window" or "blocks"
    window : int, tokens
        Of a "window": the newest keys, the query's own included.
    fraction : float or tuple of float
        Of "blocks": the share of key blocks that each KV head of each sequence keeps, or that they
        keep in turn.
    """

    kind: Literal["causal", "window", "blocks"]
    window: int = 0
    fraction: float | tuple[float, ...] = 1.0


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes
    ----------
    name, group : str
        A group is what ``--cases`` selects.
    B, Hq, Hkv, Lq, Lkv, D, Dv : int
        Batch, query heads, KV heads, queries, capacity in keys, head dims of keys and values.
    lengths : tuple of int, or None
        Valid keys of each sequence; None when all of ``Lkv`` are.
    mask : Mask or None
    score : "alibi", "softcap" or None
    shared : bool
        Values are the first ``Dv`` columns of the keys (a latent cache).
    page : int
        Slots of a page, in an order that nothing knows of; 0 for a cache without pages.
    """

    name: str
    group: str
    B: int
    Hq: int
    Hkv: int
    Lkv: int
    D: int = 128
    Dv: int = 128
    Lq: int = 1
    lengths: tuple[int, ...] | None = None
    mask: Mask | None = None
    score: Literal["alibi", "softcap"] | None = None
    shared: bool = False
    page: int = 0

    @property
    def G(self) -> int:
        """Query heads of one KV head."""
        return self.Hq // self.Hkv

    def length(self, b: int) -> int:
        """Valid keys of sequence `b`."""
        return self.Lkv if self.lengths is None else self.lengths[b]

    def blocks_kept(self) -> list[int]:
        """Blocks that a "blocks" mask keeps for each KV head of the first sequence, the next ..."""
        assert self.mask is not None
        fraction = self.mask.fraction
        fractions = (fraction,) if isinstance(fraction, float) else fraction
        return [
            max(1, round(fractions[n % len(fractions)] * (self.Lkv // BLOCK)))
            for n in range(self.B * self.Hkv)
        ]

    def active_keys(self) -> int:
        """Keys that must be read, summed over sequences and KV heads."""
        limits = [self.Lkv] * (self.B * self.Hkv)
        if self.mask is not None and self.mask.kind == "window":
            limits = [self.mask.window + self.Lq - 1] * len(limits)
        elif self.mask is not None and self.mask.kind == "blocks":
            limits = [blocks * BLOCK for blocks in self.blocks_kept()]
        return sum(min(self.length(n // self.Hkv), most) for n, most in enumerate(limits))

    @property
    def width(self) -> int:
        """Elements of K and V for one key of one head."""
        return self.D if self.shared else self.D + self.Dv

    def active_bytes(self, itemsize: int) -> int:
        """Bytes of K and V that must be read once: what the floor counts."""
        return self.active_keys() * self.width * itemsize

    def stored_elements(self) -> int:
        """Elements of K and V as they lie in memory."""
        return self.B * self.Hkv * self.Lkv * self.width

    def config(self) -> dict[str, Any]:
        """All sizes, for the records; ragged lengths as (count, length) pairs."""
        fields = asdict(self)
        del fields["name"], fields["group"]
        if self.lengths is not None:
            distinct = sorted(set(self.lengths))
            fields["lengths"] = [[self.lengths.count(n), n] for n in distinct]
        return fields

    def tiny(self) -> Case:
        """Shrink the case to something that an interpreter can run."""
        Hkv, B, Lkv = min(self.Hkv, 2), min(self.B, 2), min(self.Lkv, 512)
        lengths = None if self.lengths is None else (200, Lkv)[-B:]
        mask = self.mask
        if mask is not None and mask.kind == "window":
            mask = replace(mask, window=min(mask.window, 150))
        return replace(self, B=B, Hkv=Hkv, Hq=Hkv * self.G, Lkv=Lkv, lengths=lengths, mask=mask)


def _paged() -> list[Case]:
    wanted = {"B1 128k": (16, 64), "B16 8k": (16, 64, 256), "ragged 31x2k + 1x128k": (16, 64)}
    return [
        replace(case, name=f"{case.name}, pages of {page}", group="paged", page=page)
        for case in (*_dense(), *_ragged())
        for page in wanted.get(case.name, ())
    ]


def _dense() -> list[Case]:
    rows = [
        ("B1 8k", 1, 32, 8, 8 * KIB, 128),
        ("B1 32k", 1, 32, 8, 32 * KIB, 128),
        ("B1 128k", 1, 32, 8, 128 * KIB, 128),
        ("B16 8k", 16, 32, 8, 8 * KIB, 128),
        ("B64 4k", 64, 32, 8, 4 * KIB, 128),
        ("B128 2k", 128, 32, 8, 2 * KIB, 128),
        ("MHA 32/32 B16 4k", 16, 32, 32, 4 * KIB, 128),
        ("MQA 16/1 B8 32k", 8, 16, 1, 32 * KIB, 128),
        ("D64 B16 8k", 16, 32, 8, 8 * KIB, 64),
        ("D256 16/8 B8 8k", 8, 16, 8, 8 * KIB, 256),
    ]
    return [Case(name, "dense", B, Hq, Hkv, L, D, D) for name, B, Hq, Hkv, L, D in rows]


def _mods() -> list[Case]:
    base = Case("", "mods", 16, 32, 8, 8 * KIB)
    return [
        replace(base, name="q_len 4 B16 8k", Lq=4, mask=Mask("causal")),
        replace(base, name="ALiBi B16 8k", score="alibi"),
        replace(base, name="softcap B16 8k", score="softcap"),
    ]


def _masks() -> list[Case]:
    one, many = Case("", "masks", 1, 32, 8, 128 * KIB), Case("", "masks", 16, 32, 8, 32 * KIB)
    window, blocks = Mask("window", window=KIB), Mask("blocks", fraction=0.05)
    return [
        replace(one, name="causal B1 8k", Lkv=8 * KIB, mask=Mask("causal")),
        replace(many, name="causal B16 8k", Lkv=8 * KIB, mask=Mask("causal")),
        replace(one, name="window 1k of 128k B1", mask=window),
        replace(many, name="window 1k of 32k B16", mask=window),
        replace(one, name="5% of blocks 128k B1", mask=blocks),
        replace(many, name="5% of blocks 32k B8", B=8, mask=blocks),
    ]


def _ragged() -> list[Case]:
    lengths = (*[2 * KIB] * 31, 128 * KIB)
    base = Case("ragged 31x2k + 1x128k", "ragged", 32, 32, 8, 128 * KIB, lengths=lengths)
    return [base, replace(base, name="causal, ragged 31x2k + 1x128k", mask=Mask("causal"))]


def _groups() -> list[Case]:
    return [
        Case(f"group {G} B16 8k", "groups", 16, 8 * G, 8, 8 * KIB)
        for G in (1, 3, 5, 6, 7, 8, 12, 16)
    ]


def _dims() -> list[Case]:
    # As many bytes as B16 8k at D = 128: the key length makes up for the head dim.
    def keys(width: int, rows: int) -> int:
        return round(16 * 8 * 8 * KIB * 256 / (rows * width) / BLOCK) * BLOCK

    cases = [
        Case(f"D {D}" + (f"/{Dv}" if Dv != D else ""), "dims", 16, 32, 8, keys(D + Dv, 128), D, Dv)
        for D, Dv in ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
    ]
    latent = Case("D 576/512 group 16", "dims", 64, 16, 1, keys(576 + 512, 64), 576, 512)
    return [
        *cases,
        latent,
        replace(latent, name="D 576/512 group 16, V in K", Lkv=keys(576, 64), shared=True),
    ]


def _lengths() -> list[Case]:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    return [
        Case(f"length {n}k" if n < KIB else "length 1M", "lengths", 1, 32, 8, n * KIB)
        for n in sizes
    ]


def _density() -> list[Case]:
    return [
        Case(
            f"{percent}% of blocks 128k",
            "density",
            1,
            32,
            8,
            128 * KIB,
            mask=Mask("blocks", fraction=percent / 100),
        )
        for percent in (1, 5, 20, 100)
    ]


def _batches() -> list[Case]:
    return [
        Case(f"B{B} {keys // KIB}k", "batches", B, 32, 8, keys)
        for keys in (8 * KIB, 2 * KIB)
        for B in (3, 6, 12, 20, 24, 40, 48)
    ]


def _uneven() -> list[Case]:
    numbers = random.Random(1)
    one = Case("", "uneven", 1, 32, 8, 128 * KIB)
    kept = {
        "lists of 40 % and seven of 1 %": (0.4, *[0.01] * 7),
        "lists of 1 to 10 %": tuple(0.01 + 0.09 * n / 7 for n in range(8)),
        "lists of 0 to 10 %": tuple(numbers.uniform(0, 0.1) for _ in range(8)),
        "lists of 0 to 100 %": tuple(numbers.random() for _ in range(8)),
    }
    lists = tuple(numbers.uniform(0, 0.2) for _ in range(64))
    few = (128 * KIB, *[2 * KIB] * 3)
    some = tuple(numbers.randint(KIB, 32 * KIB) for _ in range(16))
    many = tuple(numbers.randint(KIB, 16 * KIB) for _ in range(64))
    wide = tuple(numbers.randint(KIB, 64 * KIB) for _ in range(32))
    skewed = tuple(min(int(2048 * numbers.lognormvariate(0, 1)), 16 * KIB) for _ in range(128))
    return [
        *[replace(one, name=name, mask=Mask("blocks", fraction=f)) for name, f in kept.items()],
        replace(
            one,
            name="B8 lists of 0 to 20 %",
            B=8,
            Lkv=64 * KIB,
            mask=Mask("blocks", fraction=lists),
        ),
        replace(one, name="lengths of 128k and three of 2k", B=4, lengths=few),
        replace(one, name="16 lengths of 1k to 32k", B=16, Lkv=32 * KIB, lengths=some),
        replace(one, name="32 lengths of 1k to 64k", B=32, Lkv=64 * KIB, lengths=wide),
        replace(one, name="64 lengths of 1k to 16k", B=64, Lkv=16 * KIB, lengths=many),
        replace(one, name="128 lengths, log-normal", B=128, Lkv=16 * KIB, lengths=skewed),
    ]


CASES = (
    *_dense(),
    *_mods(),
    *_masks(),
    *_ragged(),
    *_paged(),
    *_groups(),
    *_dims(),
    *_lengths(),
    *_density(),
    *_batches(),
    *_uneven(),
)
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))

QUICK = (
    "B1 8k",
    "B1 128k",
    "B16 8k",
    "softcap B16 8k",
    "window 1k of 128k B1",
    "window 1k of 32k B16",
    "5% of blocks 128k B1",
    "5% of blocks 32k B8",
    "ragged 31x2k + 1x128k",
)


def select(groups: set[str], *, only: str | None = None, quick: bool = False) -> list[Case]:
    """Pick cases by group, by a regular expression on the name, or the short list."""
    chosen = [case for case in CASES if case.group in groups]
    if only is not None:
        chosen = [case for case in chosen if re.search(only, case.name)]
    if quick:
        chosen = [case for case in chosen if case.name in QUICK]
    return chosen
