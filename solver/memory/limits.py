"""Big-M terms that switch memory rows off where they do not apply, and the M of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph import COST, TensorRef, output_tensors, tensor_of
from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.model import Model
from autopar.solver.problem import Stage
from autopar.solver.seconds.replays import Expression


def limit_of(model: Model, stage: Stage) -> float:
    """MiB that no block of a stage can have at once: four times its ops' inputs, outputs, internal saved bytes and
    workspaces, all unsharded."""
    whole_bytes, memory = 0, model.problem.memory
    for number in stage.ops:
        node = model.problem.ops[number].node
        outputs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
        whole_bytes += sum(tensor_of(ref).nbytes for ref in (*memory.inputs[node], *outputs))
        cost = node.meta.get(COST)
        if cost is not None:
            whole_bytes += cost.saved_internal_bytes + cost.workspace_forward_bytes + cost.workspace_backward_bytes
    return 4.0 * whole_bytes / UNIT


def only_at(whether: Sequence[int], level: int, limit: float) -> tuple[Expression, float]:
    """What switches a row off unless the stage's first block is of this level: terms of its left side, and its right
    side. `whether`: q by level; `limit`: M in MiB."""
    if not limit:
        return {}, 0.0
    terms: Expression = {}
    if level:
        terms[whether[level - 1]] = limit * UNIT
    if level < len(whether):
        terms[whether[level]] = -limit * UNIT
    return terms, limit if level else 0.0
