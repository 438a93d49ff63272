"""The first kernel begins its way through Triton's compiler while Triton itself starts.

Triton compiles nothing before it has hashed itself and a C compiler has built its access to the
driver. The way from Python to TTIR, its first form of a kernel, needs neither: a thread goes it
meanwhile, and the compiler is handed the TTIR. Whatever fails here, or is not exactly what the
compiler asks for, it makes itself as ever.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

# So long the thread that hashes would wait, after each MiB, for the one that is in Python.
_SWITCH = 2e-5  # s

# A kernel, what its TTIR is made for, and that; none or one.
_begun: list[tuple[Any, Future[tuple[Any, Any]]]] = []
os.register_at_fork(after_in_child=_begun.clear)  # its thread is not there


class Source(ASTSource):  # type: ignore[misc]
    """What Triton compiles, whose TTIR may be there already."""

    def make_ir(self, target: GPUTarget, options: Any, *others: Any) -> Any:
        """Return the TTIR, to be changed by the compiler's passes."""
        with contextlib.suppress(Exception):  # what failed there fails again below
            for begun in [begun for begun in _begun if begun[0] is self.fn]:
                made_for, module = begun[1].result()
                if made_for == _identity(self, target, options):
                    _begun.remove(begun)  # for one use: a second thread would fail here
                    return module
        return super().make_ir(target, options, *others)


def begin(wanted: Any) -> None:
    """Start a thread that makes the TTIR of a launch."""
    # AMD's targets have names, known to the driver; a C compiler and the hash keep two processors.
    if torch.version.hip is not None or (os.cpu_count() or 1) < 3:
        return
    with contextlib.suppress(Exception):  # no thread can be started, or there is no such device
        target = _target()
        pool = ThreadPoolExecutor(1, "flexdecode begins")
        _begun.append((wanted.kernel, pool.submit(_make, wanted, target)))
        pool.shutdown(wait=False)


@contextlib.contextmanager
def handed_over(device: int) -> Iterator[None]:
    """Have Triton's compiler take what was begun, and drop it in the end."""
    kernels = [kernel for kernel, _ in _begun]
    for kernel in kernels:
        _ = kernel.device_caches[device]  # sets what is set here, too
        kernel.ASTSource = Source
    try:
        yield
    finally:
        for kernel in kernels:
            kernel.ASTSource = ASTSource
            _begun.clear()


def source_of(wanted: Any, backend: Any, bind: Any) -> tuple[ASTSource, Any]:
    """Return what Triton compiles for a launch, and its options."""
    kernel, keywords = wanted.kernel, wanted.keywords
    bound, kinds, options = bind(*wanted.arguments, **keywords)
    options, *source = kernel._pack_args(backend, keywords, bound, kinds, options)
    return ASTSource(kernel, *source), options


def _target() -> GPUTarget:
    """Return what Triton's driver will say; of another kind of device, nothing is handed over."""
    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", major * 10 + minor, 32)


def _make(wanted: Any, target: GPUTarget) -> tuple[Any, Any]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(_SWITCH, interval))
    try:
        backend, kernel = make_backend(target), wanted.kernel
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        source, options = source_of(wanted, backend, bind)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(target, options, functions, modules, context)
        return _identity(source, target, options), module
    finally:
        sys.setswitchinterval(interval)


def _identity(source: ASTSource, target: GPUTarget, options: Any) -> tuple[Any, ...]:
    """Return what Triton's disk cache tells kernels apart by, within a process."""
    return source.hash(), target, repr(options)
