"""Guards: what the trace read from known inputs is read again at run time, and must be the same.

While tracing, a reading is a node like any other, so that functionalisation sees it; afterwards the readings and
everything they depend on move to a graph of their own. A reading that uses only the shape of an activation
(`mask.expand_as(hidden)`) gets a constant tensor of that shape instead, valid while the inputs have the example's
shapes. Otherwise each call would compute these activations twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.errors import InputError
from autopar.graph import PLACE, VAL
from autopar.tracing.contents.known import AS_ANOTHER, FILLING
from autopar.tracing.errors import ArgumentError

_SHAPED = {"size": 0, "numel": 0, **{f.__name__: 1 for f in AS_ANOTHER}}
_SHAPED |= {f.__name__: 0 for f in FILLING}
"""By name of a function: the position of the argument of which it uses only shape and dtype."""
ANSWER = "answer"  # key in node.meta of a reading: the answer that the trace got


@dataclass(frozen=True)
class Guard:
    """One reading: the question, the answer that the trace got, and where in the model it was asked."""

    question: str
    answer: Any
    place: str


class Guards:
    """The readings of one trace, the graph that repeats them, and a cheaper one for inputs with the traced `shapes`."""

    def __init__(
        self,
        graph: fx.Graph | None,
        guards: Sequence[Guard],
        of_example: fx.Graph | None = None,
        shapes: Sequence[Any] = (),
    ) -> None:
        self.graph, self._of_example = graph, of_example
        self.guards, self._shapes = tuple(guards), list(shapes)

    def check_whole_inputs(self) -> None:
        """Raise InputError if a reading needs a whole input, for inputs of which each rank has only a part."""
        graph = self._of_example or fx.Graph()
        reading = {n for n in graph.nodes if n.op == "placeholder" and any(u.target is not _of_shape for u in n.users)}
        for node in graph.nodes:
            if reading.intersection(node.all_input_nodes) and node.target is not _of_shape:
                reading.add(node)
        guards_and_nodes = zip(self.guards, graph.output_node().args[0] if reading else (), strict=False)  # type: ignore[arg-type]
        if (guard := next((guard for guard, node in guards_and_nodes if node in reading), None)) is not None:
            raise InputError(
                f"forward reads the contents of a known input ({guard.question}() at {guard.place}), of which each "
                'rank has a part with inputs="local": plan with inputs="global"'
            )

    def check(self, values: Sequence[torch.Tensor], attribute: Callable[[str], Any]) -> None:
        """Raise ArgumentError where an answer is not the trace's. `values`: those of all placeholders, in order."""
        if self.graph is None:
            return
        graph = self._of_example if [_shape(value) for value in values] == self._shapes else None
        graph = graph or self.graph
        targets = {str(n.target): attribute(str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        with torch.no_grad():
            answers = fx.Interpreter(fx.GraphModule(targets, graph)).run(*values)
        for guard, answer in zip(self.guards, answers, strict=True):
            if _differs(answer, guard.answer):
                raise ArgumentError(
                    f"the trace took {guard.question}() as {guard.answer!r}, but for this input it is {answer!r}",
                    where=guard.place,
                )


def take_guards(graph: fx.Graph) -> Guards:
    """Move the readings out of a graph."""
    readings = [n for n in graph.nodes if ANSWER in n.meta]
    if not readings:
        return Guards(None, ())
    shapes = [_shape(n.meta[VAL]) for n in graph.nodes if n.op == "placeholder"]
    copies = _copied(graph, readings, whole=True), _copied(graph, readings, whole=False)
    guards = [
        Guard(str(getattr(n.target, "__name__", n.target)).strip("_"), n.meta[ANSWER], n.meta[PLACE]) for n in readings
    ]
    for node in reversed(readings):
        graph.erase_node(node)
    return Guards(copies[0], guards, copies[1], shapes)


def _copied(graph: fx.Graph, readings: Sequence[fx.Node], *, whole: bool) -> fx.Graph:
    """A graph of the readings and everything they depend on.

    Unless `whole`, activations of which only the shape is used are replaced by a tensor of that shape.
    """
    needed, looked_at = set(readings), set[fx.Node]()
    for node in reversed(graph.nodes):
        if node in needed:
            other = None if whole else _shaped(node)
            looked_at.update([other] if other is not None else [])
            needed.update(n for n in node.all_input_nodes if n is not other)
    copy = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    first: fx.Node | None = None
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            copied[node] = copy.node_copy(node, copied.__getitem__)
            first = first or copied[node]
        elif node in looked_at:
            copied[node] = copy.call_function(_of_shape, (node.meta[VAL].shape, node.meta[VAL].dtype, first))
    copy.output(tuple(copied[n] for n in readings))
    return copy


def _differs(answer: Any, traced: Any) -> bool:
    if isinstance(traced, np.ndarray):
        return not np.array_equal(answer, traced)
    return bool(answer != traced)


def _shaped(node: fx.Node) -> fx.Node | None:
    """The activation of which a node uses only shape and dtype, if any. Readings themselves are excluded: they check
    whether a shape is as traced."""
    if ANSWER in node.meta:
        return None
    place = _SHAPED.get(getattr(node.target, "__name__", str(node.target)))
    other = node.args[place] if place is not None and place < len(node.args) else None
    if not isinstance(other, fx.Node) or other.op in ("placeholder", "get_attr"):
        return None
    value = other.meta[VAL]
    return other if isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape) else None


def _of_shape(shape: Sequence[int], dtype: torch.dtype, like: Any) -> torch.Tensor:
    """A tensor of this shape that occupies one element, on the device of `like`."""
    device = like.device if isinstance(like, torch.Tensor) else None
    return torch.zeros((), dtype=dtype, device=device).expand(*shape)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
