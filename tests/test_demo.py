"""The demonstration that needs no model."""

import re

import pytest
import torch

from flexdecode import create_block_mask
from flexdecode.__main__ import main
from flexdecode.demo import create_cases, dense_mask, draw, states

CPU = torch.device("cpu")


def test_demo_prints_small_errors(capsys, tmp_path):
    picture = tmp_path / "sub" / "demo.png"
    assert main(["demo", "--device", "cpu", "--keys", "1000", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    errors = [float(x) for x in re.findall(r"\d\.\de[-+]\d\d", printed)]
    assert len(errors) == len(create_cases(1000, CPU))
    assert max(errors) < 1e-5
    assert picture.exists() == (str(picture) in printed)


def test_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    draw(create_cases(100, CPU)[:6], 100, 16, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case", create_cases(100, CPU), ids=lambda case: case.name)
def test_states_count_the_elements_of_each_block(case):
    mask = create_block_mask(case.mask_mod, 1, 8, 100, 100, BLOCK_SIZE=16)
    q_idx, kv_idx = torch.arange(100)[:, None], torch.arange(100)
    for h in (0, 7):
        dense = case.mask_mod(0, torch.tensor(h), q_idx, kv_idx)
        got = states(mask)[0, h if states(mask).shape[1] > 1 else 0]
        for i, rows in enumerate(dense.split(16)):
            for j, block in enumerate(rows.split(16, dim=1)):
                wanted = 0 if not block.any() else 2 if block.all() else 1
                assert got[i, j] == wanted, (h, i, j)


@pytest.mark.parametrize("case", create_cases(100, CPU), ids=lambda case: case.name)
def test_dense_mask_is_the_last_row(case):
    dense = dense_mask(case, 100, CPU, torch.float32)
    assert dense.shape == (1, 8, 1, 100)
    allowed = dense if dense.dtype == torch.bool else dense.isfinite()
    for h in (0, 7):
        wanted = [bool(case.mask_mod(0, h, torch.tensor(99), kv)) for kv in torch.arange(100)]
        assert allowed[0, h, 0].tolist() == wanted
