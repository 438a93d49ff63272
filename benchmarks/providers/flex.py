"""torch's FlexAttention, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.providers.base import Provider, Run
from benchmarks.rules import Rules


class Flex(Provider):
    """``torch.compile(flex_attention)``."""

    name = "flex"
    mode: str | None = None

    def refuses(self, case: Case) -> str | None:
        return "no pages without rewriting the mask" if case.page else None

    def open(self, case: Case, rules: Rules) -> Run:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        mask_mod, score_mod, block_mask = self._mask(case, rules), self._score(case, rules), None
        if mask_mod is not None:
            blocks = case.mask is not None and case.mask.kind == "blocks"
            uses_b, uses_h = blocks or case.lengths is not None, blocks
            block_mask = create_block_mask(
                mask_mod,
                case.B if uses_b else None,
                case.Hq if uses_h else None,
                case.Lq,
                case.Lkv,
                device=self.setup.device,
            )
        compiled = torch.compile(flex_attention, dynamic=False, mode=self.mode)
        return lambda inputs: compiled(
            inputs.q,
            inputs.k,
            inputs.v,
            score_mod=score_mod,
            block_mask=block_mask,
            enable_gqa=case.G > 1,
        )

    def close(self) -> None:
        torch._dynamo.reset()

    def _mask(self, case: Case, rules: Rules) -> Callable[..., Any] | None:
        """The same rule from torch's positions, where the first query stands at 0."""
        rule, lengths, rows, capacity = rules.mask, self.lengths(case), case.Lq, case.Lkv
        if lengths is None:
            if rule is None:
                return None
            return lambda b, h, q_idx, kv_idx: rule(b, h, q_idx + (capacity - rows), kv_idx)
        if rule is None:
            return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]
        return lambda b, h, q_idx, kv_idx: (
            rule(b, h, q_idx + (lengths[b] - rows), kv_idx) & (kv_idx < lengths[b])
        )

    def _score(self, case: Case, rules: Rules) -> Callable[..., Any] | None:
        rule, rows, capacity = rules.score, case.Lq, case.Lkv
        if rule is None:
            return None
        return lambda score, b, h, q_idx, kv_idx: rule(
            score, b, h, q_idx + (capacity - rows), kv_idx
        )


class FlexAutotuned(Flex):
    """``torch.compile(flex_attention)`` with every configuration tried."""

    name = "flex_at"
    mode = "max-autotune-no-cudagraphs"
