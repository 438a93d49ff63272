"""``python -m flexdecode``: report the environment; ``python -m flexdecode demo``: try it out."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

import torch

from flexdecode.backends import choose_backend

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
    for name in ("TRITON_INTERPRET", "FLEXDECODE_CHECK"):
        if name in os.environ:
            facts[name] = os.environ[name]
    facts["transformers"] = _version("transformers")
    facts["matplotlib"] = _version("matplotlib")
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
    parser = argparse.ArgumentParser(prog="python -m flexdecode", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    demo = commands.add_parser("demo", help="a few masks on random tensors: error, time, picture")
    demo.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    demo.add_argument("--keys", type=int, default=16384, help="tokens in the cache")
    demo.add_argument("--picture", default="flexdecode-demo.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    if options.command == "demo":
        from flexdecode.demo import run

        return run(options.device, options.keys, options.picture)
    for name, value in environment().items():
        print(f"{name:<17} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
