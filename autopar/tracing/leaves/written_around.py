"""Writes outside a leaf that conflict with it; its caller then becomes one op instead.

A leaf is a function of its tensors' earlier values: it reads its own buffers as they were before the call. And its
outputs have memory of their own: if it returns its input, or the same tensor twice, a write into one is not seen in the
other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.graph import PLACE, VAL, input_nodes, output_tensors, storage_of
from autopar.tracing.errors import TraceError
from autopar.tracing.rewriting.cleaning import WRITES


def check_writes(graph: fx.Graph, model: nn.Module, sharing: Collection[nn.Module]) -> tuple[TraceError, str] | None:
    """The error for such a write, with the path of the module that becomes one op instead; None if there is none.

    `sharing`: leaves whose outputs share memory (`shares`).
    """
    writers = [(writer, node) for writer in graph.nodes for node in writer.meta.get(WRITES, ())]
    modules = dict(model.named_modules())
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target in modules] if writers else []
    for call in calls:
        leaf, path = modules[str(call.target)], str(call.target)
        own = {name: storage_of(buffer) for name, buffer in leaf.named_buffers()}
        shared = set(_storages(call)) if leaf in sharing else set()
        for writer, node in writers:
            written = storage_of(node.meta[VAL])
            name = next((n for n, s in own.items() if written == s or node.target == f"{path}.{n}"), "")
            if name or (call < writer and written in shared):
                kind = f"{type(leaf).__name__}, which is one op,"
                fault = f"'{path}.{name}' of {kind} is" if name else f"{kind} hands on memory that is"
                error = TraceError(
                    f"{fault} written outside of it: its caller is one op instead", where=writer.meta.get(PLACE, "")
                )
                return error, path.rpartition(".")[0]
    return None


def _storages(call: fx.Node) -> Iterator[int | None]:
    """The storages of a call's inputs and outputs."""
    for node in (call, *input_nodes(call)):
        yield from map(storage_of, output_tensors(node))


def shares(result: object, *arguments: object) -> bool:
    """Whether two tensors of a result share memory, or one of them with tensors in `arguments`."""
    storages = [storage_of(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    others = {storage_of(t) for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)}
    return len(set(storages)) < len(storages) or not others.isdisjoint(storages)
