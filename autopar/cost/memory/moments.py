"""Bytes on one device at the moments of a step: a moment for every region of the graph, and the optimizer's step.

For passes without backward see `cost.memory.forward_moments`, for a step's forward `cost.memory.training_forward`.

A region is a repeated block, or the nodes between two repeats. Its moment is the largest of the points of its ops in
backward (`cost.memory.lifetimes`) and of two more: when its bucket of parameters lands, and when its gradients'
bucket is reduced. At a point there live:

- parameters with the optimizer's states, and weights that no op reads;
- what the regions before this one keep for backward, and what this one keeps up to the op;
- what the caller holds of outputs that regions after this one have kept (`cost.memory.returned`);
- gradients of parameters that this op or later ones read, those of this region unreduced
  (`cost.memory.plan_gradients`);
- the op's own tensors, and gradients of other activations;
- buckets in flight (`cost.memory.region_transfers`).

A recomputed block keeps its inputs; in its own backward, it has all that its replay saves. An inner segment keeps its
inputs, and has what its replay saves while its own ops run backward, and what others read of that until the block's
end. Micro-batches before the last leave gradients unreduced, which are never smaller than reduced ones. The optimizer's
step is one moment with the end of backward, when all gradients are handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.cost.memory.backward_transfers import Phase
from autopar.cost.memory.formulas import Copy
from autopar.cost.memory.forward_moments import forward_moments
from autopar.cost.memory.growth import Growth
from autopar.cost.memory.optimizer_step import temporaries_bytes
from autopar.cost.memory.plan_gradients import PlanGradients
from autopar.cost.memory.planned_bytes import ParameterCopy, PlannedBytes
from autopar.cost.memory.region_transfers import RegionTransfers
from autopar.cost.memory.training_forward import TrainingForward
from autopar.cost.structure.naming import stretch_name
from autopar.plans import Moment


def moments_of(planned: PlannedBytes) -> tuple[Moment, ...]:
    """The moments of a plan, in the order of the graph."""
    return _Step(planned).moments() if planned.memory.train else forward_moments(planned)


@dataclass(frozen=True)
class _Peak:
    """The largest point of a region, by part: what has grown until then, and what lives at the point alone."""

    grown: Counter[str]
    passing: tuple[tuple[str, int], ...]

    def over(self, live: Counter[str]) -> dict[str, int]:
        """The parts, with those that live throughout."""
        parts = live + self.grown
        for part, size in self.passing:
            parts[part] += size
        return _without_empty(parts)


@dataclass(frozen=True)
class _Kept:
    """What a region adds to what is kept for backward: bytes by part, and the storages."""

    parts: Counter[str]
    copies: frozenset[Copy]


class _Step:
    """The walk over the regions of a training step."""

    def __init__(self, plan: PlannedBytes) -> None:
        self.plan, self.memory, self.grouping = plan, plan.memory, plan.grouping
        self.lifetimes = plan.memory.lifetimes
        self.transfers, self.gradients = RegionTransfers(plan), PlanGradients(plan)
        self.always = self._always()
        # by region: what the caller holds until the next step of what the region keeps, and of what its replay leaves
        self.returned = [plan.returned.by_region.get(i, 0) for i in range(len(plan.rows))]
        self._models: dict[tuple[object, ...], tuple[int, frozenset[Copy]]] = {}  # by form: a region, what it reads
        self._regions: dict[tuple[object, ...], tuple[int, _Peak, _Kept]] = {}

    def moments(self) -> tuple[Moment, ...]:
        moments = []
        kept: set[Copy] = set()  # storages of the regions before
        kept_parts: Counter[str] = Counter()
        part = self.grouping.forward
        forward = TrainingForward(self.plan, part) if part is not None else None
        for i, row in enumerate(self.plan.rows):
            live = self.always + kept_parts + self.gradients.accumulated
            inputs = self.plan.segment_inputs(i)
            self._add(live, inputs, kept)
            name = stretch_name(self.plan.nodes[row.first : row.last + 1])
            if forward is not None and (fullest := forward.fullest(i, kept | inputs)) is not None:
                parts = live + fullest
                made = self.plan.returned.always
                parts["inputs and outputs"] -= sum(size for region, size in made.items() if region > i)
                moments.append(Moment(f"forward of {name}", _without_empty(parts)))
            live["gradients"] += sum(self.gradients.later[i + 1 :])
            live["inputs and outputs"] += sum(self.returned[i + 1 :]) + self.plan.returned.beside_replay(i)
            peak, keeps = self._region(i, inputs, kept)
            moments.append(Moment(f"backward of {name}", peak.over(live)))
            kept_parts.update(keeps.parts)
            kept |= keeps.copies
            for copy, size in self.plan.returned.since_forward(i, keeps.copies).items():
                kept_parts["inputs and outputs"] += size if copy not in kept else 0
                kept.add(copy)
        return (*moments, self._optimizer_step())

    def _always(self) -> Counter[str]:
        """Bytes by part that live throughout."""
        memory, chosen, parts = self.memory, self.plan.chosen, Counter(self.memory.fixed)
        for node, storage, count in self.plan.distinct_parameters:
            for part, size in memory.parameter_bytes(node, storage).items():
                parts[part] += count * size
        parts["inputs and outputs"] += sum(self.plan.returned.always.values())
        for node in (node for node in self.plan.nodes if node in chosen):
            if node.op == "placeholder" or (node.op == "get_attr" and not memory.is_parameter(node)):
                parts["inputs and outputs"] += memory.input_bytes(node, chosen[node].outputs[0])
        return parts

    def _region(self, i: int, inputs: set[Copy], kept: set[Copy]) -> tuple[_Peak, _Kept]:
        """A region's peak and what it keeps: the same for all middle blocks of a fold (`cost.structure.folds`) that are
        recomputed alike, have as much in flight, and find the same of what they read already kept."""
        form = self.plan.form(i)
        if form is None:
            return self._fullest(i, kept | inputs), self._keeps(i, inputs, kept)
        form = (form, self.returned[i], *self.transfers.in_flight(i).items())
        if form not in self._models:
            self._models[form] = i, frozenset(self.plan.foreign(i) | inputs)
        model, foreign = self._models[form]
        pairs = zip(foreign, self.plan.as_in(foreign, model, i), strict=True)
        key = form, frozenset(models_copy for models_copy, copy in pairs if copy in kept)
        if key not in self._regions:
            self._regions[key] = i, self._fullest(i, kept | inputs), self._keeps(i, inputs, kept)
        model, peak, keeps = self._regions[key]
        return peak, _Kept(keeps.parts, frozenset(self.plan.as_in(keeps.copies, model, i)))

    def _keeps(self, i: int, inputs: set[Copy], kept: set[Copy]) -> _Kept:
        parts: Counter[str] = Counter()
        new: set[Copy] = set()
        if i in self.plan.recomputed:
            self._add(parts, inputs, kept)
            return _Kept(parts, frozenset(inputs))
        parameters: dict[ParameterCopy, int] = {}
        for node in self.plan.members[i]:
            segment = self.plan.segment_of.get(node)
            copies = self.plan.inner_inputs(segment) if segment is not None else self.plan.copies(node)
            if segment is None:
                parts["activations"] += self.plan.beside(node)
                parameters.update(self.plan.kept_parameters(node))
            self._add(parts, copies - new, kept)
            new |= copies
        parts["gathered parameters"] += sum(parameters.values())
        return _Kept(parts, frozenset(new))

    def _fullest(self, i: int, kept: set[Copy]) -> _Peak:
        """The largest point of a region; `kept`: storages that the regions before keep."""
        growth = Growth(self.plan, i, kept)
        grows = growth.parts
        grows["gradients"] = sum(self.gradients.waiting[node] for node in self.plan.members[i])
        in_flight = self.transfers.in_flight(i)
        most_bytes, peak = self._reducing(i, kept)
        for node in self.plan.members[i]:
            growth.begin(node)
            growth.keep(node)
            yet_to_keep = growth.yet_to_keep()
            for phase, size in self._at(node, i, in_flight):
                yet_to_give = self.gradients.waiting[node] if phase is Phase.LANDING else 0
                total = grows.total() - yet_to_give + in_flight[phase] + size + yet_to_keep
                if total > most_bytes:
                    own = "logits and loss" if self.lifetimes.after_parameters(node) else "workspace"
                    passing = (
                        ("communication buffers", in_flight[phase]),
                        (own, size),
                        ("inputs and outputs", yet_to_keep),
                    )
                    most_bytes = total
                    peak = _Peak(grows - Counter({"gradients": yet_to_give}), passing)
            grows["gradients"] -= self.gradients.waiting[node]
        return peak

    def _add(self, parts: Counter[str], copies: set[Copy], kept: set[Copy]) -> None:
        parts["activations"] += sum(self.memory.copy_bytes(copy) for copy in copies - kept)

    def _reducing(self, i: int, kept: set[Copy]) -> tuple[int, _Peak]:
        """The point at which a region's bucket is reduced: the gradients of all ops are there from the first on that
        reads a weight whose gradient moves, and the saved tensors of the ops before, which backward has yet to
        reach."""
        growth, first = Growth(self.plan, i, kept), self.plan.first_reduced(i)
        before = [node for node in self.plan.members[i] if self.lifetimes.position[node] < first]
        for node in before:
            growth.begin(node)
            growth.keep(node)
        gradients = sum(self.gradients.waiting[node] for node in self.plan.members[i][len(before) :])
        grown = growth.parts + Counter(gradients=gradients)
        buffers, behind = self.transfers.in_flight(i).get(Phase.REDUCING, 0), self.lifetimes.left_to_do(first)
        size = self.plan.momentary.passing_bytes(behind) if behind is not None else 0
        later = self.returned[i] - self.plan.returned.beside_replay(i)  # the rest counts at every point of the region
        passing = (("communication buffers", buffers), ("workspace", size), ("inputs and outputs", later))
        return grown.total() + sum(n for _, n in passing), _Peak(grown, passing)

    def _at(self, node: fx.Node, i: int, in_flight: Mapping[Phase, int]) -> Iterator[tuple[Phase, int]]:
        """The points of an op of a region: the phase of each, and what lives at it alone."""
        behind = self.grouping.readers.last(i) - self.lifetimes.position[node]
        for point in self.lifetimes.points(node):
            if behind == 0 and point.backward and Phase.LANDING in in_flight:
                yield Phase.LANDING, self.plan.momentary.passing_bytes(point)
            cast = self.gradients.cast[node] if point.backward else 0
            yield Phase.SINCE if behind >= 0 else Phase.BEFORE, self.plan.momentary.bytes_at(point) + cast

    def _optimizer_step(self) -> Moment:
        memory, parameters = self.memory, self.plan.distinct_parameters
        live = self.always.copy()
        live["gradients"] += sum(count * memory.gradient_bytes(node, storage) for node, storage, count in parameters)
        temporaries, landed = temporaries_bytes(self.plan), self.transfers.landed_bytes()
        if landed > temporaries:  # what landed is gone when the optimizer begins
            live["communication buffers"] += landed
        else:
            live["optimizer transients"] += temporaries
        live["inputs and outputs"] += sum(self.returned)
        return Moment("optimizer step", _without_empty(live))


def _without_empty(parts: Counter[str]) -> dict[str, int]:
    return {part: size for part, size in parts.items() if size}
