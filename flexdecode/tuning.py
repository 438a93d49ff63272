"""Measured configurations: `tune` times a call on its own tensors; `load` and `save` keep the best.

Nothing is tuned, read or written unless it is asked for, but for the defaults that the package
ships and the file that the environment variable ``FLEXDECODE_TUNING`` names: both are read when the
first configuration is chosen.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexdecode import choices
from flexdecode.api import prepare
from flexdecode.backends import load_backend
from flexdecode.checks import check_options
from flexdecode.choices import clear, load, save
from flexdecode.kernels.configs import LEGAL, DecodeConfig
from flexdecode.kernels.sizes import ceil_div
from flexdecode.kernels.splits import MAX_SPLITS
from flexdecode.plan import TUNABLE, device_of, is_invariant, lists_of, plan_by_rules, tuning_key

if TYPE_CHECKING:
    from flexdecode.choices import Key
    from flexdecode.problem import Request, Result
    from flexdecode.quantized_tensor import QuantizedTensor

__all__ = ["TUNABLE", "Trial", "TuningReport", "clear", "load", "neighbours", "save", "tune"]

MIN_GAIN = 0.02  # of the time; less may be noise
_ROUNDS = 3  # in which the best candidate and the rules' choice are measured again in turn
_ERROR_LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
_TF32_ERROR = 5e-3
_ARGUMENTS = (
    *("score_mod", "block_mask", "scale", "kv_len", "kv_start", "q_offset", "page_table"),
    *("cu_seqlens_q", "bias", "sinks", "return_aux", "kernel_options"),
)
Options = dict[str, int]


@dataclass(frozen=True)
class Trial:
    """One candidate.

    Attributes
    ----------
    options : dict of str to int
        Of ``kernel_options``.
    us : float or None, microseconds
        One call; None where it was not measured.
    note : str
        Why it was not measured, or cannot be used.
    """

    options: Options
    us: float | None = None
    note: str = ""

    def __str__(self) -> str:
        names = ", ".join(f"{name} {value}" for name, value in self.options.items())
        time = "-" if self.us is None else f"{self.us:.1f} us"
        return f"{time:>12}  {names}" + (f": {self.note}" if self.note else "")


@dataclass(frozen=True)
class TuningReport:
    """What `tune` measured, and what it made of that.

    Attributes
    ----------
    key : Key
        The calls that it is for.
    trials : tuple of Trial
        The rules' own choice first.
    best : dict of str to int, or None
        What is used from now on; None where the rules' choice is not beaten by more than noise.
    rule_us, best_us : float, microseconds
        Of the rules' choice, and of what is used from now on, measured in turn.
    """

    key: Key
    trials: tuple[Trial, ...]
    best: Options | None
    rule_us: float
    best_us: float

    def __str__(self) -> str:
        lines = [str(trial) for trial in self.trials]
        lines[0] += ": by the rules"
        if self.best is None:
            lines.append(f"The rules' choice stays, {self.rule_us:.1f} us.")
        else:
            lines.append(f"{Trial(self.best, self.best_us)}: from now on")
        return "\n".join(lines)


def tune(
    q: Tensor | QuantizedTensor,
    k: Tensor | QuantizedTensor,
    v: Tensor | QuantizedTensor,
    *,
    candidates: Sequence[Mapping[str, int]] | None = None,
    repeats: int = 15,
    seconds: float | None = None,
    progress: Callable[[Trial], object] | None = None,
    **arguments: Any,
) -> TuningReport:
    """Time configurations on a call's own tensors, tables and lengths, and keep the best.

    Calls that look alike take it from then on, in this process and, through `save` and `load`, in
    others. A CUDA graph that was captured before keeps the configuration that it has.

    Parameters
    ----------
    q, k, v
        As `attention` takes them, on a GPU. Nothing is written to them.
    candidates : sequence of dicts, optional
        Each with some of ``BLOCK_M``, ``BLOCK_N``, ``num_warps``, ``num_stages`` and
        ``num_splits``. Default: `neighbours` of the rules' choice, at most 16.
    repeats : int, default 15
        Timed replays of the CUDA graph of a candidate.
    seconds : float, optional
        No further candidate is begun after that time. Most of it is compilation.
    progress : callable (Trial) -> any, optional
        Told of each trial as it ends.
    **arguments
        The other arguments of `attention`; ``kernel_options`` without those that are tuned.

    Returns
    -------
    TuningReport

    Raises
    ------
    ValueError, TypeError
        What `attention` would raise; q is not on a GPU; an option would be tuned that
        ``kernel_options`` fixes.

    Notes
    -----
    Tables are made once, outside the clock. Between two calls the L2 cache is swept by reading
    something else, since a model reads other keys and values in between; the time of the sweep is
    taken off. A candidate is left out if it fails, or if its result differs from that of the rules'
    choice by more than rounding. It is kept if it beats the rules by more than 2 % when both are
    measured again in turn.
    """
    request = _prepared(q, k, v, arguments)
    if request.problem.device.type != "cuda":
        raise ValueError(f"q: expected a tensor on a GPU to tune, got {request.problem.device}")
    with torch.cuda.device(request.problem.device), torch.no_grad():
        clock = _Clock(request.problem.device, repeats)
        return _tune(request, candidates, clock.microseconds, seconds, progress)


def neighbours(config: DecodeConfig, programs: int, block: int = 0) -> list[Options]:
    """List configurations near a given one, the most promising first.

    Parameters
    ----------
    config : DecodeConfig
    programs : int
        Programs that one split of each row makes.
    block : int
        Keys of a block of the tables, or 0; steps are not made longer than that.

    Returns
    -------
    list of dict
        Complete: all tuned options, but ``num_splits`` only where shares are not balanced.
    """
    base = _options_of(config)
    N, warps, stages = config.BLOCK_N, config.num_warps, config.num_stages
    splits = base.get("num_splits")
    moves: list[Options] = []
    if splits is None:
        moves += [{"num_splits": max(ceil_div(config.processors, programs), 1)}]
    elif splits == 1:
        moves += [{"num_splits": 2}]
    else:
        moves += [{"num_splits": splits * 2}, {"num_splits": splits // 2}]
    moves += [
        {"BLOCK_N": N * 2, "num_stages": max(stages - 1, 2)},
        {"BLOCK_N": N // 2},
        {"num_warps": warps * 2},
        {"num_stages": stages + 1},
        {"num_stages": stages - 1},
        {"num_warps": warps // 2},
        {"BLOCK_N": N * 2, "num_warps": warps * 2},
        {"BLOCK_N": N // 2, "num_stages": stages + 1},
        {"BLOCK_N": N // 2, "num_stages": stages * 2},  # as many bytes in flight
        {"BLOCK_N": N * 2},
        {"BLOCK_N": N // 2, "num_warps": warps // 2},
        {"BLOCK_N": N * 2, "num_warps": warps * 2, "num_stages": max(stages - 1, 2)},
    ]
    if splits is not None:
        two = {"num_splits": splits * 2}
        moves += [
            two | {"num_stages": max(stages - 1, 2)},
            two | {"BLOCK_N": N // 2},
            {"num_splits": splits * 3 // 2},
        ]
    if config.BLOCK_M > 32:
        moves.append({"BLOCK_M": config.BLOCK_M // 2})
    found = [base | move for move in moves]
    legal = [options for options in found if _is_legal(options, block)]
    return [options for n, options in enumerate(legal) if options not in [base, *legal[:n]]][:16]


def _is_legal(options: Options, block: int) -> bool:
    if block and options["BLOCK_N"] > max(block, 16):
        return False
    if not 1 <= options.get("num_splits", 1) <= MAX_SPLITS:
        return False
    return all(options[name] in values for name, values in LEGAL.items())


def _options_of(config: DecodeConfig) -> Options:
    options = {
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return options if config.plan_rows else options | {"num_splits": config.num_splits}


def _prepared(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> Request:
    """Check a call's arguments and make its tables."""
    unknown = [name for name in arguments if name not in _ARGUMENTS]
    if unknown:
        raise TypeError(f"tune: expected arguments of attention, got {', '.join(unknown)}")
    every: dict[str, Any] = {name: arguments.get(name) for name in _ARGUMENTS}
    request, _ = prepare(q, k, v, backend="triton", **every)
    fixed = [name for name in TUNABLE if name in request.options]
    if fixed or is_invariant(request.options):
        raise ValueError(
            "kernel_options: expected none of those that are tuned and no batch_invariant, got "
            f"{', '.join(fixed) or 'batch_invariant'}"
        )
    if not request.problem.B * request.problem.Lq * request.problem.Lkv:
        raise ValueError(f"q: expected something to do, got shape {list(q.shape)}")
    return request


