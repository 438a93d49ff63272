"""The table of what masks cost, on a small scale: every line is there, and right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import masks
from benchmarks.records import Record, load


def test_every_line_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "masks.json"
    masks.main(["--tiny", "--device", "cpu", "--out", str(out)])
    _, records = load(out)
    assert [(r.case, r.provider) for r in records if r.status != "ok"] == []
    assert all(r.median is not None and r.median >= 0 for r in records)
    own = {r.case: r for r in records if r.provider == "flexdecode"}
    words = [
        "first call of a new mask",
        "512^2 causal",
        "1024^2 causal",
        "update, B2",
        "12 updates",
    ]
    for word in [*words, "new closure"]:
        assert any(word in case for case in own), word
    assert "right in 3 of 3" in own["12 updates"].note
    assert own["12 tokens, a new closure each"].config["later"] == 0
    both = {r.case for r in records if r.provider == "torch"} & set(own)
    assert len([case for case in both if "peak" not in case]) == 3
    printed = capsys.readouterr().out
    assert all(f"| {case} |" in printed for case in own)


def test_what_was_measured_is_shown_whatever_comes_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel of another library may leave the device unusable."""

    def measure(*given: object) -> Iterator[Record]:
        yield Record("masks", "masks", "a case", "flexdecode", median=7.0)
        raise RuntimeError("device lost")

    monkeypatch.setattr(masks, "measure", measure)
    with pytest.raises(RuntimeError, match="device lost"):
        masks.main(["--tiny", "--device", "cpu"])
    assert "| a case | 7.0 us |" in capsys.readouterr().out


def test_torch_has_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_TORCH_LIMIT", 0.0)
    sizes, device = masks.Sizes.tiny(), torch.device("cpu")
    records = list(masks._torch(sizes, device, "square", "huge", masks.causal))
    assert [(r.status, r.note) for r in records] == [("skipped", "no time left")] * 3


def test_wrong_tables_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that does nothing leaves tables that a fresh build contradicts."""
    from flexdecode.bound_mask import BoundMask

    sizes = masks.Sizes(window=10, batch=2, heads=2, capacity=2000, tokens=200, check=100)
    monkeypatch.setattr(BoundMask, "update", lambda self: None)
    (record,) = masks._replays(sizes, torch.device("cpu"))
    assert record.status == "wrong" and "right in 0 of 2" in record.note


def test_documents_are_sorted_and_of_every_length() -> None:
    documents = masks.documents_of(100_000, torch.device("cpu"))
    assert documents.shape == (100_000,) and (documents.diff() >= 0).all()
    assert 5 < int(documents[-1]) < 40
