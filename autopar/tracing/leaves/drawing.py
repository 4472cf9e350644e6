"""Whether code that becomes one node draws random numbers; ranks that hold its result must draw the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_CHANCES = ("dropout_p", "dropout", "p")  # names of arguments; an op with one that is 0 draws nothing


class Drawing(TorchDispatchMode):
    """While it is entered, `draws` becomes True at the first op whose numbers come from a generator."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags and not _has_no_chance(func, args, kwargs)
        return func(*args, **kwargs)


def _has_no_chance(func: Any, args: Any, kwargs: Any) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _CHANCES:
            chance = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return isinstance(chance, (int, float)) and chance == 0
    return False
