"""Annotates a graph with costs: each node is measured by itself on data-free tensors, identical nodes only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import fx, nn

from autopar.cost.ops.call_keys import CallKinds
from autopar.cost.ops.calls import NoDataError, arguments, callable_of, data_free
from autopar.cost.ops.fusion import fuse
from autopar.cost.ops.kernels import Kernel, kernel
from autopar.cost.ops.measure import Measured, measure, storage_id, touched_bytes
from autopar.cost.ops.node_cost import NodeCost, Work
from autopar.cost.ops.products import as_product
from autopar.cost.ops.strides import correct_strides
from autopar.cost.ops.workspace import measure_workspace
from autopar.graph import (
    COST,
    FORM,
    GRAD_MODE,
    KIND,
    TRIAL_FLOPS,
    TensorRef,
    is_getitem,
    output_tensors,
    resolve,
    tensor_inputs,
    tensor_of,
)
from autopar.leaf_calls import LeafCall


def annotate(
    graph: fx.Graph, device_kind: str = "cpu", root: nn.Module | None = None, *, compiled: bool = False
) -> None:
    """Set `node.meta[COST]` of every node, for a device of torch type `device_kind`.

    Nothing runs on that device: each call runs on meta tensors like its inputs' VAL. Before that, strides and shared
    storages of all VAL are corrected to those of the device's kernels. `root` has the leaf modules (default: the
    graph's owner). `compiled`: ops that `torch.compile` fuses are priced as one kernel (`cost.ops.fusion`).

    >>> from autopar.graph import VAL
    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> x.meta[VAL] = torch.empty(2, 3, device="meta", requires_grad=True)
    >>> y.meta[VAL] = torch.empty(3, 5, device="meta")
    >>> product = graph.call_function(torch.matmul, (x, y))
    >>> product.meta[VAL] = torch.empty(2, 5, device="meta", requires_grad=True)
    >>> annotate(graph)
    >>> cost = product.meta[COST]
    >>> cost.flops_forward, cost.flops_backward, cost.saved_inputs
    (60, 60, (1,))
    """
    costs: dict[int, NodeCost] = {}
    kinds = CallKinds()
    root = root if root is not None else graph.owning_module
    correct_strides(graph, device_kind, root)
    for node in graph.nodes:
        node.meta.pop(KIND, None)
        node.meta.pop(FORM, None)
        outputs = output_tensors(node)
        if node.op in ("placeholder", "get_attr", "output") or not outputs:
            node.meta[COST] = _nothing(len(outputs))
        elif is_getitem(node):
            node.meta[COST] = _picked(node)
        else:
            form, kind = kinds.of(node)
            if kind not in costs:
                costs[kind] = _cost(node, device_kind, root)
            node.meta[COST] = costs[kind]
            if not isinstance(node.target, LeafCall):  # equal leaf calls may have different rules
                node.meta[KIND], node.meta[FORM] = kind, form
    if compiled:
        fuse(graph)


def saved_bytes(graph: fx.Graph) -> int:
    """Bytes that all nodes save for backward, counting each storage once, without parameters, buffers and inputs.

    Equal to what `saved_tensors_hooks` sees when the model runs on the annotated device.
    """
    storages: dict[int, int] = {}
    owned: set[int] = set()
    internal = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            owned.update(map(storage_id, output_tensors(node)))
        cost: NodeCost = node.meta[COST]
        internal += cost.saved_internal_bytes
        inputs = tensor_inputs(node) if cost.saved_inputs else []
        outputs = output_tensors(node) if cost.saved_outputs else []
        for tensor in [tensor_of(inputs[i]) for i in cost.saved_inputs] + [outputs[i] for i in cost.saved_outputs]:
            storages[storage_id(tensor)] = tensor.untyped_storage().nbytes()
    return internal + sum(size for storage, size in storages.items() if storage not in owned)


def total_flops(graph: fx.Graph) -> tuple[int, int]:
    """Model FLOPs of the whole graph, forward and backward."""
    costs = [node.meta[COST] for node in graph.nodes]
    return sum(c.flops_forward for c in costs), sum(c.flops_backward for c in costs)


@cache
def _nothing(tensors: int) -> NodeCost:
    """The cost of a node that runs nothing: a parameter, an input, the output."""
    return NodeCost(alias_of=(None,) * tensors)


def _picked(node: fx.Node) -> NodeCost:
    """The cost of a `getitem` on a tuple: it runs nothing, and its tensors alias those of the tuple."""
    position = {ref: i for i, ref in enumerate(tensor_inputs(node))}
    return NodeCost(alias_of=tuple(position[ref] for ref in resolve(node)))


def _cost(node: fx.Node, device_kind: str, root: nn.Module | None) -> NodeCost:
    """Measure one node, or estimate its cost if it does not run on data-free tensors."""
    refs = tensor_inputs(node)
    if not refs and node.op != "call_module":  # a factory: it writes its outputs
        outputs = output_tensors(node)
        written = sum(map(touched_bytes, outputs))
        work = _work(outputs, [], [], _Pass(0, written, 1), _Pass(0, 0, 0))
        return NodeCost(moved_bytes_forward=written, alias_of=(None,) * len(outputs), work=work)
    for leaves in (True, False):  # autograd refuses in-place ops on leaf tensors: try again with non-leaf inputs
        try:
            cost = _measured(node, refs, device_kind, root, leaves)
            return dataclasses.replace(cost, estimated=isinstance(node.target, LeafCall))  # may depend on data
        except NoDataError:
            continue
    return _estimate(node, root)


def _measured(
    node: fx.Node, refs: Sequence[TensorRef], device_kind: str, root: nn.Module | None, leaves: bool
) -> NodeCost:
    """The cost of running the node by itself; raises NoDataError if that is impossible without data."""
    with torch.set_grad_enabled(bool(node.meta.get(GRAD_MODE, True))):
        fresh = {ref: _fresh(tensor_of(ref), leaves) for ref in dict.fromkeys(refs)}
        args, kwargs = arguments(node, fresh)
        call, owned = callable_of(node, root)
        with data_free(node):
            measured = measure(lambda: call(*args, **kwargs), [*fresh.values(), *owned])
            workspace = measure_workspace(lambda: call(*args, **kwargs), [*fresh.values(), *owned])
    if len(measured.outputs) != len(output_tensors(node)):
        raise NoDataError(f"{node} alone yields {len(measured.outputs)} tensors")
    own = kernel(node.target, device_kind, measured.outputs, args, kwargs)
    cost = _from_measured(node, measured, [fresh[ref] for ref in refs], owned, own)
    places = [list(fresh).index(ref) for ref in refs]
    return workspace.added_to(cost, places, at_once=own is not None and own.at_once)


def _fresh(tensor: torch.Tensor, leaf: bool) -> torch.Tensor:
    """A meta tensor with shape, strides, dtype and `requires_grad` of `tensor`, and its own storage."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made.requires_grad_(tensor.requires_grad)
    return made if leaf or not tensor.requires_grad else made.view_as(made).clone()


