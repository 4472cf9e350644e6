"""The value that an in-place write computes, as a node that writes nothing."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverloadPacket  # private: there is no other name for what `torch.ops` holds

from autopar.graph import KNOWN, VAL
from autopar.ops.random_ops import is_random
from autopar.tracing.rewriting import functional
from autopar.tracing.rewriting.cleaning import WRITES

Tensor = torch.Tensor

# In-place methods whose pure form would draw other random numbers, or does not exist.
_NO_TWIN = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_"}


_TORCHS_OWN = "aten", "prims", "_c10d_functional"


def pure_overload(target: Any) -> Any:
    """The pure overload of an ATen-style in-place overload; None if there is none."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    namespace, name = target._schema.name.split("::")
    if namespace not in _TORCHS_OWN:  # in other namespaces `add` need not be the pure form of `add_`
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if name.endswith("_") else None


class Pure:
    """Makes the pure form of a write: the written tensor, now `target`, gets a new value like `value`."""

    def __init__(self, graph: fx.Graph, source: fx.Node, target: fx.Node, value: Tensor) -> None:
        self.graph, self.source, self.target, self.value = graph, source, target, value

    def function(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._noted(self.graph.call_function(function, args, kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self._noted(self.graph.call_method(name, args, kwargs))

    def _noted(self, node: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        node.meta = {k: v for k, v in self.source.meta.items() if k not in (WRITES, KNOWN)}
        node.meta[VAL] = fresh(self.value, dtype)
        return node

    def node(self, args: Any, kwargs: Any) -> fx.Node | None:
        """The node that computes the new value of the written tensor; None if only the call itself can."""
        writer = self.source
        name = writer.target if isinstance(writer.target, str) else getattr(writer.target, "__name__", "")
        if isinstance(writer.target, OpOverloadPacket) and not writer.target._qualified_op_name.startswith("aten::"):
            return None  # `mylib::add_` is no `Tensor.add_`
        if writer.target is operator.setitem:
            return self.function(functional.write, *args)
        twin = pure_overload(writer.target)
        if twin is not None and args[0] is self.target:
            return self._overload(twin, args, kwargs)
        if kwargs.get("out") is self.target and not isinstance(writer.target, str):
            returned = self._returned(writer.target, args, {k: v for k, v in kwargs.items() if k != "out"})
            if returned is not None:
                return returned
        if kwargs.get("inplace"):
            return self.function(writer.target, *args, **{**kwargs, "inplace": False})
        if _pure_method(name) and args and args[0] is self.target:
            return self._twin(name, args, kwargs)
        return None

    def _returned(self, function: Any, args: Any, kwargs: Any) -> fx.Node | None:
        """The result of `torch.add(x, y, out=z)` without `out`, cast to z's dtype; None if it has another shape."""
        dtype = self._dtype_of(function, args, kwargs)
        if dtype is None:
            return None
        node = self._noted(self.graph.call_function(function, args, kwargs), dtype)
        return node if dtype == self.value.dtype else self.method("to", node, self.value.dtype)

    def _overload(self, twin: Any, args: Any, kwargs: Any) -> fx.Node:
        """The pure form of an ATen operation."""
        name = self.source.target._schema.name  # type: ignore[union-attr]
        if (
            name == "aten::copy_"
            and args[1].meta[VAL].shape == self.value.shape
            and args[1].meta[VAL].dtype == self.value.dtype
        ):
            source: fx.Node = args[1]
            return source
        return self.function(twin, *args, **kwargs)

    def _twin(self, name: str, args: Any, kwargs: Any) -> fx.Node | None:
        """The pure form of an in-place method or function."""
        if name == "zero_":
            return self.function(torch.zeros_like, self.target)
        source = args[1] if len(args) > 1 else kwargs.get("value", kwargs.get("other"))  # of `fill_` and `copy_`
        if name == "fill_" and not isinstance(source, fx.Node):
            return self.function(torch.full_like, self.target, source)
        if name == "copy_" and isinstance(source, fx.Node) and source.meta[VAL].shape == self.value.shape:
            return source if source.meta[VAL].dtype == self.value.dtype else self.method("to", source, self.value.dtype)
        twin = _pure_method(name)
        if not hasattr(Tensor, name):
            return self._function_twin(twin, args, kwargs)
        if name in _NO_TWIN or not hasattr(Tensor, twin):
            return self.function(functional.apply_inplace, name, *args, **kwargs)
        dtype = self._dtype_of(getattr(Tensor, twin), args, kwargs)
        if dtype is None or (self.value.requires_grad and not (dtype.is_floating_point or dtype.is_complex)):
            return self.function(functional.apply_inplace, name, *args, **kwargs)  # `==` has no gradient
        node = self.method(twin, *args, **kwargs)
        if dtype != self.value.dtype:
            self._noted(node, dtype)
            node = self.method("to", node, self.value.dtype)
        return node

    def _function_twin(self, name: str, args: Any, kwargs: Any) -> fx.Node | None:
        """`torch.threshold` for `F.threshold_`, which is no method; None if there is none, or a random one."""
        pure = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
        if pure is None or is_random(pure) or self._dtype_of(pure, args, kwargs) != self.value.dtype:
            return None
        return self.function(pure, *args, **kwargs)

    def _dtype_of(self, pure: Any, args: Any, kwargs: Any) -> torch.dtype | None:
        """The dtype of the pure call, which may be promoted where the write's is not; None if shapes differ."""
        values, keywords = fx.map_arg((args, kwargs), lambda n: n.meta[VAL])
        try:
            with torch.no_grad():
                result = pure(*values, **keywords)
        except (RuntimeError, TypeError):
            return None
        fits = isinstance(result, Tensor) and result.shape == self.value.shape
        return result.dtype if fits else None


def fresh(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A data-free tensor like another one, with its own storage."""
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device="meta")
    return tensor.requires_grad_() if value.requires_grad else tensor


def _pure_method(name: str) -> str:
    """`add` for `add_`, `__and__` for `__iand__` (`a &= b`); "" for other names."""
    if name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.startswith("_") else ""
