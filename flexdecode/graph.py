"""The expression graph of a mod: node kinds, dtypes, structural key, printing.

A mod is traced once into a few typed nodes. Everything downstream reads this graph: `evaluate`
gives it values, the interval analysis gives it ranges, the code generator gives it text. The op
set is closed (``OPS``), so each of those readers can be complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["INFIX", "INPUTS", "OPS", "CaptureSpec", "Graph", "GraphBuilder", "Node", "promote"]

INPUTS = ("b", "h", "q_idx", "kv_idx")  # int64; a score mod has "score" (float32) besides

LEAVES = frozenset({"input", "const", "param", "size"})
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "floordiv", "mod", "pow", "minimum", "maximum"})
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
BITWISE = frozenset({"and", "or", "xor", "not", "shl", "shr"})
FUNCTIONS = frozenset(
    "exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid erf floor ceil trunc round".split()
)
OPS = LEAVES | ARITHMETIC | COMPARISONS | BITWISE | FUNCTIONS
OPS = OPS | frozenset({"neg", "abs", "where", "cast", "load", "isnan"})

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
}

# 16-bit floats exist only in storage: loads widen them to float32.
_RANK = {
    "bool": 0,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float32": 5,
    "float64": 6,
}


def promote(first: str, second: str) -> str:
    """Common dtype of two operands, by torch's rules for tensors of equal rank."""
    if first == second:
        return first
    if {first, second} == {"uint8", "int8"}:
        return "int16"
    return first if _RANK[first] > _RANK[second] else second


def is_float(dtype: str) -> bool:
    """True for float32 and float64."""
    return _RANK[dtype] >= _RANK["float32"]


@dataclass(frozen=True, eq=False)
class Node:
    """One operation; nodes are shared, so identity is equality within one graph.

    ``attr`` is the value of a ``const``, the name of an ``input``, the slot of a ``param``, the
    capture slot of a ``load`` and ``(capture slot, dim)`` of a ``size``.
    """

    op: str
    dtype: str
    args: tuple[Node, ...] = ()
    attr: Any = None


