"""The arguments of a recorded call, in two forms: as the graph holds them, and as they run without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.tracing.calls.dynamic import Symbolic
from autopar.tracing.contents.unknown import UnknownBool, UnknownNumber
from autopar.tracing.picked.picked_rows import PickedRows
from autopar.tracing.sizes import TracedFloat, TracedInt
from autopar.tracing.values import META, PLAIN, value_of

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor


class Arguments:
    """The arguments of one call, converted to graph arguments; `tensors` are their data-free tensors, in order."""

    __slots__ = (
        "_detach", "elsewhere", "graph_args", "graph_kwargs", "nodes", "parameters", "recorder", "replaced",
        "tensors", "unknown",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self.recorder = recorder
        self.tensors: list[Tensor] = []
        self.nodes: list[fx.Node] = []  # of `tensors`: the nodes that the call reads
        self.elsewhere: dict[int, fx.Node] = {}  # by id, of tensors that the call reads detached: their own nodes
        self.parameters: list[str] = []  # names of the parameters among them
        self.replaced = False  # an argument must be replaced for the run: a constant, a device, an unknown number
        self.unknown = False  # an argument is an unknown number
        self._detach = recorder.grad and not torch.is_grad_enabled()
        self.graph_args = self.take(args)
        self.graph_kwargs = self.take(kwargs) if kwargs else {}

    def value(self, index: int) -> Tensor:
        """A tensor's value as the node that the call reads has it.

        Under no_grad this node is a detach of the tensor: a write goes through that view, and keeps the tensor's
        history.
        """
        value = value_of(self.tensors[index])
        return value.detach() if id(self.tensors[index]) in self.elsewhere else value

    def take(self, value: Any) -> Any:
        """A value as a graph argument: tensors and traced numbers become their nodes."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is PickedRows:
            raise value.unknown()
        if isinstance(value, Tensor):
            return self._take_tensor(value)
        if kind is tuple or kind is torch.Size:
            return tuple([v if type(v) in PLAIN else self.take(v) for v in value])
        if kind is list:
            return [v if type(v) in PLAIN else self.take(v) for v in value]
        if kind is dict:
            return {k: self.take(v) for k, v in value.items()}
        if kind is TracedInt or kind is TracedFloat:
            return self.recorder.sizes.node(value)
        if kind is UnknownNumber or kind is UnknownBool:
            self.replaced = self.unknown = True
            return value.node
        if kind in Symbolic:
            self.unknown = True
            return self.recorder.dynamic.node(value)
        if kind is slice:
            return slice(self.take(value.start), self.take(value.stop), self.take(value.step))
        if kind is type and value in _DTYPES:
            return _DTYPES[value]
        if kind is torch.device:
            self.replaced = True
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*[self.take(v) for v in value])
        if isinstance(value, (list, tuple)):
            return tuple([self.take(v) for v in value])
        if isinstance(value, dict):
            return {k: self.take(v) for k, v in value.items()}
        return value

    def _take_tensor(self, value: Tensor) -> fx.Node:
        """The node that the call reads for a tensor, which is noted with it."""
        recorder = self.recorder
        node = recorder.nodes.get(id(value))
        if node is None:
            node = recorder.node_of(value)
            if value.device.type != "meta":
                self.replaced = True
                value = recorder.attributes.data_free(value)
        elif value.requires_grad:
            recorder.check_backward(value)
        if node.op == "get_attr" and isinstance(value, torch.nn.Parameter):
            self.parameters.append(str(node.target))
        if self._detach and value.requires_grad:
            self.elsewhere[id(value)] = node
            node = recorder.without_gradient(value, node)
        self.tensors.append(value)
        self.nodes.append(node)
        return node

    def data_free(self, value: Any) -> Any:
        """The same arguments for a run without data: constants become data-free, devices meta."""
        if isinstance(value, Tensor):
            return value if value.device.type == "meta" else self.recorder.attributes.data_free(value)
        if isinstance(value, torch.device):
            return META
        if isinstance(value, UnknownNumber):
            return value.stand_in
        if isinstance(value, slice):
            return slice(self.data_free(value.start), self.data_free(value.stop), self.data_free(value.step))
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            items = [self.data_free(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {k: (META if k == "device" and v is not None else self.data_free(v)) for k, v in value.items()}
        return value


_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # as torch does
