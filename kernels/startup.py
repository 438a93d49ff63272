"""What Triton does once in a process, begun as early as possible."""

import importlib
import threading

import torch
from triton import knobs
from triton.runtime import driver

_lock = threading.Lock()
_started = False
_MODULES = "decode reduce tables interval_tables modmath interval_math".split()


def start() -> None:
    """Make Triton ready for the first kernel, where a GPU is to run it; at the first call only.

    Triton has a C compiler build its access to the driver, hashes its own 400 MiB, and looks at the
    source of every kernel. The compiler works on its own while the rest takes this thread's time.
    """
    global _started
    if _started:
        return
    with _lock:
        if not _started and not knobs.runtime.interpret and torch.cuda.is_available():
            thread = threading.Thread(target=_reach_driver, name="flexdecode start")
            thread.start()
            for module in _MODULES:
                importlib.import_module(f"flexdecode.kernels.{module}")
            _hash_triton()
            thread.join()
        _started = True


def _reach_driver() -> None:
    try:
        _ = driver.active.utils
    except Exception:  # the first launch raises it again, where it can be caught
        return


def _hash_triton() -> None:
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # of no other use: it remembers the hash
        return
    triton_key()
