"""Attention over ranks on GPUs: NCCL and graphs where there are two, two processes on one else."""

import pytest
import torch

from flexdecode.masks import sliding_window
from tests.helpers import assert_matches
from tests.ranks import CASES, STEPS, assert_matches_whole, draw_steps, run_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    several = torch.cuda.device_count() > 1
    devices, backend = (["cuda:0", "cuda:1"], "nccl") if several else (["cuda:0"] * 2, "gloo")
    return run_ranks(tmp_path_factory.mktemp("ranks"), devices, backend)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_the_formula_over_whole_sequences(ranks, name):
    assert_matches_whole(name, [rank["all"][name] for rank in ranks])


@pytest.mark.parametrize("bound", [False, True])
def test_a_graph_replays_with_new_lengths(ranks, bound):
    """The collectives too, that of the lengths included where nothing is bound."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: gloo cannot be captured")
    q, k, v = draw_steps(torch.device("cpu"))
    for step, lengths in enumerate(STEPS):
        found = [rank["replays"][bound][step] for rank in ranks]
        assert torch.equal(found[0], found[1])
        kv_len = torch.tensor(lengths)
        assert_matches(found[0], q, k, v, mask=sliding_window(150), kv_len=kv_len, slack=2.0)