def _checked(candidate: Mapping[str, int]) -> Options:
    options = check_options(dict(candidate))
    if not options or not set(options) <= set(TUNABLE):
        raise ValueError(
            f"candidates: expected dicts with some of {', '.join(TUNABLE)}, got {options}"
        )
    return options


Measure = Callable[[Callable[[], object]], float]


def _tune(
    request: Request,
    candidates: Iterable[Mapping[str, int]] | None,
    measure: Measure,
    seconds: float | None = None,
    progress: Callable[[Trial], object] | None = None,
) -> TuningReport:
    """Measure, compare, record. `measure` gives the microseconds of a call."""
    stop = None if seconds is None else time.perf_counter() + seconds
    device = device_of(request.problem.device)
    lists = lists_of(request)
    key, rows = tuning_key(request, lists, device)
    config = plan_by_rules(request, lists, device, {})
    if candidates is None:
        tiles = ceil_div(request.problem.G, config.TG) * ceil_div(key.queries, config.TQ)
        candidates = neighbours(config, rows * tiles, key.block)
    earlier = choices.find(key)
    others = [_checked(options) for options in candidates]
    if earlier is not None:
        others.insert(0, earlier.options_for(rows, device.processors))

    rule = _options_of(config)
    call = functools.partial(_call, request)
    wanted = call(rule)().out
    limit = _ERROR_LIMITS[wanted.dtype]
    if request.options.get("tf32"):
        limit = max(limit, _TF32_ERROR)
    trials = [Trial(rule, measure(call(rule)))]
    report = progress or (lambda trial: None)
    report(trials[0])
    for options in others:
        if any(options == trial.options for trial in trials):
            continue
        if stop is not None and time.perf_counter() > stop:
            trials.append(Trial(options, note="no time left"))
        else:
            trials.append(_try(call, options, wanted, limit, measure))
        report(trials[-1])

    measured = [trial for trial in trials[1:] if trial.us is not None]
    rule_us = best_us = trials[0].us or 0.0
    best = min(measured, key=lambda trial: trial.us or 0.0, default=None)
    won = False
    if best is not None and (best.us or 0.0) < rule_us * (1 - MIN_GAIN):
        pairs = [(measure(call(rule)), measure(call(best.options))) for _ in range(_ROUNDS)]
        rule_us, best_us = (statistics.median(times) for times in zip(*pairs, strict=True))
        won = best_us < rule_us * (1 - MIN_GAIN)
    chosen = best.options if best is not None and won else None
    if chosen is not None:
        choices.record(key, choices.Choice(chosen, rows, device.processors, best_us, rule_us))
    elif earlier is not None:  # which would be taken in place of the rules
        choices.record(key, choices.Choice(rule, rows, device.processors, rule_us, rule_us))
    if chosen is None:
        best_us = rule_us
    return TuningReport(key, tuple(trials), chosen, rule_us, best_us)


