"""What a planned model carries: its graphs, one for each kind of call, and how it runs a call."""

from __future__ import annotations

import copy
import weakref
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.calls.entries import FORWARD, Entry
from autopar.calls.states import without_states
from autopar.errors import AutoparError, InputError
from autopar.fingerprints.fingerprint import fingerprint
from autopar.layout import Layout
from autopar.plans import Plan
from autopar.runtime.calling.calls import call_key, gathered, global_stand_ins, order_of
from autopar.runtime.calling.local_rows import asked_as_own
from autopar.runtime.calling.outer_autocast import outer_autocast
from autopar.runtime.calling.outputs import as_float32, each_averaged, each_own_rows, returned, rows_or_whole
from autopar.runtime.calling.planning_anew import plan_anew
from autopar.runtime.calling.states import layouts_of_states, put_states, with_states
from autopar.runtime.communication.transit import Transit
from autopar.runtime.gradients.accumulation import Accumulation
from autopar.runtime.gradients.backward_start import prepare_backward
from autopar.runtime.gradients.second_derivatives import detached
from autopar.runtime.lowering.lowering import Lowered, Rank, lower
from autopar.runtime.programs import Program, Programs
from autopar.runtime.randomness import RandomState
from autopar.runtime.ranges import named
from autopar.runtime.ranks.agreement import agree
from autopar.runtime.ranks.alike import Alike, CallSize, group_of_all
from autopar.runtime.stored.changed_values import Changed, ChangedValues
from autopar.runtime.stored.parameters import check_ready, local_of, placements
from autopar.runtime.stored.places import Places
from autopar.runtime.stored.structure import Structure, check_parameters
from autopar.runtime.stored.trained import Trained
from autopar.runtime.traces import Replan, Traced

_COMPARED = 10
"""The call at which batches are compared for the second time; then at twice as many calls each time."""
_MAX_SIZES = 1024  # kinds of calls whose `CallSize` is cached; for others it is computed at each call


