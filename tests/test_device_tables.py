"""Tables built by kernels equal tables built by evaluation."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import mod_cases

from flexdecode.tables import Extent, build_tables, table_states
from flexdecode.trace import trace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS_KERNELS = INTERPRETED or torch.cuda.is_available()
CASES = ["causal", "sliding", "chunks", "documents", "flag_table", "never", "always", "strided"]
SHAPES = [
    # Lq, Lkv, BLOCK_SIZE, kv_len, q_offset
    (1, 40, (128, 16), 40, 39),
    (3, 40, (2, 8), torch.tensor([0, 33]), torch.tensor([-3, 30])),
    (40, 40, (16, 24), 37, 0),
    (17, 33, (128, 128), torch.tensor([33, 1]), 5),
]


@pytest.mark.skipif(not RUNS_KERNELS, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_tables_equal_evaluated_tables(name, shape):
    from flexdecode.device_tables import build_device_tables, update_device_tables

    device = torch.device("cuda" if not INTERPRETED else "cpu")
    Lq, Lkv, block_size, kv_len, q_offset = shape
    mask = trace(mod_cases.masks()[name], "mask")
    cpu = Extent(2, 2, Lq, Lkv, kv_len, q_offset, block_size, torch.device("cpu"))
    expected = table_states(build_tables(mask, cpu))
    captures = tuple(capture.to(device) for capture in mask.captures)
    there = type(mask)(mask.graph, mask.params, captures)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in (kv_len, q_offset)]
    extent = Extent(2, 2, Lq, Lkv, *moved, block_size, device).for_mask(there)
    tables = build_device_tables(there, extent)
    assert torch.equal(table_states(tables).cpu(), expected)
    # Once more into the same buffers, as a bound mask does.
    for table in tables.tensors:
        table.fill_(-1)
    update_device_tables(there, extent, dataclasses.replace(tables, laid_out={}))
    assert torch.equal(table_states(tables).cpu(), expected)
    for counts, indices in (
        (tables.kv_num_blocks, tables.kv_indices),
        (tables.full_kv_num_blocks, tables.full_kv_indices),
    ):
        for count, row in zip(
            counts.flatten().tolist(), indices.flatten(0, 2).tolist(), strict=True
        ):
            assert row[:count] == sorted(row[:count])


@pytest.mark.skipif(RUNS_KERNELS, reason="runs in this process already")
def test_kernel_tables_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "equal_evaluated"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
