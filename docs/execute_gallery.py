"""Run masks_gallery.ipynb and store its pictures in it, with few colors: ``make gallery``.

The overview goes to ``_static/masks.png`` as well.
"""

from __future__ import annotations

import base64
import io
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

LIMIT = 180.0  # seconds that the whole notebook may take


def few_colors(png: str) -> str:
    """Return a PNG in base64 with a palette of 128 colors: a third of the size."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    stream = io.BytesIO()
    image.quantize(128, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    return base64.b64encode(stream.getvalue()).decode()


def main() -> int:
    """Run the notebook beside this file; 1 if it took too long."""
    path = Path(__file__).with_name("masks_gallery.ipynb")
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}).execute()
    seconds = time.perf_counter() - start
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the clock, which differ at every run
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = few_colors(data["image/png"])
                if "overview" in cell.metadata.get("tags", ()):
                    overview = base64.b64decode(data["image/png"])
                    (path.parent / "_static" / "masks.png").write_bytes(overview)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
    print(f"{path.name}: {seconds:.0f} s, {path.stat().st_size / 2**20:.1f} MiB")
    return int(seconds > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
