"""Hooks for all modules (`torch.nn.modules.module.register_module_*_hook`), with which FLOP counters, loggers of
activations and NaN finders look into any model. They see nothing of a planned model: its calls run none of its
modules."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as modules

from autopar.errors import InputError
from autopar.user_warnings import warn

_FORWARD = modules._global_forward_hooks, modules._global_forward_pre_hooks
_BACKWARD = modules._global_backward_hooks, modules._global_backward_pre_hooks


class HooksForAll:
    """The hooks that are registered when a model is planned; its trace has run them."""

    def __init__(self) -> None:
        self._known = _present()

    def check(self) -> None:
        """Warn once about each hook registered since, but not about torch's own, whose tables show what they saw."""
        present = _present()
        if present != self._known:
            came = [hook for number, hook in present.items() if number not in self._known]
            self._known = present
            if any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in came):
                warn(
                    "a hook for all modules was registered after the model was planned, and calls run the plan, not "
                    "the modules: it sees the model as a whole, and nothing inside; use it on a model without a plan"
                )


def refuse_backward_hooks_for_all() -> None:
    """Raise InputError if there are backward hooks for all modules."""
    if any(_BACKWARD):
        raise InputError(
            "there is a backward hook for all modules (torch.nn.modules.module.register_module_full_backward_hook), "
            "which would never run: calls run the plan, not the modules. Remove it, or register it on parameters"
        )


def _present() -> dict[int, Any]:
    return {number: hook for hooks in (*_FORWARD, *_BACKWARD) for number, hook in hooks.items()}
