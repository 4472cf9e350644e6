"""Scopes, into which lowered nodes are inserted: the outer graph, or the graph of one recomputed segment."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import TensorRef, is_getitem, output_tensors, resolve, target_name, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.leaf_calls import LeafCall


class Scope:
    """A graph under construction, and which tensors of the trace are known in it.

    `values` holds tensors as they are produced or stored, `converted` the same tensors in other layouts. A tensor that
    a segment needs from outside becomes an input of the segment, in the layout that it has outside. `copied` are
    buffers that the graph writes: a segment is given a copy of them, so that its replay reads the same values. Buffers
    that the segment writes itself, `updated`, it copies once more and returns (see `updates`). `segment` is the
    segment's number in the plan, and `replayed` the position of the last node that its replay runs; both are -1
    outside. An `inner` segment is given activations in the layouts that its nodes want.
    """

    segment = -1
    replayed = -1
    inner = False

    def __init__(
        self,
        graph: fx.Graph,
        parent: Scope | None = None,
        copied: Collection[TensorRef] = (),
        updated: Collection[TensorRef] = (),
    ) -> None:
        self.graph = graph
        self.parent = parent
        self.values: dict[TensorRef, fx.Node] = {}
        self.converted: dict[tuple[TensorRef, Layout], fx.Node] = {}
        self.outer_inputs: list[fx.Node] = []
        self._attributes: dict[str, Any] = {}
        self._attribute_nodes: dict[tuple[str, Any], fx.Node] = {}
        self._key: fx.Node | None = None
        self._transit: fx.Node | None = None
        self._copied, self._updated = copied, updated
        self.updates: dict[TensorRef, tuple[fx.Node, fx.Node]] = {}  # buffer outside, its new value inside
        self._last_placeholder: fx.Node | None = None

    def placeholder(self, name: str) -> fx.Node:
        """Add an input to this graph, after those that it has."""
        last = self._last_placeholder
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(last) if last else self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.target = node.name  # unique in this graph, as names of arguments must be
        self._last_placeholder = node
        return node

    def value(self, ref: TensorRef) -> fx.Node:
        """The tensor as it is produced or stored; if it comes from outside, it becomes an input."""
        if ref not in self.values:
            assert self.parent is not None, f"{ref.node.name} is read before it is made"
            outside = original = self.parent.value(ref)
            if ref in self._copied:
                outside = self.parent.graph.call_method("clone", (original,))
            self.values[ref] = self._input(outside)
            if ref in self._updated:
                self.values[ref] = self.graph.call_method("clone", (self.values[ref],))
                self.updates[ref] = original, self.values[ref]
        return self.values[ref]

    def takes_converted(self, ref: TensorRef) -> bool:
        """Whether a tensor from outside is converted there, to the layout wanted in this scope."""
        return self.inner and ref not in self.values and ref not in self._copied and not _is_parameter(ref)

    def further_input(self, outside: fx.Node) -> fx.Node:
        """A further input of this segment, with the value of a node outside."""
        return self._input(outside)

    def random_key(self) -> fx.Node:
        """The key of this step's random numbers."""
        if self._key is None:
            self._key = self._input(self.parent.random_key()) if self.parent else self.placeholder("random_key")
        return self._key

    def transit(self) -> fx.Node:
        """The node of this call's `communication.transit.Transit`."""
        if self._transit is None:
            self._transit = self._input(self.parent.transit()) if self.parent else self.placeholder("transit")
        return self._transit

    @property
    def has_random_key(self) -> bool:
        return self._key is not None

    def object_attribute(self, value: Any) -> fx.Node:
        """`attribute` for any object, by identity: the object may equal another one or have no hash."""
        return self.attribute("object", value, id(value))

    def attribute(self, name: str, value: Any, identity: Hashable = None) -> fx.Node:
        """The node of a constant that fx cannot print (a recipe, a segment): an attribute of the module."""
        key = (name, value if identity is None else identity)
        if key not in self._attribute_nodes:
            unique = f"{name}_{len(self._attributes)}"
            self._attributes[unique] = value
            self._attribute_nodes[key] = self.graph.get_attr(unique)
        return self._attribute_nodes[key]

    def module(self) -> fx.GraphModule:
        """The finished graph, runnable."""
        self.graph.lint()
        module = fx.GraphModule(_Attributes(self._attributes), self.graph)
        # fx's own `__call__` reads source lines for the traceback of every exception, and every replay ends with one
        type(module).__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]  # its own class
        return module

    def pick(self, node: fx.Node, path: pytree.KeyPath) -> fx.Node:
        """The part of a structured value at a pytree path."""
        for step in path:
            if isinstance(step, pytree.GetAttrKey):
                node = self.graph.call_function(getattr, (node, step.name))
            else:
                key = step.idx if isinstance(step, pytree.SequenceKey) else step.key  # type: ignore[attr-defined]
                node = self.graph.call_function(operator.getitem, (node, key))
        return node

    def _input(self, outside: fx.Node) -> fx.Node:
        self.outer_inputs.append(outside)
        return self.placeholder(outside.name)


class _Attributes(torch.nn.Module):
    """Holds the attributes that `get_attr` and `call_module` nodes name until fx has copied them."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def written_buffers(node: fx.Node) -> list[TensorRef]:
    """The buffers that a node writes, or may write, in place (running statistics, counters); whole on every rank."""
    if isinstance(node.target, LeafCall):
        return [ref for ref in tensor_inputs(node) if ref.node.op == "get_attr" and not _is_parameter(ref)]
    name = target_name(node).rsplit(".", 1)[-1]
    if not keeps_statistics(node) and not (name.endswith("_") and not name.endswith("__")):
        return []
    return [ref for ref in tensor_inputs(node) if ref.node.op == "get_attr" and not tensor_of(ref).requires_grad]


def keeps_statistics(node: fx.Node) -> bool:
    """Whether the buffers that a node writes are running statistics."""
    return target_name(node).rsplit(".", 1)[-1] in ("batch_norm", "instance_norm")


def _is_parameter(ref: TensorRef) -> bool:
    return isinstance(tensor_of(ref), torch.nn.Parameter)


def readers(ref: TensorRef) -> set[fx.Node]:
    """The nodes that read a tensor's data, followed through `getitem`; asking for its size is not reading."""
    readers: set[fx.Node] = set()
    waiting = list(ref.node.users)
    while waiting:
        user = waiting.pop()
        if not is_getitem(user):
            if user.op == "output" or output_tensors(user):
                readers.add(user)
        elif ref in resolve(user):
            waiting += user.users
    return readers
