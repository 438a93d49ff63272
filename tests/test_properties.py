"""Calls drawn at random against a dense float64 formula: every storage, mask, stride and dtype.

A sample that is the same on every run; `python -m tests.fuzz` (`make fuzz`) goes on for longer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings

from tests.attempts import Attempt, as_test, attempts, check

BACKENDS = {"cpu": 100, "reference": 40, "triton": 10}
ON_GPU = torch.cuda.is_available()


@pytest.mark.skipif(ON_GPU, reason="compiles kernels for each call; make fuzz does")
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_calls_equal_the_formula(backend: str) -> None:
    @settings(
        max_examples=BACKENDS[backend],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(attempts())
    def every(attempt: Attempt) -> None:
        check(attempt, backend)

    every()


# Calls that once went wrong are kept here, made smaller.
FOUND: list[Attempt] = [
    # Rows of a cache in another order, and other addresses: other bits of a matrix product.
    Attempt(seed=177, kv_len=(18, 32), q_len=(2, 2), Dv=31, layout="turned",
            mask="(q - k < 9)", block=(1, 16), again="paged 3"),
    # A bias that ends before the pages of the last block do.
    Attempt(seed=359, kv_len=(11, 39), q_len=(5, 5), kind="paged 4", bias=True, again="paged 3"),
]  # fmt: skip


@pytest.mark.parametrize("attempt", FOUND, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_found_by_fuzzing(backend: str, attempt: Attempt) -> None:
    check(attempt, backend, "cuda" if ON_GPU and backend != "cpu" else "cpu")


def test_a_failing_call_is_printed_as_a_test() -> None:
    attempt = Attempt(seed=3, kv_len=(4, 0), q_len=(2, 0), packed=True, mask="(q >= k)")
    names: dict[str, Any] = {}
    exec(as_test(attempt, "reference"), names)
    names["test_found_by_fuzzing_on_reference"]()
    assert names["Attempt"] is Attempt
