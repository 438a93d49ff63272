"""Every kind of kernel compiles without a device, and for each architecture what depends on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def variants(tmp_path, *arguments):
    """Run aot_variants.py with a fresh cache; any diagnostic on stderr is a failure."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "tests/aot_variants.py"), *arguments],
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    assert run.stderr == "", run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("target", "group"),
    [
        *((target, "everywhere") for target in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")),
        ("cuda:90", "plain"),
        ("cuda:90", "quantised"),
    ],
)
def test_variants_compile(target, group, tmp_path):
    records = variants(tmp_path, target, group)
    assert len(records) > 15
    for record in records:
        assert record["shared"] <= record["shared_limit"], record
        # Where registers run out altogether, thousands of bytes a thread are spilled.
        assert record.get("stack", 0) <= 1024, record
        if record["variant"] == "dense" and "registers" in record and "decode" in record["kernel"]:
            # K and V arrive 16 bytes at a time, asynchronously, several tiles ahead.
            assert record["cp_async"] == record["cp_async_16"] > 0, record
            assert record["commit_groups"] > 4, record
        if record["kernel"] == "_append_kernel":
            # What is quantised has the bits that torch operations make.
            assert record["inexact"] == 0, record


def test_a_decoding_session_compiles_once(tmp_path):
    """Each kernel has one variant for all lengths, and the first token compiles them all."""
    for record in variants(tmp_path, "keys"):
        assert set(record["kernels"].values()) == {1}, record
        if record["session"] == "a growing cache":
            # Nobody knows how far it grows: what only long rows need is compiled for them.
            assert record["later"] == ["_reduce_kernel"], record
        elif record["session"] != "heads":
            assert record["later"] == [], record
