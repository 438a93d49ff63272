"""FlashInfer."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import KVSet, page_table
from benchmarks.providers.base import Provider, Run, missing_module
from benchmarks.rules import Rules


class FlashInfer(Provider):
    """FlashInfer's paged decode on tensor cores, planned outside the clock, pages of 64."""

    name = "flashinfer"
    page = 64

    def missing(self) -> str | None:
        return super().missing() or missing_module("flashinfer", self.setup)

    def refuses(self, case: Case) -> str | None:
        if case.mask is not None and case.mask.kind == "blocks":
            return "no block tables"
        if case.Lq > 1:
            return "one query"
        if case.D != case.Dv or case.D not in (64, 128, 256):
            return "head dims 64, 128, 256"
        return None

    def layout(self, case: Case) -> str:
        return "BLHD"

    def open(self, case: Case, rules: Rules) -> Run:
        import flashinfer

        device, page = self.setup.device, case.page or self.page
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        lengths = [case.length(b) for b in range(case.B)]
        counts = [-(-length // page) for length in lengths]
        starts = [sum(counts[:b]) for b in range(case.B + 1)]
        stride = case.Lkv // page  # pages from one sequence to the next
        table = torch.arange(case.B * stride).view(case.B, stride)
        if case.page:
            table = page_table(case)
        pages = [int(p) for row, count in zip(table, counts, strict=True) for p in row[:count]]

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        window = case.mask.window - 1 if case.mask and case.mask.kind == "window" else -1
        wrapper.plan(
            int32(starts),
            int32(pages),
            int32([n - (count - 1) * page for n, count in zip(lengths, counts, strict=True)]),
            case.Hq,
            case.Hkv,
            case.D,
            page,
            pos_encoding_mode="ALIBI" if case.score == "alibi" else "NONE",
            window_left=window,
            logits_soft_cap=50.0 if case.score == "softcap" else None,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

        def run(inputs: KVSet) -> Tensor:
            cache = tuple(
                x.transpose(1, 2).view(case.B * stride, page, case.Hkv, case.D)
                for x in (inputs.k, inputs.v)
            )
            out: Tensor = wrapper.run(inputs.q[:, :, 0], cache)
            return out[:, :, None]

        return run
