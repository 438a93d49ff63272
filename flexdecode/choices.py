"""Measured choices of configurations: what each is for, where they are kept, how files are read.

Two layers: what this process measured or loaded, and behind it what the package ships. Files are
JSON; every field is checked, and nothing in them is ever executed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexdecode.kernels.configs import LEGAL
from flexdecode.kernels.splits import MAX_SPLITS

__all__ = [
    "Choice",
    "Key",
    "arch_of",
    "bucket",
    "clear",
    "dump",
    "find",
    "load",
    "parse",
    "record",
    "save",
]

FORMAT, VERSION = "flexdecode tuning", 1  # another meaning of a key or an option: another version
WORK = ("uniform", "ragged", "listed")
SHIPPED, MEASURED = "shipped defaults", "measured in this process"
_MOST_BYTES, _MOST_ENTRIES = 1 << 24, 1 << 16
_WORD = re.compile(r"[A-Za-z0-9_.:]{1,40}")

# Plans made before the last change of what is kept are not to be used again.
generation = 0


class Key(NamedTuple):
    """Which calls a choice is for. Sizes in buckets are powers of two, rounded up.

    Attributes
    ----------
    arch : str
        ``"cuda:90"``, ``"hip:gfx942"`` or ``"interpreter"``.
    D, Dv, G : int
        Head dims of keys and of values, query heads of a key head.
    q, k, v : str
        How they are stored: a dtype, or a format of `QuantizedTensor` with its coefficients.
    queries : int
        Queries that may share a tile; a bucket.
    work : {"uniform", "ragged", "listed"}
        Lists of active blocks are equally long as far as the host knows; differ between sequences;
        differ in other ways.
    keys : int
        Most keys that a row may have to read; a bucket.
    rows : int
        Sequences times key heads times rows of blocks; a bucket.
    block : int
        Keys of a block of the tables, 0 without tables.
    page : int
        Largest power of two in a page's slots, at most 256; 0 without pages.
    scored : bool
        A score rule or a bias is applied.
    """

    arch: str
    D: int
    Dv: int
    G: int
    q: str
    k: str
    v: str
    queries: int
    work: str
    keys: int
    rows: int
    block: int
    page: int
    scored: bool


@dataclass(frozen=True)
class Choice:
    """What was measured to be best for a key.

    Attributes
    ----------
    options : mapping of str to int
        Of ``kernel_options``: ``BLOCK_M``, ``BLOCK_N``, ``num_warps``, ``num_stages`` and
        ``num_splits``, or some of them.
    rows, processors : int
        Rows of the call that was measured, and processors of the device; ``num_splits`` holds
        for these alone.
    us, rule_us : float, microseconds
        One call with these options, and with what the rules would have chosen.
    origin : str
        Where the choice comes from, for `explain`.
    """

    options: Mapping[str, int]
    rows: int
    processors: int
    us: float
    rule_us: float
    origin: str = MEASURED

    def options_for(self, rows: int, processors: int) -> dict[str, int]:
        """Options of a call with so many rows on such a device."""
        options = dict(self.options)
        if (rows, processors) != (self.rows, self.processors):
            options.pop("num_splits", None)
        return options


_shipped: dict[Key, Choice] = {}
_own: dict[Key, Choice] = {}
_ready = False
_lock = threading.RLock()


def bucket(n: int) -> int:
    """Round up to a power of two, at least 1."""
    return 1 << (max(n, 1) - 1).bit_length()


def arch_of(device: torch.device) -> str:
    """Name the instruction set of a device; a CPU means the interpreter."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return f"hip:{properties.gcnArchName.partition(':')[0]}"
    return f"cuda:{properties.major}{properties.minor}"


def find(key: Key) -> Choice | None:
    """Look a choice up; the first look reads what is shipped and ``FLEXDECODE_TUNING``."""
    if not _ready:
        _read_first()
    return _own.get(key) or _shipped.get(key)


def record(key: Key, choice: Choice) -> None:
    """Keep a choice for the calls of this process."""
    global generation
    with _lock:
        _read_first()
        _own[key] = choice
        generation += 1


def clear() -> None:
    """Forget what was tuned and loaded; what the package ships remains."""
    global generation
    with _lock:
        _read_first()
        _own.clear()
        generation += 1


def load(path: str | os.PathLike[str]) -> int:
    """Add the choices of a file to those of this process; they win over earlier ones.

    Parameters
    ----------
    path : str or path
        A file that `save` wrote. It is parsed as JSON and every field is checked; nothing in it is
        executed.

    Returns
    -------
    int
        How many choices were taken.

    Warns
    -----
    UserWarning
        The file is missing, damaged or of another version, and is ignored as a whole; or holds
        choices for other architectures than those of this machine, which are left out.
    """
    global generation
    with _lock:
        _read_first()
        found = _read(path)
        if found:
            _own.update(found)
            generation += 1
    return len(found)


def save(path: str | os.PathLike[str]) -> int:
    """Write the choices that this process has tuned and loaded into a file, at once or not at all.

    Parameters
    ----------
    path : str or path
        Replaced if it is there. The text is written beside it first, in the same folder.

    Returns
    -------
    int
        How many choices were written.

    Raises
    ------
    OSError
        The folder is missing or cannot be written.
    """
    with _lock:
        _read_first()
        entries = dict(_own)
    dump(path, entries)
    return len(entries)


def _read_first() -> None:
    """Read what is shipped, and the file that the environment names: once, before anything else."""
    global _ready
    with _lock:
        if _ready:
            return
        _ready = True
        shipped = importlib.resources.files("flexdecode").joinpath("data", "defaults.json")
        if shipped.is_file():
            _shipped.update(parse(shipped.read_bytes(), SHIPPED))
        path = os.environ.get("FLEXDECODE_TUNING")
        if path:
            _own.update(_read(path))


