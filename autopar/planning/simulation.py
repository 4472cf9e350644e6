"""A plan evaluated again on its graph: simulated, or priced on another cluster.

Each node of the graph is matched with the strategy that the plan chose for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.memory.weights import buffers_of, parameters_of
from autopar.cost.seconds import node_seconds
from autopar.cost.simulated import Simulated
from autopar.cost.simulator import simulate
from autopar.cost.step import predict, seconds_of
from autopar.cost.structure.blocks import Repeat
from autopar.cost.traffic import announced
from autopar.errors import PlanMismatchError
from autopar.fingerprints.fingerprint import check_fingerprints, fingerprints
from autopar.plan_forms.checks import check_on_graph
from autopar.planning.stages import Prepared
from autopar.plans import Collective, ParameterPlan, Plan, Prediction, Span
from autopar.precision import Precision
from autopar.python.collecting import collection_paused
from autopar.strategies.strategy import Strategy


def simulated(prepared: Prepared, plan: Plan) -> Simulated:
    """The simulated step of `plan`; `prepared` holds the graph that the plan was made for.

    Raises PlanMismatchError where it does not.
    """
    return Restated.of(prepared, plan).simulated()


def streams(prepared: Prepared, plan: Plan, resolution: int = 1000) -> tuple[Span, ...]:
    """The simulated step for a picture: pauses shorter than 1/`resolution` of the step are closed.

    Raises PlanMismatchError where `prepared` does not hold the plan's graph.
    """
    step = simulated(prepared, plan)
    spans: list[Span] = []
    for stream in step.streams:
        start = end = 0.0
        kind = ""
        for event in (e for e in step.events if e.stream == stream and e.seconds > 0):
            if event.kind != kind or event.start_seconds - end > step.step_seconds / resolution:
                if kind:
                    spans.append(Span(stream, kind, start, end - start))
                start, kind = event.start_seconds, event.kind
            end = event.start_seconds + event.seconds
        if kind:
            spans.append(Span(stream, kind, start, end - start))
    return tuple(spans)


def predicted_on(prepared: Prepared, plan: Plan, cluster: Cluster) -> Prediction:
    """The predicted step of `plan` on another cluster with the same mesh: new measurements, or other devices.

    Raises PlanMismatchError where `prepared` holds another graph, or the mesh differs.
    """
    return Restated.of(prepared, plan, cluster).predicted()


def chosen_strategies(prepared: Prepared, plan: Plan, cluster: Cluster) -> dict[fx.Node, Strategy]:
    """The strategy of every node that the plan chose one for; among equal layouts, the fastest on this cluster.

    Raises PlanMismatchError where `prepared` holds another graph, or the plan is damaged.
    """
    check_fingerprints(plan.fingerprints, fingerprints(prepared.model, prepared.traced.graph, cluster.shape))
    check_on_graph(plan, prepared.traced.graph)
    nodes = list(prepared.traced.graph.nodes)
    by_list: dict[int, dict[object, list[Strategy]]] = {}  # equal nodes share a list of strategies
    chosen = {}
    for node_plan in plan.nodes:
        node = nodes[node_plan.position]
        strategies = prepared.strategies.get(node, ())
        by_layouts = by_list.get(id(strategies))
        if by_layouts is None:
            by_layouts = by_list[id(strategies)] = {}
            for s in strategies:
                by_layouts.setdefault((s.inputs, s.outputs, s.local), []).append(s)
        options = by_layouts.get((node_plan.inputs, node_plan.outputs, node_plan.local), [])
        if len(options) > 1:
            options = [min(options, key=lambda s: sum(node_seconds(node, s, cluster.device, cluster.shape)))]
        if options:
            chosen[node] = options[0]
        elif node in prepared.strategies:
            raise PlanMismatchError(f"'{node.name}' has no strategy of the plan's layouts: plan again")
    return chosen


@dataclass(frozen=True)
class Restated:
    """The arguments of `autopar.cost`, reconstructed from a saved plan: the plan of a graph, on a cluster."""

    plan: Plan
    cluster: Cluster
    memory: StepMemory
    chosen: Mapping[fx.Node, Strategy]
    repeats: Sequence[Repeat]

    @staticmethod
    @collection_paused()
    def of(prepared: Prepared, plan: Plan, cluster: Cluster | None = None) -> Restated:
        """`cluster`: another one with the same mesh; by default the plan's own.

        Raises PlanMismatchError where `prepared` holds another graph, or the mesh differs.
        """
        cluster = cluster if cluster is not None else Cluster.from_dict(plan.cluster)
        if cluster.shape != tuple(plan.mesh_shape):
            raise PlanMismatchError(f"the plan is for a mesh of {plan.mesh_shape}, not of {cluster.shape}")
        graph = prepared.traced.graph
        chosen = chosen_strategies(prepared, plan, cluster)
        memory = memory_on(
            cluster,
            graph,
            parameters_of(prepared.model),
            Precision.from_dict(plan.precision),
            plan.optimizer,
            plan.micro_batches,
            any(collective.phase == "backward" for collective in plan.collectives)
            or plan.predicted.optimizer_seconds > 0,
            buffers_of(prepared.model),
        )
        return Restated(plan, cluster, memory, chosen, prepared.repeats)

    @collection_paused()
    def predicted(self) -> Prediction:
        """Predicted seconds and bytes of a step."""
        return predict(self.memory, self.cluster, self.chosen, self._stored, self.plan.recompute, self.repeats)[0]

    @collection_paused()
    def simulated(self) -> Simulated:
        """The step as events on streams.

        Raises PlanMismatchError where the plan lists other collectives than its choices result in.
        """
        grouping = Grouping(self.memory, self.repeats)
        traffic = announced(self.memory, self.cluster, self.chosen, self._stored, self.plan.recompute, grouping)
        _check_announced(self.plan.collectives, traffic.collectives)
        return simulate(
            self.memory.graph,
            self.cluster,
            {node: seconds_of(self.memory, node, strategy, self.cluster) for node, strategy in self.chosen.items()},
            traffic.transfers,
            self.plan.recompute,
            micro_batches=self.plan.micro_batches,
            optimizer_seconds=self.plan.predicted.optimizer_seconds,
            train=self.memory.train,
        )

    @property
    def _stored(self) -> Mapping[str, ParameterPlan]:
        return {parameter.name: parameter for parameter in self.plan.parameters}


def _check_announced(planned: Sequence[Collective], resulting: Sequence[Collective]) -> None:
    """Raise PlanMismatchError where a plan lists other collectives than its decisions result in."""
    announced, made = (
        {(c.kind, c.bytes, c.axis, c.cause, c.phase): c.count for c in collectives}
        for collectives in (planned, resulting)
    )
    for key in [*announced, *made]:
        announces, makes = announced.get(key, 0), made.get(key, 0)
        if announces != makes:
            kind, size, axis, cause, phase = key
            raise PlanMismatchError(
                f"the plan is damaged (it announces {announces} {kind} of {size} bytes on axis {axis} for '{cause}' "
                f"({phase}), and what it decides makes {makes}): take it as it was saved, or plan again"
            )
