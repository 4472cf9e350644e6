"""Functionalisation by storage identity: no node writes into a tensor that another node can see.

Data-free values share storage as the real tensors would, so the aliases of a written tensor are known. A write becomes
a pure op; the new value is written back through the chain of views to the base of the storage, and every alias that is
read later is recomputed from the new base. Writes into inputs, parameters and buffers are copied there at the end of
the graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import UntraceableError
from autopar.graph import GRAD_MODE, KNOWN, PLACE, VAL, input_nodes, output_tensors, storage_of
from autopar.ops.norms import NORMS
from autopar.ops.on_copies import OnCopies
from autopar.tracing.rewriting import functional
from autopar.tracing.rewriting.cleaning import WRITES
from autopar.tracing.rewriting.first_writes import take_first_writes
from autopar.tracing.rewriting.pure_writes import Pure, fresh

Tensor = torch.Tensor


def functionalize(graph: fx.Graph) -> int:
    """Remove every in-place write that the recorder marked; returns how many there were.

    Norms that update running statistics stay, since the runtime has its own code for that.
    """
    writers = [n for n in graph.nodes if WRITES in n.meta and n.target not in NORMS]
    if not writers:
        return 0
    erased = take_first_writes(graph, writers)
    remaining = [writer for writer in writers if writer not in erased]
    if remaining:
        _Functionalization(graph, remaining).run()
    return len(writers)


class _Functionalization:
    """Rewrites a graph in order, and tracks which node holds the current value of each alias of a written storage."""

    def __init__(self, graph: fx.Graph, writers: list[fx.Node]) -> None:
        self.graph = graph
        self.writers = set(writers)
        self.dirty = {storage_of(node.meta[VAL]) for w in writers for node in w.meta[WRITES]}
        self.version = dict.fromkeys(self.dirty, 0)
        self.base: dict[int | None, fx.Node] = {}
        self.storage: dict[fx.Node, int | None] = {}  # of each alias of a written storage
        self.parent: dict[fx.Node, fx.Node | None] = {}  # alias -> the input that it is a view of
        self.arguments: dict[fx.Node, tuple[Any, Any]] = {}  # of views: parent as recorded, else current nodes
        self.current: dict[fx.Node, fx.Node] = {}  # alias -> node that now holds its value
        self.fresh: dict[fx.Node, int] = {}  # alias -> version of the storage for which `current` is valid
        for node in graph.nodes:
            storage = next((s for s in map(storage_of, output_tensors(node)) if s in self.dirty), None)
            if storage is None or node.op == "output":
                continue
            parent = next((n for n in input_nodes(node) if self.storage.get(n) == storage), None)
            if parent is None and not isinstance(node.meta[VAL], Tensor):
                continue  # an op with several results: each `getitem` is the base of its own storage
            self.base.setdefault(storage, node)
            self.storage[node] = storage
            self.parent[node] = parent

    def run(self) -> None:
        self._check_parameters()
        for node in list(self.graph.nodes):
            with self.graph.inserting_before(node):
                if node in self.writers:
                    self._replace(node)
                    continue
                if node.op == "output":
                    self._copy_back()
                if node in self.storage:
                    self._note_arguments(node)
                node.args = fx.map_arg(node.args, self.current_node)
                node.kwargs = fx.map_arg(node.kwargs, self.current_node)
            if node in self.storage:
                node.meta.pop(KNOWN, None)
                self._hold(node, node)
        for node in reversed(list(self.graph.nodes)):
            if node in self.writers:
                self.graph.erase_node(node)

    def _check_parameters(self) -> None:
        """Raise UntraceableError if a parameter is written: calls read gathered copies, which are dropped."""
        for storage, node in self.base.items():
            if node.op == "get_attr" and isinstance(node.meta[VAL], torch.nn.Parameter):
                writers = {w: [storage_of(n.meta[VAL]) for n in w.meta[WRITES]] for w in self.writers}
                writer = next(w for w in self.graph.nodes if storage in writers.get(w, ()))
                raise UntraceableError(
                    f"forward writes into the parameter '{node.target}': write after optimizer.step(), under "
                    "torch.no_grad(), or make it a buffer where it is not trained, or compute with a new tensor "
                    "(weight.clamp(-1, 1) in place of weight.clamp_(-1, 1)); if it initialises by its first batch, "
                    "run one batch through the model before planning",
                    where=writer.meta.get(PLACE, ""),
                )

    def _note_arguments(self, node: fx.Node) -> None:
        """Note a view's arguments for recomputing it: `self.queue[self.step]` stays that row when step changes."""
        parent = self.parent[node]
        self.arguments[node] = fx.map_arg(
            (node.args, node.kwargs), lambda n: n if n is parent else self.current_node(n)
        )

    def current_node(self, node: fx.Node) -> fx.Node:
        """The node that holds the value of `node` at this point."""
        if node not in self.storage or self.fresh[node] == self.version[self.storage[node]]:
            return self.current.get(node, node)
        parent = self.parent[node]
        assert parent is not None, f"{node} is the base of its storage"
        source = self.current_node(parent)
        self._hold(node, source if node in self.writers else self._moved_view(node, parent, source))
        return self.current[node]

    def _hold(self, node: fx.Node, value: fx.Node) -> None:
        self.current[node] = value
        self.fresh[node] = self.version[self.storage[node]]

    def _moved_view(self, node: fx.Node, parent: fx.Node, source: fx.Node) -> fx.Node:
        """The same view of the storage's new value."""
        args, kwargs = fx.map_arg(self.arguments[node], lambda n: source if n is parent else n)
        again = self.graph.create_node(node.op, node.target, args, kwargs)
        again.meta = {k: v for k, v in node.meta.items() if k not in (WRITES, KNOWN)}
        new = output_tensors(source)[0]

        def look(view: Tensor) -> Tensor:
            moved = new.detach().as_strided(view.shape, view.stride(), view.storage_offset())
            return moved.requires_grad_() if new.requires_grad else moved

        again.meta[VAL] = pytree.tree_map_only(Tensor, look, node.meta[VAL])
        return again

    def _replace(self, writer: fx.Node) -> None:
        """Replace a write by its pure form, or by a call on copies where there is none."""
        args, kwargs = fx.map_arg(writer.args, self.current_node), fx.map_arg(writer.kwargs, self.current_node)
        written = writer.meta[WRITES]
        if len(written) == 1:
            ((target, value),) = written.items()
            pure = Pure(self.graph, writer, self.current_node(target), value).node(args, kwargs)
            if pure is not None:
                self._write_back(target, pure)
                if writer in self.storage:
                    self._hold(writer, self.current_node(target))
                return
        self._run_on_copies(writer, args, kwargs)

    def _run_on_copies(self, writer: fx.Node, args: Any, kwargs: Any) -> None:
        """Replace a write by the same call on copies, which it writes into and returns.

        The call makes the copies itself. Copies that are nodes of their own could be sharded differently from the
        call's operands, and the writes into them would be lost.
        """
        written = writer.meta[WRITES]
        leaves = pytree.tree_leaves((args, kwargs))
        places = [[i for i, leaf in enumerate(leaves) if leaf is self.current_node(target)] for target in written]
        call = self.graph.call_function(OnCopies(writer.target, places), args, kwargs)
        call.meta = {k: v for k, v in writer.meta.items() if k not in (WRITES, KNOWN)}
        own = set(map(storage_of, written.values()))
        returned = pytree.tree_map_only(Tensor, lambda t: None if storage_of(t) in own else t, writer.meta[VAL])
        call.meta[VAL] = (*(fresh(value) for value in written.values()), returned)
        for i, target in enumerate(written):
            self._write_back(target, self._picked(call, i))
        aliases = [target for target in written if self.storage[target] == self.storage.get(writer)]
        if aliases:
            self._hold(writer, self.current_node(aliases[0]))
        elif output_tensors(writer):
            result = self._picked(call, len(written))
            self.current[writer] = result
            self.fresh[writer] = self.version.get(self.storage.get(writer), 0)

    def _picked(self, call: fx.Node, i: int) -> fx.Node:
        """One of the values that a call returns."""
        node = self.graph.call_function(operator.getitem, (call, i))
        node.meta = {**call.meta, VAL: call.meta[VAL][i]}
        return node

    def _write_back(self, node: fx.Node, value: fx.Node) -> None:
        """Set the current value of `node`, and update the tensors that it is a view of."""
        parent = self.parent[node]
        if parent is None:
            self.version[self.storage[node]] += 1
        elif node in self.writers:
            self._write_back(parent, value)
        else:
            self._write_back(*self._through(node, parent, value))
        self._hold(node, value)

    def _through(self, node: fx.Node, parent: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The tensor that `node` is a view of, and its value after the write into the view."""
        index = None
        if node.target is operator.getitem and not isinstance(parent.meta[VAL], Tensor):  # one of several views
            index = self.arguments[node][0][1]
            node, parent = parent, self.parent[parent]  # type: ignore[assignment]
        whole = self.current_node(parent)
        args, kwargs = fx.map_arg(self.arguments[node], lambda n: whole if n is parent else n)
        pure = Pure(self.graph, value, whole, _requiring(parent.meta[VAL], output_tensors(value)[0].requires_grad))
        if node.target is operator.getitem:
            back = pure.function(functional.write, whole, args[1], value)
        else:
            target = node.target
            name = str(target) if isinstance(target, (str, torch._ops.OpOverload)) else target.__name__
            back = pure.function(functional.write_view, whole, value, name, tuple(args[1:]), dict(kwargs), index)
        back.meta[GRAD_MODE] = any(n.meta.get(GRAD_MODE, True) for n in (parent, value))  # history continues
        return parent, back

    def _copy_back(self) -> None:
        """Copy the new values of written inputs, parameters and buffers into these."""
        for storage, node in self.base.items():
            if node.op in ("placeholder", "get_attr") and self.version[storage]:
                value = self.current[node]
                copy = Pure(self.graph, value, node, node.meta[VAL]).method("copy_", node, value)
                copy.meta[VAL] = node.meta[VAL]
                copy.meta[WRITES] = {node: node.meta[VAL]}


def _requiring(value: Tensor, needed: bool) -> Tensor:
    """Like `value`, but requiring a gradient if what is written into it does."""
    return value.detach().requires_grad_() if needed and not value.requires_grad else value
