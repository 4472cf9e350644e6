"""The graphs of a planned model, each ready to run, and which calls they are for; deep copies share them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.calls.entries import Entry, of_model
from autopar.calls.state_rows import by_output
from autopar.calls.states import State
from autopar.graph import STATE
from autopar.layout import Layout
from autopar.plans import Plan
from autopar.runtime.calling.calls import Order
from autopar.runtime.lowering.lowering import Lowered
from autopar.runtime.ranks.agreement import BATCH, content_digest
from autopar.runtime.traces import Traced
from autopar.user_warnings import warn

MAX_GRAPHS = 16
"""How many graphs of one model, or of one of its modules that is called, are kept; the one that was not used for
longest goes first, but that of the call that the model was planned for stays: samplers deal out batches of its size."""

made_by_calls: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""States as calls have left them."""

SET = "states of forward that the loop has set"

_CHANGING = 3  # values of a number: two may be a loop's two modes, as in training and evaluation


@dataclass(eq=False)
class Program:
    """One graph of a model, ready to run. `number` counts the graphs that the model has had."""

    number: int
    traced: Traced
    plan: Plan
    lowered: Lowered
    last_use: int
    checked: bool = False
    state: list[torch.Tensor] = field(default_factory=list)  # that was checked last

    def runs(self, key: Hashable) -> bool:
        """Whether it is for calls of this key (`Traced.key`)."""
        return key == self.traced.own_key or any(key == other for other in self.traced.other_keys)

    @cached_property
    def inputs(self) -> dict[str, tuple[Layout, tuple[int, ...]]]:
        """How each input lies, and its global shape, by its name in the graph."""
        nodes = list(self.traced.graph.nodes)
        planned = [p for p in self.plan.nodes if nodes[p.position].op == "placeholder"]
        return {str(nodes[p.position].target): (p.outputs[0], p.shapes[0]) for p in planned}

    def whole(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Of what a call is given, in the graph's order, the tensors that every rank has as a whole."""
        return {
            str(i): v for i, (name, v) in enumerate(self._whole(inputs)) if v is not None and name not in self.states
        }

    def batch_digests(self, inputs: Sequence[Any]) -> dict[str, str]:
        """What ranks are asked whether they have it alike, in words."""
        return {BATCH: content_digest(self.whole(inputs)), SET: content_digest(self.set_by_loop(inputs))}

    def set_by_loop(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The same of states, by their names, of which calls have not left it as it is."""
        given = ((name, v) for name, v in self._whole(inputs) if v is not None and v not in made_by_calls)
        return {name: v for name, v in given if name in self.states}

    def _whole(self, inputs: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
        for value, (name, (layout, _)) in zip(inputs, self.inputs.items(), strict=True):
            yield name, value if layout.is_replicated and isinstance(value, torch.Tensor) else None

    @cached_property
    def states(self) -> frozenset[str]:
        """The inputs that are states, by their names in the graph."""
        return frozenset(str(n.target) for n in self.traced.graph.find_nodes(op="placeholder") if STATE in n.meta)

    @cached_property
    def asks_for_gradients(self) -> bool:
        """Whether forward itself does."""
        return any(node.target is torch.autograd.grad for node in self.traced.graph.nodes)

    @property
    def rows(self) -> int:
        """How many rows the whole batch has of which each rank passes its part; 0 where every rank passes all."""
        return next((shape[0] for layout, shape in self.inputs.values() if not layout.is_replicated), 0)


class Programs(Sequence[Program]):
    """The programs of one model; first those that were looked for last."""

    def __init__(self) -> None:
        self._kept: list[Program] = []
        self._given: dict[tuple[Entry, str], set[int | float]] = {}  # values of arguments that are numbers
        self._numbers, self._uses = itertools.count(), itertools.count()
        self._calls: dict[Hashable, tuple[Program, Order]] = {}
        self.states: dict[str, State] = {}
        """Attributes that any of them goes on from, by the names of their arguments; each is given all of these."""
        self.rows_of_states: dict[str, int] = {}

    @overload
    def __getitem__(self, place: int) -> Program: ...
    @overload
    def __getitem__(self, place: slice) -> list[Program]: ...
    def __getitem__(self, place: int | slice) -> Program | list[Program]:
        return self._kept[place]

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._kept)

    @property
    def first(self) -> Program:
        """The oldest: of the call that the model was planned for."""
        return min(self._kept, key=lambda program: program.number)

    def of(self, entry: Entry) -> list[Program]:
        """Those of what is called there."""
        return [program for program in self._kept if program.traced.entry == entry]

    @property
    def traces(self) -> Iterator[Traced]:
        return (program.traced for program in self._kept)

    @property
    def read_memory(self) -> bool:
        """Whether a call may run another one where its tensors lie otherwise."""
        return any(program.traced.reads_memory for program in self._kept)

    @property
    def ask_for_gradients(self) -> bool:
        return any(program.asks_for_gradients for program in self._kept)

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(program.number for program in self._kept)

    def add(self, traced: Traced, plan: Plan, lowered: Lowered) -> Program:
        """One more, as the last that was used."""
        program = Program(next(self._numbers), traced, plan, lowered, next(self._uses))
        self._kept.insert(0, program)
        self.states.update(traced.states)
        self._settle_rows(program)
        self._tell_numbers(traced)
        alike = self.of(traced.entry)
        if len(alike) > MAX_GRAPHS:
            dropped = min((one for one in alike if one is not self.first), key=lambda one: one.last_use)
            self._kept.remove(dropped)
            for key in [key for key, (known, _) in self._calls.items() if known is dropped]:
                del self._calls[key]
            warn(
                f"{of_model(traced.entry)} was called in more than {MAX_GRAPHS} ways (shapes, arguments, modes), and "
                "each new one is traced and planned: pad the inputs to fewer shapes, and pass numbers that change as "
                "tensors"
            )
        return program

    def _settle_rows(self, program: Program) -> None:
        """States stay along the dim along which the first program reads them, or leaves them; -1 without rows."""
        given = {name: layout for name, (layout, _) in program.inputs.items() if name in program.states}
        read = {name: next((p.dim for p in one.placements if p.is_sharded), -1) for name, one in given.items()}
        dims = by_output(program.traced.graph, program.plan.batch_dims)
        left = {}
        for place, (_, name) in program.traced.set_outputs.items():
            dim, lies = dims.get(place, -1), program.lowered.outputs[place]
            is_even = dim >= 0 and lies is not None and lies[1][dim] % math.prod(program.plan.mesh_shape) == 0
            left[name] = dim if is_even else -1
        self.rows_of_states = left | read | self.rows_of_states

    def _tell_numbers(self, traced: Traced) -> None:
        """Warn, of each argument once, where it changes from call to call and not between a few modes."""
        for name, value in traced.numbers.items():
            given = self._given.setdefault((traced.entry, name), set())
            before = len(given)
            given.add(value)
            if before < len(given) == _CHANGING:
                warn(
                    f"the number {name!r} changes from call to call (now {value!r}), and the model is traced and "
                    "planned again for each value: pass a tensor, torch.tensor(...), with an example in meta_args"
                )

    def used(self, program: Program) -> None:
        """This one is the last that was used."""
        self._kept.remove(program)
        self._kept.insert(0, program)
        self.note(program)

    def note(self, program: Program) -> None:
        """The same where the order in which they are looked at may stay: compiled calls have gone by it."""
        if not torch.compiler.is_compiling():  # it would be one number for all calls, and torch 2.11 follows no counter
            program.last_use = next(self._uses)

    def known(self, key: Hashable | None) -> tuple[Program, Order] | None:
        """What calls of this key run, and in which order their arguments are its inputs."""
        return self._calls.get(key) if key is not None else None

    def remember(self, key: Hashable, program: Program, order: Order) -> None:
        self._calls[key] = program, order
