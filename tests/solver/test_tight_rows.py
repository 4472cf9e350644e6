"""Valid inequalities on counts of recomputed blocks, which tighten relaxations but exclude no integral solution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_branches import four

from autopar.solver.linear.outcome import Bounds
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model


def model(*mesh: int) -> Model:
    """Four blocks, which may be recomputed as a whole or at an inner level, under a budget that binds."""
    problem, least, most = four(*mesh)
    made = Model(problem.problem())
    Rows(made, least + 0.3 * (most - least))
    return made


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_a_choice_has_no_more_blocks_at_a_level_than_at_the_one_below(mesh: tuple[int, ...]) -> None:
    asked, draw, pairs = model(*mesh), np.random.default_rng(0), 0
    program = asked.program
    for number, op in enumerate(asked.problem.ops):
        levels = sorted(asked._z.get((number, op.stage), {}))
        for lower, higher in itertools.pairwise(levels):
            assert len(asked.recomputed[op.stage]) > 1
            weights = draw.random(len(asked.x[number]))
            program.cost = np.zeros(len(program.names))
            program.cost[asked.z(number, lower)] += weights
            program.cost[asked.z(number, higher)] -= weights
            assert program.relax("cbc", 60.0, {}).objective >= -1e-6
            pairs += 1
    assert pairs > 1


def test_whether_counts_are_at_an_end_is_told_as_well_as_their_bounds_allow() -> None:
    asked = model(2)
    program, told = asked.program, 0
    for _, count, kept in program.records.rest_rows:
        most = program.upper[count]
        for low in (0.0, most - 2, most - 1):
            program.cost = np.zeros(len(program.names))
            program.cost[[count, kept]] = 1.0, most - low
            box: Bounds = {count: (low, most)}
            assert program.relax("cbc", 60.0, box).objective >= most - 1e-6
            told += 1
    for _, count, some in program.records.any_rows:
        for high in (1.0, 2.0):
            program.cost = np.zeros(len(program.names))
            program.cost[[count, some]] = -1.0, high
            box = {count: (0.0, high)}
            found = program.relax("cbc", 60.0, box)
            assert found.status == "infeasible" or found.objective >= -1e-6
            told += 1
    assert told > 4
