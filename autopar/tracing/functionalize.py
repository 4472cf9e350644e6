"""Functionalisation by storage identity: no node writes into a tensor that another node can see.

Data-free values share storage as the real tensors would, so the aliases of a written tensor are known. A
write becomes a pure operation; the base of the storage gets the new value written back through the chain of
views, and every alias that is read later is made again from the new base. What was written into inputs,
parameters and buffers is copied there at the end of the graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import UntraceableError
from autopar.graph import GRAD_MODE, KNOWN, PLACE, VAL, input_nodes, output_tensors, storage_of
from autopar.tracing import functional
from autopar.tracing.cleaning import WRITES
from autopar.tracing.first_writes import take_first_writes

Tensor = torch.Tensor

# They update running statistics inside; the runtime has its own code for them, so they stay as they are.
_OWN_STATE = {torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.batch_norm, torch.instance_norm}
# In-place methods whose pure twin draws other random numbers, or does not exist.
_NO_TWIN = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_"}


def functionalize(graph: fx.Graph) -> int:
    """Remove every write in place that the recorder marked; returns how many there were."""
    writers = [n for n in graph.nodes if WRITES in n.meta and n.target not in _OWN_STATE]
    taken = take_first_writes(graph, writers)
    left = [writer for writer in writers if writer not in taken]
    if left:
        _Functionalization(graph, left).run()
    return len(writers)


def pure_overload(target: Any) -> Any:
    """The pure twin of an ATen-style in-place overload; None where there is none."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if name.endswith("_") else None


