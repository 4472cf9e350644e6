"""Guards: what the trace read from known inputs is read again at run time, and must be the same.

While tracing, a reading is a node like any other, so that functionalisation sees it; afterwards the readings
and all that they need are taken out into a graph of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.graph import PLACE
from autopar.tracing.errors import ArgumentError

ANSWER = "answer"  # node.meta of a reading: what the trace was told


@dataclass(frozen=True)
class Guard:
    """One reading: the question, the answer the trace took, and where in the model it was asked."""

    question: str
    answer: Any
    place: str


class Guards:
    """The readings of one trace, and the graph that repeats them."""

    def __init__(self, graph: fx.Graph | None, guards: Sequence[Guard]) -> None:
        self.graph = graph
        self.guards = tuple(guards)

    def check(self, values: Sequence[torch.Tensor], attribute: Callable[[str], Any]) -> None:
        """Raise ArgumentError where an answer is another than the trace's. `values`: of all placeholders, in order."""
        if self.graph is None:
            return
        targets = {str(n.target): attribute(str(n.target)) for n in self.graph.nodes if n.op == "get_attr"}
        with torch.no_grad():
            answers = fx.Interpreter(fx.GraphModule(targets, self.graph)).run(*values)
        for guard, answer in zip(self.guards, answers, strict=True):
            if answer != guard.answer:
                raise ArgumentError(
                    f"the trace took {guard.question}() as {guard.answer!r}, but for this input it is {answer!r}",
                    where=guard.place,
                )


def take_guards(graph: fx.Graph) -> Guards:
    """Move the readings out of a graph."""
    readings = [n for n in graph.nodes if ANSWER in n.meta]
    if not readings:
        return Guards(None, ())
    needed = set(readings)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    copy = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            copied[node] = copy.node_copy(node, copied.__getitem__)
    copy.output(tuple(copied[n] for n in readings))
    guards = [
        Guard(str(getattr(n.target, "__name__", n.target)).strip("_"), n.meta[ANSWER], n.meta[PLACE]) for n in readings
    ]
    for node in reversed(readings):
        graph.erase_node(node)
    return Guards(copy, guards)
