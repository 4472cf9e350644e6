"""The programs of a planned model (graphs ready to run) and the calls that each is for; deep copies share them."""

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
"""How many graphs are kept for calls of the model, and for each of its modules or methods that is called. The least
recently used one is dropped first, except that of the planned call, since samplers deal out batches of its size."""

made_by_calls: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Values of states that calls have made, as opposed to those that the loop has set."""

SET = "states of forward that the loop has set"

_CHANGING = 3  # warn at so many values of a number: two may be the modes training and evaluation


@dataclass(eq=False)
class Program:
    """One graph of a model, ready to run. `number` counts the graphs that the model has had."""

    number: int
    traced: Traced
    plan: Plan
    lowered: Lowered
    last_use: int
    checked: bool = False
    state: list[torch.Tensor] = field(default_factory=list)  # the state that was checked last

    def runs(self, key: Hashable) -> bool:
        """Whether the program is for calls with this key (`Traced.key`)."""
        return key == self.traced.own_key or any(key == other for other in self.traced.other_keys)

    @cached_property
    def inputs(self) -> dict[str, tuple[Layout, tuple[int, ...]]]:
        """The layout and global shape of each input, by its name in the graph."""
        nodes = list(self.traced.graph.nodes)
        planned = [p for p in self.plan.nodes if nodes[p.position].op == "placeholder"]
        return {str(nodes[p.position].target): (p.outputs[0], p.shapes[0]) for p in planned}

    def whole(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The tensors among a call's inputs (in graph order) that every rank holds whole, without states."""
        return {
            str(i): v for i, (name, v) in enumerate(self._whole(inputs)) if v is not None and name not in self.states
        }

    def batch_digests(self, inputs: Sequence[Any]) -> dict[str, str]:
        """Digests of what must be equal on all ranks, by its description in words."""
        return {BATCH: content_digest(self.whole(inputs)), SET: content_digest(self.set_by_loop(inputs))}

    def set_by_loop(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The whole states whose value the loop has set, not a call, by name."""
        set_states = ((name, v) for name, v in self._whole(inputs) if v is not None and v not in made_by_calls)
        return {name: v for name, v in set_states if name in self.states}

    def _whole(self, inputs: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
        for value, (name, (layout, _)) in zip(inputs, self.inputs.items(), strict=True):
            yield name, value if layout.is_replicated and isinstance(value, torch.Tensor) else None

    @cached_property
    def states(self) -> frozenset[str]:
        """The inputs that are states, by their names in the graph."""
        return frozenset(str(n.target) for n in self.traced.graph.find_nodes(op="placeholder") if STATE in n.meta)

    @cached_property
    def asks_for_gradients(self) -> bool:
        """Whether forward itself calls `torch.autograd.grad`."""
        return any(node.target is torch.autograd.grad for node in self.traced.graph.nodes)

    @property
    def rows(self) -> int:
        """Number of rows of the whole batch if each rank passes a part of it; 0 if every rank passes all rows."""
        return next((shape[0] for layout, shape in self.inputs.values() if not layout.is_replicated), 0)


class Programs(Sequence[Program]):
    """The programs of one model, those looked for most recently first."""

    def __init__(self) -> None:
        self._kept: list[Program] = []
        self._given: dict[tuple[Entry, str], set[int | float]] = {}  # values of numbers, by their name or place
        self._numbers, self._uses = itertools.count(), itertools.count()
        self._calls: dict[Hashable, tuple[Program, Order]] = {}
        self.states: dict[str, State] = {}
        """Attributes that forward carries from call to call in some program, by argument name; all programs get all."""
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
        """The oldest program: that of the call that the model was planned for."""
        return min(self._kept, key=lambda program: program.number)

    def of(self, entry: Entry) -> list[Program]:
        """The programs of one entry: the model, a submodule or a method."""
        return [program for program in self._kept if program.traced.entry == entry]

    @property
    def traces(self) -> Iterator[Traced]:
        return (program.traced for program in self._kept)

    @property
    def read_memory(self) -> bool:
        """Whether the program of a call may depend on how its tensors lie in memory."""
        return any(program.traced.reads_memory for program in self._kept)

    @property
    def ask_for_gradients(self) -> bool:
        return any(program.asks_for_gradients for program in self._kept)

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(program.number for program in self._kept)

    def add(self, traced: Traced, plan: Plan, lowered: Lowered) -> Program:
        """Add a program, as the most recently used."""
        program = Program(next(self._numbers), traced, plan, lowered, next(self._uses))
        self._kept.insert(0, program)
        self.states.update(traced.states)
        self._settle_rows(program)
        self._tell_numbers(traced)
        of_entry = self.of(traced.entry)
        if len(of_entry) > MAX_GRAPHS:
            dropped = min(
                (program_kept for program_kept in of_entry if program_kept is not self.first),
                key=lambda program_kept: program_kept.last_use,
            )
            self._kept.remove(dropped)
            for key in [key for key, (called, _) in self._calls.items() if called is dropped]:
                del self._calls[key]
            warn(
                f"{of_model(traced.entry)} was called in more than {MAX_GRAPHS} ways (shapes, arguments, modes), and "
                "each new one is traced and planned: pad the inputs to fewer shapes, and pass numbers that change as "
                "tensors"
            )
        return program

    def _settle_rows(self, program: Program) -> None:
        """Fix the dim of each state's rows, -1 without: that of the first program that reads it, or else sets it."""
        layouts = {name: layout for name, (layout, _) in program.inputs.items() if name in program.states}
        read = {
            name: next((p.dim for p in state_layout.placements if p.is_sharded), -1)
            for name, state_layout in layouts.items()
        }
        dims = by_output(program.traced.graph, program.plan.batch_dims)
        set_dims = {}
        for place, (_, name) in program.traced.set_outputs.items():
            dim, layout_and_shape = dims.get(place, -1), program.lowered.outputs[place]
            is_even = (
                dim >= 0
                and layout_and_shape is not None
                and layout_and_shape[1][dim] % math.prod(program.plan.mesh_shape) == 0
            )
            set_dims[name] = dim if is_even else -1
        self.rows_of_states = set_dims | read | self.rows_of_states

    def _tell_numbers(self, traced: Traced) -> None:
        """Warn once of each number that changes from call to call, and not just between a few modes."""
        for name, value in traced.numbers.items():
            if self._changes(traced.entry, name, value):
                warn(
                    f"the number {name!r} changes from call to call (now {value!r}), and the model is traced and "
                    "planned again for each value: pass a tensor, torch.tensor(...), with an example in meta_args"
                )
        for place, value in traced.numbers_read.items():
            if self._changes(traced.entry, place, value):
                warn(
                    f"forward reads a number from a tensor by {place}, which changes from call to call (now "
                    f"{value!r}), and the model is traced and planned again for each value: compute with the tensor "
                    "(a queue is written by queue.index_copy_(0, (pointer + torch.arange(n)) % len(queue), rows))"
                )

    def _changes(self, entry: Entry, name: str, value: int | float) -> bool:
        """Whether this is the value of a number that makes it one that changes, and not just between a few modes."""
        given = self._given.setdefault((entry, name), set())
        before = len(given)
        given.add(value)
        return before < len(given) == _CHANGING

    def used(self, program: Program) -> None:
        """Mark a program as the most recently used, and look for it first."""
        self._kept.remove(program)
        self._kept.insert(0, program)
        self.note(program)

    def note(self, program: Program) -> None:
        """Mark a program as the most recently used, but keep the order, which compiled calls rely on."""
        if not torch.compiler.is_compiling():  # it would be one number for all calls, and torch 2.11 follows no counter
            program.last_use = next(self._uses)

    def cached(self, key: Hashable | None) -> tuple[Program, Order] | None:
        """The program that calls with this key run, and the order of their arguments as its inputs."""
        return self._calls.get(key) if key is not None else None

    def remember(self, key: Hashable, program: Program, order: Order) -> None:
        self._calls[key] = program, order
