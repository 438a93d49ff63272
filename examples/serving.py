"""A serving loop: continuous batching on pages, speculative trees, an endless stream.

A small Llama with random weights (`llama`) is served in three ways, each a step in static buffers
that is one CUDA graph where there is a GPU:

1. *Continuous batching*: requests of all lengths share a few slots. They are admitted as pages
   allow, grow page by page, and hand their pages on when they finish.
2. *Speculative decoding*: a tree of draft tokens is verified in one pass, by a mask of two lines.
3. *Streaming*: attention sinks and a window, in constant memory: pages that have left the window
   are used again.

Run ``python examples/serving.py``; ``--help`` lists the sizes. On a GPU the first and the last run
through torch's FlexAttention too.
"""

from __future__ import annotations

import argparse
import collections
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

# Threads that wait for one another by spinning crawl when anything else runs. Read with torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from engines import Engine, PagedEngine, TorchFlexEngine
from llama import Llama, Shape
from speculation import Speculation
from torch import Tensor

from flexdecode.masks import sink_window

__all__ = ["Request", "create_requests", "serve", "stream"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Request:
    """A prompt, int64 on the CPU, and how many tokens are wanted."""

    prompt: Tensor
    tokens: int


def create_requests(count: int, longest: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Draw ragged requests: prompts of 1 to `longest` tokens, half as many new ones at most."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: tuple[int, ...] = ()) -> Tensor:
        return torch.randint(low, high, size, generator=generator)

    requests = []
    for _ in range(count):
        prompt = draw(0, vocabulary, (int(draw(1, longest + 1)),))
        requests.append(Request(prompt, int(draw(1, max(2, longest // 2)))))
    return requests


@dataclass
class _Running:
    number: int
    tokens: int  # in the cache, or just about to be
    left: int


def serve(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run all requests to their end; returns the new tokens of each.

    The host never waits for the device: lengths are known here, and tokens are read at the end.
    """
    waiting = collections.deque(enumerate(requests))
    running: dict[int, _Running] = {}
    log: list[tuple[Tensor, list[tuple[int, int]]]] = []  # tokens; their places and requests
    pages = engine.pages if isinstance(engine, PagedEngine) else None
    while waiting or running:
        started: list[tuple[int, int, Request]] = []
        for slot in range(engine.slots):
            if slot in running or not waiting:
                continue
            number, request = waiting[0]
            length = len(request.prompt)
            if pages is not None:
                most = length + request.tokens - 1  # the last token is not cached
                if not pages.admits(most):
                    break
                pages.reserve(slot, most)
                pages.grow(slot, 0, length)
            waiting.popleft()
            started.append((slot, number, request))
            running[slot] = _Running(number, length, request.tokens - 1)
        if pages is not None:
            pages.push()
        if started:
            first = engine.start([s for s, _, _ in started], [r.prompt for _, _, r in started])
            log.append((first, [(i, number) for i, (_, number, _) in enumerate(started)]))
        _stop_finished(engine, running)
        for slot, state in running.items():
            state.tokens += 1
            state.left -= 1
            if pages is not None:
                pages.grow(slot, state.tokens - 1, state.tokens)
        if pages is not None:
            pages.push()
        if running:
            tokens = engine.decode()
            log.append((tokens, [(slot, state.number) for slot, state in running.items()]))
            _stop_finished(engine, running)
    if pages is not None:
        pages.push()
    found: list[list[int]] = [[] for _ in requests]
    for tokens, places in log:
        values = tokens.tolist()
        for place, number in places:
            found[number].append(values[place])
    return found


def _stop_finished(engine: Engine, running: dict[int, _Running]) -> None:
    for slot in [slot for slot, state in running.items() if state.left == 0]:
        del running[slot]
        engine.stop(slot)
        if isinstance(engine, PagedEngine):
            engine.pages.release(slot)


def stream(engine: Engine, prompt: Tensor, tokens: int, sinks: int, window: int) -> list[int]:
    """Decode one sequence for long; pages between the sinks and the window go back to the pool."""
    pages = engine.pages if isinstance(engine, PagedEngine) else None
    if pages is not None:
        pages.grow(0, 0, len(prompt))
        pages.push()
    found = [engine.start([0], [prompt])]
    for length in range(len(prompt), len(prompt) + tokens - 1):
        if pages is not None:
            pages.grow(0, length, length + 1)
            # The query sits at `length`; no later one sees further back than it does.
            gone = slice(pages.pages_for(sinks), max(0, length - window + 1) // pages.page_size)
            pages.release(0, gone)
            pages.push()
        found.append(engine.decode()[:1])
    return torch.cat(found).tolist()


def timed(device: torch.device, run: object, *args: object) -> tuple[object, float]:
    """What `run` returns, and the seconds that it took."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run(*args)  # type: ignore[operator]
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def batching(options: argparse.Namespace, model: Llama) -> None:
    """Continuous batching, and how many pages it took."""
    longest = options.prompt
    requests = create_requests(options.requests, longest, model.shape.vocabulary)
    capacity = longest + max(1, longest // 2)
    # Room for about half of what the slots could hold at most: pages must be handed on.
    num_pages = (options.slots // 2 + 1) * -(-capacity // options.page_size)
    print(
        f"Continuous batching: {len(requests)} requests of up to {longest} + {longest // 2} tokens "
        f"in {options.slots} slots"
    )

    def paged() -> Engine:
        return PagedEngine(model, options.slots, capacity, num_pages, options.page_size)

    engines = {"flexdecode, pages": paged}
    if model.device.type == "cuda":
        engines["torch flex, dense"] = lambda: TorchFlexEngine(model, options.slots, capacity)
    for name, create in engines.items():
        engine = create()
        serve(engine, requests[: options.slots])  # compiles, captures
        outputs, seconds = timed(model.device, serve, engine, requests)
        count = sum(map(len, outputs))  # type: ignore[arg-type, call-overload]
        line = f"  {name:<20}{count / seconds:>10.0f} tokens/s"
        if isinstance(engine, PagedEngine):
            need = sum(engine.pages.pages_for(len(r.prompt) + r.tokens - 1) for r in requests)
            line += f"   {engine.pages.most_used} pages at most, {need} used in turn"
        print(line)


def speculating(options: argparse.Namespace, model: Llama) -> None:
    """Speculative trees against plain decoding of the same prompts."""
    generator = torch.Generator().manual_seed(1)
    size = (options.slots, options.prompt)
    prompts = torch.randint(0, model.shape.vocabulary, size, generator=generator)
    capacity = options.prompt + options.tokens + 64
    speculation = Speculation(model, options.slots, capacity)

    def trees() -> tuple[int, int]:
        speculation.start(prompts.to(model.device))
        gained, rounds = torch.zeros(options.slots, dtype=torch.int32), 0
        while int(gained.min()) < options.tokens and int(gained.max()) < options.tokens + 48:
            gained += speculation.round()[1].cpu()
            rounds += 1
        return int(gained.sum()), rounds

    trees()
    (count, rounds), seconds = timed(model.device, trees)  # type: ignore[misc]
    per_round = count / rounds / options.slots
    print(
        f"Speculative trees of {len(speculation.parents)} tokens, {options.slots} sequences\n"
        f"  {'flexdecode':<20}{count / seconds:>10.0f} tokens/s   {per_round:.2f} tokens a round"
    )


def streaming(options: argparse.Namespace, model: Llama) -> None:
    """A stream much longer than what is kept of it."""
    sinks, window, tokens = 4, options.window, options.stream
    prompt = torch.arange(8) % model.shape.vocabulary
    capacity = len(prompt) + tokens
    # The sinks' page, the window's, and the one that is being filled.
    num_pages = 3 + -(-window // options.page_size)
    rule = sink_window(sinks, window)
    print(f"Streaming: {tokens} tokens, {sinks} sinks and a window of {window}")
    engine: Engine = PagedEngine(model, 1, capacity, num_pages, options.page_size, rule)
    engine.decode()  # captures
    _, seconds = timed(model.device, stream, engine, prompt, tokens, sinks, window)
    whole = -(-capacity // options.page_size)
    print(
        f"  {'flexdecode, pages':<20}{tokens / seconds:>10.0f} tokens/s   {num_pages} pages, where "
        f"all tokens would take {whole}"
    )
    if model.device.type == "cuda":
        engine = TorchFlexEngine(model, 1, capacity, rule)
        engine.decode()
        _, seconds = timed(model.device, stream, engine, prompt, tokens, sinks, window)
        print(f"  {'torch flex, dense':<20}{tokens / seconds:>10.0f} tokens/s")


def main() -> None:
    """Serve in all three ways and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = Shape()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8, help="sequences at a time")
    parser.add_argument("--prompt", type=int, default=48, help="longest prompt, tokens")
    parser.add_argument("--tokens", type=int, default=32, help="new ones of speculative decoding")
    parser.add_argument("--stream", type=int, default=300, help="tokens of the stream")
    parser.add_argument("--window", type=int, default=64, help="tokens that the stream keeps")
    parser.add_argument("--page-size", type=int, default=16)
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocabulary"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(sizes, name))
    options = parser.parse_args()
    shape = Shape(
        options.layers,
        options.hidden,
        options.heads,
        options.kv_heads,
        options.head_dim,
        options.mlp,
        options.vocabulary,
    )
    print(f"{shape}\n{options.dtype} on {options.device}\n")
    with torch.inference_mode():
        model = Llama(shape, options.device, DTYPES[options.dtype])
        batching(options, model)
        speculating(options, model)
        streaming(options, model)


if __name__ == "__main__":
    main()
