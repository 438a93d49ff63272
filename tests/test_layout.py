"""The folders kernels/ and masks/ are the packages flexdecode.kernels and flexdecode.masks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
LINKED = ("kernels", "masks")


@pytest.fixture
def setuptools_table() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["tool"]["setuptools"]
    return table


def test_every_folder_of_modules_is_packaged(setuptools_table: dict[str, Any]) -> None:
    packaged = {ROOT / folder for folder in setuptools_table["package-dir"].values()}
    on_disk = {
        path.parent for top in ("flexdecode", *LINKED) for path in (ROOT / top).rglob("*.py")
    }
    assert on_disk - {ROOT / "flexdecode" / name for name in LINKED} == packaged
    assert set(setuptools_table["packages"]) == set(setuptools_table["package-dir"])


def test_every_package_has_an_init(setuptools_table: dict[str, Any]) -> None:
    for folder in setuptools_table["package-dir"].values():
        assert (ROOT / folder / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_link_for_type_checkers(name: str) -> None:
    link = ROOT / "flexdecode" / name
    if not link.is_symlink() and link.is_file():
        pytest.skip("this checkout has no symlinks")
    assert link.resolve() == ROOT / name
    assert not link.readlink().is_absolute()


@pytest.mark.parametrize(("name", "module"), [("kernels", "decode"), ("masks", "positions")])
def test_not_importable_as_top_level(name: str, module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"from {name} import {module}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert f"flexdecode.{name}: import it by that name" in run.stderr


def test_importable_by_their_names() -> None:
    code = "import flexdecode.kernels as k, flexdecode.masks as m; print(k.__name__, m.__name__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.split() == [f"flexdecode.{name}" for name in LINKED], run.stderr
