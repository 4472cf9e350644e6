"""Hooks. Calls of the planned model run the model's own hooks around the graph, so these are not part of it.

Hooks of submodules run while the model is traced: their changes to results are in the graph, other effects are lost.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as modules

from autopar.tracing import places

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def own_hooks_left_out(model: nn.Module) -> Iterator[None]:
    """While inside, a call of `model` runs none of the hooks that the user registered on it; submodules keep theirs.

    Hooks of torch.nn.utils (the old weight norm, pruning) stay: they compute attributes that forward reads.
    """
    before = [(hooks, dict(hooks)) for hooks in (getattr(model, name) for name in _HOOKS)]
    for hooks, registered in before:
        for key, hook in registered.items():
            if not type(hook).__module__.startswith("torch.nn.utils"):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, registered in before:
            hooks.clear()
            hooks.update(registered)


def users_hooks(model: nn.Module) -> list[str]:
    """Paths of submodules with forward hooks of the user's own code; "all modules" for global hooks."""
    for_all = (*modules._global_forward_hooks.values(), *modules._global_forward_pre_hooks.values())
    hooks = [("all modules", hook) for hook in for_all] + [
        (path, hook)
        for path, module in model.named_modules()
        if module is not model
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return list(dict.fromkeys(path for path, hook in hooks if _is_users(hook)))


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    name = getattr(function, "__module__", None) or type(hook).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    ours = name.partition(".")[0] == "autopar"
    return not ours and file is not None and places.is_users(file) and not places.is_installed(file)
