"""An expression graph as a line of text, and back: what operators can carry and files can keep."""

from __future__ import annotations

import functools
import json

from flexdecode.graph import CaptureSpec, Graph, Node, finish

__all__ = ["graph_from_text", "graph_to_text"]


@functools.lru_cache(maxsize=1024)
def graph_to_text(graph: Graph) -> str:
    """Write `graph` as JSON.

    Examples
    --------
    >>> from flexdecode.trace import trace
    >>> graph_to_text(trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").graph)[:30]
    '{"kind": "mask", "name": "lamb'
    """
    number = {node: i for i, node in enumerate(graph.nodes)}
    return json.dumps(
        {
            "kind": graph.kind,
            "name": graph.name,
            "where": graph.where,
            "source": graph.source,
            "params": graph.params,
            "captures": [[c.dtype, c.rank, c.name] for c in graph.captures],
            "nodes": [
                [node.op, node.dtype, [number[arg] for arg in node.args], node.attr]
                for node in graph.nodes
            ],
        }
    )


@functools.lru_cache(maxsize=1024)
def graph_from_text(text: str) -> Graph:
    """Read what `graph_to_text` wrote."""
    stored = json.loads(text)
    nodes: list[Node] = []
    for op, dtype, args, attr in stored["nodes"]:
        value = tuple(attr) if isinstance(attr, list) else attr
        nodes.append(Node(op, dtype, tuple(nodes[arg] for arg in args), value))
    captures = [CaptureSpec(*spec) for spec in stored["captures"]]
    graph, params, slots = finish(
        stored["kind"],
        stored["name"],
        nodes[-1],
        stored["params"],
        captures,
        stored["where"],
        stored["source"],
    )
    # The order of first use is that of the graph that was written.
    assert params == tuple(range(len(params))) and slots == tuple(range(len(slots)))
    return graph
