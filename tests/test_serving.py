"""The serving example gives what each sequence gives alone, attended densely."""

import sys
from pathlib import Path

import pytest
import torch

from flexdecode.masks import causal, sink_window

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import serving
from engines import PagedEngine, TorchFlexEngine
from llama import Llama, Shape
from speculation import Speculation

CAPACITY, PAGE = 40, 4


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def model(device):
    return Llama(Shape(vocabulary=61), device)


def alone(model, prompt, tokens, rule=causal):
    """Greedy tokens of one sequence; nothing is cached."""
    shape = model.shape
    group = shape.heads // shape.kv_heads
    sequence = prompt.to(model.device)

    def attend(layer, q, k, v):
        place = torch.arange(q.shape[2], device=q.device)
        allowed = rule(0, 0, place[:, None], place) & (place[:, None] >= place)
        scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * shape.head_dim**-0.5
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        return weights @ v.repeat_interleave(group, 1)

    for _ in range(tokens):
        positions = torch.arange(len(sequence), device=model.device)
        logits = model.forward(sequence[None], positions[None], attend)
        sequence = torch.cat([sequence, logits[0, -1:].argmax(-1)])
    return sequence[len(prompt) :].tolist()


def test_continuous_batching_equals_each_request_alone(model):
    requests = serving.create_requests(14, 24, model.shape.vocabulary, seed=3)
    engine = PagedEngine(model, slots=3, capacity=CAPACITY, num_pages=17, page_size=PAGE)
    found = serving.serve(engine, requests)
    assert found == [alone(model, r.prompt, r.tokens) for r in requests]
    assert sorted(engine.pages.free) == list(range(17))  # all were handed back
    assert sum(engine.pages.pages_for(len(r.prompt) + r.tokens) for r in requests) > 3 * 17
    assert (engine.pages.table == -1).all() and not engine.active.any()


def test_a_full_pool_makes_requests_wait(model):
    requests = [serving.Request(torch.arange(9), 8) for _ in range(3)]
    engine = PagedEngine(model, slots=3, capacity=CAPACITY, num_pages=6, page_size=PAGE)
    assert serving.serve(engine, requests) == [alone(model, requests[0].prompt, 8)] * 3
    assert engine.pages.most_used == 4  # one at a time


def test_speculation_equals_plain_decoding(model):
    prompts = torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(1))
    speculation = Speculation(model, 3, 11 + 10 * 7)
    speculation.start(prompts.to(model.device))
    found, rounds = [[] for _ in prompts], 0
    while min(map(len, found)) < 12:
        path, gained = speculation.round()
        rounds += 1
        for sequence, tokens, count in zip(found, path.tolist(), gained.tolist(), strict=True):
            sequence += tokens[:count]
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens[:12] == alone(model, prompt, 12)
    assert sum(map(len, found)) > 3 * rounds  # some guesses were right


def test_a_stream_reuses_pages(model):
    prompt = torch.arange(10)
    rule = sink_window(3, 9)
    engine = PagedEngine(model, 1, 60, num_pages=6, page_size=PAGE, rule=rule)
    found = serving.stream(engine, prompt, 40, sinks=3, window=9)
    wanted = alone(model, prompt, 40, rule)
    assert found == wanted
    assert wanted != alone(model, prompt, 40)
    assert engine.pages.most_used <= 6 < engine.pages.pages_for(50)


def test_it_runs_as_a_program(monkeypatch, capsys):
    small = "serving.py --requests 4 --slots 2 --prompt 6 --tokens 3 --stream 12 --window 8"
    monkeypatch.setattr(sys, "argv", [*small.split(), "--page-size", "4"])
    serving.main()
    text = capsys.readouterr().out
    assert text.count("tokens/s") >= 3
    assert "tokens a round" in text


@pytest.mark.gpu
def test_torch_flex_gives_the_same():
    model = Llama(Shape(vocabulary=61, head_dim=64), "cuda")
    requests = serving.create_requests(9, 24, 61, seed=3)
    paged = PagedEngine(model, slots=3, capacity=128, num_pages=100, page_size=16)
    dense = TorchFlexEngine(model, slots=3, capacity=128)
    assert serving.serve(dense, requests) == serving.serve(paged, requests)


@pytest.mark.parametrize("own", [True, False])
def test_benchmark_of_models_runs(own, capsys):
    from benchmarks import models

    if not own:
        pytest.importorskip("transformers", minversion="5")
    providers = "--providers flexdecode,sdpa,flexdecode+window".split()
    rows = models.main(["--tiny", "--replays", "1", *providers, *["--own"] * own])
    assert len(rows) == 6
    assert all(row.tokens_per_second > 0 for row in rows)
    agreement = [float(row.note.split()[-1]) for row in rows if "rms" in row.note]
    assert len(agreement) == 4 and max(agreement) < 1e-2
    assert ("rms error of logits" in capsys.readouterr().out) is not own
