"""Warnings of what forward does while it is traced, and calls of the graph then do not."""

from __future__ import annotations

from torch import nn

from autopar.tracing.model_state.changed_state import LostChanges
from autopar.tracing.model_state.own_hooks import users_hooks
from autopar.user_warnings import warn

_NAMED = 4  # at most so many names are in a warning


def warn_of_lost(root: nn.Module, lost: LostChanges) -> None:
    """Warn of attributes and objects that forward changes, and of what hooks of submodules do beside their results."""
    if lost.attributes:
        warn(
            f"forward sets {', '.join(lost.attributes[:_NAMED])}, which later calls neither read again nor set: "
            "make it a buffer, or pass it as an argument and return it"
        )
    if hooked := users_hooks(root):  # what is stored outside may be what they collect
        warn(
            f"forward hooks of {', '.join(hooked[:_NAMED])} run now, while the model is traced, and not at every call: "
            "their changes to outputs are part of the plan, their other effects are lost; return what they collect"
        )
    elif lost.places:
        warn(
            f"forward stores what it computes at {', '.join(lost.places[:_NAMED])} in an object, class, list or dict "
            "outside its modules, and later calls do not: return it from forward"
        )
