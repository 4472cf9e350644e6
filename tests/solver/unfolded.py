"""The problem in which every block of a model decides for itself, recompute levels included, to judge folded plans.

Unfolded blocks have the levels of folded ones (`single_levels`), so each folded plan is also an unfolded one with the
same cost.
"""

from __future__ import annotations

import itertools

import numpy as np
from small_models import NO_LIMIT
from toys import Toy

from autopar import Plan
from autopar.solver.linear.pricing import least_more
from autopar.solver.memory.rows import Rows
from autopar.solver.model import OBJECTIVE, Model
from autopar.solver.problem import Stage

NEAR = 1e-3
EXACT = 1e-6  # relative: the feasibility tolerance of HiGHS


class Unfolded:
    """An unfolded problem under a budget; None: no budget and no recompute."""

    def __init__(self, asked: Toy, budget: int | None) -> None:
        self.asked, self.budget = asked, budget
        self.problem = asked.problem(fold=False, recompute=budget is not None)

    def bound(self) -> float:
        """Lower bound in seconds on every plan: the relaxation's objective."""
        model = self._model()
        root = model.program.relax("highs", NO_LIMIT, {}, everything=True)
        assert root.status == "optimal"
        return root.objective * model.reference() / OBJECTIVE

    def faster(self, seconds: float, *, alike: bool = False) -> float | None:
        """Step time of the best plan (to a gap of `NEAR`) that takes less than `seconds`; None if it is proven that
        there is none.

        `alike`: only plans in which equal blocks have the same layouts and storage, and the first ones recompute, any
        number of them at each level.
        """
        model = self._model()
        program, scale = model.program, model.reference() / OBJECTIVE
        if alike:
            self._tie(model)
        root = program.relax("highs", NO_LIMIT, {}, everything=True)
        cutoff = seconds / scale
        if root.status == "infeasible" or root.objective >= cutoff:
            return None
        matrix = program.matrix()
        kept = (root.objective + least_more(matrix, root.reduced) <= cutoff) | ~matrix.whole | (matrix.lower != 0)
        kept[[r for counts in model.recomputed.values() for r in counts]] = True
        found = program.integrate("highs", np.flatnonzero(kept), NO_LIMIT, NEAR, {}, cutoff=cutoff)
        assert found.status in ("optimal", "infeasible")
        return found.objective * scale if found.objective < cutoff else None

    def seconds_of(self, made: Plan) -> float | None:
        """Step time of a folded plan in this problem; None where it does not fit."""
        segments = {(segment.first, segment.last) for segment in made.recompute}
        nodes = {node.position: (node.inputs, node.outputs, node.local) for node in made.nodes}
        regathers = {p.name: p.regather for p in made.parameters}
        position = {node: i for i, node in enumerate(self.asked.graph.nodes)}
        model = self._model()
        for op, variables in zip(self.problem.ops, model.x, strict=True):
            keys = [(c.strategy.inputs, c.strategy.outputs, c.strategy.local, c.regather) for c in op.choices]
            regather = self.asked.memory.is_parameter(op.node) and regathers[str(op.node.target)]
            one = keys.index((*nodes[position[op.node]], regather))
            for i, variable in enumerate(variables):
                model.program.lower[variable] = model.program.upper[variable] = float(i == one)
        for number, counts in model.recomputed.items():
            level = _level(self.problem.stages[number], segments)
            for i, variable in enumerate(counts):
                model.program.lower[variable] = model.program.upper[variable] = float(i < level)
        found = model.program.integrate("highs", np.arange(len(model.program.names)), NO_LIMIT, 0.0, {})
        assert found.status in ("optimal", "infeasible")
        return found.objective * model.reference() / OBJECTIVE if found.status == "optimal" else None

    def _model(self) -> Model:
        model = Model(self.problem)
        if self.budget is not None:
            Rows(model, self.budget * (1 - EXACT))
        model.program.cost = model.seconds.array(len(model.program.names)) / (model.reference() / OBJECTIVE)
        return model

    def _tie(self, model: Model) -> None:
        """Each block has the choices of the block before it, and recomputes no more than that one."""
        stages, program = self.problem.stages, model.program
        for before, here in itertools.pairwise(range(len(stages))):
            if stages[here].repeat is None or stages[before].repeat is not stages[here].repeat:
                continue
            for its, own in zip(stages[before].ops, stages[here].ops, strict=True):
                for x, y in zip(model.x[its], model.x[own], strict=True):
                    program.equal("alike", [(x, 1.0), (y, -1.0)], 0.0)
            for r, less in zip(model.recomputed.get(before, ()), model.recomputed.get(here, ()), strict=True):
                program.at_most("in order", [(less, 1.0), (r, -1.0)], 0.0)


def _level(stage: Stage, segments: set[tuple[int, int]]) -> int:
    """The level at which a single block recomputes (0: none), derived from the segments of the whole plan."""
    assert stage.repeat is not None and stage.levels is not None and stage.count == 1
    start = stage.repeat.instance(stage.first).start
    inside = {s for s in segments if start <= s[0] and s[1] < start + stage.repeat.period}
    spans = [{(start + a, start + b) for a, b in stage.levels.spans(level)} for level in range(1, stage.depth + 1)]
    return spans.index(inside) + 1 if inside else 0
