"""Sets that a model's code creates are iterated in a fixed order, the same in every process.

Python orders a set of strings by hashes that differ between processes. A forward that loops over
`set(config.layer_types)`, as some models of transformers do, would give each rank a different graph.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.tracing.patching import attributes_set


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.set)


class Ordered(builtins.set[Any], metaclass=_Kind):
    """A set that is iterated in the order of its elements' `repr`.

    >>> list(Ordered(["sliding", "full", "chunked"]))
    ['chunked', 'full', 'sliding']
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=repr))


@contextlib.contextmanager
def sets_in_order(model: nn.Module) -> Iterator[None]:
    """While inside, `set(...)` makes such a set in the files that define the model's classes."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    library = ("torch.", "builtins", "typing")
    own = [sys.modules[n] for n in sorted(names) if n in sys.modules and not n.startswith(library)]
    with contextlib.ExitStack() as stack:
        for file in own:
            if "set" not in vars(file):
                stack.enter_context(attributes_set(file, set=Ordered))
        yield