def _from_measured(
    node: fx.Node,
    measured: Measured,
    inputs: Sequence[torch.Tensor],
    owned: Sequence[torch.Tensor],
    override: Kernel | None,
) -> NodeCost:
    """The figures of the target device: as measured, except for those that its own kernel overrides."""
    outputs, trains = measured.outputs, any(t.requires_grad for t in measured.outputs)
    saved = dict(measured.saved)
    if override and trains and override.saved is not None:
        saved = {storage_id(t): 0 for t in override.saved}
    for tensor in owned:
        saved.pop(storage_id(tensor), None)
    input_at = {storage_id(t): i for i, t in reversed(list(enumerate(inputs)))}
    output_at = {storage_id(t): i for i, t in reversed(list(enumerate(outputs))) if storage_id(t) not in input_at}
    copies = tuple[tuple[int, int], ...]()
    if override and trains and override.internal_bytes is not None:
        internal = override.internal_bytes
    else:
        beside = {s: size for s, size in saved.items() if s not in input_at and s not in output_at}
        internal = sum(beside.values())
        copied = [(input_at.get(measured.copied.get(s, s)), size) for s, size in beside.items()]
        copies = tuple((place, size) for place, size in copied if place is not None)
    forward, backward, read = _passes(measured, inputs, override)
    work = _work(outputs, inputs, read, forward, backward)
    if work and forward.flops:
        work = as_product(work, node, outputs[0], inputs, attention=bool(override and override.attention))
    return NodeCost(
        measured.flops_forward,
        measured.flops_backward,
        tuple(sorted(i for s, i in input_at.items() if s in saved)),
        tuple(sorted(i for s, i in output_at.items() if s in saved)),
        internal,
        copies,
        forward.moved_bytes,
        backward.moved_bytes,
        tuple(input_at.get(storage_id(t)) for t in outputs),
        work=work,
        workspace_backward_bytes=override.workspace_backward if override and trains else 0,
    )


