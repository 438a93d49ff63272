"""Measure the configurations that the package ships: ``python -m benchmarks.tune_defaults --help``.

Each case is tuned on random tensors of its size, with its mask bound; what beats the rules by more
than 2 %, twice, goes into ``flexdecode/data/defaults.json``. Lengths and masks that the host cannot
tell apart share a choice: it must not lose by more than 1 % on the case's guards, either. What was
in the file for a measured case and does not win any more is dropped.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cases import CASES, Case, Mask
from benchmarks.inputs import Pool
from benchmarks.providers import FlexDecode, Setup
from benchmarks.rules import make_rules
from flexdecode import choices, tuning

__all__ = ["main"]

SHIPPED = Path(choices.__file__).with_name("data") / "defaults.json"
NAMES = (
    *("B1 8k", "B1 32k", "B1 128k", "B16 8k", "MQA 16/1 B8 32k", "D64 B16 8k", "D256 16/8 B8 8k"),
    *("q_len 4 B16 8k", "softcap B16 8k", "window 1k of 128k B1", "window 1k of 32k B16"),
    *("5% of blocks 128k B1", "5% of blocks 32k B8", "ragged 31x2k + 1x128k", "B128 2k", "B64 4k"),
    *("B1 128k, pages of 64", "B16 8k, pages of 16", "B16 8k, pages of 64", "D 96", "D 80"),
    *("D 192/128", "D 576/512 group 16"),
)
MOST_LOSS = 0.01  # on a guard


def guards(case: Case) -> list[Case]:
    """Cases that look up the same choice, and are as different as can be."""
    mask, shortest = case.mask, min(case.lengths or (case.Lkv,))
    changes: list[dict[str, object]] = []
    if mask is not None and mask.kind == "window":
        changes.append({"mask": Mask("causal")})
    elif mask is not None and mask.kind == "causal":
        changes.append({"mask": Mask("window", window=1024)})
    elif mask is not None:
        changes += [{"mask": replace(mask, fraction=fraction)} for fraction in (0.2, 1.0)]
    if case.lengths is not None:
        changes += [{"lengths": (keys,) * case.B} for keys in (shortest, case.Lkv // 4)]
    return [
        replace(case, name=f"{case.name}, guard {n}", **change)  # type: ignore[arg-type]
        for n, change in enumerate(changes, 1)
    ]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="cases of benchmarks/cases.py")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--repeats", type=int, default=15, help="timed replays of a candidate")
    parser.add_argument("--seconds", type=float, help="for a case: begin no candidate after it")
    parser.add_argument("--budget", type=float, help="seconds: begin no case after it")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--compile", action="store_true", help="write nothing")
    chosen = parser.parse_args(arguments)
    known = {case.name: case for case in CASES}
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        parser.error(f"expected names of cases, got {', '.join(unknown)}")
    chosen.cases = [known[name] for name in dict.fromkeys(chosen.names)]
    return chosen


def tune(
    case: Case,
    device: torch.device,
    repeats: int,
    seconds: float | None = None,
    candidates: Sequence[Mapping[str, int]] | None = None,
) -> tuning.TuningReport:
    """Tune one case on tensors of its own."""
    pool = Pool(case.stored_elements() + (1 << 20), torch.bfloat16, device)
    inputs = pool.sets(case, 1)[0]
    rules = make_rules(case, device)
    provider = FlexDecode(Setup(device))
    lengths = provider.lengths(case)
    return tuning.tune(
        inputs.q,
        inputs.k,
        inputs.v,
        block_mask=None if rules.mask is None else provider.block_mask(case, rules, lengths),
        score_mod=rules.score,
        kv_len=lengths,
        page_table=inputs.page_table,
        candidates=candidates,
        repeats=repeats,
        seconds=seconds,
    )


def is_guarded(case: Case, choice: choices.Choice, device: torch.device, repeats: int) -> bool:
    """True where a choice loses on no guard of its case; says what it measures."""
    for guard in guards(case):
        rule, other = tune(guard, device, repeats, candidates=[choice.options]).trials[:2]
        print(
            f"    {guard.name}: {guard.mask or 'other lengths'}\n    {rule}\n    {other}",
            flush=True,
        )
        free_memory()
        if rule.us is None or other.us is None or other.us > rule.us * (1 + MOST_LOSS):
            return False
    return True


def free_memory() -> None:
    """Give what the last case held back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def compile_first(cases: list[Case], jobs: int) -> None:
    """Fill Triton's disk cache by several processes, each with some of the cases."""
    started = []
    for n in range(min(jobs, len(cases))):
        names = [case.name for case in cases[n::jobs]]
        command = [sys.executable, "-m", "benchmarks.tune_defaults", *names]
        started.append(
            subprocess.Popen(
                [*command, "--compile", "--repeats", "1"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    for process in started:
        process.wait()


def main(arguments: list[str] | None = None) -> None:
    """Tune what the command line asks for."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("tuning needs a GPU")
    start = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    if options.jobs:
        compile_first(options.cases, options.jobs)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    entries = choices.parse(SHIPPED.read_bytes(), choices.SHIPPED)
    for number, case in enumerate(options.cases, 1):
        if options.budget is not None and time.perf_counter() - start > options.budget:
            print(f"no time left for {case.name} and what follows")
            break
        report = tune(case, device, options.repeats, options.seconds)
        title = f"[{number}/{len(options.cases)}] {case.name}"
        print(f"{title}: {report.rule_us:.1f} -> {report.best_us:.1f} us", flush=True)
        print("\n".join(f"    {line}" for line in str(report).splitlines()), flush=True)
        free_memory()
        if options.compile:
            continue
        choice = choices.find(report.key)
        entries.pop(report.key, None)
        if report.best is not None and choice is not None:
            if is_guarded(case, choice, device, options.repeats):
                entries[report.key] = choice
        choices.dump(options.out, entries)
    if not options.compile:
        print(f"{len(entries)} choices in {options.out}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
