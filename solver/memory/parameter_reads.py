"""What moves for the parameters that the ops of each stage read, with the program's variables that say whether it does.

Memory rows count what a bucket holds read by read: a read is one parameter in one stage, and where several of the
stage's ops read it in the same layouts, it moves once for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.transfer_bytes import TransferBytes, transfer_bytes
from autopar.cost.traffic import in_segment
from autopar.solver.memory.replay_gathers import replay_gathers
from autopar.solver.memory.stage_transfers import Reads
from autopar.solver.model import Model
from autopar.solver.problem import Stage
from autopar.solver.seconds.replays import Flow, Pair

Transfers = list[tuple[TransferBytes, int]]


class ParameterReads:
    """The reads of a model. `flows`: in one block, by the op read and its reader.

    `alike`: for flows of parameters that several regions read, a key that is equal for those that read one alike.
    """

    def __init__(self, model: Model, flows: Mapping[tuple[int, int], list[Flow]]) -> None:
        self.model, self.problem, self.program = model, model.problem, model.program
        self.memory, self.flows = model.problem.memory, flows
        self.alike: dict[int, Hashable] = {}
        stages = self.problem.stages
        self._kept = [list(filter(self._is_kept, self._of_stage(stage))) for stage in stages]
        self._reduced = [list(filter(self._is_reduced, self._of_stage(stage))) for stage in stages]

    def by_stage(self, grouping: Grouping) -> Reads:
        """The reads of each stage, with the buckets of `grouping`."""
        again = replay_gathers(self.model, self.flows, self.alike, grouping)
        return Reads(
            [self._by_read(flows, grouping) + again.get(i, []) for i, flows in enumerate(self._kept)],
            [self._by_read(flows, grouping) for flows in self._reduced],
        )

    def most_left_behind(self, stage: int) -> int:
        """The most bytes that the buckets of a stage's parameters can leave behind while the next block runs
        backward."""
        most = 0
        for flow in self._reduced[stage]:
            transfers = self.transfers([flow], self.problem.grouping)
            most += max((transfer.left_behind + transfer.others for transfer, _ in transfers), default=0)
        return most

    def transfers(self, flows: Sequence[Flow], grouping: Grouping) -> Transfers:
        """What the transfers of parameters hold, with the variable of each flow and the buckets of `grouping`."""
        transfers = []
        for flow in flows:
            ref = self.problem.ref(flow.tensor)
            if not self.memory.is_parameter(ref.node) or not in_segment(self.problem.ops[flow.use.op].node):
                continue
            paths = self.model.costs.table(ref).transfer_paths([storage for storage, _ in flow.ports], flow.wanted)
            for (storage, regather), row, variables in zip(flow.ports, paths, flow.numbers.tolist(), strict=True):
                for wanted, path, variable in zip(flow.wanted, row, variables, strict=True):
                    if variable >= 0:
                        transfer = transfer_bytes(
                            self.memory, grouping, ref, storage, wanted, regather=regather, path=path
                        )
                        transfers.append((transfer, variable))
        return transfers

    def _by_read(self, flows: Sequence[Flow], grouping: Grouping) -> list[Transfers]:
        reads, by_source = list[Transfers](), dict[int, list[Flow]]()
        for flow in flows:
            by_source.setdefault(flow.tensor.source, []).append(flow)
        for source, of_source in by_source.items():
            if self.problem.grouping.shared(self.problem.ops[source].node):
                self.alike.update((v, (source, (pair,))) for flow in of_source for pair, v in flow.pairs.items())
            if len(of_source) == 1:
                reads.append(self.transfers(of_source, grouping))
            else:
                reads += self._shared(of_source, grouping)
        return reads

    def _shared(self, flows: Sequence[Flow], grouping: Grouping) -> list[Transfers]:
        """The reads of one parameter by several ops: one for each pair of layouts, of all ops that use this pair."""
        by_layouts: dict[tuple[Pair, TransferBytes], list[int]] = {}
        for flow in flows:
            pairs = {variable: pair for pair, variable in flow.pairs.items()}
            for transfer, variable in self.transfers([flow], grouping):
                by_layouts.setdefault((pairs[variable], transfer), []).append(variable)
        return [[(transfer, self._any(variables))] for (_, transfer), variables in by_layouts.items()]

    def _any(self, variables: Sequence[int]) -> int:
        """A variable that is at least 1 where any of some flows in the same layouts is."""
        if len(variables) == 1:
            return variables[0]
        any_reads = self.program.variable("read", whole=False)
        if variables[0] in self.alike:
            self.alike[any_reads] = self.alike[variables[0]]
        for variable in variables:
            self.program.at_least("read", [(any_reads, 1.0), (variable, -1.0)], 0.0)
        return any_reads

    def _of_stage(self, stage: Stage) -> list[Flow]:
        """The flows of all tensors of its block that a stage's ops read."""
        inside = set(stage.ops)
        return [flow for (_, reader), flows in self.flows.items() if reader in inside for flow in flows]

    def _is_kept(self, flow: Flow) -> bool:
        """Whether an op keeps what it reads for backward."""
        return flow.use.index in self.memory.saved(self.problem.ops[flow.use.op].node)[0]

    def _is_reduced(self, flow: Flow) -> bool:
        """Whether a parameter's gradient is reduced after the backward of the stage that reads it: that of the region
        that reads it first."""
        parameter, reader = self.problem.ops[flow.tensor.source].node, self.problem.ops[flow.use.op].node
        grouping = self.problem.grouping
        return self.memory.is_parameter(parameter) and grouping.home(parameter) == grouping.region(reader)
