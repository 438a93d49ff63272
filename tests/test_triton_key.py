"""Triton's hash of itself is recalled where it is certain, and computed everywhere else."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from flexdecode.kernels import triton_key

ROOT = Path(__file__).parents[1]


class Package:
    """A small Triton: two files, and a hash of them. Each process of it starts with `key`."""

    def __init__(self, root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cache, self.hashed = root, cache, 0
        self.files = [root / "__init__.py", root / "language" / "core.py"]
        self.files[1].parent.mkdir(parents=True)
        for file in self.files:
            file.write_text(file.name)
        self.module = SimpleNamespace(__file__=str(self.files[0]), __version__="3.6.0+here")
        monkeypatch.setattr(triton_key, "triton", self.module)
        monkeypatch.setattr(triton_key, "cache", SimpleNamespace())
        monkeypatch.setattr(triton_key, "_SETTLED", 0)
        monkeypatch.delenv("FLEXDECODE_TRITON_KEY", raising=False)

    def real(self) -> str:
        self.hashed += 1
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in self.files]
        return self.module.__version__ + "-".join(digests)

    def start(self) -> None:
        """Begin a process."""
        triton_key.cache.triton_key = functools.lru_cache(self.real)

    def key(self) -> str:
        """Start, and return what Triton finds its hash to be."""
        self.start()
        triton_key.prepare()
        return str(triton_key.cache.triton_key())

    def hashes(self) -> bool:
        """Whether another process hashes; what it finds is right in either case."""
        before = self.hashed
        assert self.key() == self.real()
        return self.hashed - before == 2

    def kept(self) -> Path:
        (path,) = self.cache.iterdir()
        return path


@pytest.fixture
def package(tmp_path: Path, fresh_triton_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return Package(tmp_path / "triton", tmp_path / "cache", monkeypatch)


def test_another_process_recalls_it(package: Package) -> None:
    assert package.hashes()
    assert not package.hashes()
    assert package.kept().stat().st_mode & 0o777 == 0o600


def rewrite(file: Path) -> None:
    """As large as before, and seemingly as old."""
    before = file.stat()
    file.write_text(file.read_text().upper())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def move_in(file: Path) -> None:
    other = shutil.copy2(file, file.with_suffix(".new"))
    Path(other).replace(file)


CHANGES: dict[str, Callable[[Package], object]] = {
    "touched": lambda package: package.files[1].touch(),
    "rewritten": lambda package: rewrite(package.files[1]),
    "replaced": lambda package: move_in(package.files[0]),
    "longer": lambda package: package.files[1].write_text("longer"),
    "another file": lambda package: (package.root / "language" / "math.py").write_text("1"),
    "another folder": lambda package: ((package.root / "a").mkdir(), CHANGES["touched"](package)),
    "another version": lambda package: setattr(package.module, "__version__", "3.6.1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_it_is_computed_again(package: Package, change: str) -> None:
    package.key()
    CHANGES[change](package)
    assert package.hashes()
    assert not package.hashes()


def test_compiled_python_changes_nothing(package: Package) -> None:
    package.key()
    (package.root / "__pycache__").mkdir()
    (package.root / "__pycache__" / "core.pyc").write_bytes(b"1")
    assert not package.hashes()


def test_a_package_that_was_just_changed_is_not_remembered(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change might fall on the same time."""
    monkeypatch.setattr(triton_key, "_SETTLED", 10**12)
    package.key()
    assert package.hashes() and not package.cache.exists()


def test_a_change_while_it_hashes_is_not_remembered(package: Package) -> None:
    real = package.real

    def disturbed() -> str:
        key = real()
        package.files[1].write_text("changed meanwhile")
        return key

    package.real = disturbed  # type: ignore[method-assign]
    package.key()
    package.real = real  # type: ignore[method-assign]
    assert package.hashes()


def test_a_tree_of_sources_is_not_remembered(package: Package) -> None:
    (package.root / "backend").symlink_to(package.root / "language")
    package.key()
    assert package.hashes() and not package.cache.exists()


def test_links_to_files_are_followed(package: Package, tmp_path: Path) -> None:
    package.files[1].rename(tmp_path / "core.py")
    package.files[1].symlink_to(tmp_path / "core.py")
    package.key()
    assert not package.hashes()
    rewrite(tmp_path / "core.py")
    assert package.hashes()


