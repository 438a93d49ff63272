"""Rules written as text, for the command line: ``causal & sliding_window(1024)``."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["parse_rule"]


def parse_rule(text: str, device: torch.device | str = "cpu") -> Callable[..., Any]:
    """Build a mask or score rule of `flexdecode.masks` from its text; nothing else is evaluated.

    Parameters
    ----------
    text : str
        Names of `flexdecode.masks`, called with numbers, strings, tuples of these, or lists, which
        become tensors; joined by ``&``, ``|``, ``~`` and parentheses.
    device : torch.device or str, default "cpu"
        Where the tensors go.

    Returns
    -------
    callable

    Raises
    ------
    ValueError
        Anything else stands in the text, or a rule refuses its arguments.

    Examples
    --------
    >>> parse_rule("causal & ~sliding_window(2)")(0, 0, 3, 1)
    True
    """
    try:
        rule = _value(ast.parse(text.strip(), mode="eval").body, device)
    except SyntaxError as error:
        raise ValueError(f"rule: expected an expression, got {text!r}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule: {text!r}: {error}") from error
    if not callable(rule):
        raise ValueError(f"rule: expected a mask or score rule, got {text!r}")
    return rule  # type: ignore[no-any-return]


def _value(node: ast.expr, device: torch.device | str) -> Any:
    from flexdecode import masks

    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_value(each, device) for each in node.elts)
    if isinstance(node, ast.List):
        return torch.tensor(ast.literal_eval(node), device=device)
    if isinstance(node, ast.Name) and node.id in masks.__all__:
        return getattr(masks, node.id)
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand, device)
        if isinstance(node.op, ast.Invert):
            return ~operand
        if isinstance(node.op, ast.USub):
            return -operand
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        first, second = _value(node.left, device), _value(node.right, device)
        return first & second if isinstance(node.op, ast.BitAnd) else first | second
    if isinstance(node, ast.Call):
        arguments = [_value(each, device) for each in node.args]
        named = {each.arg: _value(each.value, device) for each in node.keywords if each.arg}
        if len(named) == len(node.keywords):
            return _value(node.func, device)(*arguments, **named)
    raise ValueError(
        f"{ast.unparse(node)!r} is no name of flexdecode.masks, number, list, call, or & | ~"
    )
