"""The benchmark of first calls: processes of its own, and what is shown of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import first_call
from benchmarks.extras import first_calls


def test_processes_with_and_without_a_disk_cache() -> None:
    records = list(first_calls(torch.device("cpu"), "triton", tiny=True))
    assert [record.status for record in records] == ["ok"] * 8
    assert {record.case for record in records} == {
        f"{what}, {state} disk cache"
        for what in (
            "import",
            "first call",
            "next call with other numbers",
            "first call of other rules",
        )
        for state in ("cold", "warm")
    }
    assert all(record.median is not None and record.median > 0 for record in records)


def test_an_error_of_a_process_is_told() -> None:
    state, error = next(first_call.run(torch.device("cpu"), "no such backend", "tiny"))
    assert state == "cold" and "no such backend" in str(error)


def test_nothing_is_timed_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_call.main([]) == 1
    assert "no GPU" in capsys.readouterr().out


def test_a_table_of_seconds_and_one_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"import": 0.1, "first": 1.5, "other numbers": 0.001, "new pair": 0.7}
    process = first_call.Process(seconds, [("decode: LLVM", 0.25, 0.5)], [3, 3, 5])
    first_call._show("here", {"cold": [process], "warm": [process]})
    shown = capsys.readouterr().out
    assert "first call in 1500 ms, cold disk cache" in shown
    (line,) = {line.strip() for line in shown.splitlines() if "decode: LLVM" in line}
    assert line.split() == ["decode:", "LLVM", "250", "500"]
