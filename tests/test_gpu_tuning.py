"""Tuning on a GPU: real clocks, real compilers, and calls that take what was found.

Clocks want the GPU to themselves: beside other workers of pytest-xdist only what is slower by far
is told apart.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from flexdecode import attention, choices, create_block_mask, explain, quantize, tuning
from flexdecode.masks import causal, sliding_window, softcap

pytestmark = pytest.mark.gpu
SHARED = "PYTEST_XDIST_WORKER" in os.environ


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_own", {})
    monkeypatch.setattr(choices, "_shipped", {})
    monkeypatch.setattr(choices, "_ready", True)
    monkeypatch.setattr(choices, "generation", choices.generation + 1000)


def draw(B: int, Lkv: int, D: int = 64) -> tuple[Any, Any, Any]:
    q = torch.randn(B, 8, 1, D, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, B, 2, Lkv, D, dtype=torch.bfloat16, device="cuda")
    return q, k, v


CALLS: dict[str, Any] = {
    "plain": {},
    "ragged": {"kv_len": [4000, 100, 7, 3000]},
    "window": {"block_mask": create_block_mask(causal & sliding_window(1000))},
    "softcap": {"score_mod": softcap(20.0)},
    "quantized": {},
}


@pytest.mark.parametrize("name", CALLS)
def test_candidates_are_measured_and_the_best_is_taken(name: str, tmp_path: Any) -> None:
    q, k, v = draw(4, 4096)
    arguments = dict(CALLS[name])
    if "kv_len" in arguments:
        arguments["kv_len"] = torch.tensor(arguments["kv_len"], device="cuda")
    exact = attention(q, k, v, **arguments, backend="reference")
    limit = 0.02
    if name == "quantized":
        k, v = quantize(k, "int4"), quantize(v, "int4")
        exact = attention(q, k, v, **arguments, backend="reference")
    slow, fast = {"BLOCK_N": 16, "num_splits": 1}, {"BLOCK_N": 32, "num_splits": 8}
    report = tuning.tune(q, k, v, **arguments, candidates=[slow, fast], repeats=5)
    assert [trial.options for trial in report.trials[1:]] == [slow, fast], str(report)
    assert all(trial.us is not None and trial.us < 1e4 for trial in report.trials), str(report)
    assert SHARED or all(trial.us > 0 for trial in report.trials if trial.us is not None)
    assert report.best != slow
    key = report.key
    entry = choices.Choice(fast, 8, explain(q, k, v).target.device.processors, 1.0, 2.0)
    choices.record(key, entry)
    path = tmp_path / "tuned.json"
    tuning.save(path)
    tuning.clear()
    assert explain(q, k, v, **arguments).work.origin == "rules"
    assert tuning.load(path) == 1
    work = explain(q, k, v, **arguments).work
    assert work.origin == f"file {path}" and work.config.num_splits == 8
    out = attention(q, k, v, **arguments)
    torch.testing.assert_close(out.float(), exact.float(), atol=limit, rtol=limit)


@pytest.mark.skipif(SHARED, reason="other workers use the GPU")
def test_the_clock_sees_memory_that_is_not_in_the_cache() -> None:
    q, k, v = draw(1, 32768, D=128)  # 33 MB, which a cache of 50 MB would keep
    clock = tuning._Clock(q.device, 9)
    us = clock.microseconds(lambda: attention(q, k, v))
    rate = (k.numel() + v.numel()) * 2 / us * 1e6
    properties = torch.cuda.get_device_properties(q.device)
    if "H200" in properties.name:
        assert rate < 4.9e12  # of its memory
    assert rate > 2e11
    nothing = clock.microseconds(lambda: torch.zeros((), device="cuda"))
    assert -1.0 < nothing < 8.0


def test_what_cannot_be_compiled_is_left_out() -> None:
    q, k, v = draw(2, 2048, D=256)
    large = {"BLOCK_M": 64, "BLOCK_N": 256, "num_stages": 8}
    report = tuning.tune(q, k, v, candidates=[large], repeats=3)
    assert report.trials[1].us is None and "fails, ValueError" in report.trials[1].note
    assert report.best is None


def test_neighbours_within_a_time() -> None:
    q, k, v = draw(16, 8192, D=128)
    told: list[tuning.Trial] = []
    report = tuning.tune(q, k, v, seconds=4.0, repeats=5, progress=told.append)
    assert len(told) == len(report.trials) >= 8
    assert report.best_us <= report.rule_us
    print(report)
