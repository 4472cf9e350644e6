"""Which dim of each returned tensor is the batch dim: followed from the inputs through the strategies, op by op.

If a strategy splits an op's inputs along their batch dims, then the dim along which it splits an output is the batch
dim of this output; an output that is a partial sum under this strategy has none. If no strategy splits along the batch,
the outputs are unknown: such a tensor, when it is returned, counts as batched if its first dim is as long as the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.graph import VAL, TensorRef, output_tensors, resolve, tensor_inputs, tensor_of
from autopar.strategies.strategy import Strategy

Marks = frozenset[int] | None  # the dims of a tensor that may be the batch dim; None: unknown
_NONE: frozenset[int] = frozenset()


def batch_dims(graph: fx.Graph, strategies: Mapping[fx.Node, Sequence[Strategy]]) -> tuple[int, ...]:
    """For each tensor that the graph returns its (first) batch dim, or -1 if it has none.

    `strategies` must be those for `inputs="local"`: there an input that is split is batched.
    """
    marks: dict[TensorRef, Marks] = {}
    marks_of_outputs: dict[tuple[int, tuple[Marks, ...]], list[Marks]] = {}
    rows = 0
    for node in graph.nodes:
        if node.op == "output":
            leaves = (resolve(leaf) for leaf in node.args[0] if isinstance(leaf, fx.Node))
            return tuple(_at_end(refs[0], marks.get(refs[0], _NONE), rows) for refs in leaves if refs)
        if node not in strategies:
            continue
        if node.op == "placeholder":
            if isinstance(node.meta.get(VAL), torch.Tensor) and not strategies[node][0].outputs[0].is_replicated:
                dims = frozenset(p.dim for p in strategies[node][0].outputs[0].placements if p.is_sharded)
                marks[TensorRef(node, 0)], rows = dims, node.meta[VAL].shape[min(dims)]
            continue
        input_marks = tuple(marks.get(ref, _NONE) for ref in tensor_inputs(node))
        if any(mark != _NONE for mark in input_marks):
            key = id(strategies[node]), input_marks
            if key not in marks_of_outputs:
                marks_of_outputs[key] = _carried(strategies[node], input_marks, len(output_tensors(node)))
            marks.update((TensorRef(node, i), mark) for i, mark in enumerate(marks_of_outputs[key]))
    return ()


def _carried(ways: Sequence[Strategy], input_marks: Sequence[Marks], outputs: int) -> list[Marks]:
    """The batch dims of an op's outputs, given those of its inputs."""
    output_marks: list[Marks] = [None] * outputs
    for way in ways:
        axes = [axis for axis, factor in enumerate(way.factors) if factor not in ("", "P", "R+")]
        if len(axes) != 1:
            continue
        placed = [
            (layout.placements[axes[0]], mark) for layout, mark in zip(way.inputs, input_marks, strict=True) if mark
        ]
        along = [p.is_sharded and p.outer == 1 and p.dim in mark for p, mark in placed]
        if any(along) and all(is_along or not p.is_sharded for is_along, (p, _) in zip(along, placed, strict=True)):
            for i, layout in enumerate(way.outputs):
                p = layout.placements[axes[0]]
                dims = {p.dim} if p.is_sharded and p.outer == 1 else set()
                output_marks[i] = frozenset({*(output_marks[i] or ()), *dims})
    return output_marks


def _at_end(ref: TensorRef, mark: Marks, rows: int) -> int:
    shape = tensor_of(ref).shape
    if mark is None:
        return 0 if len(shape) and shape[0] == rows else -1
    return min(mark, default=-1)