class Planned:
    """A model's programs, and how it runs them.

    A program holds no parameters: it reads those of the model that it runs for. Deep copies of a model share programs.
    """

    def __init__(
        self,
        user_class: type[nn.Module],
        device_mesh: DeviceMesh,
        rank: Rank,
        storage: Mapping[str, Layout],
        replan: Replan,
        micro_batches: int,
    ) -> None:
        self.user_class, self.micro_batches = user_class, micro_batches
        self.device_mesh, self.rank, self.storage, self.replan = device_mesh, rank, storage, replan
        self._stored = {name: placements(layout) for name, layout in storage.items()}
        self.random: RandomState | None = None
        self.programs = Programs()
        self.replaced: list[weakref.ref[nn.Parameter]] = []
        self.built_dtypes: Mapping[str, torch.dtype] = {}  # of parameters as the user built them
        self._outputs_whole = False
        self.returns_own_rows = False  # for loops in which each process has rows of its own
        self.returns_float32 = False  # in place of half precision, for loops with autocast
        self.trained = Trained()
        self._sizes: dict[Hashable, CallSize] = {}
        self._group = group_of_all()
        self.observers: list[Callable[[Planned, Program, list[Any]], None]] = []  # told of each call and its inputs
        self._forget_model()

    def __deepcopy__(self, memo: dict[int, Any]) -> Planned:
        copied = copy.copy(self)
        copied.observers = []
        copied._forget_model()
        return copied

    def _forget_model(self) -> None:
        self.accumulation = Accumulation(self.micro_batches)
        self._alike = Alike(self._group)
        self._values = ChangedValues()
        self.structure: Structure | None = None
        self._places = Places()
        self._calls, self._compared_next = 0, _COMPARED

    def belong_to(self, model: nn.Module, other: Planned) -> None:
        """Belong to `model`, which was just copied from the model of `other`."""
        if other.structure is not None:
            self.structure = other.structure.of_copy(model, self.programs.traces)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry = FORWARD) -> Any:
        """Run one call of the model, or of the submodule or method `entry`, on this rank's part."""
        if not torch.is_grad_enabled() and self.programs.ask_for_gradients:
            return detached(lambda: self.run(model, args, kwargs, entry))
        if self.structure is None:
            self.structure = Structure(model)
        self.structure.check(self.programs.traces)
        kwargs = with_states(self.programs.states, model, kwargs)
        args, kwargs = gathered(args, kwargs, self.programs[0].plan.inputs)
        key = call_key(self.structure.modules, args, kwargs, entry, reads_memory=self.programs.read_memory)
        cached = self.programs.cached(key)
        changed = self._changed(cached[0], model) if cached is not None else {}
        if not torch.compiler.is_compiling():
            self._announce(model, key, args, kwargs, changed, entry)
        if cached is None or changed:
            met = len(self.programs.states)
            program = self._program(model, args, kwargs, entry)
            if len(self.programs.states) > met:  # the call must be given the new states too
                return self.run(model, args, without_states(kwargs), entry)
            order = order_of(program.traced, *self.whole_call(model, [program], args, kwargs, entry))
            if key is not None and not program.traced.reads_values:
                self.programs.remember(key, program, order)
        else:
            program, order = cached
        leaves = pytree.tree_leaves((args, kwargs)) if key is None else (*args, *kwargs.values())
        inputs = [leaves[place] if isinstance(place, int) else place for place in order]
        for observer in self.observers:
            observer(self, program, inputs)
        if not torch.compiler.is_compiling():
            self._check(model, program, inputs)
        outputs = self._outputs_of(model, program, inputs, entry)
        results = self._returned(program, outputs, entry)
        results = [as_float32(value) for value in results] if self.returns_float32 else results
        put_states(results, outputs, program, self.programs, self.device_mesh)
        program.traced.set_on(model, results)
        return program.traced.rebuild(results)

    def _outputs_of(self, model: nn.Module, program: Program, inputs: list[Any], entry: Entry) -> Sequence[Any]:
        """Run a program's graph on this rank's part of the inputs and of the model's tensors."""
        if not self._places.has(program):
            self._places.find(model, program, self.rank.device, self.programs.numbers)
            self._values.keep(self.programs.numbers)
        lowered, tensors = program.lowered, [holder[name] for holder, name in self._places.of(program)]
        check_parameters(tensors, lowered.state, self._stored, program.state)
        lowered.writes.write(tensors, model)
        transit = self._transit(lowered, tensors)
        state = [local_of(t, transit, i, lowered.state[i]) for i, t in enumerate(tensors)]
        if program.plan.inputs == "local" and torch.is_grad_enabled():
            inputs = asked_as_own(inputs, program, self.device_mesh.size())
        random = (self.random.next_key(),) if lowered.takes_key and self.random is not None else ()
        watched = lowered.route.regathers and torch.is_grad_enabled()
        label = self.user_class.__name__ if entry == FORWARD else str(entry)
        with named(f"call of {label}"), transit.gathers.watching() if transit and watched else nullcontext():
            outputs = lowered.module(*inputs, *state, transit, *random)
        if not torch.compiler.is_compiling():
            prepare_backward(outputs, inputs, tensors)
        return outputs

    def _returned(self, program: Program, outputs: Sequence[Any], entry: Entry) -> list[Any]:
        """The outputs of a call as the loop gets them; submodules and methods return plain tensors only."""
        plan, layouts = program.plan, program.lowered.outputs
        is_local, is_beside = plan.inputs == "local", entry != FORWARD
        whole = self._outputs_whole or (is_beside and not is_local)
        results = returned(outputs, layouts, self.device_mesh, whole=whole)
        if is_local and is_beside:
            results = rows_or_whole(results, layouts, self.device_mesh, plan.batch_dims)
        if is_local and torch.is_grad_enabled():
            see_to_it = is_beside or self.returns_own_rows
            results = each_averaged(results, layouts, self.rank.mesh, plan.batch_dims if see_to_it else ())
        if self.returns_own_rows and plan.batch_dims and not is_beside:
            results = each_own_rows(results, layouts, self.device_mesh, plan.batch_dims)
        return results

    def _transit(self, lowered: Lowered, state: Sequence[torch.Tensor]) -> Transit | None:
        """The communication of one call; None while compiling, since the compiler orders collectives itself."""
        if torch.compiler.is_compiling():
            return None
        shards = [(t._local_tensor if isinstance(t, DTensor) else t).detach() for t in state]
        return Transit(lowered.route, shards, state, self.accumulation)

    @contextmanager
    def whole_outputs(self) -> Iterator[None]:
        """For loops inside libraries, such as `generate`: outputs of calls inside are gathered on every rank.

        Raises InputError with inputs="local", where each rank would have its own prompts and end at its own step.
        """
        if self.programs and self.programs[0].plan.inputs == "local":
            raise InputError(
                'generate needs the same prompts on every rank, and this plan has inputs="local": plan with '
                'inputs="global", or generate with a plain model that loads what export_full_state wrote'
            )
        before, self._outputs_whole = self._outputs_whole, True
        try:
            yield
        finally:
            self._outputs_whole = before

    def add(self, traced: Traced, plan: Plan, model: nn.Module) -> Program:
        """Lower a graph under its plan, and keep it as a program."""
        self.trained.note(plan, model, self.storage, self.programs)
        return self.programs.add(traced, plan, lower(traced.graph, plan, self.rank))

    def _announce(
        self,
        model: nn.Module,
        key: Hashable | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changed: Changed,
        entry: Entry,
    ) -> None:
        """Check that the other ranks make the same kind of call."""
        size = self._sizes.get(key) if key is not None and not changed else None
        if size is None:
            size = CallSize.of(model, args, kwargs, changed, entry, reads_memory=self.programs.read_memory)
            if key is not None and not changed and len(self._sizes) < _MAX_SIZES:
                self._sizes[key] = size
        self._alike.announce(size)

    def _changed(self, program: Program, model: nn.Module) -> Changed:
        """Values of the model that the program's trace has read and that have changed since."""
        if torch.compiler.is_compiling():
            return {}
        return self._values.since(program.traced, program.number, model)

    # -- which graph ---------------------------------------------------------------------------------

    def _program(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry) -> Program:
        """The program for a call, planned anew if no program fits."""
        changed: dict[str, str] = {}
        for program in self.programs.of(entry):
            traced = program.traced
            call = self.whole_call(model, [program], args, kwargs, entry)
            if not program.runs(traced.key(*call, model)):
                continue
            if others := self._changed(program, model):
                changed |= others
                continue
            try:
                traced.bind(*call)
            except InputError:  # a guard on values failed: another program may fit, or one is planned
                continue
            self.programs.used(program)
            return program
        self._values.tell(changed, self.programs.states)
        return plan_anew(self, model, args, kwargs, entry)

    def whole_call(
        self,
        model: nn.Module,
        programs: Sequence[Program],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        entry: Entry = FORWARD,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call as a trace sees it; with inputs="local", parts become stand-ins of global shape, by `programs`."""
        if self.programs[0].plan.inputs == "global":
            return args, kwargs
        shape = self.rank.mesh.shape
        layouts_of = [{name: (layout, shape) for name, (layout, _) in program.inputs.items()} for program in programs]
        layouts = (layout for layout, _ in self.programs.first.inputs.values() if not layout.is_replicated)
        rows = next(((layout, shape) for layout in layouts), None)
        states = layouts_of_states(self.programs.rows_of_states, self.rank.mesh)
        return global_stand_ins(entry.of(model), ChainMap(states, *layouts_of), rows, args, kwargs, states)

    def _check(self, model: nn.Module, program: Program, inputs: Sequence[Any]) -> None:
        """Count a call, and compare what ranks must have in common: all of it at a program's first call, later their
        batches, at some calls."""
        self._calls += 1
        self.programs.note(program)
        if not program.checked:
            self._check_first_call(model, program, inputs)
        elif self._calls >= self._compared_next:
            self._check_batch(program, inputs)

    def _check_first_call(self, model: nn.Module, program: Program, inputs: Sequence[Any]) -> None:
        """Find what would make ranks disagree later, before the first collective of a program."""
        error: AutoparError | None = None
        try:
            check_ready(model, self.replaced)
        except AutoparError as found:
            error = found
        digests = {"the graph": fingerprint(program.traced.graph)} | program.batch_digests(inputs)
        agree(self.rank.device, digests | outer_autocast(program.traced.graph, self.rank.device), error)
        self.replaced = []
        program.checked = True

    def _check_batch(self, program: Program, inputs: Sequence[Any]) -> None:
        """Compare the ranks' batches: a rank that draws one random number more shuffles differently from then on.

        The number of calls until the next comparison doubles each time, so the cost is negligible.
        """
        self._compared_next *= 2
        if program.whole(inputs):
            agree(self.rank.device, program.batch_digests(inputs))
