"""`attention`: check the arguments, resolve the mask for this call, run a backend."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexdecode import checks
from flexdecode.backends import choose_backend, launches_of, load_backend
from flexdecode.block_mask import BlockMask
from flexdecode.capture_checks import check_captured_indices
from flexdecode.kernels.ahead import Later
from flexdecode.mask_arguments import check_captures
from flexdecode.mask_resolution import ResolvedMask
from flexdecode.ops import is_transformed
from flexdecode.packed import PackedQueries, tile_size
from flexdecode.problem import Problem, Request
from flexdecode.quantization import with_scales
from flexdecode.quantized_tensor import QuantizedTensor
from flexdecode.repeats import Signature, remember, run_again, sign
from flexdecode.trace import trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexdecode.mods import ScoreMod
    from flexdecode.problem import Result
    from flexdecode.tables import Tables

__all__ = ["AuxOutput", "AuxRequest", "attention", "prepare"]


_NOTHING = contextlib.nullcontext()


class AuxRequest(NamedTuple):
    """Which statistics `attention` returns beside the output.

    Attributes
    ----------
    lse : bool
        The natural log of the sum of exponentials of each row.
    max_scores : bool
        The greatest score of each row, in natural units, sinks excluded.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The statistics that an `AuxRequest` asked for; None where it did not.

    Attributes
    ----------
    lse : Tensor [B, Hq, Lq], float32, or None
        Natural log; ``-inf`` in a row that may attend to nothing.
    max_scores : Tensor [B, Hq, Lq], float32, or None
        Natural units; ``-inf`` in a row that may attend to nothing.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def attention(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    *,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    kv_len: int | Tensor | None = None,
    kv_start: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
    kernel_options: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    r"""Attend from each query to the keys its mask allows, reading only the blocks that hold one.

    With ``G = Hq // Hkv``, for query ``i`` of head ``h`` in sequence ``b``::

        s   = scale * <q[b, h, i], k[b, h // G, kv_idx]> + bias[b, h, i, kv_idx]
        t   = score_mod(s, b, h, q_idx, kv_idx)
        lse = ln (sum exp(t) [+ exp(sinks[h])])          over allowed kv_idx < kv_len[b]
        out = sum exp(t - lse) * v[b, h // G, kv_idx]    over the same kv_idx

    Positions are logical: ``kv_idx`` is a token's place in its own sequence and
    ``q_idx = q_offset[b] + i``, where ``q_offset`` defaults to ``kv_len[b] - Lq``, so that the
    last query sits on the last key.

    Parameters
    ----------
    q : Tensor, [B, Hq, Lq, D], float16, bfloat16 or float32, or QuantizedTensor in fp8
        Queries; ``Lq`` is 1 for plain decoding, more for speculative decoding and prefill.
    k : Tensor, [B or 1, Hkv, Lkv, D], dtype of q, float8, or QuantizedTensor of any format
        Keys, any strides; ``Hq`` is a multiple of ``Hkv``. ``Lkv`` is the capacity of the cache.
        One head expanded to many (stride 0) is recognised, and read once.
    v : Tensor, [B or 1, Hkv, Lkv, Dv], dtype of q, float8, or QuantizedTensor of any format
        Values, laid out like `k`; ``Dv`` may differ from ``D``.
    score_mod : callable (score, b, h, q_idx, kv_idx) -> score, optional
        Rewrites a scaled score before the softmax. Scores are float32 in natural units, never log2;
        ``h`` is the query head.
    block_mask : BlockMask, optional
        Which keys may be attended, from `create_block_mask`. Default: all of them. torch's own
        ``BlockMask`` is taken too, with its rule that the first query sits on position 0.
    scale : float, default ``D ** -0.5``
        Multiplies the dot product, before `bias` and `score_mod`.
    kv_len : int or Tensor [B], int32 or int64, tokens; default ``Lkv - kv_start``
        Valid keys of each sequence; shapes ``[]`` and ``[1]`` stand for all of them. Data, not
        shape: a new value neither syncs nor recompiles. A tensor's values are clamped to
        ``[0, Lkv - kv_start]``, an int outside of ``[0, Lkv]`` is an error.
    kv_start : Tensor [B], int32 or int64, slots, optional
        First slot of each sequence: its keys are slots ``kv_start + [0, kv_len)``, and ``kv_idx``
        counts from there. Left padding; with one batch of k and v for all, packed keys, gaps
        allowed (``kv_len`` is required then); with pages, slot s is on page ``s // page_size``.
    q_offset : int or Tensor [B], int32 or int64, tokens; default ``kv_len - Lq``
        Position of the first query row; may be negative.
    page_table : Tensor [B, max_pages], int32, optional
        Pages of each sequence; k and v are then ``[num_pages, Hkv, page_size, D]``, any strides,
        any page size, and `kv_len` is required. Pages may be shared and repeated; entries past
        the length are never read.
    cu_seqlens_q : Tensor [B + 1], int32 or int64, rows, optional
        Packed queries: q is ``[1, Hq, total_q, D]``, and sequence b has rows ``cu_seqlens_q[b]``
        to ``cu_seqlens_q[b + 1]``, none perhaps. ``q_offset`` defaults to ``kv_len[b]`` minus its
        own number of queries. The block mask must be lazy or bound.
    bias : Tensor, [B or 1, Hq or 1, Lq, Lkv], floating point, any strides, optional
        Added to the scaled score before `score_mod`, indexed by row and ``kv_idx``.
    sinks : Tensor, [Hq], floating point, logits in natural units, optional
        Takes softmax mass and gives no value; joins each row once.
    return_aux : AuxRequest, optional
        Statistics to return beside the output.
    backend : str, default "auto"
        ``"auto"`` (triton on a GPU, cpu elsewhere), ``"triton"`` (also takes CPU tensors, under
        ``TRITON_INTERPRET=1``), ``"cpu"``, or ``"reference"`` (dense float64).
    kernel_options : dict, optional
        ``deterministic`` (bool or ``"batch_invariant"``), ``num_splits``, ``tf32``, ``approx``,
        ``partial_dtype``, ``BLOCK_M``, ``BLOCK_N``, ``num_warps``, ``num_stages``.

    Returns
    -------
    out : Tensor, [B, Hq, Lq, Dv], dtype of q, bfloat16 where q is quantised
        Zero in a row that may attend to nothing.
    aux : AuxOutput
        Only with `return_aux`. ``aux.lse`` is [B, Hq, Lq], float32, natural log; ``-inf`` in a row
        that may attend to nothing.

    Raises
    ------
    ValueError
        A shape, length or device does not fit, or q, k or v require grad while grad mode is on.
        The message names the argument, what came and what is wanted:
        ``k: expected head dim 128 to match q, got 64 (shape [2, 8, 4096, 64])``.
    TypeError
        A dtype or kind is unsupported, or a mod calls something that cannot be traced; the message
        then names the function and the line of the mod. All are raised before anything is launched.

    See Also
    --------
    create_block_mask : Turn a ``mask_mod`` into a `BlockMask`.
    merge_attentions : Combine outputs over disjoint sets of keys.

    Notes
    -----
    Split-KV decoding [1]_ over the active blocks only: full blocks run `score_mod`, partial blocks
    run `score_mod` and the mask [2]_, and the splits meet in an online softmax [3]_. Accumulation
    is float32. Memory traffic is the active blocks of `k` and `v`, each read once.

    References
    ----------
    .. [1] T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023.
    .. [2] J. Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
       Kernels", arXiv:2412.05496, 2024.
    .. [3] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax",
       arXiv:1805.02867, 2018.

    Examples
    --------
    One new token for each of two sequences, eight query heads over two key heads:

    >>> import torch
    >>> from flexdecode import AuxRequest, attention, create_block_mask
    >>> from flexdecode.masks import causal
    >>> q = torch.randn(2, 8, 1, 64)
    >>> k, v = torch.randn(2, 2, 2, 4096, 64)
    >>> out = attention(q, k, v, block_mask=create_block_mask(causal))
    >>> out.shape
    torch.Size([2, 8, 1, 64])

    The newest token sees the whole cache, so here ``causal`` changes nothing:

    >>> torch.allclose(out, attention(q, k, v), atol=1e-6)
    True

    Sequences of different length share one call; keys past ``kv_len`` have no effect:

    >>> kv_len = torch.tensor([4096, 1000])
    >>> out, aux = attention(q, k, v, kv_len=kv_len, return_aux=AuxRequest(lse=True))
    >>> torch.allclose(out[1:], attention(q[1:], k[1:, :, :1000], v[1:, :, :1000]), atol=1e-6)
    True
    >>> aux.lse.shape, aux.lse.dtype
    (torch.Size([2, 8, 1]), torch.float32)
    """
    if torch.compiler.is_compiling() or is_transformed():
        return _attention_in_graph(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            kv_len=kv_len,
            kv_start=kv_start,
            q_offset=q_offset,
            page_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            bias=bias,
            sinks=sinks,
            return_aux=return_aux,
            backend=backend,
            kernel_options=kernel_options,
        )
    signature: Signature | None = None
    if q_offset is None and cu_seqlens_q is None and bias is None:
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v}
        if kv_len is not None:
            tensors["kv_len"] = kv_len
        if kv_start is not None:
            tensors["kv_start"] = kv_start
        if page_table is not None:
            tensors["page_table"] = page_table
        if sinks is not None:
            tensors["sinks"] = sinks
        asked = (score_mod, block_mask, scale, return_aux, backend, kernel_options)
        signature = sign(tensors, *asked)
        if signature is not None:
            again = run_again(signature, tensors, score_mod, block_mask)
            if again is not None:
                return _answer(again, return_aux)
    request, name = prepare(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        kv_len=kv_len,
        kv_start=kv_start,
        q_offset=q_offset,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        bias=bias,
        sinks=sinks,
        return_aux=return_aux,
        backend=backend,
        kernel_options=kernel_options,
        runs=True,
    )
    # Captured parameters must not record anything either.
    with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
        result = load_backend(name)(request)
    if signature is not None:
        remember(signature, tensors, score_mod, block_mask, request, result)
    return _answer(result, return_aux)


