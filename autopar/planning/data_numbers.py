"""Numbers that forward reads from tensors (`.item()`) and passes to an op that cannot take a tensor there."""

from __future__ import annotations

from torch import fx

from autopar.errors import UntraceableError
from autopar.graph import OF_DATA, PLACE, SCOPE, output_tensors, target_name


def check_numbers(graph: fx.Graph) -> None:
    """Raise UntraceableError where an op's shape or meaning depends on a number read from data, unknown to a plan."""
    numbers = (node for node in graph.nodes if OF_DATA in node.meta)
    for node in (user for number in numbers for user in number.users):
        if output_tensors(node):
            scope = [path for path, _ in node.meta.get(SCOPE, ())[-1:]]
            raise UntraceableError(
                f"{target_name(node)} is given a number read from a tensor, so its result depends on data that no plan "
                "knows. Give it the tensor where it takes one (leave out .item()), or compute the number before the "
                "call and pass it as an argument",
                where=", ".join(filter(None, [*scope, node.meta.get(PLACE, "")])),
            )
