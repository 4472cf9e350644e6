"""Traced sizes: numbers that remember the tensor they were read from.

`x.shape[i]` and similar questions return a `TracedInt`, an ordinary `int` that also holds its origin: a size of a node,
or arithmetic on other traced numbers. Nodes are written only when such a number reaches a torch function, so that a
graph traced at one batch size can run at another. Where Python reads a number without a hook (`range`, indexing,
slicing a list), it sees a plain `int`, and the origin is lost.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

Origin = tuple[Any, ...]  # ("size", node, dim), ("numel", node) or (function, operand, ...)


class TracedInt(int):
    """An int that knows its origin.

    >>> n = TracedInt(6, ("numel", None))
    >>> type(n // 2).__name__, n // 2, n > 5, type(n * 0.5).__name__
    ('TracedInt', 3, True, 'TracedFloat')
    """

    origin: Origin

    def __new__(cls, value: int, origin: Origin) -> TracedInt:
        self = super().__new__(cls, value)
        self.origin = origin
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> int:
        return int(self)

    def __reduce__(self) -> Any:
        return (int, (int(self),))


class TracedFloat(float):
    """A float computed from traced sizes."""

    origin: Origin

    def __new__(cls, value: float, origin: Origin) -> TracedFloat:
        self = super().__new__(cls, value)
        self.origin = origin
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> float:
        return float(self)

    def __reduce__(self) -> Any:
        return (float, (float(self),))


Traced = (TracedInt, TracedFloat)
_COMMUTATIVE = {operator.add: 0, operator.mul: 1}  # with the identity element


def traced(value: Any, origin: Origin) -> Any:
    """A number with an origin; what is neither int nor float (a bool, NotImplemented) is returned as it is."""
    if type(value) is int:
        return TracedInt(value, origin)
    if type(value) is float:
        return TracedFloat(value, origin)
    return value


def _plain(value: Any) -> Any:
    """The number without its origin."""
    return int(value) if isinstance(value, TracedInt) else float(value) if isinstance(value, TracedFloat) else value


def _binary(function: Callable[..., Any], method: str) -> Callable[[Any, Any], Any]:
    def forward(self: Any, other: Any) -> Any:
        value = getattr(_plain(self), method)(_plain(other))
        if value is NotImplemented and isinstance(other, float) and isinstance(self, int):
            value = getattr(float(self), method)(_plain(other))  # int + float: Python asks the int first
        return traced(value, (function, self, other))

    return forward


def _reflected(function: Callable[..., Any], method: str) -> Callable[[Any, Any], Any]:
    def backward(self: Any, other: Any) -> Any:
        value = getattr(_plain(self), method)(_plain(other))
        if value is NotImplemented and isinstance(other, float) and isinstance(self, int):
            value = getattr(float(self), method)(_plain(other))
        return traced(value, (function, other, self))

    return backward


def _unary(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    def forward(self: Any, *arguments: Any) -> Any:
        return traced(getattr(_plain(self), method)(*arguments), (function, self, *arguments))

    return forward


for _kind in Traced:
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _binary(getattr(operator, _name), f"__{_name}__"))
        setattr(_kind, f"__r{_name}__", _reflected(getattr(operator, _name), f"__r{_name}__"))
    for _name, _function in (
        ("neg", operator.neg), ("pos", operator.pos), ("abs", operator.abs), ("round", round),
        ("ceil", math.ceil), ("floor", math.floor), ("trunc", math.trunc),
    ):  # fmt: skip
        setattr(_kind, f"__{_name}__", _unary(_function, f"__{_name}__"))


class SizeNodes:
    """Writes the nodes of traced numbers into a graph, each once.

    The size of a tensor is read right behind the node that made the tensor, so that no tensor is kept alive for its
    size; arithmetic is written where it is first needed.
    """

    def __init__(self, graph: fx.Graph, annotate: Callable[[fx.Node, Any, fx.Node | None], None]) -> None:
        self.graph = graph
        self.annotate = annotate
        self.written: dict[Any, fx.Node] = {}

    def node(self, value: Any) -> Any:
        """The node that computes a traced number; the plain number if its origin is in the graph of an earlier trace.

        The latter comes from libraries that cache what they derive from shapes (einops).
        """
        origin = value.origin
        if not self._is_here(origin):
            return _plain(value)
        if isinstance(value, TracedInt) and origin[0] in _COMMUTATIVE:
            return self._in_order(value)
        key = _key(origin)
        node = self.written.get(key)
        if node is None:
            node = self.written[key] = self._write(value, origin)
        return node

    def _in_order(self, value: TracedInt) -> fx.Node:
        """The node of a sum or product of ints, with operands in the order of the graph.

        A library may iterate over a set of names (einops) in an order that differs between processes, but all ranks
        must make the same graph.
        """
        function, identity = value.origin[0], _COMMUTATIVE[value.origin[0]]
        operands = list(_operands(function, value))
        constant = functools.reduce(function, (v for v in operands if not isinstance(v, Traced)), identity)
        so_far, *further = sorted((v for v in operands if isinstance(v, Traced)), key=lambda v: _order(v.origin))
        node = self.node(so_far)
        for operand in further if constant == identity else [*further, constant]:
            so_far = TracedInt(function(int(so_far), int(operand)), (function, so_far, operand))
            key = _key(so_far.origin)
            if key not in self.written:
                other = self.node(operand) if isinstance(operand, Traced) else operand
                self.written[key] = self._call(so_far, function, (node, other))
            node = self.written[key]
        return node

    def _is_here(self, origin: Origin) -> bool:
        """Whether everything that a number was computed from is in this graph."""
        if origin[0] in ("size", "numel"):
            return origin[1].graph is self.graph
        return all(self._is_here(v.origin) for v in origin[1:] if isinstance(v, Traced))

    def _write(self, value: Any, origin: Origin) -> fx.Node:
        if origin[0] in ("size", "numel"):
            source: fx.Node = origin[1]
            place = source
            while source.op == "placeholder" and place.next.op == "placeholder":
                place = place.next
            with self.graph.inserting_after(place):
                node = self.graph.call_method(origin[0], origin[1:])
            self.annotate(node, _plain(value), source)
            return node
        return self._call(value, origin[0], tuple(self.node(v) if isinstance(v, Traced) else v for v in origin[1:]))

    def _call(self, value: Any, function: Callable[..., Any], operands: tuple[Any, ...]) -> fx.Node:
        node = self.graph.call_function(function, operands)
        self.annotate(node, _plain(value), None)
        return node


def _key(origin: Origin) -> Any:
    return tuple(_key(v.origin) if isinstance(v, Traced) else (type(v), v) for v in origin)


def _operands(function: Callable[..., Any], value: Any) -> Iterator[Any]:
    """The operands of a sum or product of ints, with nested sums or products flattened."""
    if (
        isinstance(value, TracedInt)
        and value.origin[0] is function
        and all(isinstance(v, int) for v in value.origin[1:])
    ):
        for operand in value.origin[1:]:
            yield from _operands(function, operand)
    else:
        yield value


def _order(origin: Origin) -> tuple[Any, ...]:
    """A sort key: the sizes that a number was computed from, in graph order, then the text of its formula."""
    return [*_sizes(origin)], _text(origin)


def _sizes(origin: Origin) -> Iterator[tuple[fx.Node, int]]:
    if origin[0] in ("size", "numel"):
        yield origin[1], origin[2] if len(origin) > 2 else -1
    for operand in origin[1:]:
        if isinstance(operand, Traced):
            yield from _sizes(operand.origin)


def _text(origin: Origin) -> str:
    head = getattr(origin[0], "__name__", origin[0])
    return f"{head}({', '.join(_text(v.origin) if isinstance(v, Traced) else str(v) for v in origin[1:])})"