def _read(path: str | os.PathLike[str]) -> dict[Key, Choice]:
    """Read a file for this machine; what cannot be used is left out with a warning."""
    name = os.fspath(path)
    try:
        if not Path(path).is_file():
            raise ValueError("there is no such file")
        with Path(path).open("rb") as file:
            entries = parse(file.read(_MOST_BYTES + 1), f"file {name}")
    except (OSError, ValueError) as error:
        warnings.warn(f"{name}: ignored, {error}", UserWarning, stacklevel=3)
        return {}
    here = _archs_here()
    known = {key: choice for key, choice in entries.items() if key.arch in here}
    if len(known) < len(entries):
        others = ", ".join(sorted({key.arch for key in entries} - here))
        warnings.warn(
            f"{name}: {len(entries) - len(known)} choices ignored, for {others}; this machine has "
            f"{', '.join(sorted(here))}",
            UserWarning,
            stacklevel=3,
        )
    return known


def _archs_here() -> set[str]:
    if not torch.cuda.is_available():
        return {"interpreter"}
    return {arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}


# -- the format of files ---------------------------------------------------------------------------


def dump(path: str | os.PathLike[str], entries: Mapping[Key, Choice]) -> None:
    """Write choices as a file that `parse` reads; a reader never sees half of it."""
    lines = [
        json.dumps(
            {
                "key": key._asdict(),
                "options": dict(sorted(choice.options.items())),
                "rows": choice.rows,
                "processors": choice.processors,
                "us": round(choice.us, 3),
                "rule_us": round(choice.rule_us, 3),
            }
        )
        for key, choice in sorted(entries.items(), key=lambda entry: entry[0])
    ]
    head = {"format": FORMAT, "version": VERSION, "made": _made()}
    text = json.dumps(head, indent=1)[:-2] + ',\n "entries": ['
    text += ",".join(f"\n  {line}" for line in lines) + ("\n ]\n}\n" if lines else "]\n}\n")
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _made() -> dict[str, str]:
    """What the choices were measured with; for people, no one else reads it."""
    made = {"torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    for package in ("flexdecode", "triton"):
        try:
            made[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        made["device"] = torch.cuda.get_device_name()
    return made


def parse(text: bytes, origin: str) -> dict[Key, Choice]:
    """Read the text of a file.

    Raises
    ------
    ValueError
        It is not what `dump` writes: damaged, of another version, or with a field that cannot be.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"expected at most {_MOST_BYTES} bytes")
    try:
        found = json.loads(text.decode("ascii"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON ({str(error)[:100]})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError("expected a file written by flexdecode.tuning.save")
    version = found.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"expected version {VERSION}, got {str(version)[:20]}")
    _names(found, {"format", "version", "made", "entries"}, "the file")
    entries = found["entries"]
    if not isinstance(entries, list) or len(entries) > _MOST_ENTRIES:
        raise ValueError(f"entries: expected a list of at most {_MOST_ENTRIES}")
    return dict(_entry(entry, origin) for entry in entries)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _entry(entry: Any, origin: str) -> tuple[Key, Choice]:
    _names(entry, {"key", "options", "rows", "processors", "us", "rule_us"}, "an entry")
    key, options = entry["key"], entry["options"]
    _names(key, set(Key._fields), "a key")
    for name in ("arch", "q", "k", "v"):
        if not isinstance(key[name], str) or not _WORD.fullmatch(key[name]):
            raise ValueError(f"{name}: expected a short word, got {str(key[name])[:40]!r}")
    if key["work"] not in WORK:
        raise ValueError(f"work: expected one of {', '.join(WORK)}, got {str(key['work'])[:40]!r}")
    if not isinstance(key["scored"], bool):
        raise ValueError(f"scored: expected true or false, got {str(key['scored'])[:40]!r}")
    for name, least, most in (("D", 1, 1 << 16), ("Dv", 1, 1 << 16), ("G", 1, 1 << 16)):
        _whole(name, key[name], least, most)
    for name in ("queries", "keys", "rows"):
        if bucket(_whole(name, key[name], 1, 1 << 50)) != key[name]:
            raise ValueError(f"{name}: expected a power of two, got {key[name]}")
    _whole("block", key["block"], 0, 1 << 31)
    page = _whole("page", key["page"], 0, 256)
    if page and bucket(page) != page:
        raise ValueError(f"page: expected 0 or a power of two, got {page}")
    if not isinstance(options, dict) or not options:
        raise ValueError(f"options: expected some of {', '.join(_OPTIONS)}")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"options: expected some of {', '.join(_OPTIONS)}, got {name[:40]!r}")
        legal = LEGAL.get(name, range(1, MAX_SPLITS + 1))
        if type(value) is not int or value not in legal:
            raise ValueError(f"{name}: expected a legal number, got {str(value)[:40]}")
    return Key(**key), Choice(
        options,
        _whole("rows", entry["rows"], 1, 1 << 50),
        _whole("processors", entry["processors"], 1, 1 << 20),
        _time("us", entry["us"]),
        _time("rule_us", entry["rule_us"]),
        origin,
    )


_OPTIONS = (*LEGAL, "num_splits")


def _names(value: Any, wanted: Iterable[str], what: str) -> None:
    if not isinstance(value, dict) or set(value) != set(wanted):
        raise ValueError(f"{what}: expected {', '.join(sorted(wanted))}")


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}: expected an int from {least} to {most}, got {str(value)[:40]}")
    return value


def _time(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise ValueError(f"{name}: expected microseconds above 0, got {str(value)[:40]}")
    return float(value)
