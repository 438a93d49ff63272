"""The benchmark of quantised caches runs, judges what it times, and knows what it moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quantized import main
from benchmarks.records import load


def test_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quantized.json"
    main(
        [
            "--tiny",
            "--replays",
            "2",
            "--device",
            "cpu",
            "--only",
            "bfloat16|^int4$",
            "--out",
            str(out),
        ]
    )
    _, records = load(out)
    own = [record for record in records if record.provider == "flexdecode"]
    assert [record.status for record in own] == ["ok"] * 4, [record.note for record in own]
    moved = {record.case: record.config["active_bytes"] for record in own}
    # 2 heads, 128 keys of K and of V: 32 elements of two bytes, or 16 bytes and a word
    assert moved["tiny, bfloat16"] == 2 * 128 * 2 * 64
    assert moved["tiny, int4"] == 2 * 128 * 2 * (16 + 4)
    assert "x bfloat16" in capsys.readouterr().out


def test_tiny_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sweep", "--tiny", "--device", "cpu", "--only", "^int4$", "--part", "1/12"])
    printed = capsys.readouterr().out
    assert "tiny, int4: 4 ways" in printed and "as the rules choose" in printed, printed
    assert "'BLOCK_M': 8" in printed and "'num_splits': 4" in printed