class _Pass(NamedTuple):
    """What the device's kernels do in an op's forward or backward."""

    flops: int
    moved_bytes: int
    kernels: int


def _passes(
    measured: Measured, inputs: Sequence[torch.Tensor], override: Kernel | None
) -> tuple[_Pass, _Pass, list[int]]:
    """Forward, backward, and the bytes that forward reads of each input."""
    forward = _Pass(measured.flops_forward, measured.forward.moved_bytes, measured.forward.kernels)
    backward = _Pass(measured.flops_backward, measured.backward.moved_bytes, measured.backward.kernels)
    read = [measured.forward.read_bytes.get(storage_id(t), 0) for t in inputs]
    if override:
        forward = forward._replace(flops=int(forward.flops * override.causal))
        if override.backward_passes is not None and backward.flops:
            backward = backward._replace(flops=int(forward.flops * override.backward_passes))
        if override.moved_forward is not None and override.moved_backward is not None:
            trains = any(t.requires_grad for t in measured.outputs)
            forward = _Pass(forward.flops, override.moved_forward, 1)
            backward = _Pass(backward.flops, *((override.moved_backward, 1) if trains else (0, 0)))
            read = list(map(touched_bytes, inputs))
    return forward, backward, read


def _work(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    read: Sequence[int],
    forward: _Pass,
    backward: _Pass,
) -> Work | None:
    """What the device does; None if it runs no kernel (views)."""
    if not forward.kernels + backward.kernels:
        return None
    floating = [t.dtype for t in (*inputs, *outputs) if t.dtype.is_floating_point]
    shares = dict.fromkeys(map(storage_id, inputs), 0)
    for tensor in inputs:
        shares[storage_id(tensor)] += 1
    return Work(
        str(floating[0] if floating else outputs[0].dtype).removeprefix("torch."),
        forward.flops,
        backward.flops,
        tuple(map(touched_bytes, inputs)),
        tuple(size // shares[storage_id(t)] for size, t in zip(read, inputs, strict=True)),
        sum(map(touched_bytes, outputs)),
        sum(t.numel() for t in outputs),
        forward.kernels,
        backward.kernels,
        input_shapes=tuple(tuple(t.shape) for t in inputs),
        output_shapes=tuple(tuple(t.shape) for t in outputs),
    )


def _estimate(node: fx.Node, root: nn.Module | None) -> NodeCost:
    """An estimate for a node that cannot run without data: it reads its inputs once, and saves them and its outputs.

    The FLOPs of a leaf are those of a product of every output row with each of its parameters (too many for a mixture
    of experts), or of its trial run during the trace if these are more.
    """
    inputs, outputs = [tensor_of(ref) for ref in tensor_inputs(node)], output_tensors(node)
    parameters = 0
    if node.op == "call_module" and root is not None:
        parameters = sum(p.numel() for p in root.get_submodule(str(node.target)).parameters())
    if isinstance(node.target, LeafCall):
        parameters = sum(t.numel() for t in inputs if isinstance(t, nn.Parameter))
    rows = max((t.numel() // t.shape[-1] for t in outputs if t.dim() and t.shape[-1]), default=1)
    flops, trains = max(2 * parameters * rows, node.meta.get(TRIAL_FLOPS, 0)), any(t.requires_grad for t in outputs)
    read = [touched_bytes(t) for t in inputs]
    moved = sum(read) + sum(map(touched_bytes, outputs))
    forward, backward = _Pass(flops, moved, 1), _Pass(2 * flops * trains, 2 * moved * trains, int(trains))
    work = _work(outputs, inputs, read, forward, backward)
    return NodeCost(
        flops_forward=forward.flops,
        flops_backward=backward.flops,
        saved_inputs=tuple(i for i, t in enumerate(inputs) if trains and t.dtype.is_floating_point),
        saved_outputs=tuple(i for i, t in enumerate(outputs) if t.requires_grad),
        moved_bytes_forward=forward.moved_bytes,
        moved_bytes_backward=backward.moved_bytes,
        alias_of=(None,) * len(outputs),
        estimated=True,
        work=work,
    )
