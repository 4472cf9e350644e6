"""What autograd saves for each op of a graph, and who keeps it: backward, or the caller.

Backward begins at the loss (`cost.traffic.gradient_enters`) and frees what is saved as it goes. It never comes
to ops whose results are returned beside the loss, or go to such ops alone: what they save stays until the caller lets
go of what they led to. So it is taken to where what they led to is returned detached: plain autograd drops it then,
but under what moves parameters (fsdp) it was seen to stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.structure.found import Found
from autopar.cost.traffic import gradient_enters, needs_grad
from autopar.graph import COST, TensorRef, output_tensors

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy

Kept = tuple[tuple[int, ...], tuple[int, ...], int]  # inputs, outputs, and bytes beside them
_NOTHING: Kept = (), (), 0


class Savings:
    """Of the graph of a step; `kept`: what backward frees, and of ops that it never comes to, parameters alone."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self.nodes = list(memory.graph.nodes)
        self.kept: dict[fx.Node, Kept] = Found(self._kept)

    def saved(self, node: fx.Node) -> Kept:
        """All that autograd saves for a node."""
        cost = node.meta.get(COST)
        if cost is None or not self.memory.train:
            return _NOTHING
        return cost.saved

    def held(self, node: fx.Node) -> Kept:
        """What the caller holds of what is saved for a node, parameters apart."""
        if node not in self.holding:
            return _NOTHING
        inputs, outputs, beside = self.saved(node)
        return self._some(node, inputs, parameters=False), outputs, beside

    def held_copies(self, node: fx.Node, strategy: Strategy) -> dict[Copy, int]:
        """The storages that the caller holds because of a node, with their bytes: of the graph's output what it
        returns, of others what they save."""
        memory, refs = self.memory, self.memory.inputs[node]
        inputs, outputs, _ = self.held(node)
        pairs = [(refs[j], strategy.inputs[j]) for j in inputs]
        pairs += [(TensorRef(node, j), strategy.outputs[j]) for j in outputs]
        if node.op == "output":
            pairs = list(zip(refs, strategy.inputs, strict=True))
        copies = (memory.copy(ref, layout) for ref, layout in pairs)
        sizes = {copy: memory.copy_bytes(copy) for copy in copies if copy[0].node.op != "get_attr"}
        return {copy: size for copy, size in sizes.items() if size}

    @cached_property
    def holding(self) -> frozenset[fx.Node]:
        """The nodes of which the caller holds what they save: all that backward does not come to."""
        others = (node for node in self.nodes if self._entered and node not in self.passed and any(self.saved(node)))
        outputs = ((node, TensorRef(node, i)) for node in others for i in range(len(output_tensors(node))))
        return frozenset(node for node, ref in outputs if needs_grad(self.memory, ref))

    def _kept(self, node: fx.Node) -> Kept:
        inputs, outputs, beside = self.saved(node)
        if not self._entered or node in self.passed:
            return inputs, outputs, beside
        return self._some(node, inputs, parameters=True), (), 0

    def _some(self, node: fx.Node, inputs: Iterable[int], *, parameters: bool) -> tuple[int, ...]:
        refs = self.memory.inputs[node]
        return tuple(j for j in inputs if self.memory.is_parameter(refs[j].node) is parameters)

    @cached_property
    def _entered(self) -> frozenset[TensorRef]:
        """Where backward begins."""
        outputs = (node for node in self.nodes if node.op == "output")
        pairs = ((node, ref) for node in outputs for ref in self.memory.inputs[node])
        return frozenset(ref for node, ref in pairs if gradient_enters(self.memory, node, ref))

    @cached_property
    def passed(self) -> frozenset[fx.Node]:
        """The nodes that backward comes to."""
        found = {ref.node for ref in self._entered}
        for node in reversed(self.nodes):
            if node in found:
                found.update([ref.node for ref in self.memory.inputs[node] if needs_grad(self.memory, ref)])
        return frozenset(found)
