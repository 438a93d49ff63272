"""flexdecode, with tables made before the clock starts or inside."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import BLOCK, Case
from benchmarks.inputs import KVSet
from benchmarks.providers.base import Provider, Run
from benchmarks.rules import Rules, selection


def own_backend(device: torch.device) -> str:
    """The Triton kernels wherever they run."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "triton" if device.type == "cuda" or interpreted else "cpu"


class FlexDecode(Provider):
    """flexdecode with a mask that is bound once per token, its tables reused."""

    name = "flexdecode"
    own = True

    def missing(self) -> str | None:
        return None

    def block_mask(self, case: Case, rules: Rules, lengths: Tensor | None) -> Any:
        """Make the mask before the clock starts."""
        import flexdecode

        return flexdecode.create_block_mask(rules.mask).bind(
            batch=case.B,
            heads=case.Hq,
            q_len=case.Lq,
            kv_len=case.Lkv if lengths is None else lengths,
            kv_capacity=case.Lkv,
            device=self.setup.device,
        )

    def open(self, case: Case, rules: Rules) -> Run:
        import flexdecode

        lengths = self.lengths(case)
        block_mask = self.block_mask(case, rules, lengths) if rules.mask is not None else None
        backend, options = own_backend(self.setup.device), self.setup.options or None

        def run(inputs: KVSet) -> Tensor:
            return flexdecode.attention(
                inputs.q,
                inputs.k,
                inputs.v,
                block_mask=block_mask,
                score_mod=rules.score,
                kv_len=lengths,
                page_table=inputs.page_table,
                backend=backend,
                kernel_options=options,
            )

        return run


class FlexDecodeLazy(FlexDecode):
    """flexdecode with a lazy mask: its tables are made inside the clock."""

    name = "flexdecode_lazy"

    def refuses(self, case: Case) -> str | None:
        return "no mask" if case.mask is None else None

    def block_mask(self, case: Case, rules: Rules, lengths: Tensor | None) -> Any:
        import flexdecode

        return flexdecode.create_block_mask(rules.mask)


class FlexDecodeLists(FlexDecode):
    """flexdecode with the lists of blocks that a retriever gives, and no function."""

    name = "flexdecode_lists"

    def refuses(self, case: Case) -> str | None:
        given = case.mask is not None and case.mask.kind == "blocks"
        return None if given else "no lists of blocks"

    def block_mask(self, case: Case, rules: Rules, lengths: Tensor | None) -> Any:
        import flexdecode

        kept = selection(case)
        counts = kept.sum(-1, keepdim=True)
        # Those that are kept come first, in order.
        indices = kept.int().argsort(dim=-1, descending=True, stable=True)[..., : int(counts.max())]
        counts, indices = (x.to(self.setup.device) for x in (counts, indices[:, :, None]))
        return flexdecode.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK)
