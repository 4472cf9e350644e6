"""Memory rows: at every moment where the peak can be, what lives is at most the budget.

The moments are those of `autopar.cost.step`: the backward of each stage, and the optimizer's step. For a stage of m
equal blocks of which the first r recompute, with F bytes kept by one block, b by the inputs of a recomputed one and G
for one block's gradients, two rows cover all its blocks::

    last block (kept):  always + H(before) + (m - r) F + r b + G   + gradients(after) + workspace <= budget
    any other:          always + H(before) + F       + r b + m G   + gradients(after) + workspace <= budget

Products of counts and choices are the z and g of `autopar.solver.model`. What differs from the prediction is never
less: a recomputed block's inputs count beside their copies in its replay, and gradients of a whole stage count at once.
"""

from __future__ import annotations

from autopar.cost.step import moving_bytes
from autopar.cost.traffic import conversion_moves, in_segment, needs_grad, reduction_dtype
from autopar.graph import tensor_of
from autopar.solver.model import Model
from autopar.solver.replays import Expression, Flow, counted, replays
from autopar.solver.saved import Saved, StageBytes, add

UNIT = float(1 << 20)  # rows count MiB: solvers like numbers near one


class Rows:
    """The rows of a model; `peak` is a variable that they bound from below."""

    def __init__(self, model: Model, budget_bytes: float | None) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory = model.problem.memory
        self.stages = [StageBytes() for _ in self.problem.stages]
        self.always: Expression = {}
        self.optimizer: Expression = {}
        limit = None if budget_bytes is None else budget_bytes / UNIT
        self.peak = self.program.variable("peak", upper=limit, whole=False)
        self._parameters()
        self._inputs_and_outputs()
        Saved(model, self.stages)
        self._segment_inputs()
        self._parameter_copies()
        self._rows()

    # -- always, and gradients ----------------------------------------------------------------------------------------

    def _parameters(self) -> None:
        last: dict[int, int] = {}
        for tensor in self.problem.tensors:
            stage = max([self.problem.ops[use.op].stage for use in tensor.uses])
            last[tensor.source] = max(last.get(tensor.source, 0), stage)
        for number, op in enumerate(self.problem.ops):
            if not self.memory.is_parameter(op.node):
                continue
            count, stage = self.model.count(op), last.get(number, op.stage)
            for variable, choice in zip(self.model.x[number], op.choices, strict=True):
                storage = choice.strategy.outputs[0]
                add(self.always, variable, count * sum(self.memory.parameter_bytes(op.node, storage).values()))
                add(self.optimizer, variable, count * self.memory.optimizer_transient_bytes(op.node, storage))
                gradient = self.memory.gradient_bytes(op.node, storage)
                if stage == op.stage:
                    add(self.stages[stage].gradients, variable, gradient)
                else:
                    add(self.stages[stage].shared_gradients, variable, count * gradient)

    def _inputs_and_outputs(self) -> None:
        for number, op in enumerate(self.problem.ops):
            given = op.node.op == "placeholder" or (op.node.op == "get_attr" and not self.memory.is_parameter(op.node))
            for variable, choice in zip(self.model.x[number], op.choices, strict=True):
                if given:
                    size = self.memory.input_bytes(op.node, choice.strategy.outputs[0])
                    add(self.always, variable, self.model.count(op) * size)
                if op.node.op == "output":
                    for ref, wanted in zip(self.memory.inputs[op.node], choice.strategy.inputs, strict=True):
                        add(self.always, variable, self.memory.output_bytes(ref, wanted))

    # -- what is kept for backward ---------------------------------------------------------------------------------

    def _segment_inputs(self) -> None:
        """What recomputed blocks keep of the tensors that they read from outside, as those lie there."""
        for tensor in self.problem.tensors:
            stage, op = tensor.stage, self.problem.ops[tensor.source]
            if tensor.kind not in ("first", "next", "outer") or stage not in self.model.recomputed:
                continue
            if self.memory.is_parameter(op.node) or not any(
                in_segment(self.problem.ops[u.op].node) for u in tensor.uses
            ):
                continue
            copies = [self.memory.copy(self.problem.ref(tensor), c.strategy.outputs[tensor.output]) for c in op.choices]
            sizes = [self.memory.copy_bytes(copy) for copy in copies]
            if not any(sizes):
                continue
            r, q = self.model.recomputed[stage], self.model.any_recomputed[stage]
            times: Expression = {r: 1.0, q: -1.0} if tensor.kind == "next" else {q: 1.0}
            most = self.problem.stages[stage].count - 1 if tensor.kind == "next" else 1
            counts = counted(self.program, [[v] for v in self.model.x[tensor.source]], times, most)
            for variable, size in zip(counts, sizes, strict=True):
                add(self.stages[stage].held, variable, size)
                add(self.stages[stage].inputs, variable, size)

    def _parameter_copies(self) -> None:
        """Copies of parameters in the dtype and layout in which ops keep them, unless gathered again."""
        gathered: dict[int, Expression] = {}
        for flow in self.model.flows:
            op, node = self.problem.ops[flow.use.op], self.problem.ops[flow.tensor.source].node
            if not self.memory.is_parameter(node):
                continue
            if self.memory.micro_batches > 1:
                self._unreduced(flow)
            if flow.use.index not in self.memory.saved(op.node)[0]:
                continue
            sizes = {pair: self.memory.read_bytes(node, pair[0][0], pair[1]) for pair in flow.pairs}
            stays = [pair for pair, size in sizes.items() if size and not pair[0][1]]
            target, count = self.stages[op.stage], self.model.count(op)
            for pair in stays:
                add(target.block, flow.pairs[pair], sizes[pair])
                add(target.held, flow.pairs[pair], count * sizes[pair])
            if op.stage in self.model.recomputed:
                if stays:
                    counts = replays(self.model, flow, [[pair] for pair in stays])
                    for pair, variable in zip(stays, counts, strict=True):
                        add(target.held, variable, -sizes[pair])
                for pair, size in sizes.items():
                    if pair[0][1]:
                        add(gathered.setdefault(op.stage, {}), flow.pairs[pair], size)
        for stage, sizes_of in gathered.items():
            self._gathered_in_replay(stage, sizes_of)

    def _gathered_in_replay(self, stage: int, sizes: Expression) -> None:
        """In a replay a gathered parameter stays until its gradient: bytes >= sum of sizes, if any block recomputes."""
        most = sum(sizes.values()) / UNIT
        block = self.program.variable("gathered", upper=None, whole=False)
        terms = [(v, -c / UNIT) for v, c in sizes.items()]
        self.program.at_least("gathered", [(block, 1.0), (self.model.any_recomputed[stage], -most), *terms], -most)
        add(self.stages[stage].block, block, UNIT)

    def _unreduced(self, flow: Flow) -> None:
        """With several micro-batches, gradients wait in the layout of their use for the one reduction."""
        ref = self.problem.ref(flow.tensor)
        if not self.memory.is_trainable(ref.node):
            return
        grad = needs_grad(self.memory, ref)
        for (port, wanted), variable in flow.pairs.items():
            if conversion_moves(ref, port[0], wanted, self.memory.mesh_shape, needs_grad=grad)[1]:
                elements = self.memory.local_bytes(ref, wanted) // tensor_of(ref).dtype.itemsize
                size = elements * reduction_dtype(self.memory, ref).itemsize
                add(self.always, variable, self.model.count(self.problem.ops[flow.use.op]) * size)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _workspace(self, number: int) -> int | None:
        """A variable at least as large as any op's short-lived tensors in a stage."""
        sizes: list[tuple[Expression, float, float]] = []
        for member in self.problem.stages[number].ops:
            op = self.problem.ops[member]
            own = [self.memory.transient_bytes(op.node, choice.strategy) for choice in op.choices]
            terms = {v: float(size) for v, size in zip(self.model.x[member], own, strict=True) if size}
            if terms:
                sizes.append((terms, float(min(own)), float(max(own))))
        if not sizes:
            return None
        floor = max(low for _, low, _ in sizes)
        largest = self.program.variable(f"workspace.{number}", lower=floor / UNIT, upper=None, whole=False)
        for terms, _, most in sizes:
            if most > floor:
                self.program.at_least("workspace", [(largest, 1.0)] + [(v, -c / UNIT) for v, c in terms.items()], 0.0)
        return largest

    def _rows(self) -> None:
        self.flows_into: dict[int, list[Flow]] = {}
        for flow in self.model.flows:
            if flow.tensor.kind != "next":
                self.flows_into.setdefault(flow.use.op, []).append(flow)
        always = self._sum("always", self.always)
        gradients = [self._gradients(i) for i in range(len(self.stages))]
        behind: int | None = None
        suffix: list[tuple[int | None, int | None]] = []  # per stage: gradients behind it, and with its own
        for i in reversed(range(len(self.stages))):
            own = self._sum("gradients", gradients[i], behind)
            suffix.append((behind, own))
            behind = own
        suffix.reverse()
        total = suffix[0][1] if suffix else None
        before: int | None = None
        for i, (stage, data) in enumerate(zip(self.problem.stages, self.stages, strict=True)):
            workspace = self._workspace(i)
            held = self._sum("held", data.held, before)
            later, own = suffix[i] if self.memory.micro_batches == 1 else (total, total)
            block = {**data.block}
            for variable, size in self._moving(i).items():
                add(block, variable, size)
            for variable, size in data.inputs.items():
                add(block, variable, size)
            self._row(f"backward of stage {i}", [always, before, own, workspace], block)
            if stage.count > 1:
                one = {**data.gradients, **data.shared_gradients} if self.memory.micro_batches == 1 else {}
                for variable, size in self._moving(i).items():
                    add(one, variable, size)
                self._row(f"backward of stage {i}, last block", [always, held, later, workspace], one)
            before = held
        self._row("optimizer step", [always, total], self.optimizer)

    def _moving(self, number: int) -> Expression:
        """Buckets of parameters under way in the backward of one block of a stage."""
        found: Expression = {}
        for member in self.problem.stages[number].ops:
            for flow in self.flows_into.get(member, ()):
                ref = self.problem.ref(flow.tensor)
                if self.memory.is_parameter(ref.node):
                    for (port, wanted), variable in flow.pairs.items():
                        grouping = self.problem.grouping
                        again = port[1]
                        add(found, variable, moving_bytes(self.memory, grouping, ref, port[0], wanted, regather=again))
        return found

    def _gradients(self, stage: int) -> Expression:
        data, count = self.stages[stage], self.problem.stages[stage].count
        found = dict(data.shared_gradients)
        for variable, size in data.gradients.items():
            add(found, variable, count * size)
        return found

    def _sum(self, name: str, terms: Expression, more: int | None = None) -> int | None:
        """A variable equal to a sum of bytes (in MiB), and another such variable."""
        if not terms:
            return more
        found = self.program.variable(name, upper=None, whole=False)
        rest = [(more, -1.0)] if more is not None else []
        self.program.equal(name, [(found, 1.0), *rest] + [(v, -c / UNIT) for v, c in terms.items()], 0.0)
        return found

    def _row(self, name: str, parts: list[int | None], terms: Expression) -> None:
        left = [(v, 1.0) for v in parts if v is not None] + [(v, c / UNIT) for v, c in terms.items()]
        if left:
            self.program.at_most(name, [*left, (self.peak, -1.0)], 0.0)
