"""Declared dynamic dims: their sizes are symbols (`torch.SymInt`) that the user's Python computes with.

A branch on a size is decided if the answer holds for all values (a dynamic dim is at least 2), and refused otherwise.
Inside torch's own functions, which must settle broadcasting and strides, the example's size decides.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.tracing.calls.symbolic_kernels import symbolic_kernels
from autopar.tracing.errors import TraceError

Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


class DynamicSizes:
    """Symbols for the dynamic dims of inputs, and the nodes for expressions of them."""

    def __init__(
        self,
        graph: fx.Graph,
        annotate: Callable[[fx.Node, Any, fx.Node | None], None],
        refuses: Callable[[], bool],
        where: Callable[[], str],
    ) -> None:
        self.graph = graph
        self.annotate = annotate
        self.refuses, self.where = refuses, where
        self._origin: dict[Any, tuple[fx.Node, int]] = {}  # of symbols
        self._by_name: dict[str, Any] = {}
        self._written: dict[Any, Any] = {}
        self.kernels: Callable[[], AbstractContextManager[Any]] = nullcontext  # kernels for symbols, if any

    def tensor(self, example: torch.Tensor, dims: Mapping[int, str], dtype: torch.dtype) -> torch.Tensor:
        """A data-free tensor like the example, with symbols for `dims`; equal names are the same symbol."""
        sizes: list[Any] = list(example.shape)
        for dim, name in dims.items():
            if name not in self._by_name:
                self._by_name[name] = self._symbol(name, sizes[dim])
                self.kernels = symbolic_kernels
            sizes[dim] = self._by_name[name]
        return torch.empty(sizes, dtype=dtype, device="meta")

    @cached_property
    def environment(self) -> Any:
        """A shape environment that refuses to guess for the user's Python.

        Created only for traces with dynamic dims, since its import is slow.
        """
        from torch.fx.experimental.symbolic_shapes import (
            ShapeEnv,  # only it can make SymInts
        )

        refuses, where = self.refuses, self.where

        class Sizes(ShapeEnv):
            def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
                if not refuses():
                    return super().evaluate_expr(orig_expr, *args, **kwargs)
                decided = self._maybe_evaluate_static(orig_expr)
                if decided is None:
                    raise TraceError(f"a branch on {orig_expr} depends on dims declared dynamic", where=where())
                return decided

        return Sizes(duck_shape=False)

    def _symbol(self, name: str, example: int) -> Any:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self.environment.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return self.environment.create_symintnode(symbol, hint=example, source=source)

    def read_from(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Note that the symbols in this input's sizes can be read from it."""
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                self._origin.setdefault(size.node.expr, (node, dim))

    def node(self, value: Any) -> Any:
        """The node of a symbolic number; a plain number if its expression has no symbols left."""
        from torch.utils._sympy.interp import sympy_interp

        expression = value.node.expr
        if expression not in self._written:
            self._written[expression] = sympy_interp(
                self, {s: self._size(s) for s in expression.free_symbols}, expression
            )
            if isinstance(self._written[expression], fx.Node):
                self.annotate(self._written[expression], value, None)
        return self._written[expression]

    def _size(self, symbol: Any) -> fx.Node:
        if symbol not in self._written:
            source, dim = self._origin[symbol]
            place = source
            while place.next.op == "placeholder":
                place = place.next
            with self.graph.inserting_after(place):
                self._written[symbol] = self.graph.call_method("size", (source, dim))
            self.annotate(self._written[symbol], source.meta["val"].shape[dim], source)
        node: fx.Node = self._written[symbol]
        return node

    # `sympy_interp` calls a method of this object for each operation

    def constant(self, value: Any, dtype: torch.dtype) -> Any:
        return int(value) if value == int(value) and dtype is torch.int64 else float(value)

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            operands = tuple(a for a in args if not isinstance(a, torch.dtype))
            if not any(isinstance(a, fx.Node) for a in operands):
                return _FUNCTIONS[name](*operands)
            node = self.graph.call_function(_FUNCTIONS[name], operands)
            self.annotate(node, None, None)
            return node

        return call


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "python_mod": operator.mod, "truediv": operator.truediv, "int_truediv": operator.truediv, "neg": operator.neg,
    "pow": operator.pow, "pow_by_natural": operator.pow, "ceil_to_int": math.ceil, "ceil": math.ceil,
    "floor_to_int": math.floor, "floor": math.floor, "trunc_to_int": math.trunc, "round_to_int": round,
    "sqrt": math.sqrt, "to_dtype": lambda value: value,
    "maximum": max, "minimum": min, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "gt": operator.gt,
    "le": operator.le, "ge": operator.ge, "and_": operator.and_, "or_": operator.or_, "not_": operator.not_,
}  # fmt: skip
