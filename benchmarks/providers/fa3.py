"""FlashAttention-3."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import KVSet
from benchmarks.providers.base import Provider, Run
from benchmarks.rules import Rules


class Fa3(Provider):
    """FlashAttention-3 as a library of torch operators, its scheduler run in every call."""

    name = "fa3"
    planned = False

    def missing(self) -> str | None:
        if self.setup.device.type != "cuda":
            return "needs a GPU"
        if torch.cuda.get_device_capability(self.setup.device)[0] != 9:
            return "needs compute capability 9"
        if hasattr(torch.ops._vllm_fa3_C, "fwd"):
            return None
        if self.setup.peers is None:
            return "needs --peers"
        path = self.setup.peers / "_vllm_fa3_C.abi3.so"
        if not path.is_file():
            return f"no {path}"
        torch.ops.load_library(str(path))
        return None

    def refuses(self, case: Case) -> str | None:
        if case.mask is not None and case.mask.kind == "blocks":
            return "no block tables"
        if case.score == "alibi":
            return "no ALiBi"
        if max(case.D, case.Dv) > 256 and not case.shared:
            return "head dims up to 256"
        return None

    def layout(self, case: Case) -> str:
        return "BLHD" if case.page else "BHLD"

    def open(self, case: Case, rules: Rules) -> Run:
        lengths = self.lengths(case)
        if lengths is None:  # the build has kernels for given lengths only
            lengths = torch.full((case.B,), case.Lkv, dtype=torch.int32, device=self.setup.device)
        window = case.mask.window - 1 if case.mask and case.mask.kind == "window" else -1
        causal = case.Lq > 1 and window < 0
        right = 0 if window >= 0 else -1
        softcap = 0.0 if case.score is None else 50.0
        latent = case.shared
        schedule = self._schedule(case, lengths, causal, window, right) if self.planned else None
        forward, scale = torch.ops._vllm_fa3_C.fwd, case.D**-0.5

        def run(inputs: KVSet) -> Tensor:
            q, k, v, q_v = inputs.q.transpose(1, 2), inputs.k, inputs.v, None
            if latent:  # the part of the keys that is the values is a separate product
                q, q_v, k = q[..., case.Dv :], q[..., : case.Dv], k[..., case.Dv :]
            results = forward(
                q,
                k.transpose(1, 2),
                v.transpose(1, 2),
                *(None, None),  # k_new, v_new
                q_v,
                *(None, None, None, None),  # out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new
                None,  # seqused_q
                lengths,  # seqused_k
                *(None, None),  # max_seqlen_q, max_seqlen_k
                *(inputs.page_table, None, None),  # page_table, kv_batch_idx, leftpad_k
                *(None, None, None),  # rotary_cos, rotary_sin, seqlens_rotary
                *(None, None, None),  # q_descale, k_descale, v_descale
                scale,
                causal,
                window,
                right,
                softcap,
                True,  # is_rotary_interleaved
                schedule,  # scheduler_metadata
                0,  # num_splits: its own choice
                None,  # pack_gqa: its own choice
                0,  # sm_margin
                None,  # s_aux
                *(1, 0, None),  # cp_world_size, cp_rank, cp_tot_seqused_k
            )
            out: Tensor = results[0].transpose(1, 2)
            return out

        return run

    def _schedule(
        self, case: Case, lengths: Tensor, causal: bool, window: int, right: int
    ) -> Tensor:
        head_dim = case.D - case.Dv if case.shared else case.D
        schedule: Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            case.B,
            case.Lq,
            case.Lkv,
            case.Hq,
            case.Hkv,
            head_dim,
            case.Dv,
            torch.bfloat16,
            lengths,
            *(None, None, None),  # cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new
            *(None, None),  # seqused_q, leftpad_k
            case.page or None,  # page_size
            0,  # max_seqlen_k_new
            causal,
            window,
            right,
            case.score == "softcap",
            0,  # num_splits
            None,  # pack_gqa
            0,  # sm_margin
        )
        return schedule


class Fa3Planned(Fa3):
    """FlashAttention-3 with its scheduler run once per token, outside the clock."""

    name = "fa3_planned"
    planned = True
