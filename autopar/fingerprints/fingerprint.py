"""Digests that tie a plan to the model, graph and mesh that it was made for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import fx, nn

from autopar.errors import PlanMismatchError
from autopar.fingerprints.frozen import frozen
from autopar.graph import FIRST_WRITES, FORM, input_nodes, output_tensors, target_name


def fingerprints(model: nn.Module, graph: fx.Graph, mesh_shape: Sequence[int]) -> dict[str, str]:
    """The digests of the graph and of the model (names and shapes), and the mesh."""
    state = [
        (name, tuple(tensor.shape))
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
    ]
    return {
        "graph": fingerprint(graph),
        "model": hashlib.sha256(repr(state).encode()).hexdigest()[:32],
        "mesh": "x".join(map(str, mesh_shape)),
    }


def check_fingerprints(planned: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Raise PlanMismatchError where a plan's fingerprints are not those of this model and graph."""
    if planned["model"] != digests["model"]:
        raise PlanMismatchError(
            "the plan is for another model (its parameters have other names or shapes): plan again for this one"
        )
    if planned["graph"] != digests["graph"]:
        raise PlanMismatchError(
            "the plan is for another graph of this model: examples of other shapes or types, other arguments, "
            "another training mode, other parameters that are frozen, or other versions of the model's code: plan "
            "again with these examples"
        )


def fingerprint(graph: fx.Graph, first_of: Mapping[fx.Node, fx.Node] | None = None) -> str:
    """A digest of the graph's structure, targets, constants, shapes and dtypes; not of names, weights or devices.

    Devices do not count since each rank traces on its own, and a graph runs on the mesh's device whichever it names
    (`runtime.lowering.emission.constant`). To save time, each distinct description of a node enters the digest once;
    every node then adds the number of its description and the positions of its inputs. `same`: for inputs that repeat
    another input, the one that is read instead.
    """
    digest = hashlib.sha256()
    first_of = first_of or {}
    nodes = [node for node in graph.nodes if node not in first_of]
    position = {node: i for i, node in enumerate(nodes)}
    position |= {node: position[first] for node, first in first_of.items()}
    described: dict[Hashable, int] = {}  # by quick key of a node: the number of its description
    numbers: dict[str, int] = {}
    rows: list[int] = []
    names: list[str] = []
    for node in nodes:
        key = _key(node)
        number = described.get(key)
        if number is None:
            words = _words(node)
            if words not in numbers:
                digest.update(f"{len(words)} {words}".encode())
            number = described[key] = numbers.setdefault(words, len(numbers))
        read = [position[source] for source in input_nodes(node)]
        rows += (number, len(read), *read)
        if node.op == "get_attr":
            names.append(str(node.target))
    digest.update(numpy.array(rows, dtype="<i8").tobytes())
    digest.update(repr(names).encode())
    return digest.hexdigest()[:32]


def _key(node: fx.Node) -> Hashable:
    """A key that is quick to compute; nodes with equal keys have the same description (`_words`)."""
    if FIRST_WRITES in node.meta:
        return node
    if FORM in node.meta:
        return node.meta[FORM]
    target = "" if node.op in _NAMED else node.target if isinstance(node.target, str) else id(node.target)
    arguments = [frozen(argument, _not_told) for argument in node.args]
    options = [(name, frozen(argument, _not_told)) for name, argument in node.kwargs.items()]
    values = [(t.shape, t.dtype, t.requires_grad) for t in output_tensors(node)]
    return (node.op, target, *arguments, None, *options, None, *values)


def _not_told(node: fx.Node) -> Hashable:
    return None


def _words(node: fx.Node) -> str:
    """The description of a node: all that it does, except which nodes it reads."""

    def text(value: Any) -> Any:
        if isinstance(value, torch.device):
            return "device"
        return _NODE if isinstance(value, fx.Node) else value

    target = "" if node.op in _NAMED else target_name(node)
    arguments = fx.node.map_aggregate((node.args, node.kwargs), text)
    values = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in output_tensors(node)]
    words = repr((node.op, target, arguments, values, *node.meta.get(FIRST_WRITES, ())))
    return _ADDRESS.sub("", words)


class _Node:
    """Placeholder for any node in a description; no constant prints like it."""

    def __repr__(self) -> str:
        return "%"


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # an object's address, which differs between processes
_NODE = _Node()
_NAMED = ("placeholder", "get_attr")  # ops whose target is a name; only those of `get_attr` count
