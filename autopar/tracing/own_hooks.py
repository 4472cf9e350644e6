"""The hooks of the model itself: calls of the planned model run them around the graph, so they are not in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def own_hooks_left_out(model: nn.Module) -> Iterator[None]:
    """Inside, a call of `model` runs none of the hooks that the user registered on it; submodules keep theirs.

    Hooks of torch.nn.utils (the old weight norm, pruning) stay: they make the attributes that forward reads.
    """
    before = [(hooks, dict(hooks)) for hooks in (getattr(model, name) for name in _HOOKS)]
    for hooks, known in before:
        for key, hook in known.items():
            if not type(hook).__module__.startswith("torch.nn.utils"):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, known in before:
            hooks.clear()
            hooks.update(known)