def _answer(result: Result, return_aux: AuxRequest | None) -> Tensor | tuple[Tensor, AuxOutput]:
    if return_aux is None:
        return result.out
    return result.out, AuxOutput(result.lse, result.max_scores)


def _attention_in_graph(
    q: Any, k: Any, v: Any, *, return_aux: AuxRequest | None, **arguments: Any
) -> Tensor | tuple[Tensor, AuxOutput]:
    """`attention` as one operator, within a compiled region or a transform of torch.func."""
    from flexdecode.compiled import attention_in_graph

    out, lse, max_scores = attention_in_graph(q, k, v, return_aux=return_aux, **arguments)
    return out if return_aux is None else (out, AuxOutput(lse, max_scores))


def prepare(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    kv_len: int | Tensor | None,
    kv_start: Tensor | None,
    q_offset: int | Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    return_aux: AuxRequest | None,
    backend: str,
    kernel_options: dict[str, Any] | None,
    runs: bool = False,
) -> tuple[Request, str]:
    """Check the arguments of `attention` and resolve its mask, without running anything else.

    Parameters
    ----------
    runs : bool
        The request will be run: what it needs may be compiled beside what the mask needs.

    Returns
    -------
    request : Request
    name : str
        The backend that is to run it.
    """
    k, v = with_scales("k", k), with_scales("v", v)
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            checks.check_mask(block_mask)
            block_mask = BlockMask.from_torch(block_mask)
        kv_len = block_mask.inherit("kv_len", kv_len)
        q_offset = block_mask.inherit("q_offset", q_offset)
        kv_start = block_mask.inherit("kv_start", kv_start)
        page_table = block_mask.inherit("page_table", page_table)
        cu_seqlens_q = block_mask.inherit("cu_seqlens_q", cu_seqlens_q)
    sequences = None
    if cu_seqlens_q is not None:
        where = q.device if hasattr(q, "device") else torch.device("cpu")
        sequences = checks.check_cu_seqlens(cu_seqlens_q, where)
    checks.check_qkv(q, k, v, sequences, page_table is not None)
    checks.check_grad(q, k, v)
    if page_table is None:
        k, v = _without_repeats(q, k, v)
    problem = _problem(q, k, v, scale, kv_len, q_offset, kv_start, page_table, sequences)
    if cu_seqlens_q is not None:
        packed = _packed(problem, cu_seqlens_q, block_mask)
        problem = dataclasses.replace(problem, packed=packed)
    if bias is not None:
        bias = checks.check_bias(
            bias, problem.q_batch, problem.Hq, problem.Lq, problem.Lkv, problem.device
        )
    if sinks is not None:
        sinks = checks.check_sinks(sinks, problem.Hq, problem.device)
    if return_aux is not None:
        checks.check_return_aux(return_aux)
    options = checks.check_options(kernel_options) if kernel_options is not None else {}
    name = choose_backend(backend, problem.device)
    score = None
    if score_mod is not None:
        checks.check_score_mod(score_mod)
        score = trace(score_mod, "score")
        if score.captures:
            check_captures(score, problem.device)

    want_lse = return_aux is not None and return_aux.lse
    want_max = return_aux is not None and return_aux.max_scores

    def request_of(problem: Problem, resolved: ResolvedMask | None) -> Request:
        wanted = (want_lse, want_max, options)
        return Request(q, k, v, problem, score, resolved, bias, sinks, *wanted)

    resolved = None
    if block_mask is not None and problem.B and problem.Lq and problem.Lkv:
        later: contextlib.AbstractContextManager[None] = _NOTHING
        if runs and name == "triton" and block_mask.kind == "lazy":
            rule, own = block_mask.mask_mod, problem
            assert rule is not None

            def launches(tables: Tables) -> Sequence[Any]:
                resolved = ResolvedMask(trace(rule, "mask"), tables, own.offset)
                return launches_of(request_of(own, resolved))

            later = Later(launches)
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING, later:
            resolved = block_mask.resolve(problem, q_offset is not None)
        if resolved.q_offset is not None and resolved.q_offset is not problem.offset:
            problem = dataclasses.replace(problem, offset=resolved.q_offset)
        if resolved.scattered_rows and score is not None and "q_idx" in score.graph.uses:
            raise ValueError(
                "score_mod: expected a rule without q_idx, since the block_mask's rows were "
                "picked one by one and have no common offset; slice them with a step of 1"
            )
    request = request_of(problem, resolved)
    if checks.is_checking():
        check_captured_indices(request, block_mask is not None and block_mask.source == "blocks")
    return request, name


