"""Triton's hash of itself, remembered from one process to the next.

Triton hashes its own 400 MiB in every process that needs a kernel, even one from its disk cache,
which takes longer than all else about the first call of such a process. The hash depends on files
of Triton's package alone. So a file in the disk cache keeps it beside the state of all of those:
names, sizes, inodes, times of change. Where anything differs or fails, Triton hashes as ever.
``FLEXDECODE_TRITON_KEY=0`` leaves it to Triton altogether.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime import cache

_SETTLED = 5_000_000_000  # ns from which on another change shows in the time of the last one
_MOST_BYTES = 1 << 16


def prepare() -> None:
    """Have Triton's hash at hand, whether it is recalled or has to be computed.

    Then ``triton.runtime.cache.triton_key`` is another function, which returns the same.
    """
    with contextlib.suppress(AttributeError):  # another version hashes when it has to
        own = cache.triton_key
        if os.environ.get("FLEXDECODE_TRITON_KEY") != "0" and own.cache_info().currsize == 0:
            cache.triton_key = _remembering(own)
        cache.triton_key()


def _remembering(own: Any) -> Callable[[], str]:
    @functools.lru_cache
    @functools.wraps(own.__wrapped__)
    def triton_key() -> str:
        files = _state_of_triton()
        key = None if files is None else _read(files)
        if key is None:
            own.cache_clear()
            key = own()
            if files is not None and files == _state_of_triton():
                _write(files, key)
        return key

    return triton_key


def _state_of_triton() -> str | None:
    """Digest the state of all files of the package; None where it would not show every change."""
    root = str(Path(triton.__file__).absolute().parent)
    found = [triton.__version__, sys.implementation.cache_tag]
    folders, changed = [root], 0
    with contextlib.suppress(OSError):
        for folder in folders:
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if not entry.is_dir():
                        now = entry.stat()  # of what a link leads to
                        changed = max(changed, now.st_ctime_ns)
                        found += [entry.path.removeprefix(root), now.st_size, now.st_ino]
                        found += [now.st_mtime_ns, now.st_ctime_ns]
                    elif entry.is_symlink():
                        return None  # a build in a tree of sources
                    elif entry.name != "__pycache__":
                        folders.append(entry.path)
        if changed + _SETTLED < time.time_ns():
            return hashlib.sha256(repr(found).encode()).hexdigest()
    return None


def _read(files: str) -> str | None:
    """Return the hash that belongs to these files, if this user's cache has it."""
    with contextlib.suppress(Exception):
        descriptor = os.open(_path(files), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                return None
            if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            found = json.loads(file.read(_MOST_BYTES).decode("ascii"))
        key: str = found["triton_key"]
        form = re.escape(triton.__version__) + "[0-9a-f]{64}(-[0-9a-f]{64})+"
        if found == _content(files, key) and re.fullmatch(form, key):
            return key
    return None


def _write(files: str, key: str) -> None:
    with contextlib.suppress(Exception):
        path = _path(files)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump(_content(files, key), file)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _path(files: str) -> Path:
    return Path(knobs.cache.dir) / f"triton_key-{files[:32]}.json"


def _content(files: str, key: str) -> dict[str, str]:
    check = hashlib.sha256(f"{files} {key}".encode()).hexdigest()
    return {"files": files, "triton_key": key, "check": check}
