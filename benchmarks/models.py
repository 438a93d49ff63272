"""Tokens per second of a whole model, by attention: ``python -m benchmarks.models --help``.

A Llama of 8B's shape with random weights decodes one token for each sequence of a batch, against a
static cache that is filled to the last place. A step is one CUDA graph: the mask of the step, all
layers, the head. transformers' own model runs where transformers is installed, with its attention
functions by name; else `examples/llama.py`, with the same attention called directly.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import OutOfTime, time_limit
from flexdecode import attention, create_block_mask
from flexdecode.masks import causal, sink_window

__all__ = ["main"]

CASES = ((1, 8192), (1, 32768), (16, 8192), (16, 32768))
TINY = ((1, 48), (2, 64))
WINDOW = (4, 4096)  # sinks and window of the last provider
FULL = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 128256}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 96, "vocab": 97}
PROVIDERS = ("flexdecode", "sdpa", "flex_attention", "flexdecode+window")


@dataclass(frozen=True)
class Row:
    """One measurement; ``graph`` tells whether the step was replayed as a CUDA graph."""

    model: str
    provider: str
    batch: int
    length: int
    tokens_per_second: float
    milliseconds: float
    graph: bool
    note: str = ""


class HuggingFace:
    """``LlamaForCausalLM`` with a static cache."""

    name = "transformers"

    def __init__(self, sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        from flexdecode.integrations.transformers import register

        register()
        self.config = LlamaConfig(
            hidden_size=sizes["hidden"],
            intermediate_size=sizes["mlp"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["kv_heads"],
            vocab_size=sizes["vocab"],
            max_position_embeddings=65536,
            rope_theta=500000.0,
        )
        self.device, self.dtype = device, dtype
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                self.model = LlamaForCausalLM(self.config).eval()
        finally:
            torch.set_default_dtype(before)

    def fill(self, batch: int, length: int) -> None:
        """Make a full cache of random keys and values."""
        from transformers import StaticCache

        self.cache: Any = None
        gc.collect()
        self.cache = StaticCache(config=self.config, max_cache_len=length)
        self.cache.early_initialization(
            batch,
            self.config.num_key_value_heads,
            self.config.head_dim,
            self.dtype,
            self.device,
        )
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.length = length
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)

    def step(self, provider: str) -> Callable[[], Tensor]:
        """Return a decode step of the last position."""
        self.model.set_attn_implementation(provider.partition("+")[0])

        def run() -> Tensor:
            for layer in self.cache.layers:  # each step counts on by itself
                layer.cumulative_length.fill_(self.length - 1)
            return self.model(self.tokens, past_key_values=self.cache).logits  # type: ignore[no-any-return]

        return run

    def restricted(self, provider: str) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a provider runs."""
        from flexdecode.integrations.transformers import restrict

        if "window" in provider:
            return restrict(sink_window(*WINDOW))
        return contextlib.nullcontext()

    def errors(self, prompt: int, steps: int) -> dict[str, float]:
        """Root mean square errors of teacher-forced logits against eager attention in float32."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.config.vocab_size, (2, prompt + steps), generator=generator)
        ids = ids.to(self.device)

        def logits(model: Any, name: str) -> Tensor:
            from transformers import DynamicCache

            model.set_attn_implementation(name)
            cache = DynamicCache(config=self.config)
            found = [model(ids[:, :prompt], past_key_values=cache).logits.float()]
            for place in range(prompt, prompt + steps):
                token = ids[:, place : place + 1]
                found.append(model(token, past_key_values=cache).logits.float())
            return torch.cat(found, 1)

        exact_model = copy.deepcopy(self.model).float()
        exact = logits(exact_model, "eager")
        del exact_model
        names = ("eager", "sdpa", "flexdecode")
        return {
            name: (logits(self.model, name) - exact).square().mean().sqrt().item() for name in names
        }


class Own:
    """`examples/llama.py`, where transformers is not installed."""

    name = "examples/llama.py"

    def __init__(self, sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        from llama import Llama, Shape

        shape = Shape(
            layers=sizes["layers"],
            hidden=sizes["hidden"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            head_dim=sizes["hidden"] // sizes["heads"],
            mlp=sizes["mlp"],
            vocabulary=sizes["vocab"],
        )
        self.shape, self.device, self.dtype = shape, device, dtype
        self.model = Llama(shape, device, dtype)
        self._flex: Any = None

    def fill(self, batch: int, length: int) -> None:
        """Make a full cache of random keys and values."""
        s = self.shape
        self.k = self.v = None
        gc.collect()
        size = (s.layers, batch, s.kv_heads, length, s.head_dim)
        self.k, self.v = (
            torch.empty(size, dtype=self.dtype, device=self.device).normal_() for _ in range(2)
        )
        self.length = length
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.place = torch.full((batch,), length - 1, device=self.device)
        self.kv_len = torch.full((batch,), length, dtype=torch.int32, device=self.device)

    def restricted(self, provider: str) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a provider runs."""
        return contextlib.nullcontext()

    def step(self, provider: str) -> Callable[[], Tensor]:
        """Return a decode step of the last position."""
        batch, length, place = len(self.tokens), self.length, self.place
        rule = sink_window(*WINDOW) if "window" in provider else causal
        if provider.startswith("flexdecode"):
            bound = create_block_mask(rule).bind(
                batch=batch,
                heads=self.shape.heads,
                q_len=1,
                kv_len=self.kv_len,
                kv_capacity=length,
            )
            prepare: Callable[[], Any] = bound.update

            def attended(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
                return attention(q, k, v, block_mask=bound)

        elif provider == "sdpa":
            columns = torch.arange(length, device=self.device)

            def prepare() -> Any:
                return (columns <= place[:, None])[:, None, None]

            def attended(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, enable_gqa=True
                )

        else:
            from torch.nn.attention import flex_attention as flex

            if self._flex is None:
                self._flex = (
                    torch.compile(flex.flex_attention),
                    torch.compile(flex.create_block_mask),
                )
            call, create = self._flex

            def prepare() -> Any:
                return create(
                    lambda b, h, q, kv: kv <= place[b], batch, None, 1, length, device=self.device
                )

            def attended(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
                return call(q, k, v, block_mask=mask, enable_gqa=True)

        def run() -> Tensor:
            mask = prepare()

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                assert self.k is not None and self.v is not None
                self.k[layer].index_copy_(2, place[:1], k)
                self.v[layer].index_copy_(2, place[:1], v)
                out: Tensor = attended(q, self.k[layer], self.v[layer], mask)
                return out

            return self.model.forward(self.tokens, place[:, None], attend)

        return run

    def errors(self, prompt: int, steps: int) -> dict[str, float]:
        """Nothing: there is no eager attention to compare with."""
        return {}


def time_step(step: Callable[[], Tensor], replays: int) -> tuple[float, bool, str]:
    """Seconds of a step; whether it was a graph, and why not."""
    if not torch.cuda.is_available():
        step()
        return _median(step, replays), False, "no GPU"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except OutOfTime:
        raise
    except Exception as error:
        torch.cuda.synchronize()
        return _median(step, replays), False, f"not captured: {str(error)[:80]}"
    graph.replay()
    return _median(graph.replay, replays), True, ""


def _median(run: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measured(model: Any, options: argparse.Namespace, until: float) -> Iterator[Row]:
    """All cases and providers that fit into the time."""
    for batch, length in options.sizes:
        model.fill(batch, length)
        agreed: Tensor | None = None
        for provider in options.providers.split(","):
            left = until - time.perf_counter()
            if left < 5:
                return
            note = ""
            try:
                with time_limit(min(options.limit, left)), model.restricted(provider):
                    step = model.step(provider)
                    logits = step().float()
                    seconds, graph, note = time_step(step, options.replays)
                if "window" not in provider:
                    agreed = logits if agreed is None else agreed
                    note = f"{note} rms to first {(logits - agreed).square().mean().sqrt():.1e}"
            except (OutOfTime, RuntimeError, ValueError) as error:  # one row less, not all
                seconds, graph, note = float("nan"), False, str(error)[:80]
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield Row(
                model.name,
                provider,
                batch,
                length,
                batch / seconds,
                seconds * 1e3,
                graph,
                note.strip(),
            )


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure, print a table and keep it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--own", action="store_true", help="examples/llama.py in any case")
    parser.add_argument("--tiny", action="store_true", help="shrunken, to test the benchmark")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--limit", type=float, default=40, help="seconds for one case")
    parser.add_argument("--budget", type=float, default=140, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--sizes", help="batches and lengths, as 16x8192,16x32768")
    options = parser.parse_args(arguments)
    if options.sizes is None:
        options.sizes = TINY if options.tiny else CASES
    else:
        options.sizes = [tuple(map(int, each.split("x"))) for each in options.sizes.split(",")]
    start = time.perf_counter()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kind: Any = Own
    if not options.own:
        with contextlib.suppress(ImportError):
            import transformers  # noqa: F401

            kind = HuggingFace
    rows: list[Row] = []
    errors: dict[str, float] = {}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        model = kind(SMALL if options.tiny else FULL, device, dtype)
        print(f"{kind.name}, {dtype} on {device}: {time.perf_counter() - start:.1f} s to make")
        print(f"{'attention':<20}{'batch':>6}{'length':>8}{'tokens/s':>11}{'ms':>9}  graph")
        for row in measured(model, options, start + options.budget - 20):
            rows.append(row)
            print(
                f"{row.provider:<20}{row.batch:>6}{row.length:>8}{row.tokens_per_second:>11.1f}"
                f"{row.milliseconds:>9.2f}  {'yes' if row.graph else 'no'}  {row.note}"
            )
        model.fill(1, 16)  # gives the cache's memory back
        try:
            with time_limit(max(1.0, start + options.budget - time.perf_counter())):
                errors = model.errors(*((5, 3) if options.tiny else (256, 16)))
        except (OutOfTime, torch.cuda.OutOfMemoryError) as error:
            print(f"errors: {error}")
    for name, error in errors.items():
        print(f"rms error of logits against float32, teacher-forced: {name:<12}{error:.3e}")
    if options.out:
        kept = {"rows": [asdict(row) for row in rows], "errors": errors}
        options.out.write_text(json.dumps(kept, indent=1))
    print(f"{time.perf_counter() - start:.0f} s")
    return rows


if __name__ == "__main__":
    main()
