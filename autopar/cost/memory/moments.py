"""Bytes on one device at the moments of a step: a moment for every region of the graph, and the optimizer's step.

For passes without backward see `cost.memory.forward_moments`, for a step's forward `cost.memory.training_forward`.

A region is a repeated block, or the nodes between two repeats. Its moment is the largest of the points of its ops in
backward (`cost.memory.lifetimes`) and of two more: when its bucket of parameters lands, and when its gradients'
bucket is reduced. At a point there live:

- parameters with the optimizer's states, and weights that no op reads;
- what the regions before this one keep for backward, and what this one keeps up to the op;
- what the caller holds of outputs that regions after this one have kept (`cost.memory.returned`);
- gradients of parameters that this op or later ones read, those of this region unreduced;
- the op's own tensors, and gradients of other activations;
- parameters on their way (`cost.memory.on_the_way`).

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

from autopar.cost.memory.formulas import Copy
from autopar.cost.memory.forward_moments import forward_moments
from autopar.cost.memory.growth import Growth
from autopar.cost.memory.moving import Moving, largest
from autopar.cost.memory.on_the_way import READ, Phase, beside, on_the_way
from autopar.cost.memory.optimizer_step import successive, temporaries
from autopar.cost.memory.planned_bytes import ParameterCopy, PlannedBytes, Read
from autopar.cost.memory.training_forward import TrainingForward
from autopar.cost.structure.naming import stretch_name
from autopar.graph import TensorRef
from autopar.layout import Layout
from autopar.plans import Moment


def moments_of(planned: PlannedBytes) -> tuple[Moment, ...]:
    """The moments of a plan, in the order of the graph."""
    return _Walk(planned).run() if planned.memory.train else forward_moments(planned)


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
        return _parts(parts)


@dataclass(frozen=True)
class _Kept:
    """What a region adds to what is kept for backward: bytes by part, and the storages."""

    parts: Counter[str]
    copies: frozenset[Copy]


class _Walk:
    def __init__(self, plan: PlannedBytes) -> None:
        self.plan, self.memory, self.grouping = plan, plan.memory, plan.grouping
        self.lifetimes = plan.memory.lifetimes
        self.read: list[dict[Read, Moving]] = []
        self.reduced: list[list[Moving]] = []
        for i in range(len(plan.rows)):
            model = plan.model(i)
            shared = model != i and self.grouping.is_alike(model, i)
            alike = shared and plan.form(model) == plan.form(i)  # else the replays of one may read more
            self.read.append(self.read[model] if alike else plan.kept_in(i))
            self.reduced.append(self.reduced[model] if shared else plan.reduced_in(i))
        self.always = Counter(self.memory.fixed)
        self.waiting: dict[fx.Node, int] = {}  # by op: gradients it makes that wait in its region for their bucket
        self.cast: dict[fx.Node, int] = {}  # by op: gradients it makes, in the dtype from which they are cast
        self.later = [0] * len(plan.rows)  # by region: its gradients while the regions before it run backward
        self.accumulated: Counter[str] = Counter()  # gradients that earlier micro-batches leave
        # by region: what the caller holds until the next step of what the region keeps, and of what its replay leaves
        self.returned = [plan.returned.by_region.get(i, 0) for i in range(len(plan.rows))]
        self._count_parameters()
        self._count_inputs_and_outputs()
        self._alike: dict[tuple[object, ...], tuple[int, frozenset[Copy]]] = {}  # by form: one region, what it reads
        self._moved: dict[int, dict[Phase, int]] = {}
        self._sums: dict[tuple[str, int, int | None], int] = {}
        self._told: dict[tuple[object, ...], tuple[int, _Peak, _Kept]] = {}

    def run(self) -> tuple[Moment, ...]:
        found = []
        kept: set[Copy] = set()  # storages of the regions before
        held: Counter[str] = Counter()
        part = self.grouping.forward
        forward = TrainingForward(self.plan, part) if part is not None else None
        for i, row in enumerate(self.plan.rows):
            live = self.always + held + self.accumulated
            inputs = self.plan.segment_inputs(i)
            self._add(live, inputs, kept)
            name = stretch_name(self.plan.nodes[row.first : row.last + 1])
            if forward is not None and (fullest := forward.fullest(i, kept | inputs)) is not None:
                parts = live + fullest
                made = self.plan.returned.always
                parts["inputs and outputs"] -= sum(size for region, size in made.items() if region > i)
                found.append(Moment(f"forward of {name}", _parts(parts)))
            live["gradients"] += sum(self.later[i + 1 :])
            live["inputs and outputs"] += sum(self.returned[i + 1 :]) + self.plan.returned.beside_replay(i)
            peak, keeps = self._region(i, inputs, kept)
            found.append(Moment(f"backward of {name}", peak.over(live)))
            held.update(keeps.parts)
            kept |= keeps.copies
            for copy, size in self.plan.returned.since_forward(i, keeps.copies).items():
                held["inputs and outputs"] += size if copy not in kept else 0
                kept.add(copy)
        return (*found, self._optimizer_step())

    def _region(self, i: int, inputs: set[Copy], kept: set[Copy]) -> tuple[_Peak, _Kept]:
        """A region's peak and what it keeps: the same for all middle blocks of a fold (`cost.structure.folds`) that are
        recomputed alike, move as much, and find the same of what they read already kept."""
        form = self.plan.form(i)
        if form is None:
            return self._fullest(i, kept | inputs), self._keeps(i, inputs, kept)
        form = (form, self.returned[i], *self._on_the_way(i).items())
        if form not in self._alike:
            self._alike[form] = i, frozenset(self.plan.foreign(i) | inputs)
        other, foreign = self._alike[form]
        theirs = zip(foreign, self.plan.as_in(foreign, other, i), strict=True)
        key = form, frozenset(copy for copy, mine in theirs if mine in kept)
        if key not in self._told:
            self._told[key] = i, self._fullest(i, kept | inputs), self._keeps(i, inputs, kept)
        other, peak, keeps = self._told[key]
        return peak, _Kept(keeps.parts, frozenset(self.plan.as_in(keeps.copies, other, i)))

    def _keeps(self, i: int, inputs: set[Copy], kept: set[Copy]) -> _Kept:
        held: Counter[str] = Counter()
        new: set[Copy] = set()
        if i in self.plan.recomputed:
            self._add(held, inputs, kept)
            return _Kept(held, frozenset(inputs))
        parameters: dict[ParameterCopy, int] = {}
        for node in self.plan.members[i]:
            segment = self.plan.segment_of.get(node)
            copies = self.plan.inner_inputs(segment) if segment is not None else self.plan.copies(node)
            if segment is None:
                held["activations"] += self.plan.beside(node)
                parameters.update(self.plan.kept_parameters(node))
            self._add(held, copies - new, kept)
            new |= copies
        held["gathered parameters"] += sum(parameters.values())
        return _Kept(held, frozenset(new))

    def _fullest(self, i: int, kept: set[Copy]) -> _Peak:
        """The largest point of a region; `kept`: storages that the regions before keep."""
        growth = Growth(self.plan, i, kept)
        grows = growth.parts
        grows["gradients"] = sum(self.waiting.get(node, 0) for node in self.plan.members[i])
        moved = self._on_the_way(i)
        most, best = self._reducing(i, grows["gradients"], kept)
        for node in self.plan.members[i]:
            growth.begin(node)
            growth.keep(node)
            held = growth.yet_to_keep()
            for phase, size in self._at(node, i, moved):
                given = self.waiting.get(node, 0) if phase is Phase.LANDING else 0  # the op has not yet given its own
                total = grows.total() - given + moved[phase] + size + held
                if total > most:
                    own = "logits and loss" if self.lifetimes.after_parameters(node) else "workspace"
                    passing = (("communication buffers", moved[phase]), (own, size), ("inputs and outputs", held))
                    most = total
                    best = _Peak(grows - Counter({"gradients": given}), passing)
            grows["gradients"] -= self.waiting.get(node, 0)
        return best

    def _add(self, parts: Counter[str], copies: set[Copy], kept: set[Copy]) -> None:
        parts["activations"] += sum(self.memory.copy_bytes(copy) for copy in copies - kept)

    def _reducing(self, i: int, gradients: int, kept: set[Copy]) -> tuple[int, _Peak]:
        """The point at which a region's bucket is reduced: all of its gradients are there, and the saved tensors of its
        ops before the first that reads a weight (`first_reader`), which backward has yet to reach."""
        growth, first = Growth(self.plan, i, kept), self.grouping.first_reader(i)
        for node in self.plan.members[i]:
            if self.lifetimes.position[node] >= first:
                break
            growth.begin(node)
            growth.keep(node)
        grown = growth.parts + Counter(gradients=gradients)
        buffers, behind = self._on_the_way(i).get(Phase.REDUCING, 0), self.lifetimes.left_to_do(first)
        size = self.plan.momentary.passing_bytes(behind) if behind is not None else 0
        later = self.returned[i] - self.plan.returned.beside_replay(i)  # the rest counts at every point of the region
        passing = (("communication buffers", buffers), ("workspace", size), ("inputs and outputs", later))
        return grown.total() + sum(n for _, n in passing), _Peak(grown, passing)

    def _at(self, node: fx.Node, i: int, moved: Mapping[Phase, int]) -> Iterator[tuple[Phase, int]]:
        """The points of an op of a region: the phase of each, and what lives at it alone."""
        behind = self.grouping.last_reader(i) - self.lifetimes.position[node]
        for point in self.lifetimes.points(node):
            if behind == 0 and point.backward and Phase.LANDING in moved:
                yield Phase.LANDING, self.plan.momentary.passing_bytes(point)
            cast = self.cast.get(node, 0) if point.backward else 0
            yield Phase.SINCE if behind >= 0 else Phase.BEFORE, self.plan.momentary.bytes_at(point) + cast

    def _on_the_way(self, i: int) -> dict[Phase, int]:
        """By phase, bytes of buckets on their way in the backward of a region (`cost.memory.on_the_way`)."""
        if i not in self._moved:
            phases = on_the_way(self.grouping, i, self.plan.divided(i))
            if not self.plan.reduces(i):
                del phases[Phase.REDUCING]
            self._moved[i] = {
                phase: sum(self._bytes(kind, one, there) for kind, one, there in beside(terms))
                for phase, terms in phases.items()
            }
        return self._moved[i]

    def _bytes(self, kind: str, i: int, there: int | None) -> int:
        """Bytes of a kind (a field of `Moving`) of region `i`. `there`: a region whose parameters have arrived already;
        those that `i` shares with it do not arrive once more."""
        if there is not None and not self.grouping.share(i, there):
            there = None
        if (kind, i, there) not in self._sums:
            others = self.read[there].items() if there is not None else ()
            shared = {key[:2] for key, one in others if one.arriving}
            read = [one for key, one in self.read[i].items() if key[:2] not in shared]
            moved = read if kind in READ else self.reduced[i]
            self._sums[kind, i, there] = largest(moved, kind)
        return self._sums[kind, i, there]

    def _count_parameters(self) -> None:
        for node, storage, count in self.plan.distinct_parameters:
            for part, size in self.memory.parameter_bytes(node, storage).items():
                self.always[part] += count * size
        many = self.memory.micro_batches > 1
        for node, _ in self.plan.parameters():
            use = self.plan.last_use(node) if self.memory.is_trainable(node) else None
            if use is not None:
                last, one = use
                waiting, cast = self.lifetimes.waiting(node, one)
                self.waiting[last] = self.waiting.get(last, 0) + waiting
                self.cast[last] = self.cast.get(last, 0) + cast
                # where regions before also read the parameter, its gradient waits for their parts unreduced
                later = one.waiting if self.grouping.shared(node) else one.reduced
                if not many or (self.grouping.shared(node) and not one.reduction):
                    self.later[self.plan.region_of[last]] += later
                if not one.reduction and many:
                    self.accumulated["gradients"] += one.accumulated

    def _count_inputs_and_outputs(self) -> None:
        memory, chosen = self.memory, self.plan.chosen
        self.always["inputs and outputs"] += sum(self.plan.returned.always.values())
        unreduced: dict[tuple[TensorRef, Layout], int] = {}
        for node in self.plan.nodes:
            if node not in chosen:
                continue
            strategy = chosen[node]
            if node.op == "placeholder" or (node.op == "get_attr" and not memory.is_parameter(node)):
                self.always["inputs and outputs"] += memory.input_bytes(node, strategy.outputs[0])
            if memory.micro_batches == 1:
                continue
            for ref, wanted in zip(memory.inputs[node], strategy.inputs, strict=True):
                if memory.is_trainable(ref.node):
                    one = self.plan.moved(ref, wanted)
                    unreduced[ref, wanted] = one.accumulated if one.reduction else 0
        self.accumulated["unreduced gradients"] += sum(unreduced.values())

    def _optimizer_step(self) -> Moment:
        memory, parameters = self.memory, self.plan.distinct_parameters
        live = self.always.copy()
        live["gradients"] += sum(count * memory.gradient_bytes(node, storage) for node, storage, count in parameters)
        temporaries, landed = self._temporaries(), self._landed()  # what landed is gone when the optimizer begins
        if landed > temporaries:
            live["communication buffers"] += landed
        else:
            live["optimizer transients"] += temporaries
        live["inputs and outputs"] += sum(self.returned)
        return Moment("optimizer step", _parts(live))

    def _landed(self) -> int:
        return max((largest(moved, "landed") for moved in self.reduced), default=0)

    def _temporaries(self) -> int:
        parameters = self.plan.distinct_parameters
        of = {node: temporaries(self.memory, node, storage) for node, storage, _ in parameters}
        found = 0
        for before, node in successive(self.memory):
            left = of[self.plan.stands_for(before)].left if before is not None else 0
            found = max(found, left + of[self.plan.stands_for(node)].own)
        return found + sum(of[node].at_once * count for node, _, count in parameters)


def _parts(live: Counter[str]) -> dict[str, int]:
    return {name: size for name, size in live.items() if size}
