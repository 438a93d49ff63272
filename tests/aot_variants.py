"""Compile the kernels ahead of time, for devices that are not there.

A group of variants is compiled for one target through the ordinary launchers, whose launches are
intercepted, and one JSON record a kernel is printed. The signature and the specialisation are
therefore exactly those of a real call. Kernels must not be interpreted (see `forks`).
"""

import contextlib
import json
import re
import subprocess
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from flexdecode.appending import _launch
from flexdecode.backends.triton import lay_out
from flexdecode.kernels.append import launch_append
from flexdecode.kernels.call import BlockTables, DecodeCall, Mod
from flexdecode.kernels.configs import choose_config
from flexdecode.kernels.hardware import Device
from flexdecode.kernels.launch import decode
from flexdecode.kernels.merge import launch_merge, launch_merge_backward
from flexdecode.kernels.query_tiles import write_query_tiles
from flexdecode.plan import storage_of
from flexdecode.quantization import quantize

TARGETS = {
    "cuda:80": (GPUTarget("cuda", 80, 32), Device(108, shared_memory=166912, cuda=True)),
    "cuda:90": (GPUTarget("cuda", 90, 32), Device(132, 232448, True, cuda=True, fp8_rows=64)),
    "cuda:100": (GPUTarget("cuda", 100, 32), Device(148, 232448, True, cuda=True, fp8_rows=64)),
    "hip:gfx942": (GPUTarget("hip", "gfx942", 64), Device(304, shared_memory=65536, columns=16)),
}


@triton.jit
def causal_mask(b, h, q_idx, kv_idx, lane, args):
    return kv_idx <= q_idx


@triton.jit
def document_mask(b, h, q_idx, kv_idx, lane, args):
    return tl.load(args[0] + q_idx) == tl.load(args[0] + kv_idx, mask=kv_idx < args[1], other=-1)


@triton.jit
def alibi_score(score, b, h, q_idx, kv_idx, lane, args):
    return score + tl.load(args[0] + h, mask=lane, other=0.0) * (kv_idx - q_idx) * args[1]


@dataclass(frozen=True)
class Variant:
    """A kernel that users meet: what its call looks like."""

    B: int = 1
    Hkv: int = 8
    G: int = 4
    Lq: int = 1
    Lkv: int = 8192
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    block: tuple[int, int] | None = None
    full: bool = True
    exact: bool = True
    mask: str = ""
    score: str = ""
    kv_len: str = "int"
    lists: int = 1
    per_head: bool = False
    bias: bool = False
    sinks: bool = False
    aux: bool = False
    strided: bool = False
    tf32: bool = False
    page: int = 0
    start: bool = False
    packed: bool = False
    shared: bool = False
    k_as: tuple[tuple[str, object], ...] = ()  # arguments of `quantize`
    v_as: tuple[tuple[str, object], ...] = ()
    q_as_fp8: bool = False
    partial_dtype: torch.dtype = torch.float32
    invariant: bool = False
    options: tuple[tuple[str, int], ...] = ()


