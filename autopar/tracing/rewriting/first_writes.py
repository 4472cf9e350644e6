"""Writes into a parameter before anything reads it, such as a clamp of its values: they are done before the call.

A planned model's graph reads copies of parameters, so a write in it would be lost. An elementwise write, with numbers
and the corresponding elements of other parameters (a momentum encoder's average) or of buffers (the mask of a masked
convolution), is the same on every shard, and can be done when the call begins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autopar.graph import FIRST_WRITES, VAL, input_nodes, storage_of
from autopar.ops.first_writes import ELEMENTWISE, Computed, OfParameter
from autopar.tracing.rewriting.cleaning import WRITES

_WRITES = {"abs_", "add_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "div_", "lerp_", "masked_fill_", "mul_"}
_WRITES |= {"nan_to_num_", "neg_", "sub_"}
_NAMES: dict[Any, str] = {function: name for name, function in ELEMENTWISE.items()}


def take_first_writes(graph: fx.Graph, writers: Collection[fx.Node]) -> set[fx.Node]:
    """Note such writes at their parameters (`FIRST_WRITES`), and erase their nodes; returns these `writers`."""
    erased: set[fx.Node] = set()
    by_storage: dict[int | None, list[fx.Node]] = {}
    for writer in writers:
        for storage in {storage_of(node.meta[VAL]) for node in writer.meta[WRITES]}:
            by_storage.setdefault(storage, []).append(writer)
    parameters = [n for n in graph.nodes if n.op == "get_attr" and _is_parameter(n)]
    storages = [storage_of(node.meta[VAL]) for node in parameters]
    read = _read(graph, writers, {writer for storage in storages for writer in by_storage.get(storage, ())})
    alone = {n for n, s in zip(parameters, storages, strict=True) if s not in by_storage and storages.count(s) == 1}
    buffers = {n for n in graph.nodes if _is_buffer(n) and storage_of(n.meta[VAL]) not in by_storage}
    for parameter, storage in zip(parameters, storages, strict=True):
        if own := by_storage.get(storage):
            erased.update(_Taking(graph, parameter, own, alone & read | buffers).run())
    return erased


def _is_buffer(node: fx.Node) -> bool:
    is_registered = node.op == "get_attr" and not str(node.target).startswith("_constant_")
    return is_registered and isinstance(node.meta.get(VAL), torch.Tensor) and not _is_parameter(node)


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta.get(VAL), torch.nn.Parameter)


def _read(graph: fx.Graph, writers: Collection[fx.Node], into_parameters: set[fx.Node]) -> set[fx.Node]:
    """The nodes that the graph's results depend on, apart from writes into parameters; they stay in the graph."""
    read_nodes: set[fx.Node] = set()
    ahead = [node for node in graph.nodes if node.op == "output"]
    ahead += [writer for writer in writers if writer not in into_parameters]
    while ahead:
        node = ahead.pop()
        if node not in read_nodes:
            read_nodes.add(node)
            ahead += [source for source in input_nodes(node) if node not in into_parameters or source is node.args[0]]
    return read_nodes


class _Taking:
    """The writers of one parameter, in order.

    `others`: parameters that forward reads but does not write, and that have a single name; buffers that it does not
    write.
    """

    def __init__(self, graph: fx.Graph, parameter: fx.Node, own: list[fx.Node], others: set[fx.Node]) -> None:
        self.graph, self.parameter, self.own = graph, parameter, own
        self.whole = {parameter}  # nodes that are the whole parameter
        self.values: dict[fx.Node, OfParameter | Computed] = {  # possible operands of writes
            node: OfParameter(str(node.target)) for node in others if self._is_like(node)
        }
        self.made: dict[fx.Node, int] = {}  # those computed from the parameter: after how many writes

    def run(self) -> list[fx.Node]:
        """The writers that were removed: all of them or none."""
        noted = self._noted()
        if noted is None:
            return []
        self.parameter.meta[FIRST_WRITES] = noted
        for writer in self.own:  # under no_grad the parameter itself may be written, through the tracer's `detach`
            seen_as = self.parameter if writer.meta[VAL].requires_grad else writer.args[0]
            writer.replace_all_uses_with(seen_as)  # type: ignore[arg-type]  # both are nodes
        for writer in reversed(self.own):
            self.graph.erase_node(writer)
        return self.own

    def _noted(self) -> tuple[Any, ...] | None:
        """The value of `FIRST_WRITES`; None if the parameter is read before, or written in another way."""
        storage = storage_of(self.parameter.meta[VAL])
        noted: list[tuple[Any, ...]] = []
        for node in self.graph.nodes:
            if node is self.parameter or node in self.values:
                continue
            if node.op == "get_attr" and storage_of(node.meta.get(VAL)) == storage:
                return None  # a tied parameter, which may be read before
            on_it = bool(node.args) and node.args[0] in self.whole and node.op == "call_method"
            if node in self.own:
                args, kwargs = self._arguments(node.args[1:], node.kwargs, len(noted))
                if not on_it or node.target not in _WRITES or None in (*args, *dict(kwargs).values()):
                    return None
                noted.append((node.target, args, kwargs))
                self.whole.add(node)
                if node is self.own[-1]:
                    return tuple(noted) if self._is_made_for_writes() else None
            elif on_it and node.target == "detach":
                self.whole.add(node)
            elif not self._note(node, len(noted)):
                return None
        return None

    def _note(self, node: fx.Node, count: int) -> bool:
        """Note what the node computes, after `count` writes; False if it reads the parameter in an unsupported way."""
        reads = any(source in self.whole or source in self.made for source in input_nodes(node))
        value = self._computed(node, count)
        if value is not None:
            self.values[node] = value
            if reads:
                self.made[node] = count
        return value is not None or not reads

    def _computed(self, node: fx.Node, count: int) -> OfParameter | Computed | None:
        if node.op == "call_method" and node.target == "detach":
            value: OfParameter | Computed | None = self._value(node.args[0], count)
            return value
        function = f"torch.{node.target}" if node.op == "call_method" else _NAMES.get(node.target)
        if function not in ELEMENTWISE or not self._is_like(node):
            return None
        args, kwargs = self._arguments(node.args, node.kwargs, count)
        return None if None in (*args, *dict(kwargs).values()) else Computed(function, args, kwargs)

    def _arguments(self, args: Any, kwargs: Any, count: int) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Arguments in the form of `Writes`; None for each that has no such form."""
        named = tuple((name, self._value(argument, count)) for name, argument in kwargs.items())
        return tuple(self._value(argument, count) for argument in args), named

    def _value(self, argument: Any, count: int) -> Any:
        if not isinstance(argument, fx.Node):
            return argument if isinstance(argument, (int, float)) else None
        if argument in self.whole:
            return OfParameter(str(self.parameter.target))
        return self.values.get(argument) if self.made.get(argument, count) == count else None

    def _is_like(self, node: fx.Node) -> bool:
        """Whether a node's elements correspond to those of the parameter; buffers have their own dtype."""
        mine, its = self.parameter.meta[VAL], node.meta.get(VAL)
        if not isinstance(its, torch.Tensor) or its.shape != mine.shape:
            return False
        return its.dtype == mine.dtype or _is_buffer(node)

    def _is_made_for_writes(self) -> bool:
        """Whether only the writes read what was computed from the parameter's earlier values."""
        return all(user in self.made or user in self.own for node in self.made for user in node.users)
