"""What no block can have at once, for rows that are to say nothing."""

from __future__ import annotations

from autopar.graph import COST, TensorRef, output_tensors, tensor_of
from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.model import Model
from autopar.solver.problem import Stage


def limit_of(model: Model, stage: Stage) -> float:
    """MiB that no block of a stage can have at once."""
    found, memory = 0, model.problem.memory
    for number in stage.ops:
        node = model.problem.ops[number].node
        outputs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
        found += sum(tensor_of(ref).nbytes for ref in (*memory.inputs[node], *outputs))
        cost = node.meta.get(COST)
        if cost is not None:
            found += cost.saved_internal_bytes + cost.workspace_forward_bytes + cost.workspace_backward_bytes
    return 4.0 * found / UNIT
