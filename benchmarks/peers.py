"""Unpack peers that travel as files: wheels, and FlashAttention-3 as one compressed library.

``python -m benchmarks.peers FROM``, before several benchmarks are started at a time, or ``--peers
FROM`` of each of them.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["unpack"]

# Which files a provider needs, as patterns; the others stay packed.
_FILES = {
    "fa3": ("_vllm_fa3_C.*.xz",),
    "flashinfer": ("flashinfer*.whl", "apache_tvm_ffi*.whl", "nvidia_cudnn_frontend*.whl"),
    "xformers": ("xformers*.whl",),
}


def unpack(source: Path, providers: list[str] | None = None) -> Path:
    """Unpack what is not there yet, into a folder for temporary files.

    Parameters
    ----------
    source : Path
        Folder with wheels and ``*.xz``.
    providers : list of str, optional
        Only what these need.

    Returns
    -------
    target : Path
        Libraries lie in it, packages in its folder ``site``.
    """
    target = Path(tempfile.gettempdir()) / "flexdecode-peers"
    target.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in _FILES if providers is None or name in providers]
    for path in (p for name in wanted for pattern in _FILES[name] for p in source.glob(pattern)):
        done = target / f"{path.name}.done"
        if done.exists():
            continue
        if path.suffix == ".xz":
            with lzma.open(path) as packed, (target / path.stem).open("wb") as library:
                shutil.copyfileobj(packed, library, 1 << 24)
        else:
            command = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            site = str(target / "site")
            run = subprocess.run(
                [sys.executable, *command, "--upgrade", "--target", site, str(path)]
            )
            if run.returncode:  # a peer that this machine cannot take must not end the run
                print(f"{path.name}: not installed", flush=True)
                continue
        done.touch()
    return target


if __name__ == "__main__":
    print(unpack(Path(sys.argv[1])))
