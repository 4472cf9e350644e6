"""Which kind of backward pass is running: one that adds to `.grad`, or `torch.autograd.grad`, which only hands out.

What waits from earlier passes belongs to `.grad` alone. Torch does not say which kind it is, but refuses to answer
whether a leaf's node will run where its gradient is to be handed out.
"""

from __future__ import annotations

from typing import Any

import torch

_REFUSAL = "currently running autograd.grad()"
_last: tuple[int, bool] = -1, True  # a pass by its number, and of which kind it is


def fills_gradients(node: Any) -> bool:
    """Whether the pass that runs `node`, a node on the way to parameters, adds to `.grad`."""
    global _last
    number = torch._C._current_graph_task_id()
    if number != _last[0]:
        _last = number, _comes_to_a_leaf(node)
    return _last[1]


def _comes_to_a_leaf(node: Any) -> bool:
    """Whether the pass goes on from a node to a leaf and adds to its gradient there."""
    waiting, seen = [node], {node}
    while waiting:
        for after, _ in waiting.pop().next_functions:
            if after is None or after in seen:
                continue
            seen.add(after)
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
    return False  # what is handed out is no leaf's
