"""Advice where the contents of a tensor are needed: the names of the inputs and buffers that it is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from autopar.graph import NO_VALUE, PLACE, STATE_OF
from autopar.tracing.errors import OR_LEAF, UnsetError

_MOST = 3  # inputs to name; a longer list does not help


def known_or_leaf(nodes: Iterable[fx.Node | None]) -> str:
    """The advice for tensors without data, given the nodes that made them.

    Raises UnsetError where a buffer decides whose value a model on the meta device lacks: a leaf would run with a
    wrong one, and have outputs of wrong shapes.
    """
    sources = _sources(nodes)
    if buffers := [node for node in sources if NO_VALUE in node.meta]:
        raise _without_value(buffers)
    buffers, sources = ([n for n in sources if n.op == op] for op in ("get_attr", "placeholder"))
    if buffers and not sources:
        name = str(buffers[0].target)
        kept = "a tensor that the model keeps" if name.startswith("_constant_") else f"'{name}'"
        return (
            f"it depends on the contents of {kept}, which may change from call to call: where the model is built, keep "
            "what they decide (a number as an attribute, and in place of a mask its indices, mask.nonzero()[:, 0], as "
            f"a buffer){OR_LEAF}"
        )
    states = list(dict.fromkeys(node.meta[STATE_OF] for node in sources if STATE_OF in node.meta))
    if states and all(STATE_OF in node.meta for node in sources):
        return (
            f"it depends on {' and '.join(map(repr, states[:_MOST]))}, a state that forward carries from call to call: "
            f"choose with torch.where, or by an argument that is not a tensor{OR_LEAF}"
        )
    names = [str(node.target) for node in sources if STATE_OF not in node.meta]
    inputs = " and ".join(map(repr, names)) if 0 < len(names) <= _MOST else "that input"
    return f"give {inputs} a known example (autopar.known){OR_LEAF}"


def _without_value(buffers: Sequence[fx.Node]) -> UnsetError:
    names = " and ".join(repr(str(node.target)) for node in buffers[:_MOST])
    path, _, name = str(buffers[0].target).rpartition(".")
    holder = f"model.get_submodule({path!r})" if path else "model"
    return UnsetError(
        f"buffer {names} of the model, which is on the meta device, has no value, and forward asks for it (a size or a "
        "stride, say): build the model with data (without torch.device('meta')), or give such buffers their values "
        f"before planning: {holder}.{name} = torch.tensor(...)",
        where=buffers[0].meta.get(PLACE, ""),
    )


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
