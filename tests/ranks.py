"""Calls of `flexdecode.distributed` that each of several processes makes, and one for each rank.

`run_ranks` starts ``python -m tests.ranks RANK RANKS FOLDER DEVICE BACKEND`` for each rank, which
runs every case and saves what it got; `whole` gives the same call over whole sequences.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexdecode import AuxRequest, append_kv, create_block_mask
from flexdecode.distributed import Interleaved, attention, bind, locate
from flexdecode.masks import alibi, causal, documents, sliding_window
from tests.helpers import Dense, assert_within, budget, dense_attention, random_inputs

D, DV = 16, 24
BOTH = AuxRequest(lse=True, max_scores=True)


@dataclass(frozen=True)
class Case:
    """A call over whole sequences of `lengths` tokens, and how their keys are dealt out.

    Attributes
    ----------
    shards : "derived", "starts", "callable" or int
        Contiguous, with cuts at shares of each length; an int is the size of interleaved runs.
    cuts : tuple of float
        Where rank 1, 2, ... begins, as shares of a length.
    make : function (device) -> dict of ``mask``, ``score_mod``, ``sinks``
    """

    lengths: tuple[int, ...]
    shards: str | int = "derived"
    cuts: tuple[float, ...] = (0.4, 0.4)  # rank 1 of 3 has nothing
    make: Callable[[torch.device], dict[str, Any]] = lambda device: {}
    Hq: int = 6
    Hkv: int = 2
    Lq: int = 1
    dtype: torch.dtype = torch.float32
    page_size: int = 0
    packed: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    bound: bool = False
    q_offset: int | None = None


def window(device: torch.device) -> dict[str, Any]:
    return {"mask": causal & sliding_window(40)}


def biased_window(device: torch.device) -> dict[str, Any]:
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05, 0.02, 0.01], device=device)
    return {"mask": causal & sliding_window(90), "score_mod": alibi(slopes)}


def in_documents(device: torch.device) -> dict[str, Any]:
    ids = torch.arange(300, device=device) // 37
    return {"mask": causal & documents(ids)}


def with_sinks(device: torch.device) -> dict[str, Any]:
    return {"sinks": torch.linspace(-1, 4, 6, device=device)}


def everything(device: torch.device) -> dict[str, Any]:
    return biased_window(device) | with_sinks(device)


def nothing(device: torch.device) -> dict[str, Any]:
    return {"mask": lambda b, h, q_idx, kv_idx: kv_idx > q_idx + b * 1000}


CASES = {
    "no rule": Case((150, 7), make=with_sinks),
    "window, starts found out": Case((200, 90), make=window, Lq=3),
    "documents, starts given": Case((290, 55), "starts", make=in_documents, Lq=2),
    "everything by tokens": Case((201, 77), 1, make=everything, Lq=2),
    "everything by pages": Case((205, 31), 16, make=everything, page_size=16),
    "everything by uneven runs of other pages": Case((130, 260), 5, make=everything, page_size=8),
    "documents by a function": Case((180, 64), "callable", make=in_documents, Lq=2),
    "packed queries": Case((140, 90, 33), make=everything, packed=(3, 0, 2)),
    "own heads": Case((200, 90), 4, make=everything, options={"scatter_heads": True}),
    "own heads, no sinks": Case((66, 90), make=window, options={"scatter_heads": True}),
    "bfloat16, odd sizes": Case((99, 14), make=everything, dtype=torch.bfloat16, Lq=3),
    "nothing allowed": Case((64, 64), make=nothing, Lq=2),
    "bound": Case((190, 60), 16, make=everything, bound=True, page_size=16),
    "an offset of its own": Case((120, 80), 3, make=window, q_offset=50, Lq=2),
    "kernels": Case((40, 23), 4, make=everything, Lq=2, options={"backend": "triton"}),
    "more room than keys": Case((3, 1), "starts", make=biased_window, cuts=(0.5, 0.9)),
}


@dataclass(frozen=True)
class Drawn:
    q: Tensor
    k: Tensor
    v: Tensor
    rules: dict[str, Any]


def draw(case: Case, device: torch.device) -> Drawn:
    """Draw whole sequences: the same on all ranks."""
    B, Lq = len(case.lengths), sum(case.packed) or case.Lq
    q, k, v = random_inputs(
        B, case.Hq, case.Hkv, Lq, max(case.lengths), D, DV, dtype=case.dtype, device=device
    )
    return Drawn(q[:1] if case.packed else q, k, v, case.make(device))


def whole(case: Case, *, rounded: bool = False) -> Dense:
    """Evaluate the formula over whole sequences, on a CPU."""
    x = draw(case, torch.device("cpu"))
    lengths = torch.tensor(case.lengths)

    def dense(q: Tensor, rows: slice, shift: int = 0) -> Dense:
        rules = dict(x.rules)
        if shift:  # b counts from 0 in the oracle
            for name, at in (("mask", 0), ("score_mod", 1)):
                rules[name] = lambda *a, rule=rules[name], at=at: rule(
                    *a[:at], a[at] + shift, *a[at + 1 :]
                )
        return dense_attention(
            q,
            x.k[rows],
            x.v[rows],
            kv_len=lengths[rows],
            q_offset=case.q_offset,
            rounded=rounded,
            **rules,
        )

    if not case.packed:
        return dense(x.q, slice(None))
    pieces = x.q.split(list(case.packed), 2)
    found = [dense(q, slice(b, b + 1), b) for b, q in enumerate(pieces)]
    return Dense(*(torch.cat([getattr(f, n) for f in found], 2) for n in Dense.__annotations__))


def assert_matches_whole(name: str, found: list[tuple[Tensor, ...]]) -> None:
    """Compare what ranks got with the formula, and with one another bit for bit."""
    case = CASES[name]
    if "scatter_heads" in case.options:
        found = [tuple(torch.cat(each, 1) for each in zip(*found, strict=True))]
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            assert torch.equal(mine, theirs)
    exact, rounded = whole(case), whole(case, rounded=True)
    for got, at in zip(found[0], ("out", "lse", "max_scores"), strict=True):
        right, low = getattr(exact, at), getattr(rounded, at)
        # Parts are rounded to the dtype of q before they are merged, and once more after it.
        assert_within(got, right, 2 * budget(right, low), at)


def positions(case: Case, rank: int, ranks: int) -> list[Tensor]:
    """Tokens of each sequence that a rank holds."""
    if isinstance(case.shards, int):
        run = [torch.arange(n) // case.shards % ranks for n in case.lengths]
        return [(owner == rank).nonzero().flatten() for owner in run]
    cuts = (0.0, *case.cuts[: ranks - 1], 1.0)
    if case.shards == "callable":  # from the end: neither contiguous in rank order nor dealt out
        return [torch.arange(n - 1 - rank, -1, -ranks) for n in case.lengths]
    return [torch.arange(int(cuts[rank] * n), int(cuts[rank + 1] * n)) for n in case.lengths]


def run_case(case: Case, device: torch.device, group: Any) -> tuple[Tensor, ...]:
    """Make a call on this rank; slots without a key hold NaN."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    x = draw(case, device)
    own = positions(case, rank, ranks)
    lengths = torch.tensor([len(p) for p in own])
    total = torch.tensor(case.lengths, device=device)
    capacity = -(-max(len(p) for p in own) // 16) * 16
    caches = []
    for whole in (x.k, x.v):
        cache = whole.new_full((*whole.shape[:2], capacity, whole.shape[3]), torch.nan)
        for b, p in enumerate(own):
            cache[b, :, : len(p)] = whole[b][:, p.to(device)]
        caches.append(cache)
    call: dict[str, Any] = {"kv_len": lengths.to(device)}
    if len(set(lengths.tolist())) == 1:
        call["kv_len"] = int(lengths[0])
    if case.page_size:
        caches, call["page_table"] = in_pages(caches, case.page_size)
    if isinstance(case.shards, int):
        call["kv_position"] = Interleaved(case.shards)
        local = Interleaved(case.shards).local_len(total, group=group)
        assert local.tolist() == lengths.tolist()
        assert Interleaved(case.shards).local_len(case.lengths[0], group=group) == lengths[0]
    elif case.shards == "starts":
        first = [int(p[0]) if len(p) else 0 for p in own]
        call["kv_position"] = torch.tensor(first, device=device)
    elif case.shards == "callable":
        call["kv_position"] = lambda b, slot: total[b] - 1 - rank - slot * ranks
    else:
        first, found = locate(lengths.to(device), group=group)
        assert found.tolist() == list(case.lengths)
        assert all(p[0] == n for p, n in zip(own, first.tolist(), strict=True) if len(p))
    rules = dict(x.rules)
    if "mask" in rules:
        rules["block_mask"] = create_block_mask(rules.pop("mask"), BLOCK_SIZE=(128, 16))
    if case.packed:
        ends = torch.tensor((0, *case.packed)).cumsum(0)
        call["cu_seqlens_q"] = ends.to(torch.int32).to(device)
    if case.q_offset is not None:
        call["q_offset"] = case.q_offset
    if case.bound:
        return call_bound(x.q, caches, call, rules, total - case.Lq, group)
    out, aux = attention(
        x.q, *caches, group=group, return_aux=BOTH, **call, **rules, **case.options
    )
    return out, aux.lse, aux.max_scores


def call_bound(
    q: Tensor,
    caches: list[Tensor],
    call: dict[str, Any],
    rules: dict[str, Any],
    offset: Tensor,
    group: Any,
) -> tuple[Tensor, ...]:
    """Bind for other lengths, then let the buffers follow."""
    kv_len, q_offset = torch.zeros_like(offset), torch.zeros_like(offset)
    step = bind(
        rules.pop("block_mask"),
        call["kv_position"],
        group=group,
        batch=len(q),
        heads=q.shape[1],
        q_len=q.shape[2],
        kv_len=kv_len,
        q_offset=q_offset,
        kv_capacity=256,
        page_table=call["page_table"],
    )
    kv_len.copy_(torch.as_tensor(call["kv_len"]))
    q_offset.copy_(offset)
    step.update()
    for _ in range(2):  # the second call is recognised
        out, aux = attention(q, *caches, group=group, block_mask=step, return_aux=BOTH, **rules)
    return out, aux.lse, aux.max_scores


def in_pages(caches: list[Tensor], size: int) -> tuple[list[Tensor], Tensor]:
    """Cut caches into pages that lie about in any order."""
    B, pages = len(caches[0]), caches[0].shape[2] // size
    order = torch.randperm(B * pages, generator=torch.Generator().manual_seed(1))
    pools = []
    for cache in caches:
        cut = cache.unflatten(2, (pages, size)).transpose(1, 2).flatten(0, 1)
        pool = torch.empty_like(cut)
        pool[order.to(cut.device)] = cut
        pools.append(pool)
    return pools, order.view(B, pages).to(torch.int32).to(caches[0].device)


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors(device: torch.device, pair: Any) -> dict[str, str]:
    """Call wrongly, on all ranks."""
    q, k, v = random_inputs(1, 4, 2, 1, 32, D, device=device)
    rule = create_block_mask(causal)
    step = rule.bind(batch=1, heads=4, q_len=1, kv_len=32, device=device)
    fixed = create_block_mask(causal, Q_LEN=1, KV_LEN=32, q_offset=31, device=device)
    found = {
        "bound": message_of(lambda: attention(q, k, v, block_mask=step)),
        "fixed": message_of(lambda: attention(q, k, v, block_mask=fixed)),
        "heads": message_of(lambda: attention(q, k, v, scatter_heads=True)),
        "position": message_of(
            lambda: attention(q, k, v, block_mask=rule, kv_position=0.5, q_offset=0)
        ),
        "size": message_of(lambda: Interleaved(0)),
    }
    own = bind(rule, 0, batch=1, heads=4, q_len=1, kv_len=32, q_offset=31, device=device)
    found["twice"] = message_of(lambda: attention(q, k, v, block_mask=own, kv_position=0))
    if dist.get_rank() == 2:
        found["outside"] = message_of(lambda: attention(q, k, v, group=pair))
    os.environ["FLEXDECODE_CHECK"] = "1"
    found["ranks"] = message_of(lambda: attention(q[:, :, : dist.get_rank()], k, v))
    found["none"] = message_of(lambda: attention(q, k, v, block_mask=rule))
    del os.environ["FLEXDECODE_CHECK"]
    return found


def append(device: torch.device) -> tuple[Tensor, Tensor]:
    """Append 20 tokens to sequences of 0 and 5 that are dealt out; give the cache and its tokens.

    As docs/serving.md does: ranks that do not hold a token write it past the end.
    """
    dealt, capacity = Interleaved(2), 16
    cache = torch.full((2, 1, capacity, 1), -1.0, device=device)
    seen = torch.tensor([0, 5], dtype=torch.int32, device=device)
    for _ in range(20):
        old = dealt.local_len(seen)
        slot = torch.where(dealt.local_len(seen + 1) > old, old, capacity)
        new = seen.float().view(2, 1, 1, 1)
        append_kv(cache, cache.clone(), new, new, kv_len=slot)
        seen += 1
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right = torch.full((2, capacity), -1.0)
    for b, (first, end) in enumerate(((0, 20), (5, 25))):
        own = (torch.arange(end) // 2 % ranks == rank).nonzero().flatten()
        right[b, : len(own)] = torch.where(own >= first, own, -1)
    return cache[:, 0, :, 0], right


STEPS = ((100, 33), (237, 34), (400, 310))  # lengths of whole sequences, one step after another


def draw_steps(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return random_inputs(2, 8, 2, 1, 400, 64, dtype=torch.bfloat16, device=device, seed=5)


def replays(device: torch.device, *, bound: bool) -> list[Tensor]:
    """Capture a step in a CUDA graph and replay it with other lengths."""
    q, k, v = draw_steps(device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dealt = Interleaved(16)
    own = (torch.arange(400, device=device) // 16 % ranks == rank).nonzero().flatten()
    k, v = k[:, :, own].contiguous(), v[:, :, own].contiguous()
    total = torch.tensor(STEPS[-1], device=device)
    kv_len, q_offset = dealt.local_len(total), total - 1
    mask = create_block_mask(sliding_window(150))
    sizes: dict[str, Any] = {"batch": 2, "heads": 8, "q_len": 1, "kv_capacity": k.shape[2]}
    step = bind(mask, dealt, kv_len=kv_len, q_offset=q_offset, **sizes)

    def decode() -> Tensor:
        if bound:
            step.update()
            return attention(q, k, v, block_mask=step)
        return attention(q, k, v, block_mask=mask, kv_position=dealt, kv_len=kv_len)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            decode()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    found = []
    for lengths in STEPS:
        total.copy_(torch.tensor(lengths))
        kv_len.copy_(dealt.local_len(total))
        q_offset.copy_(total - 1)
        out.fill_(torch.nan)
        graph.replay()
        found.append(out.clone())
    return found


def main(rank: int, ranks: int, folder: Path, device: torch.device, backend: str) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
    )
    pair = dist.new_group([0, 1])
    results: dict[str, Any] = {"all": {}, "pair": {}}
    for name, case in CASES.items():
        results["all"][name] = run_case(case, device, None)
        if rank < 2 and ranks > 2 and "own heads" not in name:
            results["pair"][name] = run_case(case, device, pair)
    results["appended"] = append(device)
    if ranks > 2:
        results["errors"] = errors(device, pair)
    if backend == "nccl":
        results["replays"] = {bound: replays(device, bound=bound) for bound in (False, True)}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(folder: Path, devices: list[str], backend: str) -> list[dict[str, Any]]:
    """Run every case in one process for each device; give what each of them got."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    environment.pop("FLEXDECODE_CHECK", None)
    program = [sys.executable, "-W", "error::FutureWarning", "-m", "tests.ranks"]
    processes = [
        subprocess.Popen(
            [*program, str(rank), str(len(devices)), str(folder), device, backend],
            cwd=root,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, device in enumerate(devices)
    ]
    try:
        said = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(len(devices))]


if __name__ == "__main__":
    number, count, where, kind, protocol = sys.argv[1:]
    main(int(number), int(count), Path(where), torch.device(kind), protocol)
