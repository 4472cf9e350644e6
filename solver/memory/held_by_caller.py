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
        blocks = (block for tensors in self.kept.values() for tensor in tensors for block in tensor.copies)
        kept = dict.fromkeys(itertools.chain.from_iterable(blocks))  # not a set, whose order changes
        keepers = self._keepers(self.memory.graph.nodes, {root for root, _ in kept})
        alone: Counter[tuple[tuple[Variables, ...], Variables]] = Counter()  # bytes: copies with equal rows are one
        for copy in filter(self.returned.__contains__, kept):
            savers = sorted(variable for _, variables in keepers.get(copy, ()) for variable in variables)
            alone[(self.returned[copy],), tuple(savers)] += self.memory.copy_bytes(copy)
        saving: dict[Copy, dict[Variables, None]] = {}
        for node in (node for node in self.memory.graph.nodes if node in self.memory.savings.holding):
            for copy, variables in self._copies(node).items():
                saving.setdefault(copy, {})[variables] = None
        for copy, who in saving.items():
            alone[tuple(who), self.returned.get(copy, ())] += self.memory.copy_bytes(copy)
        for (groups, less), size in alone.items():
            add(always, self._alone(groups, less), size)
        self._beside(always)

    def _alone(self, groups: Sequence[Variables], less: Variables) -> int:
        """A variable that is 1 if one of the variables of any group in `groups` is 1, and none of `less` is."""
        if len(groups) == 1 and len(groups[0]) == 1 and not less:
            return groups[0][0]
        alone = self.program.variable("alone")
        for group in groups:
            terms = [(alone, 1.0), *((v, -1.0) for v in group), *((v, 1.0) for v in less if v not in group)]
            self.program.at_least("alone", terms, 0.0)
        return alone

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
        for number, tensors in self.kept.items():
            nodes = [self.problem.ops[op].node for op in self.problem.stages[number].ops]
            keepers = self._keepers(nodes, {tensor.root for tensor in tensors})
            target, sizes = stages[number].block.unkept, Counter[tuple[Variables, tuple[tuple[int, Variables], ...]]]()
            for tensor in tensors:
                for variable, size in tensor.sizes.items():
                    keep(target, -1, variable, size)
                for cuts in dict.fromkeys(cuts for _, cuts in tensor.copies[0]):
                    self._note(sizes, (tensor.root, cuts), tensor, keepers)
            for (returned, keeping), size in sizes.items():
                before: int | None = None
                for at, (op, _) in enumerate(keeping):
                    kept_by_now = self._both(returned, [v for _, variables in keeping[: at + 1] for v in variables])
                    keep(target, op, kept_by_now, -size)
                    if before is not None:
                        keep(target, op, before, size)
                    before = kept_by_now

    def _note(
        self,
        sizes: Counter[tuple[Variables, tuple[tuple[int, Variables], ...]]],
        copy: Copy,
        tensor: Kept,
        keepers: Mapping[Copy, Sequence[tuple[int, Variables]]],
    ) -> None:
        choices = [v for v, keeping in zip(tensor.sizes, tensor.copies[0], strict=True) if keeping[1] == copy[1]]
        keeping = tuple(keepers.get(copy, ()))
        if keeping:
            sizes[tuple(choices), keeping] += min(int(tensor.sizes[variable]) for variable in choices)

    def _both(self, first: Iterable[int], second: Iterable[int]) -> int:
        """A variable that can be 1 only if one of `first` and one of `second` are 1."""
        both = self.program.variable("kept")
        for uses in (first, second):
            self.program.at_most("kept", [(both, 1.0), *((v, -1.0) for v in uses)], 0.0)
        return both

    def _copies(self, node: fx.Node) -> dict[Copy, Variables]:
        """The copies that the caller holds because of a node, with the variables of the choices that have them."""
        by_copy: dict[Copy, list[int]] = {}
        number = self.problem.op_of[node]
        for variable, choice in zip(self.model.x[number], self.problem.ops[number].choices, strict=True):
            for copy in self.memory.savings.held_copies(node, choice.strategy):
                by_copy.setdefault(copy, []).append(variable)
        return {copy: tuple(variables) for copy, variables in by_copy.items()}

    def _keepers(
        self, nodes: Iterable[fx.Node], roots: Collection[TensorRef]
    ) -> dict[Copy, list[tuple[int, Variables]]]:
        """By copy of some storages: the ops that keep it, in order, with the variables of their choices that do."""
        keepers: dict[Copy, list[tuple[int, Variables]]] = {}
        for node in (node for node in nodes if roots and node in self.problem.op_of):
            inputs, outputs, _ = self.memory.saved(node)
            number, of_node = self.problem.op_of[node], dict[Copy, list[int]]()
            refs = [(self.memory.inputs[node][j], j, "inputs") for j in inputs]
            refs += [(TensorRef(node, j), j, "outputs") for j in outputs]
            for ref, j, kind in (read for read in refs if self.memory.roots[read[0]] in roots):
                for variable, choice in zip(self.model.x[number], self.problem.ops[number].choices, strict=True):
                    variables = of_node.setdefault(self.memory.copy(ref, getattr(choice.strategy, kind)[j]), [])
                    if variable not in variables:
                        variables.append(variable)
            for copy, variables in of_node.items():
                keepers.setdefault(copy, []).append((number, tuple(variables)))
        return keepers
