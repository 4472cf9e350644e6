"""Advice where the contents of a tensor are needed: the names of the inputs, states or buffers that decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx, nn

from autopar.graph import NO_VALUE, PLACE, STATE_OF, VAL
from autopar.tracing.errors import OR_LEAF, UnsetError

_MOST = 3  # names to list; a longer list does not help


def known_or_leaf(nodes: Iterable[fx.Node | None]) -> str:
    """The advice for tensors without data, given the nodes that made them.

    Raises UnsetError where a buffer decides whose value a model on the meta device lacks: a leaf would run with a
    wrong one, and have outputs of wrong shapes.
    """
    sources = _sources(nodes)
    if buffers := [node for node in sources if NO_VALUE in node.meta]:
        raise _without_value(buffers)
    attributes, inputs = ([n for n in sources if n.op == op] for op in ("get_attr", "placeholder"))
    if attributes and not inputs:
        return _of_the_model(attributes)
    states = list(dict.fromkeys(node.meta[STATE_OF] for node in inputs if STATE_OF in node.meta))
    if states and all(STATE_OF in node.meta for node in inputs):
        return (
            f"it depends on {' and '.join(map(repr, states[:_MOST]))}, a state that forward carries from call to call: "
            f"choose with torch.where, or by an argument that is not a tensor{OR_LEAF}"
        )
    names = [str(node.target) for node in inputs if STATE_OF not in node.meta]
    told = " and ".join(map(repr, names)) if 0 < len(names) <= _MOST else "that input"
    return f"give {told} a known example (autopar.known){OR_LEAF}"


def _without_value(buffers: Sequence[fx.Node]) -> UnsetError:
    path, _, name = str(buffers[0].target).rpartition(".")
    holder = f"model.get_submodule({path!r})" if path else "model"
    return UnsetError(
        f"buffer {_named(buffers)} of the model, which is on the meta device, has no value, and forward asks for it (a "
        "size or a stride, say): build the model with data (without torch.device('meta')), or give such buffers their "
        f"values before planning: {holder}.{name} = torch.tensor(...)",
        where=buffers[0].meta.get(PLACE, ""),
    )


def _of_the_model(attributes: Sequence[fx.Node]) -> str:
    """The advice where buffers, parameters or constants decide, and no input."""
    buffers = [node for node in attributes if not isinstance(node.meta.get(VAL), nn.Parameter)]
    if not buffers:
        return f"it depends on the parameter {_named(attributes)}: choose with torch.where{OR_LEAF}"
    unnamed = str(buffers[0].target).startswith("_constant_")
    told = "a tensor that the model keeps" if unnamed else f"the buffer {_named(buffers)}"
    return (
        f"it depends on {told}, and planning reads only small buffers of integers or truth values that forward does "
        "not write: where the model is built, keep what it decides (a number as an attribute; in place of a mask its "
        "indices, mask.nonzero()[:, 0], as a buffer); if forward initialises something by its first batch, make the "
        "flag such a buffer and run one batch through the model before planning; else choose with torch.where"
        f"{OR_LEAF}"
    )


def _named(attributes: Sequence[fx.Node]) -> str:
    return " and ".join(repr(str(node.target)) for node in attributes[:_MOST])


def _sources(nodes: Iterable[fx.Node | None]) -> list[fx.Node]:
    """The placeholders and attributes that nodes are computed from, in the order of the graph."""
    waiting = [node for node in nodes if node is not None]
    met = dict.fromkeys(waiting)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in met:
                met[node] = None
                waiting.append(node)
    graphs = dict.fromkeys(node.graph for node in met)
    return [node for graph in graphs for node in graph.nodes if node.op in ("placeholder", "get_attr") and node in met]
