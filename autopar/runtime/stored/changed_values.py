"""Plain values of a model that the loop changes after tracing: a call with other values is planned anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from autopar.calls.states import State
from autopar.runtime.traces import Traced
from autopar.user_warnings import warn

Changed = dict[str, str]  # what values are now, by name
_SHOWN = (bool, int, float, str, type(None))


class ChangedValues:
    """Finds changed values of one model; the function that compares them is made once for each trace."""

    def __init__(self) -> None:
        self._looks: dict[int, Callable[[], dict[str, Any]]] = {}
        self._told: set[str] = set()

    def keep(self, numbers: Collection[int]) -> None:
        """Forget all traces but these; the others were dropped."""
        self._looks = {number: look for number, look in self._looks.items() if number in numbers}

    def since(self, traced: Traced, number: int, model: nn.Module) -> Changed:
        """The values that the trace has read and that differ in `model` now: their present value, by name.

        `number`: the number of the trace's program.
        """
        look = self._looks.get(number)
        if look is None:
            look = self._looks[number] = traced.plain_values.on(model)
        return {name: repr(v) if isinstance(v, _SHOWN) else type(v).__name__ for name, v in look().items()}

    def tell(self, changed: Changed, states: Mapping[str, State]) -> None:
        """Warn, once for each value, that a call with another value is planned anew; not for `states` (by argument
        name), which are passed to calls from then on."""
        own = {argument.partition(".")[2] for argument in states}
        new = {name: value for name, value in changed.items() if name not in self._told and name not in own}
        if new:
            self._told.update(new)
            listed = ", ".join(f"'{name}' (now {value})" for name, value in list(new.items())[:4])
            warn(
                f"forward reads {listed}, changed since the model was planned: this call is traced and planned again. "
                "A value that changes at every step should be a buffer, written in place, or a tensor argument"
            )
