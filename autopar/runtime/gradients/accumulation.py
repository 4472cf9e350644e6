"""Gradient accumulation: which backward pass reduces gradients, and the gradients that wait for it.

Gradients are reduced once per optimizer step: at every backward outside `no_sync` once that was used, otherwise at
every `micro_batches`-th backward. Until then they wait here, unreduced, in the layout in which ops produce them;
`.grad` never holds a part of a sum. If the pass that reduces does not reach a parameter (another task's head), its
waiting gradients are reduced at the end of the pass. `torch.autograd.grad` reduces its own gradients at once and leaves
the waiting ones. An optimizer step while some wait would miss them, which is an error. Zeroing gradients also drops
those that wait (`gradients.dropped_gradients`).
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
    """The accumulation of one model; `held`: calls made now, inside `no_sync`, do not reduce their gradients."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.held = False
        self._by_hand = False  # no_sync was used, so it alone decides
        self._waiting: dict[str, dict[Stage, torch.Tensor]] = {}
        self._parameters: dict[str, torch.Tensor] = {}  # with gradients waiting
        self._backwards = 0  # since gradients were last reduced
        self._pass, self._moves = -1, True
        every.add(self)

    @property
    def waiting(self) -> int:
        """How many parameters have gradients waiting."""
        return len(self._parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of calls made inside wait here."""
        before, self.held, self._by_hand = self.held, True, True
        try:
            yield
        finally:
            self.held = before

    def moves(self) -> bool:
        """Whether the running backward pass reduces gradients of calls that are not held. Counts the passes."""
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
        """At the end of a pass that reduces: reduce what still waits, of parameters that the pass did not reach."""
        for name, parameter in list(self._parameters.items()):
            for gradient in self.take_rest(name):
                accumulate(parameter, gradient)

    def add(self, name: str, stage: Stage, gradient: torch.Tensor, parameter: torch.Tensor) -> None:
        """Keep an unreduced gradient of a parameter, to be reduced by `stage`."""
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
        """Remove and return the gradient that waits for this reduction."""
        return self._waiting.get(name, {}).pop(stage, None)

    def take_rest(self, name: str) -> list[torch.Tensor]:
        """Remove, reduce and return the gradients of the parameter that wait for other reductions."""
        self._parameters.pop(name, None)
        return reduced_at_once(self._waiting.pop(name, {}))

    def forget(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Drop the waiting gradients of these parameters or of all, as zeroing gradients does."""
        for name in self._waiting_of(parameters) if parameters is not None else ():
            del self._parameters[name], self._waiting[name]
        if parameters is None or not self._parameters:  # the step's backward passes begin anew
            self._waiting, self._parameters, self._backwards = {}, {}, 0

    def waits(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of a parameter wait."""
        return any(waiting is parameter for waiting in self._parameters.values())

    def _waiting_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """The names of those of `parameters` that have gradients waiting."""
        ids = set(map(id, parameters))
        return [name for name, parameter in self._parameters.items() if id(parameter) in ids]

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
    """The reduced gradients of a parameter, each by its stage, waited for."""
    flights = (Flight([g], [stage.backward], reduction_dtype=stage.reduction_dtype) for stage, g in gradients.items())
    return [gradient for flight in flights for gradient in flight.finish()]


every: weakref.WeakSet[Accumulation] = weakref.WeakSet()
