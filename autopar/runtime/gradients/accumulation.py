"""Gradient accumulation: which backward moves gradients, and those that wait for one that does.

Gradients move once per optimizer step: at every backward outside `no_sync`, once that was used, and otherwise
at every `micro_batches`-th one. Until then they wait here, unreduced, in the layout in which ops give them;
`.grad` never holds a part of a sum. Those of parameters that the pass which moves does not come to (another task's
head) are reduced at its end. `torch.autograd.grad` moves its own at once, and leaves these. An optimizer that steps
while some wait would miss them: that is an error. Zeroing gradients drops what waits, which is a part of them
(`gradients.dropped_gradients`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.autograd import Variable

from autopar.errors import InputError
from autopar.runtime.communication.convert import Stage
from autopar.runtime.communication.flights import Flight
from autopar.runtime.gradients.parameter_hooks import accumulate


class Accumulation:
    """The state of one model; `held` says that calls made now do not move gradients."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.held = False
        self._by_hand = False  # no_sync was used, so it alone decides
        self._waiting: dict[str, dict[Stage, torch.Tensor]] = {}
        self._parameters: dict[str, torch.Tensor] = {}  # those that have gradients waiting
        self._backwards = 0  # since gradients moved
        self._pass, self._moves = -1, True
        every.add(self)

    @property
    def waiting(self) -> int:
        """How many parameters have gradients waiting."""
        return len(self._parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls made inside leave their gradients here."""
        before, self.held, self._by_hand = self.held, True, True
        try:
            yield
        finally:
            self.held = before

    def moves(self) -> bool:
        """Whether the backward pass that is running moves gradients of calls that are not held."""
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            self._backwards += 1
            self._moves = self._by_hand or self._backwards >= self.micro_batches
            self._backwards = 0 if self._moves else self._backwards
            if self._moves and self._parameters:
                Variable._execution_engine.queue_callback(self._hand_out_rest)
        return self._moves

    def _hand_out_rest(self) -> None:
        """At the end of a pass that moves: what still waits is of parameters that it did not come to."""
        for name, parameter in list(self._parameters.items()):
            for gradient in self.take_rest(name):
                accumulate(parameter, gradient)

    def add(self, name: str, stage: Stage, gradient: torch.Tensor, parameter: torch.Tensor) -> None:
        """Keep an unreduced gradient of a parameter, which `stage` would reduce."""
        own = self._waiting.setdefault(name, {})
        self._parameters[name] = parameter
        if stage in own:
            own[stage] += gradient
        else:
            own[stage] = gradient.to(stage.reduction_dtype or gradient.dtype, copy=True)

    def waits_for(self, name: str) -> bool:
        """Whether gradients of the parameter wait, or did until this pass took them."""
        return name in self._waiting

    def take(self, name: str, stage: Stage) -> torch.Tensor | None:
        """What waits for this reduction, no longer kept here."""
        return self._waiting.get(name, {}).pop(stage, None)

    def take_rest(self, name: str) -> list[torch.Tensor]:
        """What still waits for other reductions of the parameter, reduced and no longer kept here."""
        self._parameters.pop(name, None)
        return reduced_at_once(self._waiting.pop(name, {}))

    def forget(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Drop what waits, of these parameters or of all, as zeroing gradients does."""
        for name in self._waiting_of(parameters) if parameters is not None else ():
            del self._parameters[name], self._waiting[name]
        if parameters is None or not self._parameters:  # the step's backward passes begin anew
            self._waiting, self._parameters, self._backwards = {}, {}, 0

    def waits(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of a parameter wait."""
        return any(one is parameter for one in self._parameters.values())

    def _waiting_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """The names of those that have gradients waiting."""
        wanted = set(map(id, parameters))
        return [name for name, parameter in self._parameters.items() if id(parameter) in wanted]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError if the optimizer is about to step past gradients that wait."""
        if not self._parameters:
            return
        names = self._waiting_of(p for group in optimizer.param_groups for p in group["params"])
        if names:
            so_far = f"{self._backwards} of the plan's {self.micro_batches} backward passes were made"
            why = "all backward passes ran inside no_sync()" if self._by_hand else so_far
            raise InputError(
                f"gradients of {len(names)} parameters ('{names[0]}' is one) are not summed over the ranks yet: {why}; "
                "make the last forward and backward before optimizer.step() outside no_sync(), or plan with "
                "micro_batches=1, or drop them with zero_grad()"
            )


def reduced_at_once(gradients: Mapping[Stage, torch.Tensor]) -> list[torch.Tensor]:
    """What several reductions make of gradients of a parameter."""
    flights = (Flight([g], [stage.backward], reduction_dtype=stage.reduction_dtype) for stage, g in gradients.items())
    return [gradient for flight in flights for gradient in flight.finish()]


every: weakref.WeakSet[Accumulation] = weakref.WeakSet()
