"""Clamps for activations that overflowed: where they change finite values nowhere, the graph holds them always.

`if not torch.isfinite(x).all(): x = x.clamp(-most, most)`, with `most` at the edge of what x's dtype can hold, does to
finite values what no clamp does, also backward. So the graph with the clamp is right whatever the check finds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graph import VAL
from autopar.tracing.targets import methods

_CLAMPS = methods("clamp", "clip")
_NAMES = {"clamp", "clip"}
_EDGE = 0.98  # of the largest number: half precision's, less 1000, is 0.985 of it


def differs_by_mends(mended: fx.Graph, plain: fx.Graph) -> bool:
    """Whether a graph is another one with such clamps put in, and nothing else."""
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
