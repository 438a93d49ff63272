"""Compile kernels side by side, and the launcher of each beside it.

Triton compiles a kernel when it is first launched, and only then has a C compiler build the code
that launches it; then the same for the next kernel. Most of that time is spent outside Python. So
is the time for what Triton does once in a process: a C compiler builds its access to the driver,
and it hashes its own 400 MiB, where `triton_key` does not know the result.
"""

import contextlib
import contextvars
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton import AsyncCompileMode, FutureKernel
from triton.compiler import ASTSource
from triton.runtime import driver

from flexdecode.kernels import ahead, triton_key

_lock = threading.Lock()
_starting: list[threading.Thread] = []


class Wanted(NamedTuple):
    """A launch to come, as ``kernel.run`` takes it.

    Attributes
    ----------
    kernel : triton.JITFunction
    grid : (int, int, int)
    arguments : sequence
    keywords : dict
        Compile-time constants and options.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Sequence[Any]
    keywords: dict[str, Any]


def compile_together(wanted: Sequence[Wanted]) -> None:
    """Have Triton compile what these launches run, or load it from its disk cache; launch nothing.

    A launch with the same arguments then finds its kernel, and its launcher in the disk cache. What
    fails here is left to that launch, which tries again and raises the error. What a call is known
    to launch later is compiled too, see `ahead`.

    Parameters
    ----------
    wanted : sequence of Wanted
        What takes longest to compile first.
    """
    if not wanted or not all(hasattr(each.kernel, "device_caches") for each in wanted):
        return  # the interpreter compiles nothing
    with contextlib.suppress(Exception):  # no thread can be started at exit, or past a limit
        starting = _start()
        with contextlib.suppress(Exception):  # raised again where it is laid out for its launch
            wanted = [*ahead.take(), *wanted]
        for thread in starting:
            thread.join()
        # On few processors the first must not wait for what the others want.
        threads = max(min(2 * len(wanted), os.cpu_count() or 1), 2)
        with ThreadPoolExecutor(threads, "flexdecode compiles") as pool:
            # In the caller's context another such mode may be active.
            contextvars.Context().run(_compile, pool, wanted)


def _start() -> list[threading.Thread]:
    """Begin side by side what Triton would do one after the other before the first kernel."""
    with _lock:
        if not _starting:
            for act in (_reach_driver, _hash_triton):
                thread = threading.Thread(target=act, name="flexdecode starts")
                thread.start()
                _starting.append(thread)
        return _starting


def _reach_driver() -> None:
    with contextlib.suppress(Exception):  # the next use raises it again, where it can be caught
        _ = driver.active.utils


def _hash_triton() -> None:
    with contextlib.suppress(Exception):
        triton_key.prepare()


def _compile(pool: ThreadPoolExecutor, wanted: Sequence[Wanted]) -> None:
    device = driver.active.get_current_device()  # of this thread
    begun: dict[FutureKernel, Wanted] = {}
    with AsyncCompileMode(pool, ignore_errors=True):
        for each in wanted:
            found = each.kernel.run(*each.arguments, grid=each.grid, warmup=True, **each.keywords)
            # Neither compiled before, nor wanted twice.
            if isinstance(found, FutureKernel) and found not in begun:
                begun[found] = each
                pool.submit(_build_launcher, each, device)
    for found, each in begun.items():
        try:
            found.result()
        except Exception:
            _forget(each.kernel.device_caches[device][0], found)


def _forget(kernels: dict[Any, Any], failed: FutureKernel) -> None:
    """Let the next launch compile again: Triton 3.8 would raise the same error ever after."""
    for key, kept in list(kernels.items()):
        if kept is failed:
            kernels.pop(key, None)


def _build_launcher(wanted: Wanted, device: int) -> None:
    """Put the launcher into Triton's disk cache. It depends on the types of the arguments alone."""
    kernel, keywords = wanted.kernel, wanted.keywords
    _, _, target, backend, bind = kernel.device_caches[device]
    bound, kinds, options = bind(*wanted.arguments, **keywords)
    _, *source = kernel._pack_args(backend, keywords, bound, kinds, options)
    # What a launcher keeps of its kernel, which is not there yet: this one is never called.
    metadata = SimpleNamespace(
        warp_size=target.warp_size,
        tensordesc_meta=None,
        num_ctas=1,
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )
    driver.active.launcher_cls(ASTSource(kernel, *source), metadata)
