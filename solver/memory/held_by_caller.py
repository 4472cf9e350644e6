"""Tensors that the caller holds and that no block's saved tensors account for, as `cost.memory.returned` has them.

A copy c is counted nowhere else if ops keep the returned tensor in another layout only, or if only ops that backward
never reaches save it. Then it counts always::

    alone >= x[output, choices with c] - sum of x[u, .] that keep c
    alone >= x[v, choices that save c] - x[output, choices with c]        for each op v that backward never reaches

A block that returns a tensor and keeps it does so from some op on. While backward is at the ops before that one, the
caller's copy is there beside what the block keeps. It is `unkept`, and this is taken off from the keeping op on::

    kept <= x[output, choices with c],  kept <= sum of x[u, .] that keep c up to the op
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx

from autopar.cost.memory.formulas import Copy
from autopar.cost.memory.local_workspace import kept_bytes
from autopar.graph import TensorRef
from autopar.solver.memory.returned import Kept
from autopar.solver.memory.stage_bytes import StageBytes, add, keep
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression

Variables = tuple[int, ...]


class HeldByCaller:
    """For a model whose op `output` returns tensors that blocks keep too (`kept`, by stage)."""

    def __init__(self, model: Model, output: int, kept: Mapping[int, Sequence[Kept]]) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory, self.kept = model.problem.memory, kept
        self.returned = self._copies(self.problem.ops[output].node)

    def add_alone(self, always: Expression) -> None:
        """Add the copies that count nowhere else."""
        blocks = (block for some in self.kept.values() for one in some for block in one.copies)
        kept = dict.fromkeys(itertools.chain.from_iterable(blocks))  # not a set, whose order changes
        keepers = self._keepers(self.memory.graph.nodes, {root for root, _ in kept})
        alone: Counter[tuple[tuple[Variables, ...], Variables]] = Counter()  # bytes: copies with equal rows are one
        for copy in filter(self.returned.__contains__, kept):
            others = sorted(variable for _, some in keepers.get(copy, ()) for variable in some)
            alone[(self.returned[copy],), tuple(others)] += self.memory.copy_bytes(copy)
        saving: dict[Copy, dict[Variables, None]] = {}
        for node in (node for node in self.memory.graph.nodes if node in self.memory.savings.holding):
            for copy, some in self._copies(node).items():
                saving.setdefault(copy, {})[some] = None
        for copy, who in saving.items():
            alone[tuple(who), self.returned.get(copy, ())] += self.memory.copy_bytes(copy)
        for (each, less), size in alone.items():
            add(always, self._alone(each, less), size)
        self._beside(always)

    def _alone(self, each: Sequence[Variables], less: Variables) -> int:
        """A variable that is 1 if one of the variables of any group in `each` is 1, and none of `less` is."""
        if len(each) == 1 and len(each[0]) == 1 and not less:
            return each[0][0]
        one = self.program.variable("alone")
        for some in each:
            terms = [(one, 1.0), *((v, -1.0) for v in some), *((v, 1.0) for v in less if v not in some)]
            self.program.at_least("alone", terms, 0.0)
        return one

    def _beside(self, always: Expression) -> None:
        """Add the statistics and masks of ops that backward never reaches, and all that replays of these save again."""
        savings = self.memory.savings
        for node in (node for node in self.memory.graph.nodes if node in savings.holding):
            number, internal = self.problem.op_of[node], savings.held(node)[2]
            op = self.problem.ops[number]
            again = self.model.z(number, op.again.dropped) if op.again.dropped and op.node is node else None
            for i, (variable, choice) in enumerate(zip(self.model.x[number], op.choices, strict=True)):
                beside = kept_bytes(node, choice.strategy, self.memory.mesh_shape, internal)
                add(always, variable, beside)
                if again is not None:
                    size = beside + sum(savings.held_copies(node, choice.strategy).values())
                    add(always, int(again[i]), size)

    def add_unkept(self, stages: Sequence[StageBytes]) -> None:
        """Add to each stage what the caller holds of a block that the block's ops do not keep yet, by op."""
        for number, some in self.kept.items():
            nodes = [self.problem.ops[op].node for op in self.problem.stages[number].ops]
            keepers = self._keepers(nodes, {one.root for one in some})
            target, sizes = stages[number].block.unkept, Counter[tuple[Variables, tuple[tuple[int, Variables], ...]]]()
            for one in some:
                for variable, size in one.sizes.items():
                    keep(target, -1, variable, size)
                for cuts in dict.fromkeys(cuts for _, cuts in one.copies[0]):
                    self._note(sizes, (one.root, cuts), one, keepers)
            for (returned, its), size in sizes.items():
                before: int | None = None
                for at, (op, _) in enumerate(its):
                    there = self._both(returned, [v for _, variables in its[: at + 1] for v in variables])
                    keep(target, op, there, -size)
                    if before is not None:
                        keep(target, op, before, size)
                    before = there

    def _note(
        self,
        sizes: Counter[tuple[Variables, tuple[tuple[int, Variables], ...]]],
        copy: Copy,
        one: Kept,
        keepers: Mapping[Copy, Sequence[tuple[int, Variables]]],
    ) -> None:
        choices = [v for v, its in zip(one.sizes, one.copies[0], strict=True) if its[1] == copy[1]]
        its = tuple(keepers.get(copy, ()))
        if its:
            sizes[tuple(choices), its] += min(int(one.sizes[variable]) for variable in choices)

    def _both(self, some: Iterable[int], others: Iterable[int]) -> int:
        """A variable that can be 1 only if one of `some` and one of `others` are 1."""
        one = self.program.variable("kept")
        for uses in (some, others):
            self.program.at_most("kept", [(one, 1.0), *((v, -1.0) for v in uses)], 0.0)
        return one

    def _copies(self, node: fx.Node) -> dict[Copy, Variables]:
        """The copies that the caller holds because of a node, with the variables of the choices that have them."""
        found: dict[Copy, list[int]] = {}
        number = self.problem.op_of[node]
        for variable, choice in zip(self.model.x[number], self.problem.ops[number].choices, strict=True):
            for copy in self.memory.savings.held_copies(node, choice.strategy):
                found.setdefault(copy, []).append(variable)
        return {copy: tuple(some) for copy, some in found.items()}

    def _keepers(
        self, nodes: Iterable[fx.Node], roots: Collection[TensorRef]
    ) -> dict[Copy, list[tuple[int, Variables]]]:
        """By copy of some storages: the ops that keep it, in order, with the variables of their choices that do."""
        found: dict[Copy, list[tuple[int, Variables]]] = {}
        for node in (node for node in nodes if roots and node in self.problem.op_of):
            inputs, outputs, _ = self.memory.saved(node)
            number, mine = self.problem.op_of[node], dict[Copy, list[int]]()
            refs = [(self.memory.inputs[node][j], j, "inputs") for j in inputs]
            refs += [(TensorRef(node, j), j, "outputs") for j in outputs]
            for ref, j, kind in (one for one in refs if self.memory.roots[one[0]] in roots):
                for variable, choice in zip(self.model.x[number], self.problem.ops[number].choices, strict=True):
                    some = mine.setdefault(self.memory.copy(ref, getattr(choice.strategy, kind)[j]), [])
                    if variable not in some:
                        some.append(variable)
            for copy, some in mine.items():
                found.setdefault(copy, []).append((number, tuple(some)))
        return found
