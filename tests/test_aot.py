"""Every kind of kernel compiles without a device, and for each architecture what depends on it."""

import pytest


@pytest.mark.parametrize(
    ("target", "group", "least"),
    [
        *((f"cuda:{arch}", "everywhere", 16) for arch in (80, 90, 100)),
        ("hip:gfx942", "everywhere", 16),
        ("cuda:90", "plain", 16),
        ("cuda:90", "quantised", 10),
        ("cuda:90", "merge and append", 11),
    ],
)
def test_variants_compile(target, group, least, forked, tmp_path):
    records = forked("aot_variants.compile_variants", target, group, cache=tmp_path)
    assert len(records) >= least
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


def test_a_decoding_session_compiles_once(forked, tmp_path):
    """Each kernel has one variant for all lengths, and the first token compiles them all."""
    for record in forked("aot_variants.count_keys", cache=tmp_path):
        assert set(record["kernels"].values()) == {1}, record
        if record["session"] == "a growing cache":
            # Nobody knows how far it grows: what only long rows need is compiled for them.
            assert record["later"] == ["_reduce_kernel"], record
        elif record["session"] != "heads":
            assert record["later"] == [], record
