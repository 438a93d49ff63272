"""The benchmarks' case table and files; a run of shrunken cases on whatever device there is."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.cases import BLOCK, CASES, QUICK, Case, Mask, select
from benchmarks.inputs import Pool, expected, number_of_sets
from benchmarks.providers import PROVIDERS, resolve
from benchmarks.records import Record, Results, load
from benchmarks.rules import make_rules
from benchmarks.run import main, parse
from benchmarks.timing import OutOfTime, Timing, time_limit

CPU = torch.device("cpu")
BYTES_OF_B16_8K = 2 * 16 * 8 * 8192 * 128 * 2


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(QUICK) <= set(names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sizes_fit(case: Case) -> None:
    assert case.Hq % case.Hkv == 0
    assert case.Lkv % BLOCK == 0
    assert case.lengths is None or len(case.lengths) == case.B
    assert 0 < case.active_bytes(2) <= case.stored_elements() * 2
    assert case.stored_elements() * 2 * 2 < 36 << 30, "two sets must fit the pool"
    if case.group in ("groups", "dims"):
        assert case.active_bytes(2) == pytest.approx(BYTES_OF_B16_8K, rel=0.02)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("B1 8k", 32),
        ("B16 8k", 512),
        ("window 1k of 128k B1", 4),
        ("5% of blocks 128k B1", 25.5),
        ("ragged 31x2k + 1x128k", 760),
    ],
)
def test_active_bytes(name: str, mib: float) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert case.active_bytes(2) == mib * 2**20


def test_blocks_are_chosen_for_each_head_and_hold_the_newest() -> None:
    case = Case("", "", 2, 8, 2, 20 * BLOCK, mask=Mask("blocks", fraction=0.25))
    rule = make_rules(case, CPU).mask
    assert rule is not None
    keys = torch.arange(case.Lkv)
    for b in range(2):
        for h in range(8):
            seen = rule(torch.tensor(b), torch.tensor(h), 0, keys)
            assert seen.sum() == 5 * BLOCK and seen[-1]
            assert torch.equal(seen, rule(torch.tensor(b), torch.tensor(h // 4 * 4), 0, keys))


def test_sets_do_not_overlap_and_agree_across_layouts() -> None:
    case = Case("", "", 2, 4, 2, 128, 16, 8)
    pool = Pool(1 << 16, torch.float32, CPU)
    for layout in ("BHLD", "BLHD"):
        sets = pool.sets(case, 3, layout)
        ends = [(x.k.data_ptr(), x.v.data_ptr()) for x in sets]
        flat = [pointer for pair in ends for pointer in pair]
        assert flat == sorted(flat)
        assert sets[0].k.shape == (2, 2, 128, 16) and sets[0].v.shape == (2, 2, 128, 8)
        gaps = [b - a for a, b in pairwise(flat)]
        assert min(gaps) >= 2 * 2 * 128 * 8 * 4
    shared = pool.sets(replace(case, shared=True), 1)[0]
    assert shared.v.data_ptr() == shared.k.data_ptr()
    with pytest.raises(ValueError, match="does not fit"):
        pool.sets(replace(case, Lkv=1 << 16), 1)


def test_number_of_sets() -> None:
    assert number_of_sets(10**9, 60 << 20) == 2
    assert number_of_sets(4 << 20, 60 << 20) == 60


def test_oracle_against_plain_attention() -> None:
    case = Case("", "", 2, 4, 2, 256, 16, 16, Lq=3, mask=Mask("causal"))
    inputs = Pool(1 << 16, torch.float32, CPU).sets(case, 1)[0]
    wanted = expected(case, make_rules(case, CPU), inputs)
    bias = torch.ones(3, 256, dtype=torch.bool).tril(256 - 3)
    out = torch.nn.functional.scaled_dot_product_attention(
        inputs.q, inputs.k, inputs.v, attn_mask=bias, enable_gqa=True
    )
    assert wanted.error(out) < 1e-6
    assert wanted.error(out * 1.1) == pytest.approx(0.1, rel=1e-3)
    out[0, 0, 0, 0] = float("nan")
    assert wanted.error(out) == float("inf")


def test_providers_are_read_from_text() -> None:
    assert resolve("fa3!,flex:dense+masks") == {"fa3": None, "flex": {"dense", "masks"}}
    own = ["flexdecode", "flexdecode_lazy", "flexdecode_lists"]
    assert list(resolve("flexdecode,sdpa!")) == [*own, "sdpa"]
    with pytest.raises(ValueError, match="expected names among"):
        resolve("flexdecode,nobody")


def test_command_line() -> None:
    chosen = parse(["--cases", "dense,masks", "--options", '{"num_splits": 4}'])
    assert chosen.groups == {"dense", "masks"} and chosen.options == {"num_splits": 4}
    with pytest.raises(SystemExit):
        parse(["--cases", "nothing"])
    assert [case.name for case in select({"dense"}, only="^B1 ")] == ["B1 8k", "B1 32k", "B1 128k"]


def test_time_limit() -> None:
    with pytest.raises(OutOfTime), time_limit(0.05):
        while True:
            pass


def test_quantiles() -> None:
    timing = Timing.of([float(i) for i in range(11)])
    assert (timing.median, timing.p20, timing.p80) == (5.0, 2.0, 8.0)


def records() -> list[Record]:
    def made(case: str, provider: str, us: float | None, status: str = "ok") -> Record:
        return Record("attention", "dense", case, provider, status, us, us, us, floor=10.0)

    return [
        made("a", "flexdecode", 12.5),
        made("a", "sdpa", 25.0),
        made("a", "fa3", 5.0, "wrong"),
        made("b", "flexdecode", 20.0),
        made("b", "sdpa", 10.0),
        made("b", "fa3", None, "failed"),
    ]


def test_tables_compare_with_the_best_right_peer() -> None:
    (table,) = report.make_tables(records())
    assert table.rows == [
        ["a", "10.0", "12.5", "25.0", "5.0 wrong", "80 %", "0.500 (sdpa)"],
        ["b", "10.0", "20.0", "10.0", "fails", "50 %", "2.000 (sdpa)"],
    ]
    assert "1.000 over 2 rows" in table.foot
    assert len(set(map(len, table.plain().splitlines()[:4]))) == 1


def test_files_and_the_page_filled_from_them(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "r.json", CPU)
    for record in records():
        results.add(record)
    environment, read = load(tmp_path / "new" / "r.json")
    assert read == records()
    with (tmp_path / "new" / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["percent_of_floor"] for row in rows[:2]] == ["80.0", "40.0"]
    assert {"operation", "provider", "metric", "unit", "case", "median", "p20", "p80"} <= set(
        rows[0]
    )
    assert rows[0]["date"] == environment["date"]
    page = (
        "x\n<!-- results: dense -->\nold\n<!-- end -->\n<!-- results: dims -->\nkept\n<!-- end -->"
    )
    filled = report.fill_page(page, environment, read)
    assert "| a | 10.0 | 12.5 |" in filled and "old" not in filled and "kept" in filled
    assert report.fill_page(filled, environment, read) == filled


@pytest.mark.parametrize(
    "name", ["window 1k of 128k B1", "ragged 31x2k [+] 1x128k", "lists of 0 to 100 %"]
)
def test_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    main(
        [
            *("--device", "cpu", "--tiny", "--only", f"^{name}$", "--out", str(out)),
            *("--providers", ",".join(PROVIDERS)),
        ]
    )
    _, read = load(out)
    status: dict[str, Any] = {record.provider: record.status for record in read}
    assert status["flexdecode"] == "ok"
    assert all(record.error < 1e-4 for record in read if record.error is not None)
    assert set(status.values()) == {"ok", "skipped"}
    assert "flexdecode" in capsys.readouterr().out


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw

    more = [
        Record("attention", "lengths", f"{n}", "flexdecode", median=n, floor=1.0, config={"Lkv": n})
        for n in (1024, 2048)
    ]
    draw([*records(), *more]).savefig(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
