"""Time attention for this library and its peers: ``python -m benchmarks.run --help``."""

from __future__ import annotations

import argparse
import gc
import json
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.cases import GROUPS, Case, select
from benchmarks.extras import EXTRAS, first_calls, host_calls, tables
from benchmarks.inputs import Pool, expected, number_of_sets
from benchmarks.peers import unpack
from benchmarks.providers import PROVIDERS, Provider, Setup, own_backend, resolve
from benchmarks.records import Record, Results
from benchmarks.rules import make_rules
from benchmarks.timing import measure_read_rate, time_graph, time_limit, time_wall

__all__ = ["main"]

_ERROR_LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_GIB = 1 << 30


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = ",".join((*GROUPS, *EXTRAS))
    parser.add_argument("--cases", default="all", help=f"all, or some of {every}")
    parser.add_argument("--only", help="regular expression that a case's name must match")
    parser.add_argument(
        "--providers",
        default="flexdecode,sdpa,fa3",
        help=f"some of {','.join(PROVIDERS)}; flex:dense+masks limits one to groups of cases, "
        "fa3! takes one name without its companion",
    )
    parser.add_argument("--out", type=Path, help="JSON to write, after every case; CSV beside it")
    parser.add_argument("--quick", action="store_true", help="a short list of cases")
    parser.add_argument("--peers", type=Path, help="folder with the peers' packed files")
    parser.add_argument("--options", type=json.loads, default={}, help="kernel_options as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="shrunken cases, to test the benchmark")
    parser.add_argument("--replays", type=int, default=25, help="timed replays of a graph")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a case of a provider")
    parser.add_argument("--budget", type=float, default=0, help="seconds for everything; 0: any")
    parser.add_argument("--pool", type=float, default=36, help="GiB of random numbers for K and V")
    chosen = parser.parse_args(arguments)
    try:
        chosen.providers = resolve(chosen.providers)
        chosen.groups = _groups(chosen.cases)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def _groups(text: str) -> set[str]:
    known = {*GROUPS, *EXTRAS}
    groups = known if text == "all" else set(text.split(","))
    if groups - known:
        raise ValueError(f"--cases: expected names among {', '.join(sorted(known))}, got {text!r}")
    return groups


class Runner:
    """Runs cases one by one and keeps what they gave."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.start = time.perf_counter()
        self.device = torch.device(arguments.device)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.itemsize = self.dtype.itemsize
        self.results = Results(arguments.out, self.device)
        self.cases = select(arguments.groups, only=arguments.only, quick=arguments.quick)
        if arguments.tiny:
            self.cases = [case.tiny() for case in self.cases]
        target = None
        if arguments.peers is not None:
            target = unpack(arguments.peers, list(arguments.providers))
        setup = Setup(self.device, arguments.options, target)
        self.providers = {name: PROVIDERS[name](setup) for name in arguments.providers}
        self.missing = {name: p.missing() for name, p in self.providers.items()}
        for name, reason in self.missing.items():
            if reason is not None:
                print(f"{name}: skipped, {reason}", flush=True)
        self.l2_bytes, self.read_rate = 0, 0.0
        self.pool = Pool(self._pool_elements(), self.dtype, self.device)
        if self.on_gpu and self.cases:
            self.l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
            print("filled the pool, measuring the read rate", flush=True)
            self.read_rate = measure_read_rate(self.pool.numbers)
            self.results.environment["read_rate"] = self.read_rate
            print(f"pure read: {self.read_rate / 1e12:.3f} TB/s", flush=True)

    def _pool_elements(self) -> int:
        if not self.on_gpu or not self.cases:
            return max((4 * case.stored_elements() for case in self.cases), default=0) + (1 << 24)
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(min(self.arguments.pool * _GIB, 0.5 * free)) // self.itemsize // 1024 * 1024

    def out_of_budget(self) -> bool:
        """True once the run has taken as long as it may."""
        budget = self.arguments.budget
        return bool(budget) and time.perf_counter() - self.start > budget

    def run(self) -> None:
        """Everything that was asked for, and the tables of it."""
        for number, case in enumerate(self.cases, 1):
            for name, provider in self.providers.items():
                limit = self.arguments.providers[name]
                if limit is None or case.group in limit:
                    record = self.attend(case, provider)
                    self.keep(record, f"[{number}/{len(self.cases)}] ")
        self.run_extras()
        print(flush=True)
        report.show(self.results.records)
        print(f"{time.perf_counter() - self.start:.0f} s in all", flush=True)

    def run_extras(self) -> None:
        """What is not a case of attention."""
        groups, names = self.arguments.groups, self.arguments.providers
        tiny = self.arguments.tiny
        if self.arguments.only is not None or self.arguments.quick:
            groups = groups & {"host"} if self.arguments.quick else set()
        usable = {
            group: [
                provider
                for name, provider in self.providers.items()
                if self.missing[name] is None and (names[name] is None or group in names[name])
            ]
            for group in EXTRAS
        }
        if "host" in groups and not self.out_of_budget():
            for record in host_calls(usable["host"], self.pool, tiny):
                self.keep(record)
        if "tables" in groups and not self.out_of_budget():
            for record in tables({p.name for p in usable["tables"]}, self.device, tiny):
                self.keep(record)
        if "first" in groups and any(p.own for p in usable["first"]) and not self.out_of_budget():
            for record in first_calls(self.device, own_backend(self.device), tiny):
                self.keep(record)

    def keep(self, record: Record, prefix: str = "") -> None:
        """Write a record down and say so in a line."""
        self.results.add(record)
        if record.status in ("skipped", "not run"):
            return
        line = f"{prefix}{record.group} | {record.case} | {record.provider}: "
        if record.median is not None:
            line += f"{record.median:.1f} {record.unit}"
        if record.percent_of_floor is not None:
            line += f", {record.percent_of_floor:.0f} % of floor"
        if record.error is not None:
            line += f", error {record.error:.1e}"
        if record.status != "ok":
            line += f" {record.status.upper()}"
        print(line + (f" ({record.note})" if record.note else ""), flush=True)

    def attend(self, case: Case, provider: Provider) -> Record:
        """Check and time one case of one provider."""
        active = case.active_bytes(self.itemsize)
        floor = active / self.read_rate * 1e6 if self.read_rate else None
        record = partial(
            Record,
            "attention",
            case.group,
            case.name,
            provider.name,
            floor=floor,
            config=case.config() | {"dtype": str(self.dtype), "active_bytes": active},
        )
        reason = self.missing[provider.name] or provider.refuses(case)
        if reason is not None:
            return record(status="skipped", note=reason)
        if self.out_of_budget():
            return record(status="not run", note="the time for the whole run is over")
        try:
            with time_limit(self.arguments.limit):
                return self._attend(case, provider, record)
        except Exception as error:
            note = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            return record(status="failed", note=note)
        finally:
            provider.close()
            gc.collect()
            if self.on_gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def _attend(self, case: Case, provider: Provider, record: partial[Record]) -> Record:
        wanted_sets = number_of_sets(case.active_bytes(self.itemsize), self.l2_bytes)
        sets = self.pool.sets(case, wanted_sets, provider.layout(case))
        rules = make_rules(case, self.device)
        with torch.no_grad():
            start = time.perf_counter()
            run = provider.open(case, rules)
            run(sets[-1])
            if self.on_gpu:
                torch.cuda.synchronize()
            opened = time.perf_counter() - start
            calls = [partial(run, inputs) for inputs in sets]
            if self.on_gpu:
                timing, out = time_graph(calls, replays=self.arguments.replays)
            else:
                timing, out = time_wall(calls, repeats=1, device=self.device), run(sets[-1])
            # What the graph left behind is judged, not a call made for the judge.
            error = expected(case, rules, sets[-1]).error(out)
        notes = [f"{len(sets)} sets", f"ready in {opened:.1f} s"]
        if len(sets) < wanted_sets:
            notes.append(f"{wanted_sets} sets wanted, so some of it may come from the cache")
        return record(
            status="ok" if error <= _ERROR_LIMITS[self.dtype] else "wrong",
            median=timing.median,
            p20=timing.p20,
            p80=timing.p80,
            error=error,
            note=", ".join(notes),
        )


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    Runner(parse(arguments)).run()


if __name__ == "__main__":
    main()
