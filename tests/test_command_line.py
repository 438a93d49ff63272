"""``python -m flexdecode``: report, explain, bench, and rules written as text."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from flexdecode import choices, console, masks, tuning
from flexdecode.__main__ import environment, main
from flexdecode.bench import Shape
from flexdecode.rule_text import parse_rule

IDS = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0])
WITH_AND_WITHOUT_RICH = pytest.mark.parametrize("rich", [True, False])


def choose(monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(console, "has_rich", lambda: rich)


@WITH_AND_WITHOUT_RICH
def test_report_names_versions_device_and_backend(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, rich: bool
) -> None:
    choose(monkeypatch, rich)
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name, value in environment().items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(value)} *$", printed, re.MULTILINE)
    assert torch.__version__ in environment()["torch"]
    assert environment()["backend"] in ("auto is cpu", "auto is triton")


@WITH_AND_WITHOUT_RICH
def test_tables_hold_every_cell(capsys: Any, monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    choose(monkeypatch, rich)
    rows = [("first", "1", "x" * 50), ("second [red]", "22", "y")]
    console.print_table(rows, ("name", "count", "text"), title="A title " * 8)
    printed = capsys.readouterr().out
    for cell in ("name", "count", "A title " * 7, *rows[0], *rows[1]):
        assert cell in printed
    assert re.search(r"first +1 +x+ *\n", printed)


def test_plain_tables_on_a_terminal_name_the_extra(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    console.print_table([("a", "b")])
    assert "pip install 'flexdecode[cli]'" in capsys.readouterr().out


@WITH_AND_WITHOUT_RICH
def test_track_gives_every_item(monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    choose(monkeypatch, rich)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert list(console.track([3, 1, 2], "counting")) == [3, 1, 2]


def test_explain_a_shape_and_a_mask(capsys: Any, tmp_path: Any) -> None:
    arguments = "--kv-len 4096x2,300 --heads 8/2 --dim 64/32 --gpu H200".split()
    picture = []
    if console.importlib.util.find_spec("matplotlib"):
        picture = ["--picture", str(tmp_path / "plan.png")]
    assert main(["explain", "--mask", "causal & sliding_window(1000)", *arguments, *picture]) == 0
    printed = capsys.readouterr().out
    assert "q [3, 8, 1, 64], k [3, 2, 4096, 64], v [3, 2, 4096, 32], bfloat16" in printed
    assert re.search(r"active +38 ", printed)  # 8, 8 and 3 blocks for each of two key heads
    if picture:
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_bench_a_shape_and_a_mask(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexdecode.bench._microseconds", lambda call, device: (call(), 10.0)[1])
    arguments = "--batch 2 --kv-len 500 --heads 4/2 --dim 16 --device cpu --q-len 2".split()
    assert (
        main(["bench", "--mask", "sliding_window(64)", "--score", "softcap(30)", *arguments]) == 0
    )
    printed = capsys.readouterr().out
    assert "2 sequences of 500 keys, 2 queries each, 4/2 heads, head dim 16, float32" in printed
    for name in ("these rules", "no rule", "SDPA"):
        assert re.search(rf"{name}.* 10\.0 us .*MiB", printed)
    assert main(["bench", *"--kv-len 50,9 --heads 2/2 --dim 16 --device cpu".split()]) == 0
    printed = capsys.readouterr().out
    assert "unequally many keys" in printed and "these rules" not in printed


@WITH_AND_WITHOUT_RICH
def test_tune_a_shape_and_a_mask(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, rich: bool
) -> None:
    choose(monkeypatch, rich)
    rule, best = {"BLOCK_N": 64, "num_warps": 4}, {"BLOCK_N": 128, "num_warps": 8}
    key = choices.Key("cuda:90", *(64, 64, 4), *["float16"] * 3, 1, "uniform", 512, 8, 0, 0, False)
    asked: dict[str, Any] = {}

    def tune(*tensors: Any, **arguments: Any) -> Any:
        asked.update(arguments)
        trials = (
            tuning.Trial(rule, 10.0),
            tuning.Trial({"num_warps": 1}, note="fails, Error"),
            tuning.Trial(best, 7.9),
        )
        choices._own[key] = choices.Choice(best, 8, 132, 8.0, 10.1)
        return tuning.TuningReport(key, trials, best, 10.1, 8.0)

    monkeypatch.setattr(choices, "_own", {})
    monkeypatch.setattr(tuning, "tune", tune)
    tensors = Shape.tensors
    monkeypatch.setattr(Shape, "tensors", lambda shape, device: tensors(shape, "cpu", empty=True))
    out = tmp_path / "tuned.json"
    shape = "--batch 2 --kv-len 500 --heads 4/2 --dim 16 --seconds 3".split()
    tuned = ["tune", "--mask", "causal", *shape, "--device", "cuda", "--out", str(out)]
    assert main(tuned) == 0
    printed = capsys.readouterr().out
    assert re.search(r"10\.0 us .*64 .* 4 .* the rules' choice", printed)
    assert re.search(r"7\.9 us .*128 .* 8 .* best, 8\.0 us against 10\.1 us", printed)
    assert re.search(r"- .* 1 .* fails, Error", printed)
    assert f"1 choices in {out}" in printed
    assert asked["kv_len"] == 500 and asked["seconds"] == 3.0 and asked["score_mod"] is None
    assert list(choices.parse(out.read_bytes(), "test")) == [key]
    assert main(["tune", *shape, "--device", "cpu"]) == 1
    assert "tune measures on a GPU, and cpu is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", masks.causal),
        ("causal & sliding_window(5)", masks.causal & masks.sliding_window(5)),
        ("~(bidirectional | chunked(size=4))", ~(masks.bidirectional | masks.chunked(4))),
        ("documents([0, 0, 1, 1, 1, 0, 0, 0])", masks.documents(IDS)),
        ("neighborhood((2, 4), (1, 3))", masks.neighborhood((2, 4), (1, 3))),
        (
            "tree(create_ancestors([-1, 0, 0]), 5)",
            masks.tree(masks.create_ancestors([-1, 0, 0]), 5),
        ),
    ],
)
def test_rules_are_read_from_text(text: str, mask: Any) -> None:
    b, h, q_idx, kv_idx = (
        torch.tensor(0),
        torch.tensor(0),
        torch.arange(8)[:, None],
        torch.arange(8),
    )
    assert torch.equal(parse_rule(text)(b, h, q_idx, kv_idx), mask(b, h, q_idx, kv_idx))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "'nothing' is no name of flexdecode.masks"),
        ("causal and causal", "is no name"),
        ("__import__('os')", "is no name"),
        ("causal.__class__", "is no name"),
        ("sliding_window(0)", "window: expected at least 1"),
        ("sliding_window()", "missing 1 required positional argument"),
        ("chunked(*[1])", "is no name"),
        ("causal &", "expected an expression"),
        ("3", "expected a mask or score rule, got '3'"),
        ("[1, 2]", "expected a mask or score rule"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_rule(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--mask", "nothing"], "is no name of flexdecode.masks"),
        (["bench", "--kv-len", "many"], "kv-len: expected a number of at least 1, got 'many'"),
        (["explain", "--heads", "0"], "heads: expected a number of at least 1"),
        (["explain", "--dtype", "int8"], "dtype: expected float32, float16 or bfloat16"),
    ],
)
def test_bad_arguments_are_named(capsys: Any, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
