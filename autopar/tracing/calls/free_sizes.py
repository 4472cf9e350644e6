"""Which dims of the inputs are free: proved by tracing again at another size.

A traced size can lose its origin where Python reads it without a hook (`range`, indexing). So a dim counts as free only
if a trace at another size, a prime, gives the same graph with the same constants. Otherwise the first difference tells
the place that fixed the dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.graph import PLACE
from autopar.tracing.errors import TraceError

Dim = tuple[str, int]  # placeholder name and dim
_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43)


@dataclass(frozen=True)
class FreeSizes:
    """`group`: a number for each free dim, the same for dims that stay equal. `fixed`: what fixed each other dim."""

    group: Mapping[Dim, int] = field(default_factory=dict)
    fixed: Mapping[Dim, str] = field(default_factory=dict)


def prove(
    graph: fx.Graph, examples: Mapping[str, Any], trace_again: Callable[[Mapping[str, Any]], fx.Graph]
) -> FreeSizes:
    """Vary all dims of one size together; `trace_again` traces at other examples (tensors by placeholder name)."""
    by_size: dict[int, list[Dim]] = {}
    for name, example in examples.items():
        for dim, size in enumerate(example.shape):
            by_size.setdefault(size, []).append((name, dim))
    group: dict[Dim, int] = {}
    fixed: dict[Dim, str] = {}
    for number, (size, dims) in enumerate(by_size.items()):
        reason = _difference(graph, examples, dims, size, trace_again)
        if reason is None:
            group.update(dict.fromkeys(dims, number))
        else:
            fixed.update(dict.fromkeys(dims, reason))
    return FreeSizes(group, fixed)


def _difference(
    graph: fx.Graph,
    examples: Mapping[str, Any],
    dims: list[Dim],
    size: int,
    trace_again: Callable[[Mapping[str, Any]], fx.Graph],
) -> str | None:
    """The place where a trace with these dims changed differs from the first; None if it does not."""
    used = {n for example in examples.values() for n in example.shape}
    other = next(p for p in _PRIMES if p not in used and p != size)
    changed = {
        name: _resized(example, [other if (name, d) in dims else n for d, n in enumerate(example.shape)])
        for name, example in examples.items()
    }
    try:
        again = trace_again(changed)
    except TraceError as error:
        return error.where
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # the model itself does not take this size
        return f"the model: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return first_difference(graph, again)


def _resized(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=example.dtype, device="meta", requires_grad=example.requires_grad)


def first_difference(graph: fx.Graph, other: fx.Graph) -> str | None:
    """The place of the first node in which two graphs differ in target, arguments or constants."""
    position = {node: i for g in (graph, other) for i, node in enumerate(g.nodes)}

    def plain(node: fx.Node) -> str:
        inside = fx.map_arg((node.args, node.kwargs), lambda n: f"%{position[n]}")
        return repr((node.op, str(node.target), inside))

    for first, second in zip(graph.nodes, other.nodes, strict=False):
        if plain(first) != plain(second):
            return str(first.meta.get(PLACE) or second.meta.get(PLACE) or first.name)
    return None if len(graph.nodes) == len(other.nodes) else "the end of the graph"
