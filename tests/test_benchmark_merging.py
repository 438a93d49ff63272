"""The benchmark of merges and shared prefixes, on shrunken cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.merging import main
from benchmarks.records import load


def test_every_number_is_taken_and_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merging.json"
    main(["--device", "cpu", "--tiny", "--out", str(out)])
    _, records = load(out)
    assert {record.operation for record in records} == {"merge", "cascade"}
    assert [record for record in records if record.status != "ok"] == []
    assert all(record.error < 1e-2 for record in records if record.error is not None)
    providers = {record.provider for record in records}
    assert {"flexdecode", "flexdecode cascade", "flexdecode plain", "copy"} <= providers
    assert "flexdecode cascade" in capsys.readouterr().out
