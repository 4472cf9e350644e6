"""Clamps of overflowed activations: those that change no finite value can be in the graph unconditionally.

`if not torch.isfinite(x).all(): x = x.clamp(-most, most)`, with `most` at the limit of x's dtype, leaves finite values
and their gradients as they are. So the graph with the clamp is valid whatever the check finds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graph import VAL
from autopar.tracing.targets import methods

_CLAMPS = methods("clamp", "clip")
_NAMES = {"clamp", "clip"}
_EDGE = 0.98  # as a fraction of the largest number; models clamp fp16 to its maximum minus 1000, which is 0.985 of it


def differs_by_mends(mended: fx.Graph, plain: fx.Graph) -> bool:
    """Whether a graph equals another one with only such clamps inserted."""
    remaining = iter(plain.nodes)
    expected = next(remaining, None)
    image: dict[fx.Node, fx.Node] = {}
    for node in mended.nodes:
        if expected is not None and _are_alike(node, expected, image):
            image[node] = expected
            expected = next(remaining, None)
        elif _clamps_at_the_edge(node):
            image[node] = image[node.all_input_nodes[0]]
        else:
            return False
    return expected is None


def _are_alike(node: fx.Node, other: fx.Node, image: dict[fx.Node, fx.Node]) -> bool:
    if (node.op, node.target) != (other.op, other.target):
        return False
    mine = fx.node.map_arg((node.args, node.kwargs), image.__getitem__)
    return bool(mine == (other.args, other.kwargs))


def _clamps_at_the_edge(node: fx.Node) -> bool:
    """Whether a node is a clamp whose bounds are at the limits of its dtype."""
    value: Any = node.meta.get(VAL)
    is_clamp = node.target in (_NAMES if node.op == "call_method" else _CLAMPS)
    if not is_clamp or len(node.all_input_nodes) != 1 or not isinstance(value, torch.Tensor):
        return False
    bounds = {**dict(zip(("min", "max"), node.args[1:], strict=False)), **node.kwargs}
    low, high = bounds.get("min"), bounds.get("max")
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)) or not value.is_floating_point():
        return False
    edge = _EDGE * torch.finfo(value.dtype).max
    return low <= -edge and high >= edge
