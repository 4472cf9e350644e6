"""How many FLOPs a call takes, in all."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker


class _NoModules(ModuleTracker):
    """Tells nothing apart by module."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class TotalFlops(FlopCounterMode):
    """`FlopCounterMode` without a count for each module.

    Its hooks on what modules read and return fail where the call itself takes gradients by such a tensor.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()
