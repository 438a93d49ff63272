"""Tables of results: in the terminal, and inside the marks of a Markdown page.

``python -m benchmarks.report RESULTS.json [--docs docs/performance.md]``
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.records import Record, load

__all__ = ["Table", "fill_page", "make_tables", "show"]

OWN = ("flexdecode", "flexdecode_lazy", "flexdecode_lists")


class Table:
    """A title, a head and rows of text."""

    def __init__(self, group: str, head: list[str], rows: list[list[str]], foot: str = "") -> None:
        self.group, self.head, self.rows, self.foot = group, head, rows, foot

    def markdown(self) -> str:
        """The table in Markdown, its foot below."""
        lines = ["| " + " | ".join(self.head) + " |", "|---" + "|---:" * (len(self.head) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + (f"\n\n{self.foot}" if self.foot else "")

    def plain(self) -> str:
        """The table in columns."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        text = []
        for line in lines:
            first, *others = zip(line, widths, strict=True)
            columns = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
            text.append("  ".join(columns))
        text.insert(1, "-" * len(text[0]))
        return "\n".join(text) + (f"\n{self.foot}" if self.foot else "")


def best_peer(records: list[Record]) -> Record | None:
    """The fastest of the others whose result is right."""
    timed = [r for r in records if r.provider not in OWN and r.status == "ok" and r.median]
    return min(timed, key=lambda r: r.median or math.inf, default=None)


def make_tables(records: list[Record]) -> list[Table]:
    """One table for each group of cases, in the order in which they came."""
    times = [r for r in records if r.metric == "time"]
    tables = []
    for group in dict.fromkeys(r.group for r in times):
        chosen = [r for r in times if r.group == group]
        tables.append(_attention(group, chosen) if chosen[0].floor else _others(group, chosen))
    memory = [r for r in records if r.metric == "memory"]
    if memory:
        tables.append(_others("memory", memory))
    return tables


def _attention(group: str, records: list[Record]) -> Table:
    providers = [p for p in dict.fromkeys(r.provider for r in records) if _any(records, p)]
    head = ["case", "floor", *providers, "of floor", "to best peer"]
    rows, ratios = [], []
    for case in dict.fromkeys(r.case for r in records):
        found = {r.provider: r for r in records if r.case == case}
        floor = next((r.floor for r in found.values() if r.floor), None)
        own, peer = found.get("flexdecode"), best_peer(list(found.values()))
        row = [case, _number(floor), *(_cell(found.get(p)) for p in providers)]
        reached = own.percent_of_floor if own is not None else None
        row.append("-" if reached is None else f"{reached:.0f} %")
        if own is not None and own.median and peer is not None and peer.median:
            ratios.append(own.median / peer.median)
            row.append(f"{ratios[-1]:.3f} ({peer.provider})")
        else:
            row.append("-")
        rows.append(row)
    foot = ""
    if len(ratios) > 1:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        foot = f"Geometric mean of the ratios to the best peer: {mean:.3f} over {len(ratios)} rows."
    return Table(group, head, rows, foot)


def _others(group: str, records: list[Record]) -> Table:
    providers = [p for p in dict.fromkeys(r.provider for r in records) if _any(records, p)]
    unit = records[0].unit
    rows = []
    for case in dict.fromkeys(r.case for r in records):
        found = {r.provider: r for r in records if r.case == case}
        rows.append([case, *(_cell(found.get(p)) for p in providers)])
    return Table(group, [f"case ({unit})", *providers], rows)


def _any(records: list[Record], provider: str) -> bool:
    return any(r.provider == provider and r.status in ("ok", "wrong", "failed") for r in records)


def _cell(record: Record | None) -> str:
    if record is None or record.status in ("skipped", "not run"):
        return "-"
    if record.status == "failed":
        return "fails"
    return _number(record.median) + (" wrong" if record.status == "wrong" else "")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def show(records: list[Record]) -> None:
    """Print the tables: with rich on a terminal if it is installed, else in plain columns."""
    console = _console()
    if console is None:
        for table in make_tables(records):
            print(f"\n{table.group}\n{table.plain()}")
        return
    import rich.table

    for table in make_tables(records):
        pretty = rich.table.Table(title=table.group, caption=table.foot or None)
        for i, name in enumerate(table.head):
            pretty.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in table.rows:
            pretty.add_row(*row)
        console.print(pretty)


def _console() -> Any:
    if not sys.stdout.isatty():  # a log is read with fewer columns and no frames
        return None
    try:
        import rich.console
    except ImportError:
        return None
    return rich.console.Console()


def fill_page(text: str, environment: dict[str, Any], records: list[Record]) -> str:
    """Put tables between ``<!-- results: GROUP -->`` and ``<!-- end -->``; others stay as they are.

    ``environment`` is one such name, for a line that says where and when.
    """
    parts = {table.group: table.markdown() for table in make_tables(records)}
    versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items())
    rate = environment["read_rate"]
    parts["environment"] = (
        f"{environment['gpu'] or environment['processor']}, {versions}, {environment['date']}"
        + (f"; measured read rate {rate / 1e12:.2f} TB/s" if rate else "")
        + "."
    )

    def put(match: re.Match[str]) -> str:
        body = parts.get(match["group"])
        return match[0] if body is None else f"{match['open']}\n\n{body}\n\n{match['close']}"

    pattern = r"(?P<open><!-- results: (?P<group>[\w ]+) -->).*?(?P<close><!-- end -->)"
    return re.sub(pattern, put, text, flags=re.DOTALL)


def main() -> None:
    """Show a file of results, or put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--docs", type=Path, help="page whose marks are to be filled")
    arguments = parser.parse_args()
    environment, records = load(arguments.results)
    if arguments.docs is not None:
        text = arguments.docs.read_text()
        arguments.docs.write_text(fill_page(text, environment, records))
    else:
        show(records)


if __name__ == "__main__":
    main()
