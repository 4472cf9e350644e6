"""Temporaries of the optimizer's step as expressions of the program's variables (`cost.memory.optimizer_step`)."""

from __future__ import annotations

from autopar.cost.memory.optimizer_step import successive, temporaries
from autopar.solver.memory.stage_bytes import add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression

Bounded = tuple[Expression, float, float]  # an expression in bytes, with a lower and an upper bound


def all_temporaries(model: Model) -> Expression:
    """Bytes of temporaries of an optimizer that updates all parameters at once."""
    terms: Expression = {}
    memory = model.problem.memory
    for number, op in enumerate(model.problem.ops):
        if memory.is_trainable(op.node):
            for variable, choice in zip(model.x[number], op.choices, strict=True):
                if size := temporaries(memory, op.node, choice.strategy.outputs[0]).at_once:
                    add(terms, variable, model.costs.count(op) * size)
    return terms


def each_temporaries(model: Model) -> list[Bounded]:
    """Bytes of temporaries where parameters are updated one by one: for each, with what the one before has left."""
    op_of = model.problem.op_of
    pairs = dict.fromkeys(
        (op_of[before] if before is not None else None, op_of[node])
        for before, node in successive(model.problem.memory)
    )
    return [_temporaries(model, before, number) for before, number in pairs]


def _temporaries(model: Model, before: int | None, number: int) -> Bounded:
    memory, terms, least_bytes, most_bytes = model.problem.memory, dict[int, float](), 0.0, 0.0
    for parameter, is_left in ((before, True), (number, False)):
        if parameter is not None:
            op = model.problem.ops[parameter]
            by_choice = [temporaries(memory, op.node, choice.strategy.outputs[0]) for choice in op.choices]
            sizes = [of_choice.left if is_left else of_choice.own for of_choice in by_choice]
            for variable, size in zip(model.x[parameter], sizes, strict=True):
                add(terms, variable, size)
            least_bytes, most_bytes = least_bytes + min(sizes), most_bytes + max(sizes)
    return terms, least_bytes, most_bytes
