"""Whether two tensors of a trace are equal because they were computed alike: `labels >= 0`, twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

# Ops that give equal results for equal arguments.
_COMPARED_BY_VALUE = {
    "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "and_", "or_",
    "xor", "invert", "not_", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "isnan", "isfinite", "isinf", "view", "reshape", "flatten", "squeeze",
    "unsqueeze", "getitem", "bool", "to", "add", "mul", "expand", "expand_as",
}  # fmt: skip


def same_contents(a: Any, b: Any, read: set[fx.Node]) -> bool:
    """Whether two nodes, or arguments, are equal, provided that nothing writes into the nodes added to `read`."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same_contents(first, second, read) for first, second in zip(a, b, strict=True))
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and type(a) in (bool, int, float, torch.dtype, type(None)) and bool(a == b)
    read |= {a, b}
    if a is b:
        return True
    name = a.target if a.op == "call_method" else getattr(a.target, "__name__", "")
    same_op = a.op == b.op and a.target == b.target and not a.kwargs and not b.kwargs
    return same_op and name in _COMPARED_BY_VALUE and same_contents(a.args, b.args, read)
