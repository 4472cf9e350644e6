"""Removing in-place writes from any graph: ours, exported, or symbolically traced.

A graph that we did not record is first run on data-free tensors, which shows what is written and what shares storage.
Without example values (`val` on placeholders), only writes into tensors without views can be removed.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import VAL
from autopar.tracing.errors import TraceError
from autopar.tracing.rewriting.cleaning import WRITES
from autopar.tracing.rewriting.functionalize import functionalize
from autopar.tracing.rewriting.pure_writes import pure_overload

Tensor = torch.Tensor
_IN_PLACE_OPERATORS = {
    getattr(operator, f"i{n}") for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
}
_VIEWS = {"view", "reshape", "transpose", "permute", "t", "getitem", "select", "narrow", "slice", "expand", "squeeze",
          "unsqueeze", "chunk", "split", "unbind", "diagonal", "flatten", "unfold", "as_strided", "detach",
          "movedim"}  # fmt: skip
_BOOKKEEPING = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_assert_scalar", "_assert_tensor_metadata",
                "sym_constrain_range", "sym_constrain_range_for_size", "_assert_async"}  # fmt: skip


def remove_inplace(graph: fx.Graph, *, strict: bool = True, recursive: bool = False) -> int:
    """Replace every in-place write by a pure op; returns how many there were.

    A write that cannot be replaced raises TraceError, or with `strict=False` leaves the graph as it is and returns a
    negative count. `recursive` also processes the graphs of submodules that `get_attr` nodes name.
    """
    writers = [n for n in graph.nodes if is_in_place(n)]
    count = 0
    if writers:
        try:
            if any(WRITES in n.meta for n in writers):
                count = functionalize(graph)
            elif all(VAL in n.meta or "val" in n.meta for n in graph.nodes if n.op == "placeholder"):
                count = _with_values(graph)
            else:
                count = _without_values(graph, writers)
        except TraceError:
            if strict:
                raise
            return -len(writers)
    if recursive and graph.owning_module is not None:
        for node in graph.nodes:
            inner = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                count += remove_inplace(inner.graph, strict=strict, recursive=True)
                inner.recompile()
    _drop_bookkeeping(graph)
    return count


def replace_inplace_targets(graph: fx.Graph) -> int:
    """Replace ATen in-place targets by their pure overloads, and change nothing else: for graphs without aliases."""
    count = 0
    for node in graph.nodes:
        twin = pure_overload(node.target)
        if twin is not None:
            node.target = twin
            count += 1
    return count


def is_in_place(node: fx.Node) -> bool:
    """Whether a node, by its name or its schema, writes into an argument."""
    if WRITES in node.meta:
        return True
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")  # type: ignore[union-attr]
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.target is operator.setitem or node.target in _IN_PLACE_OPERATORS:
        return True
    name = getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))


def _with_values(graph: fx.Graph) -> int:
    """Find by a data-free run which nodes write which tensors, then functionalise; the nodes keep their own `val`."""
    before = {n: n.meta.get(VAL) for n in graph.nodes}
    marked: dict[fx.Node, Any] = {}
    values: dict[fx.Node, Any] = {}
    try:
        for node in graph.nodes:
            values[node] = _run(node, graph, values, marked)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise TraceError(f"{node.format_node()} cannot be run on data-free tensors: {error}\n{graph}") from error
    for node, value in values.items():
        node.meta[VAL] = value
    for node, written in marked.items():
        node.meta[WRITES] = written
    count = functionalize(graph)
    for node in graph.nodes:
        if node in before:
            node.meta[VAL] = before[node]
    return count


def _run(node: fx.Node, graph: fx.Graph, values: dict[fx.Node, Any], marked: dict[fx.Node, Any]) -> Any:
    """The data-free value of a node; `marked` collects, by node, the tensors that it has written."""
    if node.op == "placeholder":
        return pytree.tree_map_only(Tensor, _like, node.meta[VAL])
    if node.op == "get_attr":
        attribute: Any = graph.owning_module
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part)
        return _like(attribute) if isinstance(attribute, Tensor) else attribute
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "output":
        return args[0]
    inputs = {n: values[n] for n in node.all_input_nodes if isinstance(values[n], Tensor)}
    versions = {n: v._version for n, v in inputs.items()}
    with torch.no_grad():
        if node.op == "call_method":
            result = getattr(Tensor, str(node.target))(*args, **kwargs)
        else:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
    written = {n: v for n, v in inputs.items() if v._version != versions[n]}
    if written:
        marked[node] = written
    elif is_in_place(node):
        raise TraceError(f"{node.format_node()} says that it writes, and wrote nothing on data-free tensors")
    return result


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_values(graph: fx.Graph, writers: list[fx.Node]) -> int:
    """Let later readers of a written tensor read the pure result; only for tensors without views."""
    plans = [_plan(graph, w) for w in writers]
    for writer, (op, target) in zip(writers, plans, strict=True):
        with graph.inserting_before(writer):
            pure = graph.create_node(op, target, writer.args, writer.kwargs)
        written = writer.args[0]
        assert isinstance(written, fx.Node)
        order = {n: i for i, n in enumerate(graph.nodes)}
        for user in list(written.users):
            if order[user] > order[writer]:
                user.replace_input_with(written, pure)
        writer.replace_all_uses_with(pure)
        graph.erase_node(writer)
    return len(writers)


def _plan(graph: fx.Graph, writer: fx.Node) -> tuple[str, Any]:
    """Op and target of the pure form of a write; TraceError if none is certain to be equivalent."""
    written = writer.args[0] if writer.args else None
    overload = pure_overload(writer.target)
    name = str(writer.target).rstrip("_")
    plan = ("call_function", overload) if overload is not None else None
    if writer.op == "call_method" and hasattr(Tensor, name):
        plan = ("call_method", name)
    if plan is None or not isinstance(written, fx.Node) or written.op == "placeholder":
        raise TraceError(f"{writer.format_node()} has no pure form that is sure to mean the same\n{graph}")
    for other in (written, *written.users):
        if _short(other) in _VIEWS:
            raise TraceError(f"{writer.format_node()} writes into a tensor that {other.format_node()} shares\n{graph}")
    return plan


def _short(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.split(".")[0]


def _drop_bookkeeping(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and _short(node) in _BOOKKEEPING:
            graph.erase_node(node)
