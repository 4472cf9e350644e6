"""Memory rows of the ILP: at every moment that can be the peak, the live bytes are at most the budget.

Rows of a pass without backward are in `solver.memory.forward_rows`, those of a step's forward in `forward_part`.

The moments are those of `cost.memory.moments`. In a stage of m equal blocks, the first r_l blocks are recomputed at
level l or a higher one (r_0 = m). F_l is what one block of level l keeps for backward, G its gradients, H_l what all
blocks of level l or higher keep, K(v) what a block's ops up to v keep, and W_l the most that lives in a block's own
backward::

    W_0 >= K(v) + gradients(v) + workspace(v)     for every point v of the stage's ops (`solver.memory.points`)
    W_l >= the same, less what recomputed segments before v have freed, plus what segments keep besides

    last block of level l:  always + H(before) + H_l - F_l + W_l + (m - r_l) G     + gradients(after) + flight <= budget
    the block after it:     always + H(before) + H_l - F_l + N_l + (m - r_l - 1) G + gradients(after) + flight <= budget
    first block, level l:   always + H(before)             + W_l + (m - 1) G       + gradients(after) + flight <= budget
    next to last of all:    always + H(before) + H_0 - 2 F_0 + W_0 + G             + gradients(after) + flight <= budget

Each phase of backward has a W of its own, and its own `flight` (`cost.memory.backward_transfers`). Blocks that share a
bucket reduce it after the backward of the first of them; where recompute may divide the bucket, after that of any of
them.
N_l: what the last block of level l keeps when the block after it, of a lower level, has only its reduction left to do.

Less is in flight after the last block of a stage than after the others. Where all blocks are of level l, the other
cases of `flight` begin at the block before the last one, which has D_l bytes less; the rows of these cases subtract
D_l::

    D_l <= most left behind * (1 - k_l),  D_l <= least F_l - G + most G * k_l,  m k_l >= m - r_l,  k_l in {0,1}

These rows suffice. From a block to the one before it, F_l leaves and G comes, so the last or the first block of a level
has the most; where it is the first (G > F_l), the last block of the next level has no less, as W_l - F_l rises with l.
So the row of a level that no block has is implied by that of the next level in use; where it is not, it is switched
off.

Products of counts and choices are the z and g of `solver.model`. Variables that count copies are bounded from below
alone, so no row may subtract one. Where rows differ from the prediction, they count more: the inputs of a block
recomputed as a whole beside their copies in its replay; what replays gather, in the backward of every block of a stage;
what all blocks share, beside each block; some of what neighbours keep (`solver.memory.neighbours`); and the gradients
of a whole stage at once.
"""

from __future__ import annotations

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.traffic import in_segment
from autopar.solver.memory.division import Division
from autopar.solver.memory.forward_part import ForwardPeaks
from autopar.solver.memory.forward_rows import ForwardRows
from autopar.solver.memory.held_by_caller import HeldByCaller
from autopar.solver.memory.later_gradient_sums import LaterGradientSums, left_by
from autopar.solver.memory.optimizer_step import all_temporaries, each_temporaries
from autopar.solver.memory.parameter_copies import add_parameter_copies
from autopar.solver.memory.parameter_reads import ParameterReads
from autopar.solver.memory.peaks import Living, Peaks
from autopar.solver.memory.points import Points
from autopar.solver.memory.returned import Returned
from autopar.solver.memory.returned_again import returned_again
from autopar.solver.memory.saved import Saved
from autopar.solver.memory.stage_bytes import UNIT, StageBytes, add, total
from autopar.solver.memory.stage_transfers import Reads, StageTransfers
from autopar.solver.memory.sums import Sums
from autopar.solver.memory.unreduced import summed_as_stored, unreduced
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, Flow


