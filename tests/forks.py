"""Functions run in processes of their own that have imported torch, Triton and the library already.

Importing them takes seconds: one process does it, and forks for each call. Its kernels are compiled
rather than interpreted, and its warnings are errors.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def forks(folder: Path) -> Iterator[Callable[..., list[Any]]]:
    """Give a function that runs another one, named with its module, on a disk cache for Triton.

    It returns what was printed and what the other one returned, if anything, read as JSON line by
    line. A process that fails, or writes to stderr, is an AssertionError.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, "-W", "error", __file__],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        complaints = folder / "stderr"

        def run(function: str, *arguments: Any, cache: Path) -> list[Any]:
            request = [function, arguments, str(cache), str(complaints)]
            print(json.dumps(request), file=server.stdin, flush=True)
            lines: list[Any] = []
            for line in iter(server.stdout.readline, ""):
                lines.append(json.loads(line))
                if "exit code" in lines[-1]:
                    break
            said = complaints.read_text()
            assert lines and lines[-1] == {"exit code": 0} and said == "", (
                f"{lines[-3:]}\n{said[-3000:]}"
            )
            return lines[:-1]

        yield run


def serve() -> None:
    """Fork for each line of the input; a child returns and ends as any program does."""
    for module in ("aot_variants", "fake_driver"):
        importlib.import_module(f"tests.{module}")
    for line in sys.stdin:
        function, arguments, os.environ["TRITON_CACHE_DIR"], complaints = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(complaints, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            module, name = function.split(".")
            result = getattr(sys.modules[f"tests.{module}"], name)(*arguments)
            if result is not None:
                print(json.dumps(result), flush=True)
            return
        _, status = os.waitpid(child, 0)
        print(json.dumps({"exit code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
