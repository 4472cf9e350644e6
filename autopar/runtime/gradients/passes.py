"""Which kind of backward pass is running: one that adds to `.grad`, or `torch.autograd.grad`, which returns gradients.

Gradients that wait from earlier passes belong to `.grad` alone. torch does not say which kind it is; but in
`torch.autograd.grad`, it refuses to say whether a leaf's node will run if the leaf's gradient is to be returned.
"""

from __future__ import annotations

from typing import Any

import torch

_REFUSAL = "currently running autograd.grad()"  # in torch's error
_last: tuple[int, bool] = -1, True  # the last pass by its number, and its kind


def fills_gradients(node: Any) -> bool:
    """Whether the pass that runs `node`, a node on the way to parameters, adds to `.grad`."""
    global _last
    number = torch._C._current_graph_task_id()
    if number != _last[0]:
        _last = number, _comes_to_a_leaf(node)
    return _last[1]


def _comes_to_a_leaf(node: Any) -> bool:
    """Whether the pass runs from this node on to a leaf, and adds to the leaf's gradient."""
    waiting, visited = [node], {node}
    while waiting:
        for after, _ in waiting.pop().next_functions:
            if after is None or after in visited:
                continue
            visited.add(after)
            if not after.next_functions:
                try:
                    if torch._C._will_engine_execute_node(after):
                        return True
                except RuntimeError as error:
                    if _REFUSAL not in str(error):
                        raise
                    return False
            elif torch._C._will_engine_execute_node(after):
                waiting.append(after)
    return False  # the gradients that are returned are not those of leaves
