"""What a forward writes into a parameter before anything reads it, such as a clamp of its values: done before the call.

A planned model's graph reads copies of parameters, so that a write in it would be lost. One that takes each element for
itself, and numbers beside, is the same on every shard, and may as well be done when the call begins.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autopar.graph import FIRST_WRITES, VAL, input_nodes, storage_of
from autopar.tracing.rewriting.cleaning import WRITES

ELEMENTWISE = {"abs_", "add_", "clamp_", "clamp_max_", "clamp_min_", "div_", "mul_", "nan_to_num_", "neg_", "sub_"}


def take_first_writes(graph: fx.Graph, writers: Collection[fx.Node]) -> set[fx.Node]:
    """Note such writes at their parameters (`FIRST_WRITES`), and take them out of the graph: those of `writers`."""
    taken: set[fx.Node] = set()
    by_storage: dict[int | None, list[fx.Node]] = {}
    for writer in writers:
        for storage in {storage_of(node.meta[VAL]) for node in writer.meta[WRITES]}:
            by_storage.setdefault(storage, []).append(writer)
    for parameter in [node for node in graph.nodes if node.op == "get_attr"]:
        if isinstance(parameter.meta.get(VAL), torch.nn.Parameter):
            own = by_storage.get(storage_of(parameter.meta[VAL]))
            if own:
                taken.update(_take(graph, parameter, own))
    return taken


def _take(graph: fx.Graph, parameter: fx.Node, own: list[fx.Node]) -> list[fx.Node]:
    """`own`: the writers of this parameter, in their order."""
    storage = storage_of(parameter.meta[VAL])
    whole = {parameter}  # nodes that stand for all of it
    for node in graph.nodes:
        if node is parameter:
            continue
        seen = any(source in whole for source in input_nodes(node))
        if node.op == "get_attr" and storage_of(node.meta.get(VAL)) == storage:
            return []  # tied to another, which may be read before
        if node.op == "call_method" and node.args and node.args[0] in whole:
            if node in own and _is_elementwise(node):
                whole.add(node)
                if node is own[-1]:
                    break
                continue
            if node.target == "detach":
                whole.add(node)
                continue
        if seen or node in own:
            return []  # it is read before, or written in another way
    parameter.meta[FIRST_WRITES] = tuple((w.target, tuple(w.args[1:]), tuple(w.kwargs.items())) for w in own)
    for writer in own:  # under no_grad the parameter itself may be written, through a `detach` that the tracer adds
        seen_as = parameter if writer.meta[VAL].requires_grad else writer.args[0]
        writer.replace_all_uses_with(seen_as)  # type: ignore[arg-type]  # both are nodes
    for writer in reversed(own):
        graph.erase_node(writer)
    return own


def _is_elementwise(writer: fx.Node) -> bool:
    return writer.target in ELEMENTWISE and len(list(input_nodes(writer))) == 1