def _without_repeats(
    q: Tensor | QuantizedTensor, k: Tensor | QuantizedTensor, v: Tensor | QuantizedTensor
) -> tuple[Tensor | QuantizedTensor, Tensor | QuantizedTensor]:
    # One head (one sequence) expanded to many has stride 0: keep the one, and read it once.
    if k.stride(1) == 0 and v.stride(1) == 0 and q.shape[1] == k.shape[1] > 1:
        k, v = k[:, :1], v[:, :1]
    if k.stride(0) == 0 and v.stride(0) == 0 and k.shape[0] > 1:
        k, v = k[:1], v[:1]
    return k, v


def _problem(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    scale: float | None,
    kv_len: int | Tensor | None,
    q_offset: int | Tensor | None,
    kv_start: Tensor | None,
    page_table: Tensor | None,
    sequences: int | None,
) -> Problem:
    B, Hq, Lq, D = q.shape
    Bkv, Hkv, Lkv, _ = k.shape
    device = q.device
    if sequences is not None:
        B = sequences
    if page_table is not None:
        page_table = checks.check_page_table(page_table, k, B, kv_len)
        Lkv *= page_table.shape[1]
    if kv_len is not None:
        kv_len = checks.check_rows("kv_len", kv_len, B, device, 0, Lkv)
    elif kv_start is None:
        kv_len = Lkv
    if kv_start is not None:
        kv_start = checks.check_kv_start(kv_start, B, device)
        if kv_len is None:
            if Bkv == 1 and B > 1:
                raise ValueError(
                    f"kv_len: expected an int or a tensor of shape [{B}] where kv_start places "
                    "all sequences in one, got None"
                )
            kv_len = Lkv - kv_start
        elif not isinstance(kv_len, Tensor):
            kv_len = torch.full((B,), kv_len, dtype=torch.int32, device=device)
    assert kv_len is not None
    if q_offset is not None:
        bound = checks.MAX_POSITION
        q_offset = checks.check_rows("q_offset", q_offset, B, device, -bound, bound)
        if isinstance(q_offset, Tensor):
            q_offset = q_offset.to(torch.int64)
    elif isinstance(kv_len, int) and sequences is None:
        q_offset = kv_len - Lq
    problem = Problem(
        B=B,
        Hq=Hq,
        Hkv=Hkv,
        G=Hq // Hkv,
        Lq=Lq,
        Lkv=Lkv,
        D=D,
        Dv=v.shape[3],
        Bkv=Bkv,
        scale=checks.check_scale(scale, D),
        dtype=checks.compute_dtype(q),
        device=device,
        kv_len=kv_len,
        offset=q_offset,
        kv_start=kv_start,
        page_table=page_table,
        page_size=0 if page_table is None else k.shape[2],
    )
    if page_table is not None and checks.is_checking():
        slots = problem.kv_len_rows() + (0 if kv_start is None else kv_start)
        checks.check_pages(page_table, Bkv, slots, k.shape[2])
    return problem


def _packed(
    problem: Problem, cu_seqlens_q: Tensor, block_mask: BlockMask | None
) -> PackedQueries | None:
    if block_mask is not None:
        found = block_mask.packed_queries(problem.Lq)
        if found is not None:
            return found
    checks.check_starts(cu_seqlens_q, problem.Lq)
    block = 128 if block_mask is None else block_mask.BLOCK_SIZE[0]
    size = tile_size(block, problem.Lq, problem.B)
    return PackedQueries.of(cu_seqlens_q, problem.Lq, size)