def broken(text: bytes) -> Iterator[bytes]:
    """What a file may hold that is not what was written."""
    yield from (b"", b"\0" * len(text), text[:-1], text[: len(text) // 2], b"[" * 60_000, b"\xff")
    yield from (b"null", b"[]", b"{}", b'{"triton_key": 1}', b" " * (1 << 17) + text)
    for name, value in json.loads(text).items():
        wrong = "1" if value[20] != "1" else "2"
        for other in (None, 1, "", [value], value[:20] + wrong + value[21:], value + "-0"):
            yield json.dumps(json.loads(text) | {name: other}).encode()
    files = json.loads(text)["files"]
    for key in ("", "3.6.0+here", f"3.6.0+here{'g' * 64}-{'0' * 64}", f"4.0{'0' * 64}-{'0' * 64}"):
        yield json.dumps(triton_key._content(files, key)).encode()


def test_damaged_files_are_ignored_and_mended(package: Package) -> None:
    package.key()
    text = package.kept().read_bytes()
    for damaged in broken(text):
        package.kept().write_bytes(damaged)
        assert package.hashes(), damaged[:200]
        assert package.kept().read_bytes() == text


def test_what_others_could_have_written_is_ignored(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package.key()
    kept, text = package.kept(), package.kept().read_bytes()
    for mode in (0o620, 0o602, 0o666):
        kept.chmod(mode)
        assert package.hashes() and kept.stat().st_mode & 0o777 == 0o600
    (tmp_path / "elsewhere").write_bytes(text)
    kept.unlink()
    kept.symlink_to(tmp_path / "elsewhere")
    assert package.hashes() and not kept.is_symlink()
    kept.unlink()
    os.mkfifo(kept)  # a reader would wait for a writer
    assert package.hashes() and kept.is_file()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert package.hashes()


def test_a_cache_that_cannot_be_used(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (package.files[0], package.files[0] / "below"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(place))
        assert package.hashes() and package.hashes()


def test_a_failed_write_leaves_nothing(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(triton_key.json, "dump", full)
    assert package.hashes() and list(package.cache.iterdir()) == []


def test_it_may_be_left_to_triton(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXDECODE_TRITON_KEY", "0")
    package.key()
    assert package.hashes() and not package.cache.exists()


def test_what_is_at_hand_already_is_neither_computed_nor_remembered(package: Package) -> None:
    package.start()
    own = triton_key.cache.triton_key
    own()
    package.files[1].write_text("changed since")
    triton_key.prepare()
    assert triton_key.cache.triton_key is own and package.hashed == 1
    assert not package.cache.exists()


def test_another_triton_is_left_alone(package: Package) -> None:
    triton_key.cache.triton_key = package.real
    triton_key.prepare()
    assert triton_key.cache.triton_key == package.real and package.hashed == 0
    del triton_key.cache.triton_key
    triton_key.prepare()


def test_it_looks_like_the_function_it_stands_for(package: Package) -> None:
    package.key()
    found = triton_key.cache.triton_key
    assert found.__name__ == "real" and found.cache_info().currsize == 1
    package.files[1].write_text("changed")
    assert found() != package.real()  # within a process it stays the same
    found.cache_clear()
    assert found() == package.real()


def test_threads_that_start_together(package: Package) -> None:
    package.start()
    meeting, found = threading.Barrier(8), []

    def work() -> None:
        meeting.wait(60)
        triton_key.prepare()
        found.append(triton_key.cache.triton_key())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [package.real()] * 8
    assert package.kept().name.endswith(".json") and not package.hashes()


def test_real_processes(tmp_path: Path) -> None:
    """Two that start together, and one after them, with Triton as it is installed."""
    text = """
import json
from triton.runtime import cache
real = cache.triton_key
from flexdecode.kernels import triton_key
triton_key.prepare()
found = cache.get_cache_key.__globals__["triton_key"]()
hashed = real.cache_info().misses
print(json.dumps([hashed, found == real.__wrapped__()]))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("FLEXDECODE_TRITON_KEY", None)

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", text]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def answers(*processes: subprocess.Popen[str]) -> list[list[int | bool]]:
        return [json.loads(process.communicate()[0]) for process in processes]

    first = answers(start(), start())
    assert all(same for _, same in first) and 1 in [hashed for hashed, _ in first]
    assert answers(start()) == [[0, True]]
