"""Writing the graph: nodes with their annotations, and which node made which tensor."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from autopar.graph import AUTOCAST, GRAD_MODE, NO_VALUE, PLACE, REGION, SCOPE, VAL
from autopar.tracing import places
from autopar.tracing.contents.finite import FiniteChecks
from autopar.tracing.contents.known import KnownValues
from autopar.tracing.errors import TraceError
from autopar.tracing.model_state.attributes import Attributes
from autopar.tracing.model_state.caches import WeakTensorRefs
from autopar.tracing.rewriting.cleaning import WRITES
from autopar.tracing.values import has_tensor, value_of

Tensor = torch.Tensor


class GraphWriter:
    """A graph being written. `device` is the device that data-free tensors claim to be on."""

    def __init__(self, graph: fx.Graph, attributes: Attributes, device: torch.device) -> None:
        self.graph = graph
        self.attributes = attributes
        self.device = device
        self.scope: tuple[tuple[str, str], ...] = ()
        self.region: tuple[int, ...] = ()
        self.known = KnownValues()
        self.finite = FiniteChecks()
        self.nodes: dict[int, fx.Node] = {}  # by id of the tensor that they made
        self.alive: list[Tensor] = []
        self._beside: WeakTensorRefs = []  # tensors that were made while nothing was recorded
        self._casts: dict[Any, Tensor] = {}
        self._custom: set[int] = set()  # tensors whose own backward belongs to the node that made them
        self._awaiting: dict[int, Tensor] = {}  # by id: values of such tensors whose backward is set later
        self._detached: dict[fx.Node, fx.Node] = {}

    def write(self, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> fx.Node:
        """A new node. Its arguments are set afterwards: `create_node` would search them for symbolic numbers, which are
        nodes here already, and that takes as long as all the rest."""
        node = self.graph.create_node(op, target, name=name)
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node

    def register(self, node: fx.Node, result: Any, real: Any = None) -> None:
        """Annotate a node and remember which tensor it made; for a tuple, each tensor element gets a `getitem` node."""
        self.annotate(node, place=True)
        if isinstance(result, Tensor):
            self._remember(node, result)
            node.meta[VAL] = value_of(result)
            if real is not None:
                self.known.put(result, real, node)
            return
        node.meta[VAL] = pytree.tree_map_only(Tensor, value_of, result)
        self._register_items(node, result, real)

    def _register_items(self, node: fx.Node, result: Any, real: Any) -> None:
        """Write a `getitem` node for each tensor in a tuple, list or dict, also a nested one."""
        if isinstance(result, dict):
            items: Any = result.items()
        elif isinstance(result, (tuple, list)):
            items = enumerate(result)
        else:
            return
        for key, item in items:
            if isinstance(item, (Tensor, tuple, list, dict)) and has_tensor(item):
                child = self.graph.call_function(operator.getitem, (node, key))
                child.meta.update(node.meta)
                child.meta.pop(WRITES, None)
                inner = None if real is None else real[key]
                if isinstance(item, Tensor):
                    self._remember(child, item)
                    child.meta[VAL] = node.meta[VAL][key]
                    if inner is not None:
                        self.known.put(item, inner, child)
                else:
                    child.meta[VAL] = node.meta[VAL][key]
                    self._register_items(child, item, inner)

    def _remember(self, node: fx.Node, tensor: Tensor) -> None:
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        if _has_custom_backward(tensor):
            self._custom.add(id(tensor))

    def unrecorded(self, result: Any) -> Any:
        """Note a result of a call that was not recorded."""
        if isinstance(result, Tensor) and result.is_meta:
            self._beside.append((weakref.ref(result), places.current()))
        return result

    def release(self) -> WeakTensorRefs:
        """Drop all references to tensors; returns weak references to those that others hold, with their places."""
        nodes = [(t, self.nodes[id(t)]) for t in self.alive]
        references = [
            (weakref.ref(t), n.meta.get(PLACE, "")) for t, n in nodes if n.op not in ("placeholder", "get_attr")
        ]
        nodes.clear()
        self.alive.clear()
        self._casts.clear()
        self.known.deferred.clear()
        living = [(reference, place) for reference, place in (*references, *self._beside) if reference() is not None]
        noted = {id(t) for node in (self.graph.nodes if living else ()) for t in pytree.tree_leaves(node.meta.get(VAL))}
        return [(reference, place) for reference, place in living if id(reference()) not in noted]

    def annotate(self, node: fx.Node, place: bool = False) -> None:
        """Set the annotations that are the same for every node made at this moment."""
        autocast: tuple[str, ...] = ()
        if torch._C._is_any_autocast_enabled():
            kind = self.device.type
            if torch.is_autocast_enabled(kind):
                autocast = (kind, str(torch.get_autocast_dtype(kind)))
        node.meta.update(
            {
                SCOPE: self.scope,
                REGION: self.region,
                PLACE: places.current() if place else "",
                GRAD_MODE: torch.is_grad_enabled(),
                AUTOCAST: autocast,
            }
        )

    def annotate_number(self, node: fx.Node, value: Any, source: fx.Node | None) -> None:
        if source is None:
            self.annotate(node, place=True)
        else:
            node.meta.update({k: source.meta[k] for k in (SCOPE, REGION, PLACE, GRAD_MODE, AUTOCAST)})
        node.meta[VAL] = value

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor; parameters, buffers and constants get their node at first use."""
        self.check_backward(tensor)
        node = self.nodes.get(id(tensor))
        if node is None:
            entry = self.attributes.find(tensor)
            if entry is None:
                raise TraceError(
                    f"a tensor of shape {tuple(tensor.shape)} was made by something the tracer cannot see (a scripted "
                    "function, numpy, nn.Parameter(...), a leaf that hands it on beside its result, "
                    "as in a cache): make it with a torch function or in __init__, and train without caches",
                    where=self.where(),
                )
            node = self.nodes.get(id(entry.data_free))
            if node is None:
                node = self.graph.create_node("get_attr", entry.name, (), {})
                self.annotate(node, place=True)
                node.meta[VAL] = (
                    entry.data_free if isinstance(entry.data_free, torch.nn.Parameter) else value_of(entry.data_free)
                )
                self._remember(node, entry.data_free)
                if entry.lacks_value:
                    node.meta[NO_VALUE] = True
                if entry.known is not None:
                    is_state = not entry.name.startswith("_constant_")
                    self.known.put(entry.data_free, entry.known, node, is_state=is_state, is_kept=entry.is_kept)
        return node

    def await_backward(self, result: Any) -> None:
        """Note that tensors in `result` get a custom backward after their node was written."""
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) in self.nodes:
                self._awaiting[id(tensor)] = self.nodes[id(tensor)].meta[VAL]

    def check_backward(self, tensor: Tensor) -> None:
        """Raise TraceError if a tensor got a custom backward after its node: a replay of the graph would lose it."""
        if not _has_custom_backward(tensor) or id(tensor) in self._custom:
            return
        awaiting = self._awaiting.pop(id(tensor), None)
        if awaiting is None:
            raise TraceError(
                f"{type(tensor.grad_fn).__name__} is the backward of a tensor whose node does not know it: let the "
                "autograd function write into none of its arguments, or name the function around it in "
                "autowrap_functions",
                where=self.where(),
            )
        with torch._C.DisableTorchFunction():  # not a call of the model
            awaiting.requires_grad_()
        self._custom.add(id(tensor))

    def without_gradient(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        """A detach node for an operand that requires a gradient under no_grad; the graph then needs no grad mode."""
        detached = self._detached.get(node)
        if detached is None:
            detached = self._detached[node] = self.graph.call_method("detach", (node,))
            self.annotate(detached, place=True)
            detached.meta[VAL] = value_of(tensor).detach()
        return detached

    def where(self) -> str:
        """The place in the user's model, for error messages."""
        path = self.scope[-1][0] if self.scope else ""
        caller = places.called_at()
        return ", ".join(filter(None, [path or "the root module", places.current(), caller and f"called at {caller}"]))


def _has_custom_backward(tensor: Tensor) -> bool:
    try:
        return isinstance(tensor.grad_fn, BackwardCFunction)
    except RuntimeError:  # torch refuses `grad_fn` of a view that was made and written under no_grad
        return False
