"""Measured configurations: keys, precedence, files that lie, and what is kept of measurements."""

from __future__ import annotations

import json
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode import attention, choices, create_block_mask, explain, quantize, repeats, tuning
from flexdecode.choices import Choice, Key
from flexdecode.kernels import configs
from flexdecode.kernels.hardware import Device
from flexdecode.kernels.splits import MAX_SPLITS
from flexdecode.masks import causal, per_head, sliding_window, softcap
from flexdecode.plan import choose_plan, device_of, lists_of, tuning_key

CPU = torch.device("cpu")
H200 = Device(132, 232448, pdl=True, arch="cuda:90")
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing shipped, nothing tuned; what a test keeps is forgotten afterwards."""
    monkeypatch.setattr(choices, "_own", {})
    monkeypatch.setattr(choices, "_shipped", {})
    monkeypatch.setattr(choices, "_ready", True)
    monkeypatch.setattr(choices, "generation", choices.generation + 1000)
    monkeypatch.setattr(repeats, "_without_mask", OrderedDict())


def draw(B=2, Hq=4, Hkv=2, Lq=1, Lkv=300, D=16, Dv=16, dtype=torch.float32):
    q = torch.randn(B, Hq, Lq, D, dtype=dtype)
    return (
        q,
        torch.randn(B, Hkv, Lkv, D, dtype=dtype),
        torch.randn(B, Hkv, Lkv, Dv, dtype=dtype),
    )


def key_of(qkv: Any, device: Device = H200, **arguments: Any) -> tuple[Key, int]:
    request = tuning._prepared(*qkv, arguments)
    return tuning_key(request, lists_of(request), device)


def keep(qkv: Any, options: dict[str, int], device: Any = None, **arguments: Any) -> Key:
    """Record options for calls like this one."""
    device = device or device_of(CPU)
    key, rows = key_of(qkv, device, **arguments)
    choices.record(key, Choice(options, rows, device.processors, 1.0, 2.0))
    return key


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_tells_apart_what_changes_the_choice() -> None:
    base, rows = key_of(draw())
    assert base == Key(
        *("cuda:90", 16, 16, 2, "float32", "float32", "float32"),
        *(1, "uniform", 512, 4, 0, 0, False),
    )
    assert rows == 4
    lengths = torch.tensor([300, 10])
    mask = create_block_mask(causal & sliding_window(100))
    rule = per_head(torch.tensor([0, 1, 0, 1]), causal, causal & sliding_window(9))
    k = draw(Hkv=2)[1]
    pages = {"page_table": torch.tensor([[0], [1]], dtype=torch.int32), "kv_len": 300}
    for changed, qkv, arguments in [
        ({"Dv": 32}, draw(Dv=32), {}),
        ({"G": 4}, draw(Hq=8), {}),
        ({"q": "tf32"}, draw(), {"kernel_options": {"tf32": True}}),
        ({"k": "int4.1.separate.words"}, (draw()[0], quantize(k, "int4"), draw()[2]), {}),
        ({"v": "fp8.rows"}, (*draw()[:2], quantize(k, "fp8")), {}),
        ({"queries": 4}, draw(Lq=3), {}),
        ({"work": "ragged"}, draw(), {"kv_len": lengths}),
        ({"keys": 1024}, draw(Lkv=600), {}),
        ({"rows": 8}, draw(B=3), {}),
        ({"page": 4}, draw(), pages),  # of 300 slots
        ({"scored": True}, draw(), {"score_mod": softcap(3.0)}),
        ({"scored": True}, draw(), {"bias": torch.zeros(1, 1, 1, 300)}),
        ({"block": 128, "keys": 512}, draw(), {"block_mask": mask}),
        (
            {"block": 128, "work": "listed"},
            draw(),
            {"block_mask": create_block_mask(rule)},
        ),
    ]:
        assert key_of(qkv, **arguments)[0] == base._replace(**changed), changed


def test_lengths_and_batches_between_two_powers_share_a_key() -> None:
    assert key_of(draw(B=5, Lkv=257))[0] == key_of(draw(B=8, Lkv=512))[0]
    assert key_of(draw(B=5))[0] != key_of(draw(B=4))[0]
    assert key_of(draw(), kv_len=257)[0] == key_of(draw(), kv_len=300)[0]
    assert [choices.bucket(n) for n in (0, 1, 2, 3, 4, 5, 1025)] == [1, 1, 2, 4, 4, 8, 2048]


def test_packed_queries_have_a_key() -> None:
    q, k, v = draw(B=3)
    starts = torch.tensor([0, 1, 3, 6])
    key, rows = key_of((q[:1].expand(-1, -1, 6, -1), k, v), cu_seqlens_q=starts)
    assert (key.work, key.queries, rows) == ("ragged", 4, 10)  # five tiles of up to four queries


# -- precedence ------------------------------------------------------------------------------------


def planned(qkv: Any, device: Any = H200, **arguments: Any) -> Any:
    options = arguments.pop("kernel_options", {})
    request = tuning._prepared(*qkv, arguments)
    request = tuning.replace(request, options=options)
    return choose_plan(request, lists_of(request), device)


def test_options_come_before_choices_and_choices_before_rules() -> None:
    qkv = draw(B=1, Lkv=4096)
    rules = planned(qkv)
    assert rules.origin == "rules"
    keep(qkv, {"BLOCK_N": 16, "num_splits": 5}, H200)
    config, origin = planned(qkv)
    assert (config.BLOCK_N, config.num_splits, origin) == (16, 5, "measured in this process")
    config, origin = planned(qkv, kernel_options={"num_warps": 2})
    assert (config.BLOCK_N, config.num_warps, origin) == (rules.config.BLOCK_N, 2, "kernel_options")
    invariant = {"deterministic": "batch_invariant"}
    assert planned(qkv, kernel_options=invariant).origin == "rules"
    assert planned(qkv, kernel_options=invariant).config.BLOCK_N == rules.config.BLOCK_N
    assert planned(qkv, Device(132, 232448, arch="cuda:80")).origin == "rules"
    choices.clear()
    assert planned(qkv) == rules


def test_splits_hold_for_the_measured_rows_and_processors_alone() -> None:
    keep(draw(B=4, Lkv=4096), {"BLOCK_N": 16, "num_splits": 5}, H200)
    fewer = draw(B=3, Lkv=4096)  # the same bucket
    config, origin = planned(fewer)
    assert (config.BLOCK_N, origin) == (16, "measured in this process")
    assert config.num_splits == 132 // 6
    smaller = Device(24, 232448, arch="cuda:90")
    assert planned(draw(B=4, Lkv=4096), smaller).config.num_splits == 24 // 8


def test_a_choice_that_does_not_fit_leaves_it_to_the_rules() -> None:
    qkv = draw(D=256, Dv=256, Lkv=4096)
    keep(qkv, {"BLOCK_N": 256, "num_stages": 8}, H200)
    assert planned(qkv).origin == "rules"


def test_explain_names_where_a_configuration_comes_from(tmp_path: Path) -> None:
    qkv = draw(B=1, Lkv=4096)
    call = {"device_name": "H200"}
    assert "chosen by" not in str(explain(*qkv, **call))
    options = {"num_warps": 2}
    assert "chosen by kernel_options" in str(explain(*qkv, kernel_options=options, **call))
    key, rows = key_of(qkv)
    choices._shipped[key] = Choice(options, rows, 132, 1.0, 2.0, choices.SHIPPED)
    report = explain(*qkv, **call)
    assert report.work.config.num_warps == 2 and "chosen by shipped defaults" in str(report)


@needs_interpreter
@pytest.mark.parametrize("bound", [False, True])
def test_calls_that_were_planned_before_take_what_is_loaded(tmp_path: Path, bound: bool) -> None:
    pytest.importorskip("triton")
    from flexdecode.backends import triton as backend

    used = []
    launch = backend.decode

    def decode(call: Any, config: Any) -> Any:
        used.append(config.BLOCK_N)
        return launch(call, config)

    qkv, arguments = draw(B=1, Lkv=90), {}
    if bound:
        arguments["block_mask"] = create_block_mask(causal & sliding_window(50)).bind(
            batch=1, heads=4, q_len=1, kv_len=90
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "decode", decode)
        patch.setattr(backend, "_plans", {})

        def run() -> None:
            out = attention(*qkv, **arguments, backend="triton")
            wanted = attention(*qkv, **arguments, backend="reference")
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)

        keep(qkv, {"BLOCK_N": 16}, **arguments)
        assert choices.save(tmp_path / "tuned.json") == 1
        choices.clear()
        run()
        run()
        assert used == [32]
        assert choices.load(tmp_path / "tuned.json") == 1
        run()
        run()
        assert used == [32, 16]
        choices.clear()
        run()
        assert used == [32, 16, 32]


# -- files -----------------------------------------------------------------------------------------


ENTRY = Key(
    *("interpreter", 64, 64, 4, "float16", "int4.1.separate.words", "fp8.rows"),
    *(1, "listed", 4096, 8, 128, 16, False),
)
CHOICE = Choice({"BLOCK_N": 64, "num_splits": 3, "num_warps": 1}, 7, 8, 12.5, 14.0)


def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "tuned.json"
    choices.dump(path, {ENTRY: CHOICE})
    return path, json.loads(path.read_text())


@needs_interpreter
def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    choices.record(ENTRY, CHOICE)
    path = tmp_path / "tuned.json"
    assert tuning.save(path) == 1
    tuning.clear()
    assert choices.find(ENTRY) is None
    before = choices.generation
    assert tuning.load(path) == 1 and choices.generation == before + 1
    found = choices.find(ENTRY)
    assert found == tuning.replace(CHOICE, origin=f"file {path}")
    assert path.read_text().count("\n") < 20  # an entry a line
    tuning.clear()
    assert tuning.save(path) == 0 and tuning.load(path) == 0


def refused(path: Path) -> None:
    before = choices.generation
    with pytest.warns(UserWarning, match="ignored"):
        assert choices.load(path) == 0
    assert not choices._own and choices.generation == before


BAD_FIELDS = [
    (("version",), [2, 0, "1", True, None, 10**400]),
    (("format",), ["", "flexdecode", None, 3]),
    (("entries",), [None, {}, "[]", [None], [[]], [{}]]),
    (("entries", 0, "us"), [-1, 0, "1", True, None, 1e300, 10**400, [1.0]]),
    (("entries", 0, "rows"), [0, 1.5, "1", True, 10**30]),
    (("entries", 0, "processors"), [0, -3, None]),
    (("entries", 0, "options"), [{}, [], None, {"BLOCK_N": 48}, {"BLOCK_N": "64"}]),
    (("entries", 0, "options", "num_splits"), [0, 1025, True, 2.0, 10**40]),
    (("entries", 0, "options", "deterministic"), [True]),
    (("entries", 0, "options", "__class__"), [1]),
    (("entries", 0, "key", "arch"), ["", "a b", "__import__('os').system('true')", 3, "x" * 41]),
    (("entries", 0, "key", "work"), ["", "other", ["listed"], None]),
    (("entries", 0, "key", "keys"), [0, 3, -4, 4096.0, 1 << 60]),
    (("entries", 0, "key", "page"), [512, 3, -1]),
    (("entries", 0, "key", "scored"), [0, "false", None]),
    (("entries", 0, "key", "D"), [0, 1 << 20, "64"]),
    (("entries", 0, "key", "more"), [1]),
    (("more",), [1]),
]


@pytest.mark.parametrize(("place", "values"), BAD_FIELDS, ids=lambda x: str(x)[:40])
def test_a_field_that_cannot_be_makes_a_file_ignored(
    tmp_path: Path, place: Any, values: list[Any]
) -> None:
    path, found = written(tmp_path)
    inner = found
    for step in place[:-1]:
        inner = inner[step]
    for value in values:
        inner[place[-1]] = value
        path.write_text(json.dumps(found))
        refused(path)


@pytest.mark.parametrize("place", [("made",), ("entries", 0, "us"), ("entries", 0, "key", "G")])
def test_a_missing_field_makes_a_file_ignored(tmp_path: Path, place: Any) -> None:
    path, found = written(tmp_path)
    inner = found
    for step in place[:-1]:
        inner = inner[step]
    del inner[place[-1]]
    path.write_text(json.dumps(found))
    refused(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"\x00\xff\xfe",
        b"__import__('os').system('true')",
        b'{"format": "flexdecode tuning", "version": 1',
        b"[" * 100_000,
        b'{"version": ' + b"9" * 5000 + b"}",
        b'{"format": "flexdecode tuning", "version": NaN, "made": {}, "entries": []}',
        b"cos\nsystem\n(S'true'\ntR.",  # a pickle
        b" " * ((1 << 24) + 1),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_other_text_is_ignored(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(text)
    refused(path)


def test_damaged_files_are_ignored_or_mean_what_they_say(tmp_path: Path) -> None:
    """Cut anywhere, and with random bytes in random places."""
    path, _ = written(tmp_path)
    text = path.read_bytes().strip()
    for cut in range(0, len(text), 7):
        with pytest.raises(ValueError, match="expected"):
            choices.parse(text[:cut], "test")
    generator = random.Random(0)
    kept = 0
    for _ in range(2000):
        damaged = bytearray(text)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(text))] = generator.choice(
                b'0123456789"{}[],:.-eaN \xff'
            )
        try:
            found = choices.parse(bytes(damaged), "test")
        except ValueError:
            continue
        kept += 1
        for key, choice in found.items():
            assert set(choice.options) <= set(choices._OPTIONS) and choice.us > 0
            assert choices.parse(rewritten(tmp_path, key, choice), "test") == {key: choice}
    assert kept  # a digit for another


def rewritten(tmp_path: Path, key: Key, choice: Choice) -> bytes:
    path = tmp_path / "again.json"
    choices.dump(path, {key: choice})
    return path.read_bytes()


def test_missing_files_and_folders_are_ignored(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.json")
    refused(tmp_path)


def test_choices_for_other_architectures_are_left_out(tmp_path: Path) -> None:
    foreign = ENTRY._replace(arch="cuda:9999")
    path = tmp_path / "tuned.json"
    choices.dump(path, {foreign: CHOICE})
    with pytest.warns(UserWarning, match="1 choices ignored, for cuda:9999; this machine has"):
        assert choices.load(path) == 0
    assert choices.find(foreign) is None


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written(tmp_path)
    before = path.read_bytes()

    def fails(*arguments: Any) -> None:
        raise OSError("disk full")

    choices.record(ENTRY._replace(G=8), CHOICE)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        choices.save(path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["tuned.json"]
    with pytest.raises(OSError):
        choices.save(tmp_path / "no folder" / "tuned.json")


@needs_interpreter
def test_the_environment_names_a_file_that_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written(tmp_path)
    before = path.read_bytes()
    monkeypatch.setenv("FLEXDECODE_TUNING", str(path))
    monkeypatch.setattr(choices, "_ready", False)
    generation = choices.generation
    found = choices.find(ENTRY)
    assert found is not None and found.origin == f"file {path}"
    assert choices.generation == generation  # nothing was planned before
    path.unlink()
    assert choices.find(ENTRY) == found
    choices.clear()
    assert choices.find(ENTRY) is None
    path.write_bytes(before)
    monkeypatch.setenv("FLEXDECODE_TUNING", str(tmp_path / "nothing.json"))
    monkeypatch.setattr(choices, "_ready", False)
    with pytest.warns(UserWarning, match=r"nothing\.json: ignored"):
        assert choices.find(ENTRY) is None


def test_the_shipped_file_is_one_that_is_read() -> None:
    path = Path(choices.__file__).with_name("data") / "defaults.json"
    for key, choice in choices.parse(path.read_bytes(), choices.SHIPPED).items():
        assert key.arch != "interpreter"
        assert choice.us < choice.rule_us * (1 - tuning.MIN_GAIN)


# -- what is kept of measurements ------------------------------------------------------------------


def clock(times: dict[tuple[str, int], float], base: float = 10.0) -> Any:
    """A clock by the options: `base`, or the time of one of them."""

    def measure(call: Any) -> float:
        call()
        options = call.args[0].options
        found = [us for (name, value), us in times.items() if options.get(name) == value]
        return min(found, default=base)

    return measure


@pytest.fixture
def request_() -> Any:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("runs in the interpreter")
    return tuning._prepared(*draw(B=1, Lkv=90), {})


def test_the_best_candidate_is_kept(request_: Any) -> None:
    told: list[Any] = []
    candidates = [{"BLOCK_N": 16}, {"num_warps": 2}, {"num_splits": 2}]
    measure = clock({("BLOCK_N", 16): 8.0, ("num_splits", 2): 9.0})
    report = tuning._tune(request_, candidates, measure, progress=told.append)
    assert report.best == {"BLOCK_N": 16} and (report.rule_us, report.best_us) == (10.0, 8.0)
    assert [trial.us for trial in report.trials] == [10.0, 8.0, 10.0, 9.0]
    assert tuple(told) == report.trials
    choice = choices.find(report.key)
    assert choice is not None and choice.options == {"BLOCK_N": 16} and choice.us == 8.0
    assert "8.0 us  BLOCK_N 16: from now on" in str(report)
    assert choose_plan(request_, None, device_of(CPU)).config.BLOCK_N == 16


def test_noise_is_not_kept(request_: Any) -> None:
    report = tuning._tune(request_, [{"BLOCK_N": 16}], clock({("BLOCK_N", 16): 9.85}))
    assert report.best is None and not choices._own
    assert "The rules' choice stays, 10.0 us." in str(report)
    times = iter([10.0, 8.0, *[9.9, 10.0] * 3])  # faster once, and not again
    report = tuning._tune(request_, [{"BLOCK_N": 16}], lambda call: next(times))
    assert report.best is None and not choices._own


def test_an_earlier_choice_is_measured_again_and_may_lose(request_: Any) -> None:
    lists = lists_of(request_)
    key, rows = tuning_key(request_, lists, device_of(CPU))
    choices._shipped[key] = Choice({"BLOCK_N": 16}, rows, 8, 5.0, 10.0, choices.SHIPPED)
    report = tuning._tune(request_, [], clock({("BLOCK_N", 16): 12.0}))
    assert [trial.us for trial in report.trials] == [10.0, 12.0] and report.best is None
    config, origin = choose_plan(request_, lists, device_of(CPU))
    assert config == tuning.plan_by_rules(request_, lists, device_of(CPU), {})
    assert origin == "measured in this process"


def test_candidates_that_fail_or_are_wrong_are_left_out(
    request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tuning.load_backend("triton")

    def faulty(request: Any) -> Any:
        result = run(request)
        if request.options.get("num_warps") == 1:
            raise RuntimeError("no such instruction\nand more")
        if request.options.get("num_warps") == 2:
            result.out[0, 1] += 0.01
        if request.options.get("num_warps") == 4:
            result.out[0, 1, 0, 3] = float("nan")
        return result

    monkeypatch.setattr(tuning, "load_backend", lambda name: faulty)
    candidates = [{"num_warps": n, "BLOCK_N": 16} for n in (1, 2, 4)]
    report = tuning._tune(request_, candidates, clock({("BLOCK_N", 16): 1.0}))
    notes = [trial.note for trial in report.trials[1:]]
    assert notes[0] == "fails, RuntimeError: no such instruction"
    assert notes[1].startswith("wrong, off by") and notes[2] == "wrong, off by inf (2-norm)"
    assert report.best is None and not choices._own
    big = [{"BLOCK_N": 256, "BLOCK_M": 64}]
    report = tuning._tune(tuning._prepared(*draw(Dv=16), {}), big, clock({}))
    assert "fails, ValueError: kernel_options['BLOCK_M']" in report.trials[1].note


def test_time_runs_out(request_: Any) -> None:
    report = tuning._tune(request_, [{"BLOCK_N": 16}], clock({}), seconds=-1.0)
    assert [trial.note for trial in report.trials] == ["", "no time left"]


@pytest.mark.parametrize(
    ("config", "block"),
    [
        (configs.DecodeConfig(16, 64, 4, 1, 16, 4, 4), 0),
        (configs.DecodeConfig(64, 128, 4, 16, 1, 8, 3), 128),
        (configs.DecodeConfig(16, 16, 4, 1, 1024, 1, 1), 8),
        (configs.DecodeConfig(16, 64, 4, 1, 16, plan_rows=128, processors=132), 0),
    ],
)
def test_neighbours_are_few_legal_and_different(config: Any, block: int) -> None:
    found = tuning.neighbours(config, 8, block)
    assert 3 <= len(found) <= 16
    assert len({tuple(sorted(options.items())) for options in found}) == len(found)
    for options in found:
        assert all(options[name] in configs.LEGAL[name] for name in configs.LEGAL)
        assert 1 <= options.get("num_splits", 1) <= MAX_SPLITS
        assert not block or options["BLOCK_N"] <= max(block, 16)
    if config.plan_rows:
        assert [x["num_splits"] for x in found if "num_splits" in x] == [17]


def test_arguments_are_checked() -> None:
    qkv = draw()
    with pytest.raises(TypeError, match="expected arguments of attention, got causal"):
        tuning.tune(*qkv, causal=True)
    with pytest.raises(ValueError, match="kv_len"):
        tuning.tune(*qkv, kv_len=1000)
    with pytest.raises(ValueError, match=r"none of those that are tuned.*got num_warps"):
        tuning.tune(*qkv, kernel_options={"num_warps": 4})
    with pytest.raises(ValueError, match="got batch_invariant"):
        tuning.tune(*qkv, kernel_options={"deterministic": "batch_invariant"})
    with pytest.raises(ValueError, match="expected something to do"):
        tuning.tune(*draw(B=0))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="q: expected a tensor on a GPU to tune, got cpu"):
            tuning.tune(*qkv)
    request = tuning._prepared(*qkv, {})
    for wrong in ({}, {"tf32": True}, {"BLOCK_X": 3}, {"num_splits": 0}):
        with pytest.raises(ValueError, match=r"candidates|kernel_options"):
            tuning._tune(request, [wrong], clock({}))


# -- the script that measures the shipped defaults -------------------------------------------------


def test_guards_look_up_the_choice_of_their_case() -> None:
    from benchmarks import tune_defaults
    from benchmarks.inputs import Pool
    from benchmarks.providers import FlexDecode, Setup
    from benchmarks.rules import make_rules

    def key(case: Any) -> Key:
        case = case.tiny()
        inputs = Pool(case.stored_elements() + 1024, torch.float32, CPU).sets(case, 1)[0]
        rules, provider = make_rules(case, CPU), FlexDecode(Setup(CPU))
        lengths = provider.lengths(case)
        mask = None if rules.mask is None else provider.block_mask(case, rules, lengths)
        qkv = inputs.q, inputs.k, inputs.v
        return key_of(qkv, block_mask=mask, kv_len=lengths, score_mod=rules.score)[0]

    found = 0
    for case in tune_defaults.parse([]).cases:
        for guard in tune_defaults.guards(case):
            assert key(guard) == key(case), guard.name
            found += 1
        assert tune_defaults.guards(case) or (case.mask is None and case.lengths is None)
    assert found >= 8


def test_defaults_that_win_and_hold_on_guards_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from benchmarks import tune_defaults

    base = ENTRY._replace(arch="cuda:90")
    names = ["B1 8k", "B16 8k", "window 1k of 128k B1", "window 1k of 32k B16", "B1 32k"]
    keys = {name: base._replace(G=n + 1) for n, name in enumerate(names)}
    best = {"BLOCK_N": 64}
    wins, loses_on_guard = {"B1 8k", *names[2:4]}, names[3]

    def tune(case: Any, *arguments: Any, **words: Any) -> Any:
        name, guard = case.name.partition(", guard")[:2]
        if guard:
            us = 11.0 if name == loses_on_guard else 10.05
            trials = (tuning.Trial({"BLOCK_N": 32}, 10.0), tuning.Trial(best, us))
            return tuning.TuningReport(keys[name], trials, None, 10.0, 10.0)
        won = name in wins
        if won:
            choices.record(keys[name], Choice(best, 8, 132, 8.0, 10.0))
        trials = (tuning.Trial({"BLOCK_N": 32}, 10.0),)
        return tuning.TuningReport(keys[name], trials, best if won else None, 10.0, 8.0)

    shipped, out = tmp_path / "shipped.json", tmp_path / "out.json"
    choices.dump(shipped, dict.fromkeys((keys["B16 8k"], base._replace(G=99)), CHOICE))
    monkeypatch.setattr(tune_defaults, "SHIPPED", shipped)
    monkeypatch.setattr(tune_defaults, "tune", tune)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    tune_defaults.main([*names, "--out", str(out)])
    found = choices.parse(out.read_bytes(), choices.MEASURED)
    # What is not measured stays; what does not win any more goes.
    assert set(found) == {keys["B1 8k"], keys["window 1k of 128k B1"], base._replace(G=99)}
    assert "3 choices in" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tune_defaults.parse(["no such case"])
