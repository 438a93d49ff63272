"""The benchmark of appending, on a shrunken case."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import appending
from benchmarks.appending import FORMATS, Size, Step, main, steps
from benchmarks.records import load


def test_every_number_is_taken_and_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "appending.json"
    main(["--device", "cpu", "--tiny", "--out", str(out)])
    _, records = load(out)
    assert [record for record in records if record.status != "ok"] == []
    found = {(record.operation, record.case, record.provider) for record in records}
    own = {(o, f"B2, {name}", "flexdecode") for o in ("append", "host") for name in FORMATS}
    assert found == own | {(o, "B2, bfloat16", "torch") for o in ("append", "host")}
    assert "B2, int4" in capsys.readouterr().out


def test_both_ways_write_the_same() -> None:
    mine, theirs = (steps(Size(2, 2, 16, 8), None, torch.device("cpu"))[0] for _ in range(2))
    mine.append()
    theirs.index(torch.arange(2))
    assert isinstance(mine.k, torch.Tensor) and isinstance(theirs.k, torch.Tensor)
    assert torch.equal(mine.k, theirs.k)


def test_wrong_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_values(step: Step, backend: str = "auto") -> None:
        new = step.k_new, step.v_new * (backend == "reference")
        appending.append_kv(step.k, step.v, *new, kv_len=step.kv_len, backend=backend)

    step = steps(Size(2, 2, 16, 8), FORMATS["int4"], torch.device("cpu"))[0]
    assert step.is_right()
    monkeypatch.setattr(Step, "append", forget_values)
    assert not step.is_right()