INT4, FP8 = (("format", "int4"),), (("format", "fp8"),)
ROWS = (*INT4, ("layout", "interleaved"))
# What depends on the target: instructions, shared memory, warps, assembly of our own.
EVERYWHERE = {
    "dense": Variant(),
    "documents": Variant(B=16, block=(128, 128), mask="documents", score="alibi", aux=True),
    "latent": Variant(Hkv=1, G=128, dims=(576, 512), kv_len="tensor", shared=True),
    "float32": Variant(dims=(64, 64), dtype=torch.float32, block=(128, 128), mask="causal"),
    "fp8 words and int4 rows": Variant(
        k_as=(*FP8, ("scale_dtype", torch.int32)), v_as=ROWS, page=16, Lkv=512
    ),
}
EVERYWHERE_TOO = {
    "merge of unlike strides",
    "merge of unlike strides, backward",
    "append to pages",
    "append, int4 and fp8",
    "append, fp8_e5m2 and int4 4",
}
PLAIN = {
    "speculative": Variant(B=64, Lq=4, block=(16, 32), mask="causal", exact=False, sinks=True),
    "latent apart": Variant(Hkv=1, G=128, dims=(576, 512), kv_len="tensor"),
    "ragged": Variant(B=32, kv_len="tensor", lists=32),
    "batch invariant": Variant(
        B=4,
        kv_len="tensor",
        block=(16, 64),
        full=False,
        per_head=True,
        mask="causal",
        invariant=True,
    ),
    "per head": Variant(block=(128, 64), mask="causal", per_head=True, dims=(80, 80)),
    "prefill": Variant(Lq=512, block=(128, 128), mask="causal", dtype=torch.float16),
    "tf32": Variant(dtype=torch.float32, tf32=True, bias=True),
    "float32 wide": Variant(dims=(256, 256), dtype=torch.float32),
    "odd": Variant(dims=(31, 31), G=71, Hkv=1, strided=True, block=(128, 20), mask="causal"),
    "wide": Variant(B=8, G=2, dims=(256, 256), block=(128, 128), full=False, mask="causal"),
    "pages": Variant(B=16, page=16, kv_len="tensor", block=(128, 128), mask="causal"),
    "packed": Variant(B=8, page=64, kv_len="tensor", Lq=64, packed=True, lists=20),
    "whole pages": Variant(B=16, page=128, kv_len="tensor", block=(128, 128), mask="documents"),
    "padded": Variant(B=16, start=True, kv_len="tensor", block=(128, 128), mask="causal"),
    "padded pages": Variant(B=16, start=True, page=64, kv_len="tensor"),
    "mqa": Variant(B=8, Hkv=1, G=16, Lkv=32768, options=(("BLOCK_N", 128), ("num_stages", 4))),
}
QUANTISED = {
    "int4 and fp8": Variant(k_as=INT4, v_as=FP8, Lkv=512),
    "int8 and int4 groups": Variant(
        k_as=(("format", "int8"),),
        v_as=(*INT4, ("groups", 2)),
        dtype=torch.float16,
        kv_len="tensor",
        partial_dtype=torch.float64,
    ),
    "fp8 queries": Variant(Lq=16, k_as=FP8, v_as=FP8, q_as_fp8=True, Lkv=512),
    "fp8 query": Variant(k_as=FP8, v_as=(*FP8, ("per", "head")), q_as_fp8=True, Lkv=512),
    "e5m2 and int8": Variant(
        k_as=(("format", "fp8_e5m2"),), v_as=(("format", "int8"), ("per", "head")), Lkv=512
    ),
    "int4 4 groups and rows": Variant(
        k_as=(*INT4, ("groups", 4)), v_as=(*ROWS, ("groups", 2)), Lkv=512, page=128
    ),
    "int4 latent": Variant(Hkv=1, G=16, dims=(576, 512), k_as=INT4, v_as=INT4, Lkv=512),
    "int4 prefill": Variant(k_as=INT4, v_as=INT4, Lkv=512, Lq=512, Hkv=1),
    "int4 beside plain": Variant(v_as=INT4, Lkv=512, dims=(96, 64), dtype=torch.float32),
}


