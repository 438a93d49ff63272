"""All that is public, with signatures, against tests/api.txt.

A change there is a change for users: it belongs into docs/changelog.md. To accept one::

    python -m tests.test_api_snapshot
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flexdecode

SNAPSHOT = Path(__file__).with_name("api.txt")
MODULES = (
    "flexdecode",
    "flexdecode.masks",
    "flexdecode.compat",
    "flexdecode.distributed",
    "flexdecode.integrations.transformers",
    "flexdecode.tuning",
    "flexdecode.visualize",
)
MADE_BY_OTHERS = {"flexdecode.bound_mask": ["BoundMask"]}  # what public functions return


def signature(thing: Any) -> str:
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    # Types are mypy's business, and print differently from one Python to the next.
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(inspect.Signature(plain))


def members(cls: type) -> Iterator[str]:
    """Yield fields, methods and properties of a class, its own and those of our base classes."""
    names = {
        name
        for base in cls.__mro__
        if base.__module__.startswith("flexdecode")
        for name in [*vars(base), *inspect.get_annotations(base)]
        if not name.startswith("_") or name in ("__and__", "__or__", "__invert__", "__getitem__")
    }
    for name in sorted(names):
        thing = inspect.getattr_static(cls, name, None)
        if isinstance(thing, (classmethod, staticmethod)):
            thing = getattr(cls, name)
        text = signature(thing) if inspect.isroutine(thing) else ""
        yield f"  .{name}{text}"


def snapshot() -> str:
    lines = []
    for module_name in (*MODULES, *MADE_BY_OTHERS):
        module = importlib.import_module(module_name)
        lines.append(f"[{module_name}]")
        for name in sorted(MADE_BY_OTHERS.get(module_name, module.__all__)):
            thing = getattr(module, name)
            if module_name != MODULES[0] and thing is getattr(flexdecode, name, None):
                lines.append(f"{name}: flexdecode.{name}")
                continue
            lines.append(name + signature(thing))
            if inspect.isclass(thing):
                lines += members(thing)
        lines.append("")
    return "\n".join(lines)


def test_public_names_and_signatures() -> None:
    pytest.importorskip("transformers")
    expected, found = SNAPSHOT.read_text().splitlines(), snapshot().splitlines()
    gone = [line for line in expected if line not in found]
    new = [line for line in found if line not in expected]
    assert not gone and not new, (
        "the public interface changed; if that is meant: python -m tests.test_api_snapshot\n"
        + "\n".join([f"- {line}" for line in gone] + [f"+ {line}" for line in new])
    )
    assert expected == found, "the order changed: python -m tests.test_api_snapshot"


def test_every_public_name_is_documented() -> None:
    """With a docstring, and on the page of its kind."""
    for name, path in (("flexdecode", "api.md"), ("flexdecode.masks", "masks.md")):
        page = (Path(__file__).parents[1] / "docs" / path).read_text()
        module = importlib.import_module(name)
        for public in module.__all__:
            thing = getattr(module, public)
            if inspect.isroutine(thing) or inspect.isclass(thing):
                assert inspect.getdoc(thing), f"{name}.{public} has no docstring"
            assert public in page, f"docs/{path} does not name {name}.{public}"


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
    print(f"wrote {SNAPSHOT}")
