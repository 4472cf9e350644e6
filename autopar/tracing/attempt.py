"""One attempt at a trace: everything is set up, the model runs once, and everything is restored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from autopar.calls.entries import FORWARD, Entry
from autopar.graph import EXAMPLE, STATE, STATE_OF, VAL
from autopar.tracing.call_outcome import CallOutcome
from autopar.tracing.calls import matching
from autopar.tracing.calls.containers import flattened
from autopar.tracing.calls.guards import Guards, take_guards
from autopar.tracing.calls.inputs import Inputs
from autopar.tracing.contents.python_random import draws_refused
from autopar.tracing.contents.unknown import UnknownNumber
from autopar.tracing.environment import tracing_environment
from autopar.tracing.errors import ArgumentError
from autopar.tracing.leaves.loss_owners import restored
from autopar.tracing.leaves.which import LeafPolicy
from autopar.tracing.leaves.written_around import check_writes
from autopar.tracing.libraries import DataFreePaths
from autopar.tracing.model_state.attributes import Attributes
from autopar.tracing.model_state.caches import WeakTensorRefs, forget
from autopar.tracing.model_state.carried_states import leave_out, mark_states
from autopar.tracing.model_state.changed_state import FoundStates, LostChanges, SetByCalls
from autopar.tracing.model_state.left_behind import LeftBehind
from autopar.tracing.model_state.own_hooks import own_hooks_left_out
from autopar.tracing.model_state.plain_reads import PlainReads
from autopar.tracing.order import ExecutionOrder
from autopar.tracing.picked.picked_rows import PickedRows
from autopar.tracing.recorder import Recorder
from autopar.tracing.rewriting.cleaning import remove_dead_nodes
from autopar.tracing.rewriting.functionalize import functionalize
from autopar.tracing.rewriting.merging import merge_equal_constants
from autopar.tracing.rewriting.sharing import place_shared_attributes
from autopar.tracing.rewriting.transposed_products import as_linear_layers
from autopar.tracing.scopes import ModuleCalls
from autopar.tracing.sizes import Traced as TracedNumbers
from autopar.tracing.traced import Traced


@dataclass
class Options:
    """How a trace is made; `trace` documents the options."""

    policy: LeafPolicy
    paths: DataFreePaths
    device: torch.device
    bias_addition_split: bool = True
    remove_inplace: bool = True
    parameter_dtype: torch.dtype | None = None
    loss_fn: Callable[..., Any] | None = None
    trace_sizes: bool = True
    trace_act_ckpt: bool = True
    one_node: Iterable[Callable[..., Any]] = field(default=())
    dynamic_shapes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    entry: Entry = FORWARD
    are_finite: bool = True  # the assumed answer to checks of activations
    remaining: WeakTensorRefs = field(default_factory=list)  # of earlier attempts: data-free tensors still referenced


class Attempt:
    """Run the model once under the recorder; `culprit` names the module that an error came from."""

    def __init__(self, model: nn.Module, inputs: Inputs, options: Options) -> None:
        self.model, self.inputs, self.options = model, inputs, options
        self.graph = fx.Graph()
        self.attributes = Attributes(model, options.parameter_dtype)
        self.order = ExecutionOrder(model)
        self.given: list[Any] = []  # the arguments of the call
        self.called: set[FunctionType] = set()  # function leaves that were called
        self.recorder = Recorder(
            self.graph,
            self.attributes,
            device=options.device,
            bias_addition_split=options.bias_addition_split,
            trace_sizes=options.trace_sizes,
            order=self.order,
        )
        self.recorder.finite.are_finite = options.are_finite
        self.calls = ModuleCalls(self.recorder, model, options.policy)

    def culprit(self, error: BaseException) -> nn.Module | None:
        """The innermost module that was running when `error` was raised."""
        return self.calls.culprit(error)

    def run(self) -> Traced:
        """Trace; nothing that the attempt has set up remains, also after an error."""
        forget(self.options.remaining, self.model)  # from a failed attempt, whose frames are gone now
        try:
            traced = self._run()
            self.calls.release()
            return traced
        finally:
            self.attributes.release()
            self.recorder.unanswered.clear()  # errors keep frames alive, and these tensors and the recorder
            self.options.remaining += self.recorder.release()

    def _run(self) -> Traced:
        examples = self.inputs.values({v.name: v.example for v in self.inputs.leaves})
        own_key = matching.key_of(self.inputs, examples)  # before the call, which may change what it reads
        placeholders = self._placeholders()
        reads = PlainReads(self.model, self.options.loss_fn)
        with tracing_environment(self), restored(reads.of_loss.values()):
            self._put_states(placeholders)
            before = LeftBehind(self.model, self.inputs.states.values(), reads.of_loss)
            with reads.noted(), draws_refused(self.model):
                returned = self._call(placeholders)
            before.write_buffers(self.options.policy, self.recorder, returned)
            self._raise_caught_errors()
            outcome = self._outcome(returned, before, reads)
        self._write_output(outcome.output)
        self._make_functional()
        guards = take_guards(self.graph)
        if outcome.unread and not self.inputs.same:  # a state that the call does not read does not distinguish calls
            self.inputs = leave_out(self.graph, self.inputs, outcome.unread)
            own_key = matching.key_without(own_key, outcome.unread)
            examples = {name: value for name, value in examples.items() if name not in outcome.unread}
        set_outputs = outcome.changed.outputs(outcome.out_spec.num_leaves)
        mark_states(self.graph, set_outputs)
        self._clean()
        repeats, lie = matching.looks_of(examples, reads_memory=self.recorder.reads_memory)
        key = (own_key, (repeats if self.inputs.same else (), lie))
        return self._traced(outcome, guards, set_outputs, key)

    def _put_states(self, placeholders: dict[str, torch.Tensor]) -> None:
        """Set the attributes that are inputs of the call to their data-free tensors."""
        for argument, value in self.inputs.values(placeholders).items():
            if argument in self.inputs.states:
                self.inputs.states[argument].put(self.model, value)

    def _raise_caught_errors(self) -> None:
        """Raise the error of a write that the graph would lose, or the first error that the model has caught."""
        if (fault := check_writes(self.graph, self.model, self.recorder.sharing)) is not None:
            self.calls.blame(*fault)
            raise fault[0]
        for error, path in self.recorder.unanswered:  # the model caught it and took its path for errors
            self.calls.blame(error, path)
            raise error

    def _outcome(self, returned: Any, before: LeftBehind, reads: PlainReads) -> CallOutcome:
        """What the call has returned and changed, to be read before the model is restored."""
        policy = self.options.policy
        leaves = [self.model] if policy.functions else [*policy.failed, *self._module_leaves()]
        changed = before.attributes(self.recorder, reads, leaves)
        outputs, out_spec = flattened(returned, "what forward returns")
        set_values, set_spec = flattened([output.value for output in changed.set], "what forward sets on modules")
        values = (*outputs, *set_values)
        return CallOutcome(
            reads,
            tuple(self.inputs.states.values()),
            changed,
            out_spec,
            set_spec,
            output=tuple(self._output(value) for value in values),
            numbers=frozenset(place for place, output in enumerate(values) if isinstance(output, UnknownNumber)),
            leaves=leaves,
            unread=before.unread(reads),
            left_beside=before.stored_elsewhere(self.recorder, self.model, self.given),
        )

    def _write_output(self, flat: tuple[Any, ...]) -> None:
        """The output node, which belongs to no module and region."""
        output = self.graph.output(flat)
        self.recorder.scope, self.recorder.region = (), ()
        self.recorder.annotate(output)
        output.meta[VAL] = fx.node.map_aggregate(flat, lambda v: v.meta[VAL] if isinstance(v, fx.Node) else v)

    def _make_functional(self) -> None:
        if self.options.remove_inplace:
            functionalize(self.graph)
            as_linear_layers(self.graph)

    def _clean(self) -> None:
        remove_dead_nodes(self.graph)
        merge_equal_constants(self.graph)
        place_shared_attributes(self.graph)

    def _traced(
        self,
        outcome: CallOutcome,
        guards: Guards,
        set_outputs: Mapping[int, tuple[str, str]],
        own_key: tuple[Hashable, Hashable],
    ) -> Traced:
        changed, reads = outcome.changed, outcome.reads
        set_names = tuple(attribute[:2] for attribute in changed.set)
        return Traced(
            self.graph,
            self.model,
            self.inputs,
            outcome.out_spec,
            self.attributes.constants,
            guards,
            order=self.order,
            types=self.calls.types,
            failures=self.options.policy.reasons(self.model),
            assumptions=tuple(self.recorder.finite.places),
            plain_values=reads.values(
                self.model, outcome.leaves, [*set_names, *((state.path, state.name) for state in outcome.states)]
            ),
            set_by_calls=SetByCalls(
                set_names,
                outcome.set_spec,
                set_outputs,
                {path: module for path, module in reads.of_loss.items() if isinstance(module, nn.Module)},
            ),
            found_states=FoundStates(tuple(changed.states), changed.maybe_states, changed.from_constants),
            lost=LostChanges(tuple(changed.lost), outcome.left_beside),
            numbers_returned=outcome.numbers,
            own_key=own_key,
            reads_memory=self.recorder.reads_memory,
            entry=self.options.entry,
        )

    def _module_leaves(self) -> list[nn.Module]:
        names = dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "call_module")
        return [self.model.get_submodule(name) for name in names if name not in self.attributes.constants]

    def _placeholders(self) -> dict[str, torch.Tensor]:
        """A placeholder, and a data-free tensor for it, for every tensor input."""
        tensors: dict[str, torch.Tensor] = {}
        dtype = self.options.parameter_dtype
        for leaf in self.inputs.leaves:
            example = leaf.example
            cast = dtype if example.is_floating_point() and leaf.argument not in self.inputs.states else None
            dims = self.options.dynamic_shapes.get(leaf.argument)
            if dims:
                free = self.recorder.dynamic.tensor(example, dims, cast or example.dtype)
            else:
                free = torch.empty_strided(example.shape, example.stride(), dtype=cast or example.dtype, device="meta")
            free.requires_grad_(example.requires_grad)
            node = self.graph.placeholder(leaf.name)
            self.recorder.register(node, free)
            self.recorder.dynamic.read_from(node, free)
            node.meta[EXAMPLE] = example
            if leaf.argument in self.inputs.states:
                node.meta[STATE], node.meta[STATE_OF] = -1, leaf.argument  # the output that sets it is not known yet
            if leaf.known:
                self.recorder.known.put(free, example.detach().cpu(), node, from_input=True)
            tensors[leaf.name] = free
        return tensors

    def _call(self, tensors: dict[str, torch.Tensor]) -> Any:
        inputs = self.inputs
        values = {name: value for name, value in inputs.values(tensors).items() if name not in inputs.states}
        self.given = list(values.values())
        kinds = {n: p.kind for n, p in inputs.signature.parameters.items()}
        positional = [values.pop(n) for n, k in kinds.items() if k is inspect.Parameter.POSITIONAL_ONLY and n in values]
        for name, kind in kinds.items():
            if kind is inspect.Parameter.VAR_POSITIONAL and name in values:
                before = [n for n, k in kinds.items() if k is inspect.Parameter.POSITIONAL_OR_KEYWORD and n in values]
                positional += [values.pop(n) for n in before] + list(values.pop(name))
        named = {n: v for n, v in values.items() if n in inputs.model_names}
        entry = self.options.entry
        if entry.method != "forward":
            result = entry.of(self.model)(*positional, **named)
        else:
            module = entry.module(self.model)
            with own_hooks_left_out(module):
                result = module(*positional, **named)
        if self.options.loss_fn is None:
            return result
        loss = self.options.loss_fn(result, **{n: values[n] for n in inputs.loss_names if n in values})
        if loss is None:
            raise ArgumentError("loss_fn returned None: it must return the loss")
        return loss

    def _output(self, value: Any) -> Any:
        if isinstance(value, PickedRows):
            raise value.unknown()
        if isinstance(value, torch.Tensor):
            return self.recorder.node_of(value)
        if isinstance(value, UnknownNumber):
            return self.recorder.node_of(value.tensor)
        return self.recorder.sizes.node(value) if isinstance(value, TracedNumbers) else value
