"""What autograd saves for each op of a graph, and how long it stays: until the op's backward, or as long as the caller
holds outputs.

Backward begins at the loss (`cost.traffic.gradient_enters`) and frees saved tensors as it goes. It never reaches ops
whose results are only returned beside the loss, or only read by such ops: what these save stays until the caller drops
the outputs that depend on them. This is assumed even if such an output is returned detached: plain autograd then drops
what is saved, but with wrappers that move parameters (FSDP) it was seen to stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.memory.local_workspace import of_sharded_rows_bytes
from autopar.cost.memory.random_workspace import also_saved
from autopar.cost.structure.memo import Memo
from autopar.cost.traffic import gradient_enters, needs_grad
from autopar.graph import COST, TensorRef, output_tensors

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy

Kept = tuple[tuple[int, ...], tuple[int, ...], int]  # inputs, outputs, and bytes beside them
_NOTHING: Kept = (), (), 0


class Savings:
    """What the graph of a step saves; `kept`: what backward frees, and only parameters of ops it never reaches."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self.nodes = list(memory.graph.nodes)
        self.kept: dict[fx.Node, Kept] = Memo(self._kept)

    def saved(self, node: fx.Node) -> Kept:
        """All that autograd saves for a node."""
        cost = node.meta.get(COST)
        if cost is None or not self.memory.train:
            return _NOTHING
        inputs, outputs, beside = cost.saved
        more, masks = also_saved(node), of_sharded_rows_bytes(node)
        return (tuple(sorted({*inputs, *more})), outputs, beside + masks) if more or masks else cost.saved

    def held(self, node: fx.Node) -> Kept:
        """What is saved for a node and held by the caller, parameters apart."""
        if node not in self.holding:
            return _NOTHING
        inputs, outputs, beside = self.saved(node)
        return self._some(node, inputs, parameters=False), outputs, beside

    def held_copies(self, node: fx.Node, strategy: Strategy) -> dict[Copy, int]:
        """The copies that the caller holds because of a node, with their bytes: for the graph's output what it returns,
        for other nodes what they save."""
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
        """The nodes whose saved tensors the caller holds: all that save any and that backward does not reach."""
        others = (node for node in self.nodes if self.entered and node not in self.passed and any(self.saved(node)))
        outputs = ((node, TensorRef(node, i)) for node in others for i in range(len(output_tensors(node))))
        return frozenset(node for node, ref in outputs if needs_grad(self.memory, ref))

    def _kept(self, node: fx.Node) -> Kept:
        inputs, outputs, beside = self.saved(node)
        if not self.entered or node in self.passed:
            return inputs, outputs, beside
        return self._some(node, inputs, parameters=True), (), 0

    def _some(self, node: fx.Node, inputs: Iterable[int], *, parameters: bool) -> tuple[int, ...]:
        refs = self.memory.inputs[node]
        return tuple(j for j in inputs if self.memory.is_parameter(refs[j].node) is parameters)

    @cached_property
    def entered(self) -> frozenset[TensorRef]:
        """The tensors at which backward begins."""
        outputs = (node for node in self.nodes if node.op == "output")
        pairs = ((node, ref) for node in outputs for ref in self.memory.inputs[node])
        return frozenset(ref for node, ref in pairs if gradient_enters(self.memory, node, ref))

    @cached_property
    def passed(self) -> frozenset[fx.Node]:
        """The nodes that backward reaches."""
        found = {ref.node for ref in self.entered}
        for node in reversed(self.nodes):
            if node in found:
                found.update([ref.node for ref in self.memory.inputs[node] if needs_grad(self.memory, ref)])
        return frozenset(found)