def make_call(variant, device):
    """Return a variant's call on CPU tensors, and its configuration."""
    B, Hkv, Lq, Lkv = variant.B, variant.Hkv, variant.Lq, variant.Lkv
    D, Dv = variant.dims
    Hq = Hkv * variant.G

    def tensor(*shape):
        step = 2 if variant.strided else 1
        return torch.empty(*shape[:-1], shape[-1] * step, dtype=variant.dtype)[..., ::step]

    q_batch, slots = (1 if variant.packed else B), variant.page or Lkv
    table = torch.empty(B, Lkv // slots, dtype=torch.int32) if variant.page else None
    made = B if table is None else table.numel()
    tables = None
    if variant.block is not None:
        rows, columns = -(-Lq // variant.block[0]), -(-Lkv // variant.block[1])
        count = torch.empty(1, 1, rows, dtype=torch.int32)
        indices = torch.empty(1, 1, rows, columns, dtype=torch.int32)
        state = torch.empty(1, Hq, rows, columns, dtype=torch.uint8)
        tables = BlockTables(
            count,
            indices,
            count.clone() if variant.full else None,
            indices.clone() if variant.full else None,
            variant.block,
            variant.exact,
            state if variant.per_head else None,
        )
    masks = {
        "causal": Mod(causal_mask),
        "documents": Mod(document_mask, (torch.empty(Lkv, dtype=torch.int32), float(Lkv))),
    }
    q = tensor(q_batch, Hq, Lq, D)
    q_scale = torch.empty(q_batch, Hq, Lq) if variant.q_as_fp8 else None
    k, v = tensor(made, Hkv, slots, D), tensor(made, Hkv, slots, Dv)
    if variant.shared:
        v = k[..., :Dv]
    k = quantize(k.zero_(), **dict(variant.k_as)) if variant.k_as else k
    v = quantize(v.zero_(), **dict(variant.v_as)) if variant.v_as else v
    stored = storage_of(k, v)
    k, k_codes = lay_out("k", k)
    v, v_codes = lay_out("v", v)
    config = choose_config(
        B=B,
        Hkv=Hkv,
        G=variant.G,
        Lq=Lq,
        D=D,
        Dv=Dv,
        itemsize=variant.dtype.itemsize,
        keys=Lkv,
        device=device,
        BLOCK_Q=variant.block[0] if variant.block else None,
        KV_BLOCK=variant.block[1] if variant.block else None,
        lists=variant.lists,
        ragged=variant.lists > 1,
        stored=stored,
        v_in_k=variant.shared,
        capacity=Lkv if variant.invariant else 0,
        options=dict(variant.options),
    )
    call = DecodeCall(
        q.to(torch.uint8) if variant.q_as_fp8 else q,
        k,
        v,
        torch.empty(q_batch, Hq, Lq, Dv, dtype=variant.dtype),
        scale=D**-0.5,
        kv_len=Lkv if variant.kv_len == "int" else torch.empty(B, dtype=torch.int64),
        kv_start=torch.empty(B, dtype=torch.int32) if variant.start else None,
        page_table=table,
        tiles=torch.empty(5, B + Lq // 8, dtype=torch.int32) if variant.packed else None,
        BLOCK_Q=8 if variant.packed else 0,
        lse=torch.empty(B, Hq, Lq) if variant.aux else None,
        max_scores=torch.empty(B, Hq, Lq) if variant.aux else None,
        tables=tables,
        score_mod=Mod(alibi_score, (torch.empty(Hq), 1.0)) if variant.score else None,
        mask_mod=masks.get(variant.mask),
        bias=torch.empty(B, 1, Lq, Lkv).expand(B, Hq, Lq, Lkv) if variant.bias else None,
        sinks=torch.empty(Hq) if variant.sinks else None,
        tf32=variant.tf32,
        k_codes=k_codes,
        v_codes=v_codes,
        q_format="e4m3" if variant.q_as_fp8 else "",
        q_scale=q_scale,
        assembly=device.cuda,
        fp8_rows=device.fp8_rows,
        partial_dtype=variant.partial_dtype,
    )
    return call, config


@contextlib.contextmanager
def launches_intercepted(target, act):
    """Call ``act(kernel, source, options, key)`` instead of launching."""
    backend = make_backend(target)

    def run(self, *args, grid, warmup, **kwargs):
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        bind = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        key = str((specialization, sorted(options.items(), key=str)))
        parsed = self._pack_args(backend, kwargs, bound, specialization, options)
        options, signature, constexprs, attributes = parsed
        act(self, ASTSource(self, signature, constexprs, attributes), options.__dict__, key)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch("flexdecode.kernels.launch.compile_together"),
    ):
        yield


def merges():
    """Yield titles and launches of merges: of lists, of stacks, of unlike strides, backward."""
    for title, dtype, parts, stacked, strided in (
        ("merge of a list", torch.bfloat16, 16, False, False),
        ("merge of unlike strides", torch.float16, 2, False, True),
        ("merge of a stack", torch.float64, 20, True, False),
    ):
        shape, each = (4, 8, 1), 1 if stacked else parts
        lead = (parts,) if stacked else ()
        outs = [torch.empty(*lead, *shape, 128, dtype=dtype) for _ in range(each)]
        lses = [torch.empty(*lead, *shape) for _ in range(each)]
        if strided:
            outs[0] = outs[0].view(8, 4, 1, 128).transpose(0, 1)
        sinks = torch.empty(8) if strided else None
        out, lse = torch.empty(*shape, 128, dtype=dtype), torch.empty(shape)
        grads = torch.empty(parts, *shape, 128, dtype=dtype), torch.empty(parts, *shape)
        rows = torch.empty(shape) if strided else None
        yield title, partial(launch_merge, outs, lses, sinks, out, lse, stacked=stacked)
        run = partial(launch_merge_backward, outs, lses, sinks, out, lse, *grads, rows)
        yield f"{title}, backward", partial(run, stacked=stacked)


def appends():
    """Yield titles and launches of writes to caches, and of the tiles of packed queries."""
    cos, sin = torch.empty(4096, 64), torch.empty(4096, 64)
    dense, pages = torch.empty(4, 8, 512, 128), torch.empty(9, 8, 16, 128, dtype=torch.bfloat16)
    new, packed = torch.empty(4, 8, 3, 128, dtype=torch.bfloat16), torch.empty(1, 8, 9, 128)
    starts = torch.empty(5, dtype=torch.int32)
    nothing = {"kv_start": None, "page_table": None, "cu_seqlens": None}
    yield "append", partial(
        launch_append, dense, dense, new, new, **nothing, rotary=(cos, sin), kv_len=7,
        interleaved=False,
    )  # fmt: skip
    place = {"page_table": torch.empty(4, 9, dtype=torch.int32), "cu_seqlens": starts}
    place |= {"kv_start": starts[1:], "kv_len": starts[1:].long()}
    rotary = cos[:, ::4], sin[:, ::4]
    yield (
        "append to pages",
        partial(
            launch_append,
            pages,
            pages,
            packed,
            packed,
            **nothing | place,
            rotary=rotary,
            interleaved=True,
        ),
    )
    yield from quantized_appends(nothing | {"kv_len": 7}, nothing | place, rotary)
    tiles = torch.empty(5, 13, dtype=torch.int32)
    yield "tiles of packed queries", partial(write_query_tiles, tiles, starts, 64, 8)


def quantized_appends(dense, paged, rotary):
    """Every format and kind of coefficients once, alternately dense and in pages."""
    words, half = ("scale_dtype", torch.int32), ("scale_dtype", torch.float16)
    pairs = [
        (INT4, FP8),
        ((*INT4, ("groups", 8)), (("format", "int8"), half)),
        (ROWS, (*FP8, words)),
        ((*ROWS, ("groups", 4)), (*FP8, ("per", "head"))),
        ((("format", "fp8_e5m2"),), (*INT4, ("groups", 4))),
        ((("format", "fp8_e5m2"), words), (*INT4, ("groups", 2))),
        ((("format", "int8"), ("per", "tensor")), ()),
    ]
    for number, pair in enumerate(pairs):
        slots, places = (16, paged) if number % 2 else (512, dense)
        plain = torch.zeros(4, 8, slots, 96, dtype=torch.float16)
        caches = [quantize(plain, **dict(as_)) if as_ else plain for as_ in pair]
        new = torch.empty(1, 8, 9, 96) if number % 2 else torch.empty(4, 8, 1, 96).bfloat16()
        title = " and ".join(" ".join(str(value) for _, value in as_) or "plain" for as_ in pair)
        angles = rotary if number % 3 else None
        yield f"append, {title}", partial(_launch, *caches, new, new, places, angles, False)


def tables():
    """Block tables by intervals and by elements, of a mask that reads a tensor."""
    from flexdecode.device_tables import (
        build_device_tables,
        order_lists,
        unite_heads,
        update_device_tables,
    )
    from flexdecode.tables import Extent
    from flexdecode.trace import trace

    documents = torch.empty(65536, dtype=torch.int64)

    def rule(b, h, q_idx, kv_idx):
        near = (q_idx >= kv_idx) & (q_idx - kv_idx < 4096 * (h + 1))
        return near & (documents[q_idx] == documents[kv_idx])

    mask = trace(rule, "mask")
    long = Extent(1, 4, 65536, 65536, 65536, 0, (128, 128), torch.device("cpu")).for_kernels(mask)
    step = replace(long, Lq=1, kv_len=torch.empty(1, dtype=torch.int32), q_offset=None)

    def update():
        built = build_device_tables(mask, long)
        unite_heads(built, 2)
        order_lists(built, 2)
        update_device_tables(mask, long, built)

    yield "intervals", update
    yield "elements", lambda: build_device_tables(mask, step)


def resources(compiled):
    """Registers and local memory (spills), in bytes a thread, of a CUDA binary."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if "cubin" not in compiled.asm or not tools.exists():
        return {}
    binary = Path(compiled.metadata_group[f"{compiled.metadata.name}.cubin"])
    run = subprocess.run([tools, "-res-usage", binary], capture_output=True, text=True, check=True)
    words = [word.split(":") for word in run.stdout.split() if word.count(":") == 1]
    found = {name: int(value) for name, value in words if value.isdigit()}
    return {"registers": found["REG"], "stack": found["STACK"], "local": found["LOCAL"]}


def launches(group, device):
    """Yield titles and launches: of "everywhere", "plain", "quantised" and "merge and append"."""
    decoded = {"everywhere": EVERYWHERE, "plain": PLAIN, "quantised": QUANTISED}.get(group, {})
    for title, variant in decoded.items():
        yield title, lambda variant=variant: decode(*make_call(variant, device))
    if group == "everywhere":
        yield from tables()
    for title, launch in (*merges(), *appends()):
        if group == ("everywhere" if title in EVERYWHERE_TOO else "merge and append"):
            yield title, launch


def compile_variants(name, group):
    """Compile a group of variants for a target and print what came out."""
    target, device = TARGETS[name]
    for title, launch in launches(group, device):
        seen = set()  # a kernel is asked for before it is launched

        def act(kernel, source, options, key, title=title, seen=seen):
            if (kernel, key) in seen:
                return
            seen.add((kernel, key))
            compiled = triton.compile(source, target=target, options=options)
            text = compiled.asm.get("ptx", "")
            record = {
                "variant": title,
                "kernel": kernel.__name__,
                "shared": compiled.metadata.shared,
                "shared_limit": device.shared_memory,
                "cp_async_16": text.count(", 0x10"),
                "cp_async": text.count("cp.async.c") - text.count("cp.async.commit_group"),
                "commit_groups": text.count("cp.async.commit_group"),
                "inexact": len(re.findall(r"\bfma\.|\.ftz|\.approx|div\.full", text)),
                **resources(compiled),
            }
            print(json.dumps(record), flush=True)

        with launches_intercepted(target, act):
            launch()


def count_keys():
    """Print how many kernels sessions would compile, and how many of them after the first call."""
    target, device = TARGETS["cuda:90"]
    keys, later, first = {}, [], True

    def act(kernel, source, options, key):
        known = keys.setdefault(kernel.__name__, set())
        if key not in known and not first:
            later.append(kernel.__name__)
        known.add(key)

    sessions = {"batches": batches(device), "heads": heads(device), **tokens()}
    with launches_intercepted(target, act), as_if_on(device):
        for title, steps in sessions.items():
            keys.clear()
            later.clear()
            first = True
            for step in steps:
                step()
                first = False
            found = {name: len(found) for name, found in keys.items()}
            print(json.dumps({"session": title, "kernels": found, "later": later}), flush=True)


BASE = Variant(block=(128, 128), mask="documents", score="alibi", B=2)


def batches(device):
    """Calls of the kernels with other batch sizes, lengths and numbers."""
    for step, variant in enumerate(replace(BASE, B=b) for b in range(1, 5)):
        yield partial(one_call, step, variant, device)


def heads(device):
    """Calls with other head counts."""
    counts = [(h, g) for h in (1, 2, 8, 16) for g in (1, 3, 4, 16)]
    for step, (h, g) in enumerate(counts):
        yield partial(one_call, step, replace(BASE, Hkv=h, G=g), device)


def one_call(step, variant, device):
    """Call with numbers that depend on the step."""
    call, config = make_call(variant, device)
    documents, width = call.mask_mod.args
    call = replace(
        call,
        kv_len=step + 1,
        q_offset=step,
        scale=1.0 + step,
        mask_mod=Mod(call.mask_mod.fn, (documents, width + step)),
    )
    # Two sizes of the reduction serve few and many heads.
    fixed = {"num_splits": 2 + step % 15, "reduce_splits": 16, "reduce_warps": 1}
    decode(call, replace(config, **fixed, more_splits=False))


def tokens():
    """Sessions of the library itself: tokens one by one, and a new closure object for each."""
    from flexdecode import attention, create_block_mask

    ids = torch.zeros(1 << 18, dtype=torch.int64)

    def window(size):
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    def by_head(size, documents):
        def rule(b, h, q_idx, kv_idx):
            return (q_idx - kv_idx < size * (h + 1)) & (documents[q_idx] == documents[kv_idx])

        return rule

    def lengths(most, least=1):
        near = [2**power + d for power in range(5, 18) for d in (-1, 0, 1)]
        return sorted(n for n in {*range(1, 18), *near} if least <= n <= most)

    def cache(B, Hkv, Lkv, D):
        return torch.empty(B, Hkv, Lkv, D, dtype=torch.bfloat16)

    def fixed(capacity, D, Lq=1, masked=True, ragged=False):
        """A cache of fixed size fills up."""
        B = 4 if ragged else 1
        q, k = cache(B, 4, Lq, D), cache(B, 1, capacity, D)
        for n in lengths(capacity, Lq):
            mask = create_block_mask(window(n // 2 + 1)) if masked else None
            kv_len = torch.full((B,), n) if ragged else n
            yield partial(attention, q, k, k, block_mask=mask, kv_len=kv_len, backend="triton")

    def grown():
        """A cache that is a new tensor at every step, and a view of ids at any address."""
        q = cache(1, 8, 1, 128)
        for n in lengths(30000):
            k = cache(1, 2, n, 128)
            mask = create_block_mask(by_head(n // 2 + 1, ids[n % 5 :][:n]))
            yield partial(attention, q, k, k, block_mask=mask, backend="triton")

    def bound():
        """A mask bound to a step, and updated for each token."""
        q, k = cache(1, 4, 1, 64), cache(1, 2, 60000, 64)
        mask = create_block_mask(by_head(100, ids))
        step = mask.bind(batch=1, heads=4, q_len=1, kv_len=1, kv_capacity=60000)

        def token(n):
            step.update(n)
            attention(q, k, k, block_mask=step, backend="triton")

        for n in lengths(60000):
            yield partial(token, n)

    return {
        "4096 tokens": fixed(4096, 16),
        "131072 tokens": fixed(131072, 128),
        "131072 tokens without a mask": fixed(131072, 128, masked=False),
        "131072 tokens, 4 at a time": fixed(131072, 128, Lq=4),
        "131072 tokens, ragged": fixed(131072, 64, ragged=True),
        "a bound mask": bound(),
        "a growing cache": grown(),
    }


@contextlib.contextmanager
def as_if_on(device):
    """Take tensors on the CPU for those of a GPU: what is launched is intercepted."""
    from flexdecode import api, bound_mask, device_tables, plan, tables
    from flexdecode.backends import triton as backend

    def build(mask, extent, *, compact=None):
        return device_tables.build_device_tables(mask, extent.for_kernels(mask))

    def build_into(buffers, mask, extent):
        device_tables.update_device_tables(mask, extent.for_kernels(mask), buffers)

    changes = [
        (api, "choose_backend", lambda name, device: name),
        (plan, "device_of", lambda where: device),
        (backend, "device_of", lambda where: device),
        (tables, "build_tables", build),
        (bound_mask, "build_tables", build),
        (bound_mask, "build_into", build_into),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
