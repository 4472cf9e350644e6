"""The solver's view of a model: one graph, the strategies of its ops, and the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.structure.blocks import Repeat
from autopar.layout import Layout
from autopar.plan_request import PlanRequest
from autopar.solver.constraints.restricted import Strategies
from autopar.strategies.strategy import Strategy


@dataclass(frozen=True)
class ModelGraph:
    """An annotated graph of a model, ready to be planned.

    `graph`: nodes carry VAL and COST; shapes are those of one micro-batch of the whole mesh. `strategies`: for every
    node with tensors; those of parameters are ways to store them. `parameters`, `buffers`: all of the model's, by
    qualified name; buffers that the graph does not read take memory too. `pinned`: the storage of parameters that an
    earlier plan of the model has fixed; None: this plan is the first. `trained`: names of parameters that other graphs
    of the model train. `train`: False if only a forward pass is planned. `repeats`: the graph's repeated blocks, if
    known (`find_repeats`). `fingerprints`: what ties a plan to this model, graph and mesh (`autopar.fingerprints`).
    """

    graph: fx.Graph
    strategies: Strategies
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    pinned: Mapping[str, Layout] | None = None
    trained: Collection[str] = ()
    train: bool = True
    repeats: tuple[Repeat, ...] | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def memory_on(self, cluster: Cluster, request: PlanRequest) -> StepMemory:
        """The memory of a step on this cluster."""
        return memory_on(
            cluster,
            self.graph,
            self.parameters,
            request.precision,
            request.optimizer,
            request.micro_batches,
            self.train,
            self.buffers,
            self.pinned,
            self.trained,
        )

    def as_stored(self, memory: StepMemory) -> ModelGraph:
        """This graph with the strategies of parameters restricted to the storage that is fixed already."""
        if not self.pinned:
            return self
        strategies = dict(self.strategies)
        for node in self.strategies:
            if memory.is_parameter(node) and str(node.target) in self.pinned:
                strategies[node] = (Strategy((), (self.pinned[str(node.target)],), ("",) * len(memory.mesh_shape)),)
        return replace(self, strategies=strategies)
