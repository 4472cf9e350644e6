"""A request to the solver: the graph with its strategies, the cluster, the budget, the time limit and the gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.blocks import Repeat
from autopar.cost.structure.levels import Levels
from autopar.solver.building import build_problem
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.problem import Problem
from autopar.strategies.strategy import Strategy


@dataclass(frozen=True)
class SolveRequest:
    """Asks for the fastest plan of a graph on a cluster, with the strategies that constraints leave, within a budget:
    to a relative `gap`, in `time_limit` seconds."""

    memory: StepMemory
    restricted: Restricted
    cluster: Cluster
    constraints: Sequence[str]
    budget_bytes: int
    time_limit: float
    gap: float
    solver: str
    fold: bool = True
    is_strict: bool = False
    """Whether memory rows keep a distance from the budget: solvers accept a choice of 1 - 1e-6 as 1, so that a plan may
    exceed the budget slightly."""

    @property
    def usable_bytes(self) -> float:
        """The budget of the memory rows: all of it, with room for rounding, or slightly less if `is_strict`."""
        return self.budget_bytes * (1 - 1e-6 if self.is_strict else 1 + 1e-9)

    def problem(self, *, recompute: bool = True) -> Problem:
        """The problem of all plans; without `recompute`, of plans that recompute nothing."""
        return build_problem(
            self.memory, self.restricted, self.cluster, self.memory.repeats, fold=self.fold, recompute=recompute
        )

    def each_block(
        self, ways: Mapping[fx.Node, Sequence[Strategy]], levels: Mapping[tuple[Repeat, int], Levels | None] | None
    ) -> Problem:
        """The unfolded problem, in which blocks decide for themselves, with only these strategies (`ways`) and these
        levels of recompute; None: of plans that recompute nothing."""
        again, cluster = replace(self.restricted, strategies=dict(ways)), self.cluster
        recompute = levels is not None
        return build_problem(
            self.memory, again, cluster, self.memory.repeats, fold=False, recompute=recompute, levels=levels
        )
