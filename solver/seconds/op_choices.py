"""The choices of each op of a problem: its strategies with their seconds.

Deep graphs have many equal calls, with the same strategies and costs. These share one tuple of choices, so that what
`solver.seconds.costs` derives from it is computed once.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.seconds import split_biases_of
from autopar.cost.step import seconds_of
from autopar.cost.traffic import in_segment
from autopar.graph import BIAS_OF, COST, readers_of, tensor_of
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.problem import Choice


class OpChoices:
    """The choices of a graph's nodes on one cluster."""

    def __init__(self, memory: StepMemory, restricted: Restricted, cluster: Cluster) -> None:
        self.memory, self.restricted, self.cluster = memory, restricted, cluster
        self._known: dict[Hashable, tuple[Choice, ...]] = {}

    def of(self, node: fx.Node) -> tuple[Choice, ...]:
        """The choices of a node. Of strategies that differ only in seconds, the fastest is kept. A parameter whose
        gathered copy may be dropped and gathered again has each strategy with and without that."""
        pinned = self.restricted.regather.get(node)
        regather = ((False, True) if pinned is None else (pinned,)) if self._may_regather(node) else (False,)
        key = (self._form(node), regather)
        if key not in self._known:
            self._known[key] = self._choices(node, regather)
        return self._known[key]

    def _form(self, node: fx.Node) -> Hashable:
        """A key of all that the seconds of a node's strategies depend on (`cost.step.seconds_of`)."""
        strategies = id(self.restricted.strategies[node])
        if not in_segment(node) or COST not in node.meta:
            return strategies
        inputs = self.memory.inputs[node]
        trained = tuple(
            (i, tensor_of(ref).shape, tensor_of(ref).dtype)
            for i, ref in enumerate(inputs)
            if self.memory.is_trainable(ref.node)
        )
        biases = tuple(split_biases_of(node))
        return strategies, node.meta[COST], BIAS_OF in node.meta, biases, trained

    def _choices(self, node: fx.Node, regather: tuple[bool, ...]) -> tuple[Choice, ...]:
        fastest: dict[tuple[object, ...], Choice] = {}
        for strategy in self.restricted.strategies[node]:
            forward, backward = seconds_of(self.memory, node, strategy, self.cluster)
            backward = backward if self.memory.train else 0.0
            for flag in regather:
                choice = Choice(strategy, forward, backward, flag)
                key = (strategy.inputs, strategy.outputs, strategy.local, flag)
                if (
                    key not in fastest
                    or forward + backward < fastest[key].forward_seconds + fastest[key].backward_seconds
                ):
                    fastest[key] = choice
        return tuple(fastest.values())

    def _may_regather(self, node: fx.Node) -> bool:
        """Whether some op saves the parameter for backward, so that it could be dropped and gathered again."""
        memory = self.memory
        return (
            memory.train
            and memory.is_parameter(node)
            and any(
                any(memory.inputs[reader][i].node is node for i in memory.saved(reader)[0])
                for reader in readers_of(node)
            )
        )
