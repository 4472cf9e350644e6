"""What the ops of a plan read, keep and move, in bytes: the terms that `cost.memory.moments` adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.cuts import Cuts
from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.memory.gradient_sums import GradientSum, gradient_sums_of, home_of
from autopar.cost.memory.local_workspace import kept_bytes
from autopar.cost.memory.momentary import Momentary
from autopar.cost.memory.returned import Returned
from autopar.cost.memory.transfer_bytes import TransferBytes, replay_transfer_bytes, transfer_bytes
from autopar.cost.structure.blocks import Repeat, regions
from autopar.cost.structure.folds import MODEL, Fold
from autopar.cost.traffic import in_segment
from autopar.graph import TensorRef, is_cast_input
from autopar.layout import Layout
from autopar.plans import ParameterPlan, Segment

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy

ParameterCopy = tuple[fx.Node, Cuts]  # a copy of a parameter, and how it is cut
Read = tuple[TensorRef, Layout, bool]  # a parameter, the wanted layout, and whether a replay reads it


class PlannedBytes:
    """Bytes of a plan by op and region; arguments as in `cost.step.predict`."""

    def __init__(
        self,
        memory: StepMemory,
        chosen: Mapping[fx.Node, Strategy],
        parameters: Mapping[str, ParameterPlan],
        segments: Sequence[Segment],
        repeats: Sequence[Repeat],
        grouping: Grouping,
    ) -> None:
        self.memory, self.chosen = memory, chosen
        self._parameters = parameters
        self.nodes = list(memory.graph.nodes)
        self.rows = regions(len(self.nodes), repeats)
        self.region_of = {n: i for i, r in enumerate(self.rows) for n in self.nodes[r.first : r.last + 1]}
        self.members = [[n for n in self.nodes[r.first : r.last + 1] if n in chosen] for r in self.rows]
        self.recomputed = {self.region_of[self.nodes[s.first]] for s in segments if not s.inner}
        self.segment_of = {n: s for s in segments for n in self.nodes[s.first : s.last + 1] if in_segment(n)}
        self.folds = {f.repeat: f for f in memory.folds if memory.repeats == tuple(repeats) and self._is_uniform(f)}
        self._repeats = repeats
        self._inner_inputs: dict[Segment, set[Copy]] = {}
        self._gradient_sums: dict[fx.Node, list[GradientSum]] = {}
        self._cuts: dict[int, list[tuple[int, int, bool]]] = {}  # by region: segments, as offsets in it
        for s in segments:
            number = self.region_of[self.nodes[s.first]]
            start = self.rows[number].first
            self._cuts.setdefault(number, []).append((s.first - start, s.last - start, s.inner))
        self.apart = self._apart(grouping)
        self.grouping = grouping.divided(self.apart)

    def _apart(self, grouping: Grouping) -> set[int]:
        """The regions whose shared buckets this plan divides, as all regions that share them are recomputed whole."""
        whole = {i for i in self.recomputed if all(n in self.segment_of for n in self.members[i] if self._reads(n))}
        return {i for i in whole if whole.issuperset(grouping.together(i))}

    def _reads(self, node: fx.Node) -> bool:
        """Whether an op reads a parameter."""
        return in_segment(node) and any(self.memory.is_parameter(ref.node) for ref in self.memory.inputs[node])

    @cached_property
    def momentary(self) -> Momentary:
        """What lives at single points."""
        return Momentary(self.memory, self.chosen)

    @cached_property
    def returned(self) -> Returned:
        """What the caller holds of the call."""
        return Returned(self.memory, self.chosen, self.region_of, self.segment_of)

    # -- equal blocks -------------------------------------------------------------------------------------------------

    def _is_uniform(self, fold: Fold) -> bool:
        """Whether a fold's blocks have the same strategies, and their parameters the same storage."""
        repeat = fold.repeat
        for at in repeat.instance(1):
            model_strategy = self.chosen.get(self.nodes[at])
            stored = self._stored(self.nodes[at])
            for block in range(2, repeat.count):
                node = self.nodes[at + (block - 1) * repeat.period]
                strategy = self.chosen.get(node)
                if strategy is not model_strategy and strategy != model_strategy:
                    return False
                if stored is not None and self._stored(node) != stored:
                    return False
        return True

    def _stored(self, node: fx.Node) -> tuple[Layout, bool] | None:
        planned = self._parameters.get(str(node.target)) if self.memory.is_parameter(node) else None
        return (planned.storage, planned.regather) if planned is not None else None

    def _middle(self, i: int) -> Fold | None:
        """The fold of which a region is a middle block, if any."""
        row = self.rows[i]
        fold = self.folds.get(self._repeats[row.repeat]) if row.repeat is not None else None
        return fold if fold is not None and row.instance in fold.middle else None

    def model(self, i: int) -> int:
        """The region that stands for this one, with the same strategies and parameters' storage; itself outside
        folds."""
        return i - self.rows[i].instance + MODEL if self._middle(i) else i

    def stands_for(self, node: fx.Node) -> fx.Node:
        """The node that stands for this one, in the same place of the region that stands for its region."""
        fold = self._middle(self.region_of[node])
        return fold.model_of(node) if fold else node

    def nodes_with_transfers(self) -> Iterator[fx.Node]:
        """The plan's nodes, in equal blocks only those for which the block that stands for them sends something."""
        places: dict[int, list[int]] = {}
        for i, members in enumerate(self.members):
            model = self.model(i)
            if model == i:
                yield from members
                continue
            if model not in places:
                places[model] = [k for k, node in enumerate(self.members[model]) if self._may_transfer(node)]
            yield from (members[k] for k in places[model])

    def _may_transfer(self, node: fx.Node) -> bool:
        """Whether anything may be sent for a node, whatever was sent before."""
        strategy, refs = self.chosen[node], self.memory.inputs[node]
        return bool(strategy.inner) or any(
            self.memory.is_parameter(ref.node) or self.chosen[ref.node].outputs[ref.index] != wanted
            for ref, wanted in zip(refs, strategy.inputs, strict=True)
        )

    def form(self, i: int) -> tuple[object, ...] | None:
        """A key that is equal for middle blocks of a fold that are recomputed alike; None for other regions."""
        return (self.model(i), *self._cuts.get(i, ())) if self._middle(i) else None

    def as_in(self, copies: Iterable[Copy], region: int, other: int) -> list[Copy]:
        """Copies that a region reads or keeps, as those of another block of its fold."""
        fold, blocks = self._middle(region), self.rows[other].instance - self.rows[region].instance
        assert fold is not None
        return [(fold.moved(root, blocks), cuts) for root, cuts in copies]

    def foreign(self, i: int) -> set[Copy]:
        """Copies that a region reads and keeps of storages that other regions make."""
        copies: set[Copy] = set()
        for node in self.members[i]:
            segment = self.segment_of.get(node)
            copies |= self.copies(node) | (self.inner_inputs(segment) if segment is not None else set())
        return {copy for copy in copies if self.region_of[copy[0].node] != i}

    # -- parameters ---------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> list[tuple[fx.Node, Layout]]:
        """The parameters' nodes, each with the layout in which it is stored."""
        return [(n, self.storage(n)) for n in self.nodes if self.memory.is_parameter(n) and n in self.chosen]

    @cached_property
    def distinct_parameters(self) -> list[tuple[fx.Node, Layout, int]]:
        """The same, once for all parameters in the same place of equal blocks, with their number."""
        counts = Counter(self.stands_for(node) for node, _ in self.parameters)
        return [(node, self.storage(node), count) for node, count in counts.items()]

    def storage(self, parameter: fx.Node) -> Layout:
        return self._parameters[str(parameter.target)].storage

    def regathers(self, parameter: fx.Node) -> bool:
        """Whether a parameter's copies are gathered again in backward."""
        return self._parameters[str(parameter.target)].regather

    def transfer(self, ref: TensorRef, wanted: Layout) -> TransferBytes:
        """What the transfers of a parameter hold that an op wants in a layout."""
        planned = self._parameters[str(ref.node.target)]
        return transfer_bytes(self.memory, self.grouping, ref, planned.storage, wanted, regather=planned.regather)

    def parameters_read(self, node: fx.Node) -> list[tuple[int, TensorRef, Layout]]:
        """The parameters that an op reads: place among its inputs, parameter and wanted layout."""
        pairs = zip(self.memory.inputs[node], self.chosen[node].inputs, strict=True) if in_segment(node) else ()
        return [(j, ref, wanted) for j, (ref, wanted) in enumerate(pairs) if self.memory.is_parameter(ref.node)]

    def transfers_in_backward(self, i: int) -> dict[Read, TransferBytes]:
        """The transfers of the parameters that a region's ops keep for backward, or that its replays read. A replay
        gathers what it reads, even if the plan keeps the copy."""
        transfers: dict[Read, TransferBytes] = {}
        for node in self.members[i]:
            saved, replays = self.memory.saved(node)[0], node in self.segment_of
            for j, ref, wanted in self.parameters_read(node):
                read = ref, wanted, replays
                if read in transfers or not (j in saved or replays):
                    continue
                if replays and not self.regathers(ref.node):
                    storage = self.storage(ref.node)
                    transfers[read] = replay_transfer_bytes(self.memory, self.grouping, ref, storage, wanted)
                else:
                    transfers[read] = self.transfer(ref, wanted)
        return transfers

    def transfers_of_gradients(self, i: int) -> list[TransferBytes]:
        """The transfers of the parameters whose gradients are reduced after a region's backward: in each layout, after
        the first region that reads the parameter so."""
        reads = dict.fromkeys(read[1:] for node in self.members[i] for read in self.parameters_read(node))
        return [self.transfer(ref, wanted) for ref, wanted in reads if home_of(self, ref, wanted) == i]

    def reduces(self, i: int) -> bool:
        """Whether a bucket may be reduced after a region: if it is the first of its bucket, or recompute divides it."""
        return self.grouping.begins(i) or i in self._cuts or i - 1 in self._cuts

    def divided(self, i: int) -> str | None:
        """The field of `TransferBytes` for what the next region's part of a bucket leaves behind, where recompute
        divides the bucket that this region shares with it; None where it does not."""
        return "left_of_one" if i + 1 in self._cuts else "left_of_rest" if i in self._cuts else None

    def first_reduced(self, i: int) -> int:
        """The position of a region's first op that reads a weight whose gradient moves: after its backward, the
        region's bucket is reduced."""
        for node in (node for node in self.grouping.readers.of_weights(i) if node in self.chosen):
            trained = [read for read in self.parameters_read(node) if self.memory.is_trainable(read[1].node)]
            if any(self.transfer(ref, wanted).reduction for _, ref, wanted in trained):
                return self.memory.lifetimes.position[node]
        return self.grouping.readers.first(i)

    def gradient_sums(self, parameter: fx.Node) -> list[GradientSum]:
        """A parameter's gradients, one for each layout in which ops read it, in the order of backward."""
        fold = self._middle(self.region_of[parameter])
        model = fold.model_of(parameter) if fold else parameter
        if model not in self._gradient_sums:
            self._gradient_sums[model] = gradient_sums_of(self, model)
        sums = self._gradient_sums[model]
        if fold is None or model is parameter:
            return sums
        blocks = self.rows[self.region_of[parameter]].instance - MODEL
        return [each._replace(reader=fold.moved(TensorRef(each.reader, 0), blocks).node) for each in sums]

    def kept_parameters(self, node: fx.Node) -> dict[ParameterCopy, int]:
        """Copies of parameters that an op keeps until its backward; those gathered again count as in flight."""
        memory = self.memory
        sizes: dict[ParameterCopy, int] = {}
        for j in memory.saved(node)[0]:
            ref, wanted = memory.inputs[node][j], self.chosen[node].inputs[j]
            parameter = self._parameters.get(str(ref.node.target)) if memory.is_parameter(ref.node) else None
            if parameter and not parameter.regather:
                sizes[ref.node, memory.cuts(wanted)] = memory.read_bytes(ref.node, parameter.storage, wanted)
        return sizes

    # -- activations --------------------------------------------------------------------------------------------------

    def copies(self, node: fx.Node) -> set[Copy]:
        """The copies that an op keeps for backward, parameters apart."""
        memory = self.memory
        inputs, outputs, _ = memory.saved(node)
        refs, strategy = memory.inputs[node], self.chosen[node]
        read = {memory.copy(refs[j], strategy.inputs[j]) for j in inputs if not memory.is_parameter(refs[j].node)}
        return read | {memory.copy(TensorRef(node, j), strategy.outputs[j]) for j in outputs}

    def beside(self, node: fx.Node) -> int:
        """Bytes of statistics and masks that an op keeps."""
        return kept_bytes(node, self.chosen[node], self.memory.mesh_shape, self.memory.saved(node)[2])

    def inner_inputs(self, segment: Segment) -> set[Copy]:
        """What an inner segment reads from outside, in the layouts that its ops want."""
        if segment not in self._inner_inputs:
            nodes = [n for n in self.nodes[segment.first : segment.last + 1] if n in self.chosen and in_segment(n)]
            reads = (
                (ref, wanted)
                for node in nodes
                for ref, wanted in zip(self.memory.inputs[node], self.chosen[node].inputs, strict=True)
            )
            self._inner_inputs[segment] = {
                self.memory.copy(ref, wanted)
                for ref, wanted in reads
                if self.segment_of.get(ref.node) != segment and not self.memory.is_parameter(ref.node)
            }
        return self._inner_inputs[segment]

    def segment_inputs(self, i: int) -> set[Copy]:
        """What a block recomputed as a whole reads from outside, in its makers' layouts; empty for other regions."""
        copies: set[Copy] = set()
        inside = set(self.members[i]) if i in self.recomputed else set()
        for node in filter(in_segment, inside):
            for ref in self.memory.inputs[node]:
                is_there = self.memory.is_parameter(ref.node) or is_cast_input(ref.node)
                if ref.node not in inside and not is_there:
                    copies.add(self.memory.copy(ref, self.chosen[ref.node].outputs[ref.index]))
        return copies
