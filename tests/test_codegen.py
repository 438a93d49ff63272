"""Printed mods: the same values as `evaluate`, stable text, one function for equal structure."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexdecode.codegen import lower, print_mod, show_code
from flexdecode.evaluate import evaluate
from flexdecode.trace import trace

sys.path.insert(0, str(Path(__file__).parent))
import mod_cases

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS_KERNELS = INTERPRETED or torch.cuda.is_available()
ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"

if RUNS_KERNELS:
    import triton
    import triton.language as tl

    @triton.jit
    def _apply_kernel(out_ptr, score_ptr, b, MOD: tl.constexpr, IS_MASK: tl.constexpr, args):
        h = tl.arange(0, 4)[:, None] % 3
        q_idx = (tl.arange(0, 4)[:, None] * 11 + 2) % 40
        kv_idx = tl.arange(0, 64)[None, :]
        lane = (kv_idx < 40) & (tl.arange(0, 4)[:, None] < 3)
        at = tl.arange(0, 4)[:, None] * 64 + kv_idx
        if IS_MASK:
            result = MOD(b, h, q_idx, kv_idx, lane, args).to(tl.float32)
            tl.store(out_ptr + at, tl.zeros([4, 64], tl.float32) + result)
        else:
            tl.store(out_ptr + at, MOD(tl.load(score_ptr + at), b, h, q_idx, kv_idx, lane, args))


def flavours():
    return ["interpret"] if INTERPRETED else ["cuda", "cuda_fast"]


@pytest.mark.skipif(not RUNS_KERNELS, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", ["mask", "score"])
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of log(0) in unused lanes
def test_printed_mods_equal_evaluation(kind, shift):
    """Captured tensors may begin anywhere in their memory."""
    device = "cpu" if INTERPRETED else "cuda"
    cases = mod_cases.masks() if kind == "mask" else mod_cases.scores()
    score = torch.randn(4, 64)
    wrong = []
    for name, mod in cases.items():
        for flavour in flavours():
            traced = trace(mod, kind)
            h = torch.arange(4)[:, None] % 3
            q_idx = (torch.arange(4)[:, None] * 11 + 2) % 40
            kv_idx = torch.arange(64)[None, :]
            expected = evaluate(traced, 1, h, q_idx, kv_idx, score).expand(4, 64).float()
            there = tuple(placed(capture.to(device), shift) for capture in traced.captures)
            function, args = lower(dataclasses.replace(traced, captures=there), flavour)
            aligned = [x.data_ptr() % 16 == 0 for x in args if isinstance(x, torch.Tensor)]
            assert len(aligned) == len(there) and all(aligned)
            out = torch.full((4, 64), float("nan"), device=device)
            _apply_kernel[(1,)](out, score.to(device), 1, function, kind == "mask", args)
            got = out.cpu()[:3, :40]
            exact = kind == "mask" and name != "float_test"
            loose = flavour == "cuda_fast" and name == "softcap"
            tolerance = 0 if exact else 2e-2 if loose else 3e-6
            close = torch.allclose(
                got, expected[:3, :40], rtol=tolerance, atol=tolerance, equal_nan=True
            )
            if not close:
                wrong.append((name, flavour, (got - expected[:3, :40]).abs().max().item()))
    assert not wrong


def placed(x, shift):
    """`x` with its strides, `shift` elements behind the start of some memory."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    memory = torch.zeros(shift + reach + 1, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride(), shift).copy_(x)


@pytest.mark.skipif(RUNS_KERNELS, reason="runs in this process already")
def test_printed_mods_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__)), "-k", "equal_evaluation"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_numbers_and_fresh_closures_share_one_function():
    def window(size):
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size

    functions = {id(lower(trace(window(n), "mask"), "cuda")[0]) for n in (1, 16, 100, 1024)}
    assert len(functions) == 1


def above_three(captured):
    return lambda b, h, q_idx, kv_idx: captured[kv_idx] > 3


def test_views_of_a_tensor_share_one_kernel():
    """Neither where a view begins nor its length is anything that Triton compiles apart."""
    ids = torch.arange(100)
    made = set()
    for first, length in ((0, 1), (1, 1), (3, 16), (4, 40), (7, 0)):
        view = ids[first:][:length]
        function, args = lower(trace(above_three(view), "mask"), "cuda")
        made.add((id(function), args[0].data_ptr() % 16))
        back = int(args[1])
        assert args[0].data_ptr() + back * 8 == view.data_ptr() and args[0].shape == view.shape
    assert len(made) == 1


def test_memory_at_an_odd_address_is_passed_as_it_is():
    """There is nothing before it that could be named."""
    words = torch.frombuffer(bytearray(200), dtype=torch.int16)
    odd = torch.frombuffer(bytearray(200), dtype=torch.int16, offset=2)
    assert words.data_ptr() % 16 != odd.data_ptr() % 16
    for view in (words, odd):
        _, args = lower(trace(above_three(view), "mask"), "cuda")
        assert args[0].data_ptr() + int(args[1]) * 2 == view.data_ptr()


def test_integers_travel_exactly():
    def above(bound):
        return lambda b, h, q_idx, kv_idx: kv_idx >= bound

    for number in (0, 1, -1, 65535, 65536, -65537, 2**30, 2**30 + 1, -(2**40) - 5, 2**62 + 12345):
        _, args = lower(trace(above(number), "mask"), "cuda")
        value = 0
        for part in args:
            value = value * 65536 + int(part)
        assert value == number
        assert all(abs(part) <= 65536 for part in args)


@pytest.mark.parametrize("name", ["documents", "sliding", "floor_of_negative"])
def test_mask_text_is_golden(name):
    _check_golden(name, print_mod(trace(mod_cases.masks()[name], "mask")))


@pytest.mark.parametrize("name", ["softcap", "bias_chain"])
def test_score_text_is_golden(name):
    _check_golden(name, print_mod(trace(mod_cases.scores()[name], "score")))


def _check_golden(name, text):
    """Compare with the golden file; FLEXDECODE_UPDATE_GOLDEN=1 writes it anew."""
    file = GOLDEN / f"{name}.py.txt"
    if os.environ.get("FLEXDECODE_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_show_code_tells_masks_from_scores():
    assert "kv_idx, lane, args" in show_code(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    assert "score, b" in show_code(lambda score, b, h, q_idx, kv_idx: score * 2)
    with pytest.raises(TypeError, match="is_even"):

        def is_even(x):
            return x % 2 == 0

        show_code(is_even)


def test_only_own_identifiers_reach_the_source():
    hostile = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx  # noqa: E731
    hostile.__name__ = "x(): import os\nos.system('true')\n#"
    text = show_code(hostile)
    assert "import os\n" not in text
    assert text.count("\n") < 8


def test_parameters_given_other_data_are_passed_anew():
    weight = torch.nn.Parameter(torch.zeros(8))

    def mod(b, h, q_idx, kv_idx):
        return weight[kv_idx] > 0

    assert lower(trace(mod, "mask"), "cuda")[1][0].data_ptr() == weight.data_ptr()
    weight.data = torch.ones(8)
    assert lower(trace(mod, "mask"), "cuda")[1][0].data_ptr() == weight.data_ptr()
