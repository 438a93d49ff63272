"""Kernels are compiled side by side, each of them once, on a driver that is not there."""

from collections import Counter

import pytest
import torch


@pytest.fixture
def run(forked):
    """Run a scenario of fake_driver.py, and return the last line that it gives."""
    return lambda scenario, cache: forked(f"fake_driver.{scenario}", cache=cache)[-1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A disk cache for scenarios to which it does not matter whether kernels are found there."""
    return tmp_path_factory.mktemp("cache")


def test_each_kernel_compiles_once(run, tmp_path):
    for cached in (False, True):
        seen = run("twice", tmp_path)
        assert seen["compiled"] == [["_decode_kernel", cached], ["_reduce_kernel", cached]]
        assert seen["launched"] == ["_decode_kernel", "_reduce_kernel"] * 2
        # What is built ahead is what Triton asks for when it launches.
        asked = Counter((kernel, text) for kernel, text, _ in seen["launchers"])
        assert [kernel for kernel, _ in sorted(asked)] == ["_decode_kernel", "_reduce_kernel"]
        assert set(asked.values()) == {2}
        threads = [thread for *_, thread in seen["launchers"]]
        assert threads.count("MainThread") == 2


def test_what_longer_rows_need_is_compiled_beside_the_rest(run, tmp_path):
    seen = run("longer_later", tmp_path)
    short, long = seen["short"], seen["long"]
    assert short["compiled"] == [["_decode_kernel", False], ["_reduce_kernel", False]]
    assert short["launched"] == ["_decode_kernel"]
    ahead = Counter(kernel for kernel, _, thread in short["launchers"] if thread != "MainThread")
    assert ahead == {"_decode_kernel": 1, "_reduce_kernel": 1}
    assert long["compiled"] == short["compiled"]
    assert long["launched"] == ["_decode_kernel"] * 2 + ["_reduce_kernel"]


def test_compilations_and_launchers_overlap(run, cache):
    assert run("side_by_side", cache) == {"broken": False}


def test_tables_of_a_lazy_mask_compile_beside_what_reads_them(run, tmp_path):
    seen = run("lazy", tmp_path)
    kernels = ["_classify_kernel", "_decode_kernel", "_reduce_kernel"]
    assert not seen["broken"]
    assert [kernel for kernel, _ in seen["compiled"]] == kernels
    assert seen["launched"] == kernels * 2


def test_tables_that_others_are_made_of_come_first(run, tmp_path):
    seen = run("lazy_otherwise", tmp_path)
    plain = ["_classify_kernel", "_decode_kernel", "_reduce_kernel"]
    united = ["_classify_kernel", "_compact_kernel", "_decode_kernel", "_reduce_kernel"]
    assert seen == {"by head": united, "invariant": united, "failed": plain}


def test_errors_are_those_of_the_launch(run, tmp_path):
    seen = run("faulty", tmp_path)
    assert seen["error"].startswith("CompilationError")
    assert "no_such_name is not defined" in seen["error"]
    assert seen["launched"] == ["_decode_kernel", "_reduce_kernel"]


def test_another_compilation_of_several_kernels_may_be_open(run, tmp_path):
    seen = run("within_another", tmp_path)
    assert seen["compiled"] == [["_decode_kernel", False], ["_reduce_kernel", False]]
    assert seen["launched"] == ["_decode_kernel", "_reduce_kernel"]


def test_tiles_still_shrink_where_memory_is_short(run, tmp_path):
    seen = run("little_memory", tmp_path)
    assert 1 <= seen["stages"] < seen["planned"]
    assert seen["launched"] == ["_decode_kernel", "_reduce_kernel"]
    kernels = Counter(kernel for kernel, _ in seen["compiled"])
    assert kernels["_reduce_kernel"] == 1
    assert kernels["_decode_kernel"] == 1 + seen["planned"] - seen["stages"]


def test_a_process_starts_once_and_does_two_things_at_a_time(run, cache):
    assert run("start", cache) == {"done": ["driver", "hash"], "broken": False}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_error_is_that_of_triton(run, tmp_path):
    assert "active drivers" in run("without_driver", tmp_path)["error"]


def test_what_failed_is_compiled_again(run, cache):
    """Triton 3.8 keeps what failed in another thread, and would raise its error ever after."""
    seen = run("failed_before", cache)
    assert len(seen["errors"]) == 2
    assert seen["launched"] == ["_decode_kernel", "_reduce_kernel"]


def test_kernels_compile_where_no_thread_can_be_started(run, tmp_path):
    assert run("without_threads", tmp_path)["launched"] == ["_decode_kernel", "_reduce_kernel"]


def test_the_first_call_may_be_made_at_exit(run, cache):
    assert run("at_exit", cache)["launched"] == ["_decode_kernel", "_reduce_kernel"]


def test_threads_may_make_the_first_calls_together(run, tmp_path):
    seen = run("many_threads", tmp_path)
    assert seen["errors"] == [] and seen["kept"] == 3
    assert seen["launched"] == ["_decode_kernel"] * 8 + ["_reduce_kernel"] * 8


def test_bound_masks_can_be_copied_whatever_they_have_launched(run, tmp_path):
    counts = run("copied", tmp_path)["counts"]
    assert len(set(counts)) == 1 and counts[0] >= 4


def test_the_benchmark_of_first_calls_finds_the_stages_of_both_kernels(run, tmp_path):
    stages = run("watched", tmp_path)["stages"]
    names = {name for name, _, took in stages if took > 0}
    made = ("Python to TTIR", "passes over TTIR", "passes over TTGIR", "LLVM", "PTX", "ptxas")
    assert {f"{kernel}: {stage}" for kernel in ("decode", "reduce") for stage in made} <= names
    assert "Triton: hash of itself" in names
