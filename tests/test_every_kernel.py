"""What `compute-sanitizer` is given runs here too: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("triton")
import triton

from tests import every_kernel

KERNELS = Path(__file__).parents[1] / "kernels"


@pytest.mark.parametrize("name", every_kernel.CASES)
def test_case(name: str) -> None:
    every_kernel.CASES[name]()


@pytest.mark.skipif(every_kernel.ON_GPU, reason="compiled kernels are launched in another way")
def test_no_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cases launch every kernel that there is, by name."""
    launched = set()
    run: Any = triton.runtime.interpreter.InterpretedFunction.run

    def noted(self: Any, *args: Any, **rest: Any) -> Any:
        launched.add(self.fn.__name__)
        return run(self, *args, **rest)

    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", noted)
    for name in every_kernel.CASES:
        if re.match(
            "splits|tables of packed|tables, blocks.*captures, by int|appending$|merging a list",
            name,
        ):
            every_kernel.CASES[name]()
    found = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and re.fullmatch(r"_\w+_kernel", node.name)
    }
    assert launched == found


def test_parts_make_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    count = len(every_kernel.CASES)
    assert every_kernel.main(["--part", f"{count}/{count}"]) == 0
    out = capsys.readouterr().out
    assert list(every_kernel.CASES)[-1] in out and "1 cases" in out