def _call(request: Request, options: Options) -> Callable[[], Result]:
    run = load_backend("triton")
    return functools.partial(run, replace(request, options=request.options | options))


def _try(
    call: Callable[[Options], Callable[[], Result]],
    options: Options,
    wanted: Tensor,
    limit: float,
    measure: Measure,
) -> Trial:
    """Compile, check and time one candidate."""
    try:
        error = _distance(call(options)().out, wanted)
    except Exception as failure:  # a compiler may fail in many ways
        first = (str(failure).strip() or " ").splitlines()[0]
        return Trial(options, note=f"fails, {type(failure).__name__}: {first}"[:160])
    if not error <= limit:
        return Trial(options, note=f"wrong, off by {error:.1e} (2-norm)")
    return Trial(options, measure(call(options)))


def _distance(out: Tensor, wanted: Tensor) -> float:
    """Relative distance in the 2-norm; infinite unless the same places are finite."""
    finite = wanted.isfinite()
    if not torch.equal(out.isfinite(), finite):
        return float("inf")
    out, wanted = (x.masked_fill(~finite, 0).double() for x in (out, wanted))
    size = float(torch.linalg.vector_norm(wanted))
    return float(torch.linalg.vector_norm(out - wanted)) / (size or 1.0)


class _Clock:
    """Times calls whose tensors are not in the L2 cache, by replays of CUDA graphs."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self.repeats = max(repeats, 1)
        self.other = torch.zeros(2 * size // 4, dtype=torch.float32, device=device)
        self.sum = torch.zeros((), device=device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.sweep_us = self._replayed(lambda: None, 20)

    def microseconds(self, call: Callable[[], object]) -> float:
        """Microseconds of a call, the median of replays."""
        start, end = _events()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # nothing may be compiled while a graph is captured
            call()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        once = start.elapsed_time(end) * 1e3 + self.sweep_us
        return self._replayed(call, max(4, min(30, round(2000 / once)))) - self.sweep_us

    def _replayed(self, call: Callable[[], object], count: int) -> float:
        """Microseconds of a sweep and a call, by graphs that hold so many of both."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._sweep()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(count):
                self._sweep()
                call()
        times = []
        for n in range(self.repeats + 2):
            start, end = _events()
            start.record()
            graph.replay()
            end.record()
            if n > 1:
                times.append((start, end))
        torch.cuda.synchronize()
        milliseconds = [float(start.elapsed_time(end)) for start, end in times]
        return statistics.median(milliseconds) * 1e3 / count

    def _sweep(self) -> None:
        # By reading: what was written would be written back during the call.
        torch.sum(self.other, 0, out=self.sum)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return start, end
