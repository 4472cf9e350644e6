"""Emission of a trace node into the local graph: as the op itself, or as the local code that its plan names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast  # private: the pair that fx graphs may hold

from autopar.graph import AUTOCAST, GRAD_MODE, VAL, output_tensors, tensor_inputs, tensor_of
from autopar.leaf_calls import LeafCall
from autopar.ops.random_ops import draws
from autopar.plans import NodePlan
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.local import LOCAL_OPS, NEEDS_KEY, LocalContext
from autopar.runtime.lowering.scopes import Scope
from autopar.runtime.lowering.seeded_leaves import SeededLeaf

WIDE = frozenset({F.binary_cross_entropy, F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss})
"""Losses whose scalar result has a storage as large as their input: ATen writes the elementwise losses there before it
sums them. The storage would live as long as the scalar, mostly through all of backward; so the result is cloned."""


class Method:
    """A tensor method by its name. torch 2.11 compiles this, whereas it loses the name of `torch.Tensor.<name>`."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, self.__name__)(*args, **kwargs)


class LocalCall:
    """Local code bound to its op (a `Method` for a method) and its context: `call(key, args, kwargs)`."""

    def __init__(self, name: str, target: Any, context: LocalContext) -> None:
        self.__name__ = f"local_{name}"
        self._code, self._target, self._context = LOCAL_OPS[name], target, context

    def __call__(self, key: torch.Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._code(self._target, args, kwargs, self._context, key)


def emit(
    node: fx.Node, plan: NodePlan, args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope, mesh: LocalMesh
) -> fx.Node:
    """Insert the op of `node` into the scope's graph, on arguments that are already in their wanted layouts."""
    emitted = _emitted(node, plan, args, kwargs, scope, mesh)
    return scope.graph.call_method("clone", (emitted,)) if node.target in WIDE and not plan.shapes[0] else emitted


def _emitted(
    node: fx.Node, plan: NodePlan, args: tuple[Any, ...], kwargs: dict[str, Any], scope: Scope, mesh: LocalMesh
) -> fx.Node:
    leaf = node.target if isinstance(node.target, LeafCall) else None
    local = plan.local or ("drawn" if draws(node) else "")
    if leaf is None and not local:
        return scope.graph.create_node(node.op, _at_any_strides(node), args, kwargs, name=node.name)
    context = LocalContext(
        mesh=mesh,
        inputs=plan.inputs,
        outputs=plan.outputs,
        input_shapes=tuple(tuple(tensor_of(ref).shape) for ref in tensor_inputs(node)),
        shapes=tuple(tuple(t.shape) for t in output_tensors(node)),
        position=plan.position,
    )
    if leaf is not None:
        return scope.graph.call_function(SeededLeaf(leaf, context, node.meta[VAL]), (scope.random_key(), args))
    target = Method(str(node.target)) if node.op == "call_method" else node.target
    key = scope.random_key() if local in NEEDS_KEY else None
    return scope.graph.call_function(LocalCall(local, target, context), (key, args, kwargs))


def _at_any_strides(node: fx.Node) -> Any:
    """The node's target; a `view` by sizes becomes a reshape, as its input may have other strides on this rank."""
    arguments = (*node.args, *node.kwargs.values())
    of_sizes = node.op == "call_method" and not any(isinstance(argument, torch.dtype) for argument in arguments)
    return _RESHAPES.get(node.target, node.target) if of_sizes else node.target


def reads_memory(target: Any) -> bool:
    """Whether an op may be a kernel of the user's, which may rely on the strides that its tensors have in one process.

    `x.contiguous()` before such an op leaves no node in the trace if x is contiguous there; a part of x, or a converted
    tensor, may not be.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in _TORCHS_OWN
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] not in _TORCHS_OWN
    home = str(getattr(target, "__module__", None) or "torch").partition(".")[0]
    return isinstance(target, LeafCall) or not (isinstance(target, str) or home in _ANY_STRIDES)


_RESHAPES: dict[Any, str] = {"view": "reshape", "view_as": "reshape_as"}
_TORCHS_OWN = ("aten", "prim", "prims")  # namespaces of torch's own ops
_ANY_STRIDES = ("torch", "autopar", "_operator", "builtins", "math")  # modules of functions that accept any strides


class Modes:
    """Sets around a node the grad mode and autocast state that the user's code had set there."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._ambient = any(node.meta.get(GRAD_MODE, True) for node in nodes)

    def enter(self, node: fx.Node, graph: fx.Graph) -> fx.Node | None:
        if self._switches(node):
            graph.call_function(torch._C._set_grad_enabled, (not self._ambient,))
        state = node.meta.get(AUTOCAST, ())
        if not state:
            return None
        kind, dtype = state
        return graph.call_function(_enter_autocast, (kind, getattr(torch, dtype.removeprefix("torch.")), True, False))

    def leave(self, node: fx.Node, graph: fx.Graph, autocast: fx.Node | None) -> None:
        if autocast is not None:
            graph.call_function(_exit_autocast, (autocast,))
        if self._switches(node):
            graph.call_function(torch._C._set_grad_enabled, (self._ambient,))

    def _switches(self, node: fx.Node) -> bool:
        return bool(node.meta.get(GRAD_MODE, self._ambient)) is not self._ambient


def constant(value: Any, device: torch.device, node_for: Callable[[Any], fx.Node]) -> Any:
    """Plain Python values of the trace as arguments in the local graph: traced sizes are ints, devices are this rank's.

    Objects that fx cannot print as code (of a user's class, say, given to an autograd function) are replaced by the
    node that `node_for` returns for them.

    >>> constant((torch.Size([2, 3]), slice(None, 4), torch.device("meta")), torch.device("cpu"), lambda item: item)
    ((2, 3), slice(None, 4, None), device(type='cpu'))
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.device):
            return device
        if isinstance(item, enum.Enum) or not isinstance(item, _PRINTED):
            return node_for(item)
        if isinstance(item, int) and not isinstance(item, bool):
            return int(item)
        return float(item) if isinstance(item, float) else item

    return fx.node.map_aggregate(value, leaf)


_PRINTED: tuple[type, ...] = (
    fx.Node, bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, torch.dtype, torch.layout,
    torch.memory_format, torch._ops.OpOverload, torch._ops.HigherOrderOperator,
)  # fmt: skip
