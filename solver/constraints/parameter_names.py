"""The names by which constraints find parameters: a tied one has several, one that the call does not read none."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import fx

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.weights import named_once


def names_by_node(memory: StepMemory) -> dict[fx.Node, Sequence[str]]:
    """All names of each parameter that the graph reads."""
    by_name = {name: names for names, _ in named_once(memory.parameters) for name in names}
    return {node: by_name[str(node.target)] for node in memory.graph.nodes if memory.is_parameter(node)}


def unread(memory: StepMemory, pattern: str) -> str | None:
    """A parameter of the model, though perhaps not of the graph, that the pattern matches; None if there is none."""
    return next((name for name in memory.parameters if fnmatchcase(name, pattern)), None)
