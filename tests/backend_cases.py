"""The backends that tests run on, and one call checked against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import AuxOutput, AuxRequest, attention, create_block_mask
from tests.helpers import assert_matches

GPU = torch.cuda.is_available()
BOTH = AuxRequest(lse=True, max_scores=True)


@dataclass(frozen=True)
class Backend:
    name: str
    device: str

    @property
    def slow(self) -> bool:  # Triton's interpreter: a sample of the cases must do
        return self.name == "triton" and not GPU

    def __str__(self) -> str:
        return self.name


BACKENDS = [
    Backend("cpu", "cpu"),
    Backend("reference", "cpu"),
    Backend("triton", "cuda" if GPU else "cpu"),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def on_every_backend(cases: list[Any], sample: int) -> list[tuple[Backend, Any]]:
    """Pairs of backend and case; only each `sample`-th case where kernels are interpreted."""
    return [
        (backend, case)
        for backend in BACKENDS
        for n, case in enumerate(cases)
        if not backend.slow or n % sample == 0
    ]


def check(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Callable[..., Any] | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    slack: float = 1.0,
    kernel_options: dict[str, Any] | None = None,
    **call: Any,
) -> tuple[Tensor, AuxOutput]:
    """Run one call, compare it with the oracle, and return it."""
    q, k, v = (x.to(backend.device) for x in (q, k, v))
    call = {n: x.to(backend.device) if isinstance(x, Tensor) else x for n, x in call.items()}
    block_mask = None if mask is None else create_block_mask(mask, BLOCK_SIZE=BLOCK_SIZE)
    out, aux = attention(
        q,
        k,
        v,
        block_mask=block_mask,
        return_aux=BOTH,
        backend=backend.name,
        kernel_options=kernel_options,
        **call,
    )
    assert out.dtype == q.dtype
    assert aux.lse.dtype == (torch.float64 if backend.name == "reference" else torch.float32)
    if q.numel():
        assert_matches(
            out, q, k, v, lse=aux.lse, max_scores=aux.max_scores, mask=mask, slack=slack, **call
        )
    return out, aux
