"""Who computes attention: this library and its peers, each behind the same three questions."""

from __future__ import annotations

from benchmarks.providers.base import Provider, Setup
from benchmarks.providers.fa3 import Fa3, Fa3Planned
from benchmarks.providers.flashinfer import FlashInfer
from benchmarks.providers.flex import Flex, FlexAutotuned
from benchmarks.providers.own import FlexDecode, FlexDecodeLazy, FlexDecodeLists, own_backend
from benchmarks.providers.sdpa import Sdpa, SdpaSlice
from benchmarks.providers.xformers import Xformers

__all__ = ["PROVIDERS", "FlexDecode", "Provider", "Setup", "own_backend", "resolve"]

PROVIDERS: dict[str, type[Provider]] = {
    kind.name: kind
    for kind in (
        FlexDecode,
        FlexDecodeLazy,
        FlexDecodeLists,
        Sdpa,
        SdpaSlice,
        Flex,
        FlexAutotuned,
        Fa3,
        Fa3Planned,
        FlashInfer,
        Xformers,
    )
}
# Names that stand for two ways of calling the same thing.
_TOGETHER = {
    "flexdecode": ("flexdecode", "flexdecode_lazy", "flexdecode_lists"),
    "fa3": ("fa3", "fa3_planned"),
    "sdpa": ("sdpa", "sdpa_slice"),
}


def resolve(text: str) -> dict[str, set[str] | None]:
    """Read ``--providers``: names, each perhaps limited to groups of cases.

    Parameters
    ----------
    text : str
        ``flexdecode,sdpa,flex:dense+masks``; ``name!`` takes one name without its companion.

    Returns
    -------
    dict of str to set of str, or None for all groups

    Raises
    ------
    ValueError
        A name is unknown.
    """
    chosen: dict[str, set[str] | None] = {}
    for item in text.split(","):
        name, _, groups = item.strip().partition(":")
        limit = set(groups.split("+")) if groups else None
        alone = name.endswith("!")
        name = name.removesuffix("!")
        if name not in PROVIDERS:
            raise ValueError(
                f"--providers: expected names among {', '.join(PROVIDERS)}, got {name!r}"
            )
        for each in (name,) if alone else _TOGETHER.get(name, (name,)):
            chosen[each] = limit
    return chosen
