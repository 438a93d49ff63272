"""Where kernels go, the current device, which need not be that of the tensors; and when."""

import contextlib
from typing import Any

import torch


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` the current one, where it is a GPU and is not already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Return True while a graph is captured: what is launched is written in its replays alone."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
