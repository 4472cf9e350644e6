"""What the caller holds beside what blocks return and keep alike, as `cost.memory.returned` has it.

Where ops keep a returned tensor in another layout, or only ops save one that backward never comes to, there is a copy c
that nobody else counts. It counts always::

    alone >= x[output, those with c] - sum of x[u, .] that keep c
    alone >= x[v, those that save c] - x[output, those with c]        for each op v that backward never comes to

And a block that keeps what it returns does so from an op on. While backward is at those before, the caller's is there::

    kept <= x[output, those with c],  kept <= sum of x[u, .] that keep c as far as an op        takes it away
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
    """Of a model's graph, of which the op `output` returns what blocks `kept`, by stage."""

    def __init__(self, model: Model, output: int, kept: Mapping[int, Sequence[Kept]]) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory, self.kept = model.problem.memory, kept
        self.returned = self._copies(self.problem.ops[output].node)

    def add_alone(self, always: Expression) -> None:
        """What nobody else counts."""
        blocks = (block for some in self.kept.values() for one in some for block in one.copies)
        kept = dict.fromkeys(itertools.chain.from_iterable(blocks))  # in order: that of a set is another each time
        keepers = self._keepers(self.memory.graph.nodes, {root for root, _ in kept})
        alone: Counter[tuple[tuple[Variables, ...], Variables]] = Counter()  # bytes, of copies with equal rows
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
        """A variable that is 1 where some of any are and none of others is."""
        if len(each) == 1 and len(each[0]) == 1 and not less:
            return each[0][0]
        one = self.program.variable("alone")
        for some in each:
            terms = [(one, 1.0), *((v, -1.0) for v in some), *((v, 1.0) for v in less if v not in some)]
            self.program.at_least("alone", terms, 0.0)
        return one

    def _beside(self, always: Expression) -> None:
        """Statistics and masks of ops that backward never comes to; and what replays save of these again."""
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
        """What blocks are yet to keep, op by op."""
        for number, some in self.kept.items():
            nodes = [self.problem.ops[op].node for op in self.problem.stages[number].ops]
            keepers = self._keepers(nodes, {one.root for one in some})
            target, sizes = stages[number].unkept, Counter[tuple[Variables, tuple[tuple[int, Variables], ...]]]()
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
        """A variable that is 0 but where one of some is 1 and one of others is."""
        one = self.program.variable("kept")
        for uses in (some, others):
            self.program.at_most("kept", [(one, 1.0), *((v, -1.0) for v in uses)], 0.0)
        return one

    def _copies(self, node: fx.Node) -> dict[Copy, Variables]:
        """The copies that the caller holds because of a node, with the choices that have them."""
        found: dict[Copy, list[int]] = {}
        number = self.problem.op_of[node]
        for variable, choice in zip(self.model.x[number], self.problem.ops[number].choices, strict=True):
            for copy in self.memory.savings.held_copies(node, choice.strategy):
                found.setdefault(copy, []).append(variable)
        return {copy: tuple(some) for copy, some in found.items()}

    def _keepers(
        self, nodes: Iterable[fx.Node], roots: Collection[TensorRef]
    ) -> dict[Copy, list[tuple[int, Variables]]]:
        """Which ops keep copies of some storages under which choices, in order."""
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