class _Functionalization:
    def __init__(self, graph: fx.Graph, writers: list[fx.Node]) -> None:
        self.graph = graph
        self.writers = set(writers)
        self.dirty = {storage_of(node.meta[VAL]) for w in writers for node in w.meta[WRITES]}
        self.version = dict.fromkeys(self.dirty, 0)
        self.base: dict[int | None, fx.Node] = {}
        self.storage: dict[fx.Node, int | None] = {}  # of the aliases of dirty storages
        self.parent: dict[fx.Node, fx.Node | None] = {}  # alias -> the input it looks into
        self.arguments: dict[fx.Node, tuple[Any, Any]] = {}  # as recorded, before rewriting
        self.current: dict[fx.Node, fx.Node] = {}  # alias -> node that now holds its value
        self.fresh: dict[fx.Node, int] = {}  # alias -> version of the storage for which that is true
        for node in graph.nodes:
            storage = next((s for s in map(storage_of, output_tensors(node)) if s in self.dirty), None)
            if storage is None or node.op == "output":
                continue
            parent = next((n for n in input_nodes(node) if self.storage.get(n) == storage), None)
            if parent is None and not isinstance(node.meta[VAL], Tensor):
                continue  # an op with several results: each of them, picked out, is the base of its own storage
            self.base.setdefault(storage, node)
            self.storage[node] = storage
            self.parent[node] = parent
            self.arguments[node] = (node.args, node.kwargs)

    def run(self) -> None:
        self._check_parameters()
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                if node in self.writers:
                    self._replace(node)
                    continue
                if node.op == "output":
                    self._copy_back()
                node.args = fx.map_arg(node.args, self.now)
                node.kwargs = fx.map_arg(node.kwargs, self.now)
            if node in self.storage:
                node.meta.pop(KNOWN, None)
                self._hold(node, node)
        for node in reversed(list(self.graph.nodes)):
            if node in self.writers:
                self.graph.erase_node(node)

    def _check_parameters(self) -> None:
        """Raise UntraceableError where a parameter is written: calls read copies that are gathered, and drop them."""
        for storage, node in self.base.items():
            if node.op == "get_attr" and isinstance(node.meta[VAL], torch.nn.Parameter):
                writers = {w: [storage_of(n.meta[VAL]) for n in w.meta[WRITES]] for w in self.writers}
                writer = next(w for w in self.graph.nodes if storage in writers.get(w, ()))
                raise UntraceableError(
                    f"forward writes into the parameter '{node.target}': write after optimizer.step(), under "
                    "torch.no_grad(), or make it a buffer where it is not trained, or compute with a new tensor "
                    "(weight.clamp(-1, 1) in place of weight.clamp_(-1, 1))",
                    where=writer.meta.get(PLACE, ""),
                )

    def now(self, node: fx.Node) -> fx.Node:
        """The node that at this point holds what `node` stands for."""
        if node not in self.storage or self.fresh[node] == self.version[self.storage[node]]:
            return self.current.get(node, node)
        parent = self.parent[node]
        assert parent is not None, f"{node} is the base of its storage"
        source = self.now(parent)
        self._hold(node, source if node in self.writers else self._again(node, parent, source))
        return self.current[node]

    def _hold(self, node: fx.Node, value: fx.Node) -> None:
        self.current[node] = value
        self.fresh[node] = self.version[self.storage[node]]

    def _again(self, node: fx.Node, parent: fx.Node, source: fx.Node) -> fx.Node:
        """The same view of the storage's new value."""
        args, kwargs = self.arguments[node]
        again = self.graph.create_node(node.op, node.target, fx.map_arg(args, self.now), fx.map_arg(kwargs, self.now))
        again.meta = {k: v for k, v in node.meta.items() if k not in (WRITES, KNOWN)}
        new = output_tensors(source)[0]

        def look(view: Tensor) -> Tensor:
            moved = new.detach().as_strided(view.shape, view.stride(), view.storage_offset())
            return moved.requires_grad_() if new.requires_grad else moved

        again.meta[VAL] = pytree.tree_map_only(Tensor, look, node.meta[VAL])
        return again

    def _replace(self, writer: fx.Node) -> None:
        args, kwargs = fx.map_arg(writer.args, self.now), fx.map_arg(writer.kwargs, self.now)
        written = writer.meta[WRITES]
        if len(written) == 1:
            ((target, value),) = written.items()
            self._write_back(target, Pure(self.graph, writer, self.now(target), value).node(args, kwargs))
            if writer in self.storage:
                self._hold(writer, self.now(target))
            return
        # Several tensors at once: the call stays, and writes into private copies.
        copies = {
            self.now(n): Pure(self.graph, writer, self.now(n), v).method("clone", self.now(n))
            for n, v in written.items()
        }
        self.writers.discard(writer)
        writer.args = fx.map_arg(args, lambda n: copies.get(n, n))
        writer.kwargs = fx.map_arg(kwargs, lambda n: copies.get(n, n))
        new = {target: copies[self.now(target)] for target in written}
        with self.graph.inserting_after(writer):
            for target, copy in new.items():
                self._write_back(target, copy)
        if writer in self.storage:
            self._hold(writer, writer)

    def _write_back(self, node: fx.Node, value: fx.Node) -> None:
        """`node` now has this value: so have the tensors it looks into, as far as it looks."""
        parent = self.parent[node]
        if parent is None:
            self.version[self.storage[node]] += 1
        elif node in self.writers:
            self._write_back(parent, value)
        else:
            self._write_back(*self._through(node, parent, value))
        self._hold(node, value)

    def _through(self, node: fx.Node, parent: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The tensor that the view `node` looks into, and its value once the view has been written."""
        args, kwargs = self.arguments[node]
        index = None
        if node.target is operator.getitem and not isinstance(parent.meta[VAL], Tensor):  # one of several views
            several, index = parent, args[1]
            parent = self.parent[several]  # type: ignore[assignment]
            args, kwargs = self.arguments[several]
            node = several
        whole = self.now(parent)
        pure = Pure(self.graph, value, whole, _requiring(parent.meta[VAL], output_tensors(value)[0].requires_grad))
        if node.target is operator.getitem:
            back = pure.function(functional.write, whole, fx.map_arg(args[1], self.now), value)
        else:
            name = node.target if isinstance(node.target, str) else node.target.__name__
            rest = fx.map_arg((tuple(args[1:]), dict(kwargs)), self.now)
            back = pure.function(functional.write_view, whole, value, name, *rest, index)
        back.meta[GRAD_MODE] = any(n.meta.get(GRAD_MODE, True) for n in (parent, value))  # a history goes on
        return parent, back

    def _copy_back(self) -> None:
        """What was written into an input, a parameter or a buffer stays written."""
        for storage, node in self.base.items():
            if node.op in ("placeholder", "get_attr") and self.version[storage]:
                value = self.current[node]
                copy = Pure(self.graph, value, node, node.meta[VAL]).method("copy_", node, value)
                copy.meta[VAL] = node.meta[VAL]
                copy.meta[WRITES] = {node: node.meta[VAL]}


class Pure:
    """Writes the pure form of a write: `target` (its value now) becomes a tensor like `value`."""

    def __init__(self, graph: fx.Graph, source: fx.Node, target: fx.Node, value: Tensor) -> None:
        self.graph, self.source, self.target, self.value = graph, source, target, value

    def function(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._noted(self.graph.call_function(function, args, kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self._noted(self.graph.call_method(name, args, kwargs))

    def _noted(self, node: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        node.meta = {k: v for k, v in self.source.meta.items() if k not in (WRITES, KNOWN)}
        value = torch.empty_strided(
            self.value.shape, self.value.stride(), dtype=dtype or self.value.dtype, device="meta"
        )
        node.meta[VAL] = value.requires_grad_() if self.value.requires_grad else value
        return node

    def node(self, args: Any, kwargs: Any) -> fx.Node:
        """The node that makes the new value of the written tensor."""
        writer = self.source
        name = writer.target if isinstance(writer.target, str) else getattr(writer.target, "__name__", "")
        if writer.target is operator.setitem:
            return self.function(functional.write, *args)
        twin = pure_overload(writer.target)
        if twin is not None and args[0] is self.target:
            return self._overload(twin, args, kwargs)
        if kwargs.get("inplace"):
            return self.function(writer.target, *args, **{**kwargs, "inplace": False})
        if _pure_method(name) and args and args[0] is self.target:
            return self._twin(name, args, kwargs)
        return self._on_a_copy(args, kwargs)

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

    def _twin(self, name: str, args: Any, kwargs: Any) -> fx.Node:
        if name == "zero_":
            return self.function(torch.zeros_like, self.target)
        if name == "fill_" and not isinstance(args[1], fx.Node):
            return self.function(torch.full_like, self.target, args[1])
        if name == "copy_" and isinstance(args[1], fx.Node) and args[1].meta[VAL].shape == self.value.shape:
            source = args[1]
            return source if source.meta[VAL].dtype == self.value.dtype else self.method("to", source, self.value.dtype)
        twin = _pure_method(name)
        if name in _NO_TWIN or not hasattr(Tensor, twin):
            return self.function(functional.apply_inplace, name, *args, **kwargs)
        made = self._dtype_of(twin, args, kwargs)
        if made is None:
            return self.function(functional.apply_inplace, name, *args, **kwargs)
        node = self.method(twin, *args, **kwargs)
        if made != self.value.dtype:
            self._noted(node, made)
            node = self.method("to", node, self.value.dtype)
        return node

    def _dtype_of(self, twin: str, args: Any, kwargs: Any) -> torch.dtype | None:
        """The pure method's dtype, which may be promoted where the write is not; None where it does not fit."""
        values, keywords = fx.map_arg((args, kwargs), lambda n: n.meta[VAL])
        try:
            with torch.no_grad():
                result = getattr(Tensor, twin)(*values, **keywords)
        except (RuntimeError, TypeError):
            return None
        fits = isinstance(result, Tensor) and result.shape == self.value.shape
        return result.dtype if fits else None

    def _on_a_copy(self, args: Any, kwargs: Any) -> fx.Node:
        """Any other call that writes: it gets a private copy to write into, and stays."""
        copy = self.method("clone", self.target)
        call = self.graph.create_node(
            self.source.op,
            self.source.target,
            fx.map_arg(args, lambda n: copy if n is self.target else n),
            fx.map_arg(kwargs, lambda n: copy if n is self.target else n),
        )
        call.meta = {**self.source.meta, WRITES: {copy: copy.meta[VAL]}}
        return copy


def _pure_method(name: str) -> str:
    """`add` for `add_`, `__and__` for `__iand__` (`a &= b`); "" for what is no method in place."""
    if name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}"):
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.startswith("_") else ""


def _requiring(value: Tensor, needed: bool) -> Tensor:
    """Like `value`, requiring a gradient also where what is written into it does."""
    return value.detach().requires_grad_() if needed and not value.requires_grad else value
