"""Triton's driver for a GPU that is not there: kernels compile, launches are counted.

Each scenario runs attention calls through the ordinary launchers, in a process of its own (see
`forks`), and returns what Triton was asked for.
"""

import atexit
import copy
import hashlib
import json
import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton import knobs
from triton.runtime import driver

from flexdecode.kernels import compiling, launch, triton_key
from flexdecode.kernels.call import Mod
from flexdecode.kernels.launch import decode
from tests.aot_variants import TARGETS, Variant, as_if_on, causal_mask, make_call

TARGET, DEVICE = TARGETS["cuda:90"]
CALL = Variant(block=(128, 128), mask="causal", dims=(64, 64))


class FakeDriver:
    """What Triton asks of a driver."""

    def __init__(self, shared_memory=DEVICE.shared_memory):
        self.compiled, self.launchers, self.launched = [], [], []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared_memory},
            load_binary=lambda name, *_: (name, name, 32, 0, 1024),
            unload_module=lambda module: None,
        )
        self.launcher_cls = self.launcher
        knobs.compilation.listener = self.listen
        driver.set_active(self)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGET

    def listen(self, src, cache_hit, **_):
        self.compiled.append([src.name, cache_hit])

    def launcher(self, src, metadata):
        """Triton builds the text; whoever asks for the same text finds what was built."""
        try:
            from triton.backends.nvidia.driver import make_launcher
        except ImportError:  # later versions build nothing here
            text = repr(src.signature)
        else:
            text = make_launcher(src.constants, src.signature, metadata.tensordesc_meta)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.launchers.append([src.name, digest, threading.current_thread().name])
        return lambda *arguments: self.launched.append(src.name)

    def seen(self):
        return {
            "compiled": sorted(self.compiled),
            "launchers": sorted(self.launchers),
            "launched": list(self.launched),
        }


def twice():
    """Two calls that look alike."""
    found = FakeDriver()
    for _ in range(2):
        decode(*make_call(CALL, DEVICE))
    return found.seen()


def side_by_side():
    """Both kernels compile, and both launchers are built, while the others do."""
    FakeDriver()
    meeting = threading.Barrier(4)
    build, real = compiling._build_launcher, triton.compiler.compile
    wait = 60

    def compile(*args, **kwargs):
        meeting.wait(wait)
        return real(*args, **kwargs)

    def build_launcher(*args):
        meeting.wait(wait)
        build(*args)

    with (
        mock.patch.object(triton.compiler, "compile", compile),
        mock.patch.object(compiling, "_build_launcher", build_launcher),
        mock.patch.object(os, "cpu_count", lambda: 4),
    ):
        decode(*make_call(CALL, DEVICE))
    return {"broken": meeting.broken}


def lazily(rule, **arguments):
    """Call attention with a lazy mask."""
    from flexdecode import attention, create_block_mask

    q = torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 2, 2, 8192, 64, dtype=torch.bfloat16)
    with as_if_on(DEVICE):
        attention(q, k, v, block_mask=create_block_mask(rule), backend="triton", **arguments)


def lazy():
    """The kernel that fills a mask's tables compiles while those that read them do."""
    found = FakeDriver()
    meeting = threading.Barrier(3)
    real = triton.compiler.compile

    def compile(*args, **kwargs):
        meeting.wait(60)
        return real(*args, **kwargs)

    with (
        mock.patch.object(triton.compiler, "compile", compile),
        mock.patch.object(os, "cpu_count", lambda: 6),
    ):
        for width in (100, 200):
            lazily(lambda b, h, q_idx, kv_idx, width=width: q_idx - kv_idx < width)
    return {"broken": meeting.broken, **found.seen()}


def lazy_otherwise():
    """What reads the tables is another kernel first, or cannot be laid out beforehand."""
    found = FakeDriver()
    seen = {}
    lazily(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) * (h + 1) < 100)
    seen["by head"] = list(found.launched)
    found.launched.clear()
    options = {"deterministic": "batch_invariant"}
    lazily(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 > 0, kernel_options=options)
    seen["invariant"] = list(found.launched)
    found.launched.clear()
    with mock.patch.object(launch, "launches_of", side_effect=RuntimeError):
        lazily(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 5 > 0)
    seen["failed"] = list(found.launched)
    return seen


def longer_later():
    """A call of one split, of a cache whose longer rows will be split."""
    found = FakeDriver()
    call, config = make_call(CALL, DEVICE)
    assert config.num_splits > 1
    config = replace(config, num_splits=1, splits_later=True)
    decode(call, config)
    short = found.seen()
    decode(call, replace(config, num_splits=2))
    return {"short": short, "long": found.seen()}


