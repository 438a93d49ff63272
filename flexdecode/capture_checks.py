"""Checks that rules look past no captured tensor where a key is allowed: FLEXDECODE_CHECK=1.

Kernels never read out of bounds: what lies outside reads as zero. That is right for lanes that no
result depends on, and hides a table that is too short. Here every allowed lane is looked at, in
chunks of bounded size; it is slow, and waits for the device.

A lane is at fault where the *result* depends on the missing element. ``(k < n) | tree[q, k - n]``
is fine where ``k < n``, and so is the branch that ``torch.where`` does not take.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdecode.evaluate import evaluate_nodes
from flexdecode.packed import run_by_runs
from flexdecode.problem import Problem, Request, Result
from flexdecode.tables import FULL, PARTIAL, table_states
from flexdecode.trace import Traced

if TYPE_CHECKING:
    from flexdecode.graph import Node

__all__ = ["check_captured_indices"]

_MAX_LANES = 1 << 21  # looked at together
_MAX_LOADS = 62  # bits of a lane's word


def check_captured_indices(request: Request, listed: bool) -> None:
    """Raise where the result of an allowed lane depends on an element that does not exist.

    Parameters
    ----------
    request : Request
    listed : bool
        The caller listed the blocks: the rule has no say in full ones.

    Raises
    ------
    ValueError
        The message names the captured tensor, the index, the lane and the line of the rule.

    Notes
    -----
    Indices that are made from a score are not checked; where a score decides between two branches,
    both count.
    """
    resolved = request.resolved
    rules = (request.score, None if resolved is None else resolved.mask)
    problem = request.problem
    if not any(rule is not None and _loads(rule) for rule in rules) or not (
        problem.Lq and problem.Lkv
    ):
        return
    check = functools.partial(_checked, listed=listed)
    if problem.packed is not None:
        run_by_runs(request, check)
    else:
        check(request)


def _checked(request: Request, listed: bool) -> Result:
    problem = request.problem
    states = None if request.resolved is None else table_states(request.resolved.tables)
    lengths = problem.kv_len_rows().tolist()
    rows = min(problem.Lq, max(1, _MAX_LANES // (problem.Hq * 1024)))
    keys = max(1, _MAX_LANES // (problem.Hq * rows))
    for b, length in enumerate(lengths):
        for i in range(0, problem.Lq, rows):
            for j in range(0, length, keys):
                part = (i, min(i + rows, problem.Lq)), (j, min(j + keys, length))
                _check_lanes(request, states, listed, _Lanes(problem, b, *part))
    nothing = torch.zeros((), dtype=problem.dtype, device=problem.device)
    return Result(nothing.expand(problem.B, problem.Hq, problem.Lq, problem.Dv), None, None)


class _Lanes:
    """Some rows and keys of one sequence, all heads: [Hq, rows, keys]."""

    def __init__(
        self, problem: Problem, b: int, rows: tuple[int, int], keys: tuple[int, int]
    ) -> None:
        def line(start: int, stop: int, dim: int) -> Tensor:
            shape = [1, 1, 1]
            shape[dim] = stop - start
            return torch.arange(start, stop, device=problem.device).view(shape)

        self.b = b
        self.head = line(0, problem.Hq, 0)
        self.row = line(*rows, 1)
        self.kv_idx = line(*keys, 2)
        first = problem.q_offset
        offset = first[b] if isinstance(first, Tensor) else first
        self.inputs = (
            torch.full((1, 1, 1), b + problem.first_b, device=problem.device),
            self.head,
            self.row + offset,
            self.kv_idx,
        )
        self.shape = (problem.Hq, rows[1] - rows[0], keys[1] - keys[0])


def _check_lanes(request: Request, states: Tensor | None, listed: bool, lanes: _Lanes) -> None:
    problem, resolved = request.problem, request.resolved
    device = problem.device
    allowed = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
    if resolved is not None and states is not None:
        size_q, size_kv = resolved.tables.BLOCK_SIZE
        own = states[lanes.b if states.shape[0] > 1 else 0]
        own = own.repeat_interleave(problem.Hq // own.shape[0], 0)
        state = own[lanes.head, lanes.row // size_q, lanes.kv_idx // size_kv]
        crosses = (lanes.kv_idx // size_kv + 1) * size_kv > problem.kv_len_rows()[lanes.b]
        allowed = state == FULL
        asked = state == PARTIAL
        # A rule that made a block full has answered for it, perhaps by what it found missing.
        asked = asked | (allowed & crosses if listed else allowed)
        if resolved.mask is None:
            allowed = allowed | asked
        else:
            values = evaluate_nodes(resolved.mask, *lanes.inputs)
            said = values[resolved.mask.graph.output].to(device)
            _raise_where(asked & said, resolved.mask, values, lanes)
            allowed = torch.where(asked, said, allowed)
    if request.score is not None:
        score = torch.zeros((1, 1, 1), device=device)
        values = evaluate_nodes(request.score, *lanes.inputs, score)
        _raise_where(allowed, request.score, values, lanes)


def _raise_where(allowed: Tensor, rule: Traced, values: dict[Node, Tensor], lanes: _Lanes) -> None:
    """Raise for the first allowed lane whose result depends on a missing element."""
    loads = _loads(rule)
    if not loads:
        return
    missing = _missing(rule, loads, values).to(allowed.device)
    wrong = (missing * allowed).expand(lanes.shape)
    if not bool(wrong.any()):
        return
    at = tuple(int(n) for n in wrong.nonzero()[0])
    bits = int(wrong[at])
    load = loads[(bits & -bits).bit_length() - 1]
    spec, tensor = rule.graph.captures[load.attr], rule.captures[load.attr]

    def here(x: Tensor) -> int:
        return int(x.expand(lanes.shape)[at]) if x.dim() else int(x)

    found = [here(values[arg]) for arg in load.args]
    axis = 0
    while -tensor.shape[axis] <= found[axis] < tensor.shape[axis]:
        axis += 1
    b, h, q_idx, kv_idx = (here(x) for x in lanes.inputs)
    graph = rule.graph
    raise ValueError(
        f"{graph.kind}_mod: expected an index of the captured tensor {spec.name} in "
        f"[0, {tensor.shape[axis]}) on axis {axis} where a key is allowed, got {found[axis]} at "
        f"b = {b}, h = {h}, q_idx = {q_idx}, kv_idx = {kv_idx}\n  at {graph.where}: {graph.source}"
    )


def _loads(rule: Traced) -> list[Node]:
    found = [node for node in rule.graph.nodes if node.op == "load" and node.args]
    return found[:_MAX_LOADS]


def _missing(rule: Traced, loads: list[Node], values: dict[Node, Tensor]) -> Tensor:
    """Missing elements that each lane's result depends on: bit n stands for ``loads[n]``."""
    bit = {node: 1 << n for n, node in enumerate(loads)}
    scored: set[Node] = set()  # nodes that a score goes into
    found: dict[Node, Tensor] = {}
    nothing = torch.zeros((), dtype=torch.int64, device="cpu")
    for node in rule.graph.nodes:
        args = node.args
        if node.attr == "score" or any(arg in scored for arg in args):
            scored.add(node)
        taken = [found[arg] for arg in args]
        if node in bit and node not in scored:
            here = bit[node] * _outside(rule.captures[node.attr], [values[arg] for arg in args])
            taken.append(here.long())
        elif node.op == "where":
            condition, yes, no = taken
            chosen = yes | no
            if args[0] not in scored:
                chosen = torch.where(values[args[0]], yes, no)
            taken = [condition, chosen]
        elif node.op in ("and", "or") and node.dtype == "bool":
            taken = _decided(node, values, taken, scored)
        result = nothing
        for part in taken:
            result = _joined(result, part)
        found[node] = result
    return found[rule.graph.output]


def _decided(
    node: Node, values: dict[Node, Tensor], missing: list[Tensor], scored: set[Node]
) -> list[Tensor]:
    """One side of ``and`` and ``or`` may decide alone; the other then does not matter."""
    first, second = node.args
    decides = node.op == "or"  # the value that does
    left, right = missing
    kept = []
    for own, other, value in ((left, right, second), (right, left, first)):
        if value in scored:
            kept.append(own)
            continue
        certain = (values[value] == decides) & (other == 0).to(values[value].device)
        kept.append(own.to(certain.device) * ~certain)
    return kept


def _joined(x: Tensor, y: Tensor) -> Tensor:
    device = x.device if x.dim() else y.device
    return x.to(device) | y.to(device)


def _outside(tensor: Tensor, indices: list[Tensor]) -> Tensor:
    wrong = torch.zeros((), dtype=torch.bool, device=tensor.device)
    for index, size in zip(indices, tensor.shape, strict=True):
        wrong = wrong | ((index < -size) | (index >= size)).to(tensor.device)
    return wrong
