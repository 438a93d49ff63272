"""Random rules and tables: the triton and cpu backends against the dense reference."""

import os
import sys
from pathlib import Path

import pytest
import torch

from flexdecode import AuxRequest, attention, create_block_mask

sys.path.insert(0, str(Path(__file__).parent))
from random_mods import RandomMods

ON_GPU = torch.cuda.is_available()
# The interpreter takes a second a rule: a sample, all of them on request and on a GPU.
SEEDS = range(200 if ON_GPU or os.environ.get("FLEXDECODE_ALL_CASES") else 16)
BACKENDS = ["triton"] if ON_GPU else ["cpu", "triton"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_rules_equal_the_reference(seed):
    device = torch.device("cuda" if ON_GPU else "cpu")
    generator = torch.Generator().manual_seed(seed)
    Lq = (1, 1, 3, 20)[seed % 4]
    Hq, Hkv = ((4, 2), (6, 2), (3, 3), (5, 1))[seed // 4 % 4]
    Lkv, D = (70, 130, 200)[seed % 3], (16, 40, 64)[seed // 3 % 3]
    mods = RandomMods(seed, device, Lkv)
    mask, score = mods.boolean(3), mods.score()
    block = ((128, 128), (16, 32), (8, 16), (128, 64))[seed // 2 % 4]

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    q, k, v = draw(2, Hq, Lq, D), draw(2, Hkv, Lkv, D), draw(2, Hkv, Lkv, D)
    call = {
        "block_mask": create_block_mask(mask, BLOCK_SIZE=block),
        "score_mod": score,
        "kv_len": torch.tensor([Lkv, Lkv // 2], device=device) if seed % 2 else None,
        "return_aux": AuxRequest(lse=True, max_scores=True),
    }
    want, want_aux = attention(q, k, v, backend="reference", **call)
    for backend in BACKENDS:
        out, aux = attention(q, k, v, backend=backend, kernel_options={"approx": False}, **call)
        torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(aux.lse, want_aux.lse.float(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(
            aux.max_scores, want_aux.max_scores.float(), rtol=2e-5, atol=2e-5
        )
