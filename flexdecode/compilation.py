"""How many kernels have been compiled: the number that must not grow while tokens are generated."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["compile_count"]

_KERNELS = "flexdecode.kernels."


def compile_count() -> int:
    """Count the kernel variants that this process has compiled, or loaded from Triton's cache.

    New lengths, batch sizes, closure numbers and values of captured tensors do not add to it; a mod
    of new structure, a new head dim or dtype does.

    Returns
    -------
    int
        Variants of all kernels over all devices; 0 under ``TRITON_INTERPRET=1``.

    Examples
    --------
    >>> before = compile_count()
    >>> # ... 100 decoding steps ...
    >>> compile_count() - before
    0
    """
    return sum(map(_variants, _kernels()))


def _kernels() -> list[Any]:
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith(_KERNELS):
            # Helpers that a module imports belong to the module that defines them.
            own = [x for x in vars(module).values() if getattr(x, "__module__", None) == name]
            found += [x for x in own if hasattr(x, "device_caches")]
    return found


def _variants(kernel: Any) -> int:
    # Triton keeps one tuple per device, the compiled variants by key first.
    return sum(len(cache[0]) for cache in kernel.device_caches.values())
