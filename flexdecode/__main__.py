"""``python -m flexdecode``: report the environment; demonstrate, explain, time or tune a call."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flexdecode.backends import choose_backend
from flexdecode.console import print_table
from flexdecode.rule_text import parse_rule

if TYPE_CHECKING:
    from flexdecode.bench import Shape

__all__ = ["environment", "main"]


def environment() -> dict[str, str]:
    """Versions, devices and the backend that ``"auto"`` means here, by name.

    Returns
    -------
    dict of str
        In reading order.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "flexdecode": _version("flexdecode"),
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}{_toolkit()}",
        "triton": _version("triton"),
    }
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            facts[f"cuda:{index}"] = (
                f"{card.name}, capability {card.major}.{card.minor}, "
                f"{card.multi_processor_count} processors, {card.total_memory / 2**30:.0f} GiB"
            )
    else:
        facts["cpu"] = f"{torch.get_num_threads()} threads, no GPU"
    facts["backend"] = f"auto is {choose_backend('auto', device)}"
    for name in ("TRITON_INTERPRET", "FLEXDECODE_CHECK", "FLEXDECODE_TRITON_KEY"):
        if name in os.environ:
            facts[name] = os.environ[name]
    for package in ("transformers", "matplotlib", "rich"):
        facts[package] = _version(package)
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed" if package != "flexdecode" else "from a checkout"


def _toolkit() -> str:
    if torch.version.hip:
        return f", HIP {torch.version.hip}"
    return f", CUDA {torch.version.cuda}" if torch.version.cuda else ""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        print_table(environment().items())
        return 0
    if options.command == "demo":
        from flexdecode.demo import run

        return run(options.device, options.keys, options.picture)
    try:
        shape = _shape(options)
        mask, score = (
            None if text is None else parse_rule(text, options.device)
            for text in (options.mask, options.score)
        )
    except ValueError as error:
        parser.error(str(error))
    if options.command == "bench":
        from flexdecode.bench import run as bench

        return bench(shape, mask, score, options.device)
    if options.command == "tune":
        return _tune(shape, mask, score, options)
    return _explain(shape, mask, score, options)


def _parser() -> argparse.ArgumentParser:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m flexdecode", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    demo = commands.add_parser("demo", help="a few masks on random tensors: error, time, picture")
    demo.add_argument("--device", default=here)
    demo.add_argument("--keys", type=int, default=16384, help="tokens in the cache")
    demo.add_argument("--picture", default="flexdecode-demo.png", help="where the picture goes")
    explain = commands.add_parser("explain", help="what a call reads, and who would do the work")
    explain.add_argument("--gpu", help="A100, H100, H200, B200 or MI300X; default: the one here")
    explain.add_argument("--picture", help="draw the shares of the work into this file")
    explain.set_defaults(device="cpu", default_dtype="bfloat16")  # nothing is computed
    bench = commands.add_parser("bench", help="time a call on this machine")
    bench.add_argument("--device", default=here)
    bench.set_defaults(default_dtype="bfloat16" if here == "cuda" else "float32")
    tune = commands.add_parser("tune", help="measure configurations of a call on this GPU")
    tune.add_argument("--device", default=here)
    tune.add_argument("--out", help="add what wins to this file; flexdecode.tuning.load reads it")
    tune.add_argument("--seconds", type=float, help="begin no further candidate after that time")
    tune.set_defaults(default_dtype="bfloat16")
    for command in (explain, bench, tune):
        command.add_argument(
            "--mask", help="a rule of flexdecode.masks: 'causal & sliding_window(1024)'"
        )
        command.add_argument("--score", help="a score rule of flexdecode.masks: 'softcap(50)'")
        command.add_argument("--batch", type=int, default=1, help="sequences")
        command.add_argument(
            "--kv-len", default="16384", help="keys of all, or a list: '2048x31,131072'"
        )
        command.add_argument("--q-len", type=int, default=1, help="queries of each sequence")
        command.add_argument("--heads", default="32/8", help="query heads / key heads")
        command.add_argument("--dim", default="128", help="head dim, or keys' / values'")
        command.add_argument("--dtype", help="float32, float16 or bfloat16")
    return parser


def _shape(options: argparse.Namespace) -> Shape:
    from flexdecode.bench import Shape

    lengths: list[int] = []
    for part in options.kv_len.split(","):
        length, _, times = part.partition("x")
        lengths += [_positive("kv-len", length)] * (_positive("kv-len", times) if times else 1)
    if len(lengths) == 1:
        lengths *= options.batch
    Hq, _, Hkv = options.heads.partition("/")
    D, _, Dv = options.dim.partition("/")
    dtype = options.dtype or options.default_dtype
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
    return Shape(
        lengths=tuple(lengths),
        q_len=options.q_len,
        Hq=_positive("heads", Hq),
        Hkv=_positive("heads", Hkv or Hq),
        D=_positive("dim", D),
        Dv=_positive("dim", Dv or D),
        dtype=getattr(torch, dtype),
    )


def _positive(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{name}: expected a number of at least 1, got {text!r}")
    return int(text)


def _explain(shape: Shape, mask: Any, score: Any, options: argparse.Namespace) -> int:
    from flexdecode import create_block_mask, explain

    report = explain(
        *shape.tensors("cpu", empty=True),
        kv_len=shape.kv_len("cpu"),
        score_mod=score,
        block_mask=None if mask is None else create_block_mask(mask),
        device_name=options.gpu,
    )
    print(report)
    if options.picture:
        from flexdecode.visualize import plot_plan

        plot_plan(report).figure.savefig(options.picture, dpi=150)
        print(f"Picture of who reads what: {options.picture}")
    return 0


def _tune(shape: Shape, mask: Any, score: Any, options: argparse.Namespace) -> int:
    from flexdecode import create_block_mask, tuning

    if torch.device(options.device).type != "cuda":
        print(f"tune measures on a GPU, and {options.device} is none", file=sys.stderr)
        return 1
    if options.out and Path(options.out).exists():
        tuning.load(options.out)
    torch.manual_seed(0)
    report = tuning.tune(
        *shape.tensors(options.device),
        kv_len=shape.kv_len(options.device),
        score_mod=score,
        block_mask=None if mask is None else create_block_mask(mask),
        seconds=options.seconds,
        progress=lambda trial: print(trial, file=sys.stderr) if sys.stderr.isatty() else None,
    )
    rows = []
    for trial in report.trials:
        us = "-" if trial.us is None else f"{trial.us:,.1f} us"
        note = "the rules' choice" if trial is report.trials[0] else trial.note
        if trial.options == report.best:
            note = f"best, {report.best_us:,.1f} us against {report.rule_us:,.1f} us"
        values = (str(trial.options.get(name, "")) for name in tuning.TUNABLE)
        rows.append((us, *values, note))
    print_table(rows, ("one call", *tuning.TUNABLE, ""), title=f"{shape} on {options.device}")
    if report.best is None:
        print("No candidate beats the rules by more than 2 %.")
    if options.out:
        print(f"{tuning.save(options.out)} choices in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