@dataclass(frozen=True)
class CaptureSpec:
    """What the graph knows of a captured tensor: storage dtype (torch's name), rank, a name."""

    dtype: str
    rank: int
    name: str = field(compare=False)


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced mod.

    Attributes
    ----------
    kind : "mask" or "score"
    name : str
        The user's function name, made an identifier.
    nodes : tuple of Node
        In order of evaluation; the last one is `output`.
    params : tuple of str
        ``"int"`` or ``"float"``: kinds of the run-time numbers.
    captures : tuple of CaptureSpec
        Captured tensors, used ones only.
    uses : frozenset of str
        Inputs that the output depends on, of b, h, q_idx, kv_idx, score.
    where : str
        ``file:line`` of the user's function.
    source : str
        The user's source line, for comments in generated code.
    key : str
        Equal for graphs of equal structure, whatever their names and numbers.
    """

    kind: Literal["mask", "score"]
    name: str
    nodes: tuple[Node, ...]
    params: tuple[str, ...]
    captures: tuple[CaptureSpec, ...]
    uses: frozenset[str]
    where: str
    source: str
    key: str

    @property
    def output(self) -> Node:
        """The node whose value the mod returns."""
        return self.nodes[-1]

    def __str__(self) -> str:
        inputs = (("score",) if self.kind == "score" else ()) + INPUTS
        lines = [f"{self.kind} {self.name}({', '.join(inputs)})"]
        for i, kind in enumerate(self.params):
            lines.append(f"  p{i}: {kind}")
        for i, capture in enumerate(self.captures):
            lines.append(f"  {capture.name}#{i}: {capture.dtype}, rank {capture.rank}")
        names: dict[Node, str] = {}
        for node in self.nodes:
            text = _text(node, names, self.captures)
            if node.op in LEAVES:
                names[node] = text
            else:
                names[node] = f"%{len(lines)}"
                lines.append(f"  {names[node]}: {node.dtype} = {text}")
        lines.append(f"  return {names[self.output]}")
        return "\n".join(lines)


def _text(node: Node, names: Mapping[Node, str], captures: tuple[CaptureSpec, ...]) -> str:
    args = [names[arg] for arg in node.args]
    if node.op == "input":
        return str(node.attr)
    if node.op == "const":
        return repr(node.attr)
    if node.op == "param":
        return f"p{node.attr}"
    if node.op == "size":
        slot, dim = node.attr
        return f"{captures[slot].name}#{slot}.shape[{dim}]"
    if node.op == "load":
        return f"{captures[node.attr].name}#{node.attr}[{', '.join(args)}]"
    if node.op == "cast":
        return f"{node.dtype}({args[0]})"
    if node.op in INFIX:
        return f"{args[0]} {INFIX[node.op]} {args[1]}"
    return f"{node.op}({', '.join(args)})"


class GraphBuilder:
    """Makes nodes, each structure once, so that common subexpressions are shared."""

    def __init__(self) -> None:
        self._nodes: dict[Any, Node] = {}

    def node(self, op: str, dtype: str, args: tuple[Node, ...] = (), attr: Any = None) -> Node:
        """Return the node of this structure."""
        # repr tells 1 from 1.0 and True, and -0.0 from 0.0, where equality does not.
        key = (op, dtype, tuple(map(id, args)), repr(attr))
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = Node(op, dtype, args, attr)
        return found

    def cast(self, node: Node, dtype: str) -> Node:
        """Return `node` as `dtype`; constants are converted here."""
        if node.dtype == dtype:
            return node
        if node.op == "const":
            convert = bool if dtype == "bool" else float if is_float(dtype) else int
            return self.node("const", dtype, (), convert(node.attr))
        return self.node("cast", dtype, (node,))


def walk(output: Node) -> Iterator[Node]:
    """Yield the nodes under `output`, arguments first."""
    done: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(output, False)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))


def finish(
    kind: Literal["mask", "score"],
    name: str,
    output: Node,
    param_kinds: list[str],
    capture_specs: list[CaptureSpec],
    where: str,
    source: str,
) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """Keep what `output` uses, number it afresh and compute the key.

    Returns
    -------
    graph : Graph
    param_slots, capture_slots : tuple of int
        The old slot of each parameter and capture of the new graph.
    """
    old = list(walk(output))
    param_slots = _first_uses(node.attr for node in old if node.op == "param")
    capture_slots = _first_uses(
        node.attr if node.op == "load" else node.attr[0]
        for node in old
        if node.op in ("load", "size")
    )
    param_of = {slot: i for i, slot in enumerate(param_slots)}
    capture_of = {slot: i for i, slot in enumerate(capture_slots)}
    new: dict[Node, Node] = {}
    key: list[str] = [kind]
    for node in old:
        attr = node.attr
        if node.op == "param":
            attr = param_of[attr]
        elif node.op == "load":
            attr = capture_of[attr]
        elif node.op == "size":
            attr = (capture_of[attr[0]], attr[1])
        new[node] = Node(node.op, node.dtype, tuple(new[arg] for arg in node.args), attr)
    number = {node: i for i, node in enumerate(new.values())}
    for node in new.values():
        args = ",".join(str(number[arg]) for arg in node.args)
        key.append(f"{node.op}:{node.dtype}:{node.attr!r}({args})")
    params = tuple(param_kinds[slot] for slot in param_slots)
    captures = tuple(capture_specs[slot] for slot in capture_slots)
    key.append(",".join(params))
    key.append(",".join(f"{capture.dtype}{capture.rank}" for capture in captures))
    graph = Graph(
        kind=kind,
        name=name,
        nodes=tuple(new.values()),
        params=params,
        captures=captures,
        uses=frozenset(node.attr for node in old if node.op == "input"),
        where=where,
        source=source,
        key=";".join(key),
    )
    return graph, param_slots, capture_slots


def _first_uses(slots: Iterator[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(slots))