@triton.jit
def faulty_mask(b, h, q_idx, kv_idx, lane, args):
    return kv_idx <= no_such_name  # noqa: F821


def faulty():
    """A kernel that does not compile, and then one that does."""
    found = FakeDriver()
    call, config = make_call(CALL, DEVICE)
    try:
        decode(replace(call, mask_mod=Mod(faulty_mask)), config)
        error = ""
    except Exception as raised:
        error = type(raised).__name__
        while raised.__cause__ is not None:
            raised = raised.__cause__
        error = f"{error} for {raised}"
    decode(replace(call, mask_mod=Mod(causal_mask)), config)
    return {"error": error, **found.seen()}


def failed_before():
    """The cache could not be written at first."""
    found = FakeDriver()
    own = os.environ["TRITON_CACHE_DIR"]
    errors = []
    for place in ("/dev/null", "/dev/null", own):
        os.environ["TRITON_CACHE_DIR"] = place
        try:
            decode(*make_call(CALL, DEVICE))
        except OSError as raised:
            errors.append(type(raised).__name__)
    return {"errors": errors, **found.seen()}


def without_threads():
    """No more threads can be started."""
    found = FakeDriver()
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no new thread")):
        decode(*make_call(CALL, DEVICE))
    return found.seen()


def at_exit():
    """The first call of a process is its last."""
    found = FakeDriver()
    atexit.register(lambda: (decode(*make_call(CALL, DEVICE)), print(json.dumps(found.seen()))))
    return {}


def many_threads():
    """Masks of one's own in every thread, all at once."""
    found = FakeDriver()
    start = threading.Barrier(4)
    errors = []

    def work(mask):
        start.wait(60)
        try:
            for _ in range(2):
                decode(*make_call(replace(CALL, mask=mask), DEVICE))
        except Exception as raised:
            errors.append(repr(raised))

    threads = [threading.Thread(target=work, args=(mask,)) for mask in ("causal", "documents") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = {id(x) for found in launch._compiled.values() for x, _ in found.values()}
    return {"errors": errors, "kept": len(kept), "launched": sorted(found.launched)}


def copied():
    """Copies of a bound mask, before and after it was used."""
    from flexdecode import attention, create_block_mask

    found = FakeDriver()
    kv_len = torch.tensor([200, 300])
    rule = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) * (h + 1) < 100)
    q = torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 2, 2, 512, 64, dtype=torch.bfloat16)
    counts = []
    with as_if_on(DEVICE):
        mask = rule.bind(batch=2, heads=8, q_len=1, kv_len=kv_len, kv_capacity=512)
        for step in ("bound", "updated", "called"):
            if step != "bound":
                mask.update()
            if step == "called":
                attention(q, k, v, block_mask=mask, backend="triton")
            other = copy.deepcopy(mask)
            found.launched.clear()
            for _ in range(2):
                other.update()
                attention(q, k, v, block_mask=other, backend="triton")
            counts.append(len(found.launched))
            assert other.tables.kv_indices.data_ptr() != mask.tables.kv_indices.data_ptr()
    return {"counts": counts}


def within_another():
    """A caller who compiles several kernels at once himself."""
    from concurrent.futures import ThreadPoolExecutor

    found = FakeDriver()
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        decode(*make_call(CALL, DEVICE))
    return found.seen()


def little_memory():
    """A device that holds fewer stages than were planned for it."""
    found = FakeDriver(shared_memory=40_000)
    _, config = make_call(CALL, DEVICE)
    plan, _ = decode(*make_call(CALL, DEVICE))
    return {"planned": config.num_stages, "stages": plan.config.num_stages, **found.seen()}


def start():
    """What is done once in a process, during two calls."""
    FakeDriver()
    meeting = threading.Barrier(2)
    done = []

    def reach():
        done.append("driver")
        meeting.wait(60)

    def key():
        done.append("hash")
        meeting.wait(60)

    with (
        mock.patch.object(compiling, "_reach_driver", reach),
        mock.patch.object(triton_key, "prepare", key),
    ):
        for dims in ((64, 64), (128, 128)):
            decode(*make_call(replace(CALL, dims=dims), DEVICE))
    return {"done": sorted(done), "broken": meeting.broken}


def without_driver():
    """A machine without any: Triton's own error, as if nothing were done beforehand."""
    try:
        decode(*make_call(CALL, DEVICE))
    except RuntimeError as raised:
        return {"error": str(raised)}


def watched():
    """Stages as the benchmark of first calls finds them."""
    from benchmarks import first_call

    FakeDriver()
    clock = first_call._Clock()
    first_call._watch_triton(clock)
    decode(*make_call(CALL, DEVICE))
    return {"stages": clock.stages}
