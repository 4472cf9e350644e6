"""A cache of rows and variables that several parts of a problem would otherwise make more than once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from autopar.solver.linear.terms import Array


@dataclass
class SharedColumns:
    """`shares`: whether several parts of a problem have the same variables; if not, nothing is cached."""

    shares: bool = False
    _results: dict[Hashable, Array] = field(default_factory=dict)

    def __call__(self, key: Hashable, of: Sequence[Array], make: Callable[[], Array]) -> Array:
        """The result of `make`, cached by `key` and the arrays of variables `of`."""
        if not self.shares:
            return make()
        key = key, *((variables.shape, variables.tobytes()) for variables in of)
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]
