"""The attention of xformers."""

from __future__ import annotations

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import KVSet
from benchmarks.providers.base import Provider, Run, missing_module
from benchmarks.rules import Rules


class Xformers(Provider):
    """The split-K Triton kernel of xformers."""

    name = "xformers"

    def missing(self) -> str | None:
        return super().missing() or missing_module("xformers.ops.fmha", self.setup)

    def refuses(self, case: Case) -> str | None:
        if case.page:
            return "no pages in that mask"
        if case.score is not None:
            return "no score rule"
        if case.mask is not None and (case.mask.kind != "causal" or case.Lq > 1):
            return "no such mask"
        if case.D != case.Dv or case.D not in (16, 32, 64, 128, 256, 512):
            return "head dims 16 to 512, powers of two"
        return None

    def layout(self, case: Case) -> str:
        return "BHLD" if case.lengths is None else "BLHD"

    def open(self, case: Case, rules: Rules) -> Run:
        from xformers.ops import fmha

        bias, packed = None, case.lengths is not None
        if case.lengths is not None:
            kind = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask
            bias = kind.from_seqlens(
                q_seqlen=[case.Lq] * case.B,
                kv_padding=case.Lkv,
                kv_seqlen=list(case.lengths),
                device=self.setup.device,
            )

        def run(inputs: KVSet) -> Tensor:
            q = inputs.q.unflatten(1, (case.Hkv, case.G)).permute(0, 3, 1, 2, 4)
            k, v = (
                x.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, case.G, -1)
                for x in (inputs.k, inputs.v)
            )
            if packed:
                q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
            out, _ = fmha.triton_splitk.FwOp.apply(
                fmha.Inputs(query=q, key=k, value=v, attn_bias=bias), needs_gradient=False
            )
            # [B, Lq, Hkv, G, D]
            out = out.reshape(case.B, case.Lq, case.Hq, case.Dv)
            return out.transpose(1, 2)  # type: ignore[no-any-return]

        return run
