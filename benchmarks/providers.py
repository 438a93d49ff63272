"""Who computes attention: this library and its peers, each behind the same three questions."""

from __future__ import annotations

import abc
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import KVSet, page_table
from benchmarks.rules import Rules

__all__ = ["PROVIDERS", "Provider", "Setup", "own_backend", "resolve"]

Run = Callable[[KVSet], Tensor]  # inputs -> [B, Hq, Lq, Dv]


@dataclass(frozen=True)
class Setup:
    """What providers are told on the command line.

    Attributes
    ----------
    device : torch.device
    options : dict
        ``kernel_options`` of this library.
    peers : Path or None
        Folder with the unpacked peers, see ``benchmarks.peers``.
    """

    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)
    peers: Path | None = None


class Provider(abc.ABC):
    """One way to compute attention."""

    name: str
    own = False  # this library rather than a peer

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        return None if self.setup.device.type == "cuda" else "needs a GPU"

    def refuses(self, case: Case) -> str | None:
        """Why it has nothing for a case, or None."""
        return None

    def layout(self, case: Case) -> str:
        """Memory order of K and V that it wants."""
        return "BHLD"

    @abc.abstractmethod
    def open(self, case: Case, rules: Rules) -> Run:
        """Do what is done once per token or less often; return what is done in every layer."""

    def close(self) -> None:  # noqa: B027 (most have nothing to forget)
        """Forget the case."""

    def lengths(self, case: Case) -> Tensor | None:
        """Lengths as data, where they differ or pages ask for them: [B], int32."""
        if case.lengths is None and not case.page:
            return None
        lengths = [case.length(b) for b in range(case.B)]
        return torch.tensor(lengths, dtype=torch.int32, device=self.setup.device)


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


class FlashInfer(Provider):
    """FlashInfer's paged decode on tensor cores, planned outside the clock, pages of 64."""

    name = "flashinfer"
    page = 64

    def missing(self) -> str | None:
        return super().missing() or _missing("flashinfer", self.setup)

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


class Xformers(Provider):
    """The split-K Triton kernel of xformers."""

    name = "xformers"

    def missing(self) -> str | None:
        return super().missing() or _missing("xformers.ops.fmha", self.setup)

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


def _missing(module: str, setup: Setup) -> str | None:
    if setup.peers is not None:
        site = str(setup.peers / "site")
        if site not in sys.path:
            sys.path.append(site)
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken peer must not end the run
        return f"{type(error).__name__}: {error}"
    return None


PROVIDERS: dict[str, type[Provider]] = {
    kind.name: kind
    for kind in (
        FlexDecode,
        FlexDecodeLazy,
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
    "flexdecode": ("flexdecode", "flexdecode_lazy"),
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
