"""torch's own attention, and the same on a slice."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.cases import Case
from benchmarks.inputs import KVSet
from benchmarks.providers.base import Provider, Run
from benchmarks.rules import Rules


class Sdpa(Provider):
    """``torch.nn.functional.scaled_dot_product_attention`` as torch dispatches it."""

    name = "sdpa"

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case) -> str | None:
        if case.lengths is not None:
            return "no lengths"
        if case.page:
            return "no pages"
        if case.score is not None:
            return "no score rule"
        if case.mask is not None and (case.mask.kind != "causal" or case.Lq > 1):
            return "no such mask without reading every key"
        return None

    def open(self, case: Case, rules: Rules) -> Run:
        # The fallback is dense arithmetic that no one would serve with; better no number.
        torch.backends.cuda.enable_math_sdp(self.setup.device.type != "cuda")
        return lambda inputs: F.scaled_dot_product_attention(
            inputs.q, inputs.k, inputs.v, enable_gqa=True
        )


class SdpaSlice(Sdpa):
    """SDPA on the part of the cache that a window leaves, cut by hand."""

    name = "sdpa_slice"

    def refuses(self, case: Case) -> str | None:
        window = case.mask is not None and case.mask.kind == "window"
        return None if window and case.Lq == 1 and case.lengths is None else "not a plain window"

    def open(self, case: Case, rules: Rules) -> Run:
        assert case.mask is not None
        run, window = super().open(case, rules), case.mask.window
        return lambda x: run(KVSet(x.q, x.k[:, :, -window:], x.v[:, :, -window:]))
