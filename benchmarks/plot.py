"""Pictures of results: ``python -m benchmarks.plot RESULTS.json OUT.png`` (needs matplotlib)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.cases import BLOCK
from benchmarks.records import Record, load

__all__ = ["draw", "main"]

_BARS = ("dense", "mods", "masks", "ragged", "groups", "dims")


def draw(records: list[Record], title: str = "") -> Any:
    """Draw bars of every case (percent of the floor) and lines over length and active blocks.

    Parameters
    ----------
    records : list of Record
    title : str

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure

    timed = [r for r in records if r.operation == "attention" and r.status == "ok" and r.median]
    providers = list(dict.fromkeys(r.provider for r in timed))
    colours = {name: f"C{i}" for i, name in enumerate(providers)}
    bars = [r for r in timed if r.group in _BARS and r.floor]
    lines = [group for group in ("lengths", "density") if any(r.group == group for r in timed)]
    cases = list(dict.fromkeys(r.case for r in bars))
    height = max(4.0, 0.16 * len(bars) + 0.1 * len(cases))
    heights = [height, 4.5] if lines else [height]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_bars(parts[0].subplots(), bars, cases, colours)
    if lines:
        places = parts[1].subplots(1, len(lines), squeeze=False)[0]
        for axes, group in zip(places, lines, strict=True):
            _draw_lines(axes, [r for r in timed if r.group == group], colours, group)
    figure.suptitle(title)
    return figure


def _draw_bars(axes: Any, bars: list[Record], cases: list[str], colours: dict[str, str]) -> None:
    place, ticks, seen = 0.0, [], set()
    for case in cases:
        start = place
        for record in (r for r in bars if r.case == case):
            label = None if record.provider in seen else record.provider
            seen.add(record.provider)
            axes.barh(
                place, record.percent_of_floor, 0.9, color=colours[record.provider], label=label
            )
            axes.text(
                record.percent_of_floor, place, f" {record.median:.1f} us", va="center", size=6
            )
            place += 1.0
        ticks.append(((start + place - 1.0) / 2, case))
        place += 0.6
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], size=8)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("percent of the memory floor (reading active keys and values once)")
    if seen:
        axes.legend()


def _draw_lines(axes: Any, records: list[Record], colours: dict[str, str], group: str) -> None:
    def across(record: Record) -> float:
        if group == "lengths":
            return float(record.config["Lkv"])
        blocks = record.config["Lkv"] // BLOCK
        return float(max(1, round(record.config["mask"]["fraction"] * blocks)))

    for provider in dict.fromkeys(r.provider for r in records):
        mine = sorted((r for r in records if r.provider == provider), key=across)
        axes.plot(
            [across(r) for r in mine],
            [r.median for r in mine],
            marker="o",
            color=colours[provider],
            label=provider,
        )
    floors = {across(r): r.floor for r in records if r.floor is not None}
    if floors:
        axes.plot(list(floors), list(floors.values()), "k--", label="floor")
    if group == "lengths":
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel("keys" if group == "lengths" else "active blocks of each KV head")
    axes.set_ylabel("us")
    axes.legend(fontsize=7)


def main(arguments: list[str] | None = None) -> None:
    """Draw one file of results into a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args(arguments)
    environment, records = load(chosen.results)
    title = f"{environment['gpu'] or environment['processor']}, {environment['date']}"
    draw(records, title).savefig(chosen.picture, dpi=130)


if __name__ == "__main__":
    main()
