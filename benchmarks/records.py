"""Rows of results: one schema for JSON and CSV, written anew after every case."""

from __future__ import annotations

import csv
import json
import platform
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["Record", "Results", "load"]

_PACKAGES = ("flexdecode", "torch", "triton", "flashinfer-python", "xformers")


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes
    ----------
    operation : str
        "attention", "tables", "host" or "first call".
    group, case, provider : str
    metric, unit : str
        "time" in "us", or "memory" in "MiB".
    status : str
        "ok", "wrong" (timed, but the output is off), "failed", "skipped" or "not run".
    median, p20, p80 : float or None
        In `unit`.
    floor : float or None
        Microseconds that reading the active keys and values takes at the measured rate.
    error : float or None
        Relative distance from a float64 result.
    note : str
        Why there is no number; or what to know about it.
    config : dict
        The sizes.
    """

    operation: str
    group: str
    case: str
    provider: str
    status: str = "ok"
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    floor: float | None = None
    error: float | None = None
    metric: str = "time"
    unit: str = "us"
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def percent_of_floor(self) -> float | None:
        """How near to the floor, 100 being on it."""
        if self.median is None or self.floor is None:
            return None
        return 100.0 * self.floor / self.median


class Results:
    """Records of one run and where they were made."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.path = path
        self.records: list[Record] = []
        self.environment: dict[str, Any] = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "processor": platform.machine(),
            "versions": {name: v for name in _PACKAGES if (v := _version(name)) is not None},
            "cuda": torch.version.cuda,
            "read_rate": None,  # bytes per second
        }

    def add(self, record: Record) -> None:
        """Keep a record and write the files."""
        self.records.append(record)
        self.write()

    def write(self) -> None:
        """Write ``path`` and, beside it, the same as CSV; never leaves half a file."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(r) | {"percent_of_floor": r.percent_of_floor} for r in self.records]
        text = json.dumps({"environment": self.environment, "records": rows}, indent=1)
        _replace(self.path, text + "\n")
        self._write_csv(self.path.with_suffix(".csv"), rows)

    def _write_csv(self, path: Path, rows: list[dict[str, Any]]) -> None:
        environment = {
            "gpu": self.environment["gpu"],
            "versions": json.dumps(self.environment["versions"]),
            "date": self.environment["date"],
        }
        partial = path.with_suffix(".csv.tmp")
        with partial.open("w", newline="") as file:
            writer: csv.DictWriter[str] | None = None
            for row in rows:
                flat = row | {"config": json.dumps(row["config"])} | environment
                if writer is None:
                    writer = csv.DictWriter(file, list(flat))
                    writer.writeheader()
                writer.writerow(flat)
        partial.replace(path)


def load(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read a JSON file of `Results`: its environment and its records."""
    data = json.loads(path.read_text())
    rows = [{k: v for k, v in row.items() if k != "percent_of_floor"} for row in data["records"]]
    return data["environment"], [Record(**row) for row in rows]


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".tmp")
    partial.write_text(text)
    partial.replace(path)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package != "flexdecode":
            return None
    import flexdecode

    return str(getattr(flexdecode, "__version__", "source"))