class Rows:
    """The rows of a model; `peak` is a variable that they bound from below."""

    def __init__(self, model: Model, budget_bytes: float | None) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory = model.problem.memory
        depths = [max(1, stage.depth) if stage.count > 1 else 1 for stage in self.problem.stages]
        self.stages = [StageBytes.of_depth(n) for n in depths]
        self.always: Expression = {}
        self.accumulated: Expression = {}  # gradients that the micro-batches before the last leave
        self.left: dict[int, Expression] = {}  # likewise, of several regions' parameters, once a stage has run backward
        self.handed_out: Expression = {}  # gradients and returned tensors, from the end of backward on
        self.temporaries: Expression = {}  # of the optimizer's step
        upper = None if budget_bytes is None else budget_bytes / UNIT
        self.peak = self.program.variable("peak", upper=upper, whole=False)
        self.sums = Sums(self.program, self.peak)
        self.program.budget = None if upper is None else self.peak
        self.flows: dict[tuple[int, int], list[Flow]] = {}  # in one block, by the op read and its reader
        for flow in model.flows:
            if flow.tensor.kind != "next":
                self.flows.setdefault((flow.tensor.source, flow.use.op), []).append(flow)
        self.returned: dict[int, Expression] = {}  # by stage: saved tensors of a block that the caller holds too
        self.held: HeldByCaller | None = None
        self.waiting: dict[int, Expression] = {}  # by op: gradients it makes that wait for their buckets
        self.cast: dict[int, Expression] = {}  # by op: gradients it makes, in the dtype from which they are cast
        self.shared: dict[int, Expression] = {}  # as `waiting`, for parameters that all blocks of a stage read
        self.reads = ParameterReads(model, self.flows)
        self._parameters()
        self._gradients()
        self.later_sums = LaterGradientSums(self)
        self.later_sums.add_gradients()
        self._inputs()
        if self.memory.train:  # else outputs live from their makers on
            self._outputs()
        if not self.memory.train:
            points, grouping = Points(model, self.stages, {}, {}, {}), self.problem.grouping
            forward = ForwardRows(model, self.flows, points, self.sums.bucket, self.memory, grouping)
            forward.add(self.sums.at_most, self._always())
            return
        saved = Saved(model, self.stages)
        if self.held is not None:
            self.held.add_unkept(self.stages)
            returned_again(model, self.stages, saved.copies, self.held.kept)
        add_parameter_copies(model, self.stages)
        if self.memory.micro_batches > 1:
            for left in (unreduced(model), summed_as_stored(model)):
                for variable, size in left.items():
                    add(self.accumulated, variable, size)
        self._rows()

    # -- always, and gradients ----------------------------------------------------------------------------------------

    def _parameters(self) -> None:
        for number, op in enumerate(self.problem.ops):
            if not self.memory.is_parameter(op.node):
                continue
            count = self.model.costs.count(op)
            for variable, choice in zip(self.model.x[number], op.choices, strict=True):
                storage = choice.strategy.outputs[0]
                add(self.always, variable, count * sum(self.memory.parameter_bytes(op.node, storage).values()))
                add(self.handed_out, variable, count * self.memory.gradient_bytes(op.node, storage))
        for variable, size in all_temporaries(self.model).items():
            add(self.temporaries, variable, size)
        if (largest := self.sums.largest("optimizer", each_temporaries(self.model))) is not None:
            add(self.temporaries, largest, UNIT)

    def _gradients(self) -> None:
        """Count each parameter's gradient at its last reader: as it waits for its bucket in the reader's region, and as
        it stays while the regions before run backward."""
        for number, op in enumerate(self.problem.ops):
            reader = self.memory.lifetimes.last_use(op.node) if self.memory.is_trainable(op.node) else None
            if reader is None or not in_segment(reader):
                continue
            last = self.problem.op_of[reader]
            stage, shared = self.problem.ops[last].stage, self.problem.grouping.shared(op.node)
            flows = self.flows.get((number, last), [])[:1]
            of_parameter: Expression = {}
            by_all = stage != op.stage and self.problem.stages[stage].count > 1 and self.memory.micro_batches == 1
            for transfer, variable in self.reads.transfers(flows, self.problem.grouping):
                waiting, cast = self.memory.lifetimes.waiting(op.node, transfer)
                for target, size in ((self.waiting, waiting), (self.cast, cast)):
                    add(target.setdefault(last, {}), variable, size)
                if by_all:
                    add(self.shared.setdefault(last, {}), variable, transfer.waiting)
                later = transfer.waiting if shared else transfer.reduced
                if self.memory.micro_batches > 1 and not transfer.reduction and shared:
                    add(left_by(self, stage), variable, self.model.costs.count(op) * later)
                if stage == op.stage:
                    add(self.stages[stage].gradients.of_block, variable, later)
                    of_parameter[variable] = float(later)
                else:
                    add(self.stages[stage].gradients.shared, variable, self.model.costs.count(op) * later)
            if of_parameter:
                self.stages[stage].gradients.by_parameter.append((flows[0].all, of_parameter))

    def _inputs(self) -> None:
        for number, op in enumerate(self.problem.ops):
            is_buffer = op.node.op == "get_attr" and not self.memory.is_parameter(op.node)
            for variable, choice in zip(self.model.x[number], op.choices, strict=True):
                if is_buffer or op.node.op == "placeholder":
                    size = self.memory.input_bytes(op.node, choice.strategy.outputs[0])
                    add(self.always, variable, self.model.costs.count(op) * size)

    def _outputs(self) -> None:
        for number in (i for i, op in enumerate(self.problem.ops) if op.node.op == "output"):
            returned = Returned.by(self.model, number)
            for part, target in ((returned.always, self.always), (returned.once, self.handed_out)):
                for variable, size in part.items():
                    add(target, variable, size)
            self.held = HeldByCaller(self.model, number, returned.kept)
            self.held.add_alone(self.always)
            for stage, (of_block, by_tensor) in returned.by_stage.items():
                self.returned[stage] = of_block
                for variable, size in () if self.memory.micro_batches > 1 else of_block.items():
                    add(self.stages[stage].gradients.of_block, variable, size)
                self.stages[stage].gradients.by_parameter += by_tensor

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _always(self) -> int | None:
        fixed = self.memory.fixed_bytes / UNIT
        add(self.always, self.program.variable("fixed", lower=fixed, upper=fixed, whole=False), UNIT)
        return self.sums.sum("always", self.always)

    def _rows(self) -> None:
        """Add the rows of all stages. Each kind of bytes of a stage is a variable, so that rows are short."""
        always = self._always()
        left = self.sums.sum("accumulated", self.accumulated)
        points = Points(self.model, self.stages, self.waiting, self.cast, self.shared)
        stages, division = list(enumerate(self.problem.stages)), Division(self.model)
        shared = own = self._reads(division.grouping)
        if division.divided is not division.grouping:
            own = self._reads(division.divided)
        transfers = StageTransfers(shared, own, self.sums.bucket, division, self.reads.alike)
        peaks = Peaks(self.model, transfers, self.sums.at_most, self.sums.sum)
        part, forward = self.problem.grouping.forward, None
        if part is not None:
            forward = ForwardPeaks(self.model, self.flows, points, peaks, self.sums, part)
        behind = self._behind()
        before: int | None = None
        for i, stage_bytes in enumerate(self.stages):
            stage_bytes.gradients.most_left_behind = self.reads.most_left_behind(i)
            returned, lands = self.returned.get(i, {}), transfers.lands(i)
            fullest = of_last = points.fullest(i, returned, self.sums.largest, lands=lands)
            if any(op in self.shared for op in stages[i][1].ops):
                of_last = points.fullest(i, returned, self.sums.largest, lands=lands, last=True)
            peaks.add(i, stage_bytes, Living(*fullest, of_last[1][0], [always, left, behind[i]], before))
            if forward is not None:
                forward.add(i, stage_bytes, [always, left], before)
            before = self.sums.sum("held", stage_bytes.kept.all_blocks, before)
        cast = [[always, cast_sum] for i, _ in stages if (cast_sum := transfers.cast(i)) is not None]
        self.sums.at_most("gradients handed out", cast, self.handed_out)
        self.sums.at_most("optimizer step", [[always]], total(self.handed_out, self.temporaries))

    def _reads(self, grouping: Grouping) -> Reads:
        """The reads of each stage, with the buckets of `grouping`."""
        kept, reduced = self.reads.by_stage(grouping)
        return Reads(kept, [[*reads, *self.later_sums.reduced(i, grouping)] for i, reads in enumerate(reduced)])

    def _behind(self) -> list[int | None]:
        """What the stages after each leave in its backward: returned tensors, and gradients that `accumulated` does not
        count."""
        accumulates, behind = self.memory.micro_batches > 1, list[int | None]([None])
        for i, (stage_bytes, stage) in reversed(list(enumerate(zip(self.stages, self.problem.stages, strict=True)))):
            shared = stage_bytes.gradients.shared
            left = total(self.returned.get(i, {}), self.left.get(i, {})) if accumulates else dict(shared)
            for variable, size in () if accumulates else stage_bytes.gradients.of_block.items():
                add(left, variable, stage.count * size)
            behind.append(self.sums.sum("gradients", left, behind[-1]))
        return behind[-2::-1]
