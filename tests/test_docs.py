"""Every ``python`` block of the README and the docs runs on a CPU; links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("[!_]*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)(?P<target>[^)#\s]+)")


@dataclass(frozen=True)
class Block:
    language: str
    tags: tuple[str, ...]
    code: str
    line: int  # of its first line of code, from 1


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language, *tags = match["info"].split() or [""]
        found.append(
            Block(
                language, tuple(tags), match["code"], text.count("\n", 0, match.start("code")) + 1
            )
        )
    return found


def run(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Execute a script, or compare an interactive session with what it shows."""
    if ">>>" not in block.code:
        # Blank lines in front, so that a traceback shows the line of the page.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(page), "exec"), namespace)
        return
    session = doctest.DocTestParser().get_doctest(
        block.code, namespace, page.name, str(page), block.line - 1
    )
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(session, out=report.append, clear_globs=False)
    namespace.update(session.globs)
    assert not failed, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": page.stem}  # later blocks build on earlier ones
    for block in blocks(page.read_text()):
        if block.language == "python" and "no-run" not in block.tags:
            run(block, page, namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    missing = [
        link["target"]
        for link in LINK.finditer(text)
        if not (page.parent / link["target"]).exists()
    ]
    assert not missing


def test_every_page_is_in_the_table_of_contents() -> None:
    docs = ROOT / "docs"
    trees = [b for b in blocks((docs / "index.md").read_text()) if b.language == "{toctree}"]
    lines = [line for tree in trees for line in tree.code.splitlines()]
    listed = {line for line in lines if line and not line.startswith(":")}
    pages = {page.relative_to(docs).with_suffix("").as_posix() for page in PAGES[1:]}
    assert pages - {"index"} <= listed
    assert not {name for name in listed if not list(docs.glob(f"{name}.*"))}


def test_first_block_of_the_readme_has_three_lines_after_the_imports() -> None:
    first = next(b for b in blocks((ROOT / "README.md").read_text()) if b.language == "python")
    lines = [line for line in first.code.splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("import ", "from "))]) <= 3


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("api.md", "flexdecode"),
        ("api.md", "flexdecode.compat"),
        ("api.md", "flexdecode.distributed"),
        ("api.md", "flexdecode.integrations.transformers"),
        ("api.md", "flexdecode.tuning"),
        ("api.md", "flexdecode.visualize"),
        ("masks.md", "flexdecode.masks"),
    ],
)
def test_every_public_name_is_on_its_page(page: str, module: str) -> None:
    if "transformers" in module:
        pytest.importorskip("transformers")
    names = importlib.import_module(module).__all__
    tables = re.findall(r"^\|.*", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    listed = set(re.findall(r"\w+", " ".join(tables)))
    assert not set(names) - listed


@pytest.mark.parametrize(
    ("page", "module"), [("core.md", "flexdecode"), ("masks.md", "flexdecode.masks")]
)
def test_every_docstring_is_in_the_reference(page: str, module: str) -> None:
    text = (ROOT / "docs" / "reference" / page).read_text()
    listed = re.findall(r"^\.\. auto(?:function|class|data):: (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(importlib.import_module(module).__all__)


def test_the_gallery_shows_every_rule_and_has_run() -> None:
    notebook = json.loads((ROOT / "docs" / "masks_gallery.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    source = "".join("".join(cell["source"]) for cell in code)
    names = importlib.import_module("flexdecode.masks").__all__
    assert not {name for name in names if not re.search(rf"\b{name}\b", source)}
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) > 30


def test_blocks_are_found_and_failures_shown() -> None:
    page = "text\n```python no-run\n1 / 0\n```\n\n```python\nx = 1\n```\n```python\n>>> x\n2\n```\n"
    skipped, first, second = blocks(page)
    assert (skipped.tags, first.line, second.line) == (("no-run",), 7, 10)
    namespace: dict[str, Any] = {}
    run(first, Path("page.md"), namespace)
    with pytest.raises(AssertionError, match=r"Expected:\s+2\s+Got:\s+1"):
        run(second, Path("page.md"), namespace)
