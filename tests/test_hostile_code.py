"""Only numbers and identifiers made by us reach generated code; shared folders stay empty."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from flexdecode import attention, create_block_mask, show_code
from tests.helpers import random_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.arange(40, device=DEVICE) // 3

NAMES = [
    "tl",
    "triton",
    "floor_div",  # helpers of generated code
    "tanh",
    "whole",
    "lane",  # arguments of generated functions
    "args",
    "score",
    "1abc",
    "²",
    "é",
    "class",
    "None",
    "__import__",
    "",
    "a" * 5000,
    "x(): import os\nos.system('true')\n#",
    'x"""\nimport os',
    "_decode_kernel",
]


def words(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_any_name_of_a_rule_works(name: str) -> None:
    width = NAMES.index(name) + 2  # differs, so that each is compiled

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ((IDS[kv_idx] + width) // 3 % 2 == 0) & ((q_idx - kv_idx) // width % 3 >= 0)

    def scored(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(s) * (kv_idx // width % 3)

    mask.__name__ = scored.__name__ = name
    for rule in (mask, scored):
        text = show_code(rule)
        assert "import" not in text.replace("__import__", "") and "os.system" not in text
        compile(text, "generated", "exec")
        assert len(text) < 4000
    q, k, v = (x.to(DEVICE) for x in random_inputs(1, 1, 1, 1, 40, 8))
    call: dict[str, Any] = {"block_mask": create_block_mask(mask, BLOCK_SIZE=16)}
    found = attention(q, k, v, score_mod=scored, backend="triton", **call)
    wanted = attention(q, k, v, score_mod=scored, backend="reference", **call)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_source_lines_and_files_are_comments_of_one_line() -> None:
    """A rule made by exec, whose file name and first line try to leave the comment."""
    text = "def rule(b, h, q_idx, kv_idx): return kv_idx <= q_idx # \x0b\x0c\x1c\x85\u2028 evil()\n"
    names: dict[str, Any] = {}
    filename = "x\nimport os; os.abort()\n#"
    import linecache

    linecache.cache[filename] = (len(text), None, [text], filename)
    exec(compile(text, filename, "exec"), names)
    shown = show_code(names["rule"])
    assert "abort" not in shown
    tree = ast.parse(shown)
    assert len(tree.body) == 1
    assert "evil" not in words(shown)


@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324, 2**63 - 1, -(2**63), True]
)
def test_numbers_are_numbers(number: float) -> None:
    closed = show_code(lambda s, b, h, q_idx, kv_idx: torch.where(s > number, s, s - 1.0))
    written = show_code(eval(f"lambda s, b, h, q_idx, kv_idx: s + {_text(number)}", vars(math)))
    for text in (closed, written):
        allowed = {"tl", "triton", "b", "h", "q_idx", "kv_idx", "lane", "args", "score", "float"}
        assert {word for word in words(text) if not word.startswith(("x", "p", "t"))} <= allowed | {
            "whole",
            "wide_whole",
        }


def _text(number: float) -> str:
    return repr(number) if math.isfinite(number) else repr(number).replace("-", "-1 * ")


@pytest.mark.parametrize("number", [2**64, -(2**70), 10**400])
def test_numbers_beyond_64_bits_are_refused(number: int) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError), match=r"64 bits"):
        show_code(lambda b, h, q_idx, kv_idx: kv_idx < number)


@pytest.mark.parametrize("value", ["1); import os #", b"x", object(), ["x"], {"x": 1}, 1j])
def test_what_is_no_number_never_becomes_text(value: Any) -> None:
    with pytest.raises(TypeError):
        show_code(lambda s, b, h, q_idx, kv_idx: s + value)


class Pretender(float):
    """A number whose text is code."""

    def __repr__(self) -> str:
        return "__import__('os').abort()"

    __str__ = __repr__


def test_a_number_with_a_text_of_its_own() -> None:
    number = Pretender(2.5)
    for rule in (
        lambda s, b, h, q_idx, kv_idx: s * number,
        lambda s, b, h, q_idx, kv_idx: s * (number + 1.0 if number > 2 else 3.0),
    ):
        try:
            text = show_code(rule)
        except TypeError:
            continue
        assert "abort" not in text


CODE = """
import torch
from flexdecode import attention, create_block_mask, show_code, explain, quantize
from flexdecode.masks import causal, documents
q, k = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 200, 32)
mask = create_block_mask(causal & documents(torch.arange(200) // 50))
for backend in ("cpu", "reference", "triton"):
    attention(q, k, k, block_mask=mask, score_mod=lambda s, b, h, i, j: s * 2, backend=backend)
    attention(q, quantize(k, "int4"), quantize(k, "fp8"), backend=backend)
show_code(causal)
print(explain(q, k, k, block_mask=mask))
"""


def test_nothing_is_written_to_temporary_folders(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("tmp", "home", "work", "cache")}
    for folder in folders.values():
        folder.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(folders["tmp"]),
        "HOME": str(folders["home"]),
        "XDG_CACHE_HOME": str(folders["cache"]),
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        cwd=folders["work"],
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    for folder in folders.values():
        left = [path for path in folder.rglob("*") if path.is_file() and ".triton" not in str(path)]
        assert left == []
