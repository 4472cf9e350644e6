"""One attempt at a trace: everything is set up, the model runs once, and everything is restored."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from autopar.calls.entries import FORWARD, Entry
from autopar.graph import EXAMPLE, STATE, STATE_OF, VAL
from autopar.python.one_process import one_process
from autopar.python.replaced import overrides_active
from autopar.tracing import huggingface
from autopar.tracing.calls import matching
from autopar.tracing.calls.containers import flattened
from autopar.tracing.calls.guards import take_guards
from autopar.tracing.calls.inputs import Inputs
from autopar.tracing.contents import numbers_of_math
from autopar.tracing.contents.asserting import unvalidated
from autopar.tracing.contents.extremes import extremes_computed
from autopar.tracing.contents.python_random import draws_refused
from autopar.tracing.contents.unknown import UnknownNumber, checks_noted
from autopar.tracing.errors import ArgumentError
from autopar.tracing.leaves.compiled import compiled_functions
from autopar.tracing.leaves.control_flow import bodies_recorded
from autopar.tracing.leaves.custom_functions import custom_functions, one_node_functions
from autopar.tracing.leaves.experts import experts_as_one
from autopar.tracing.leaves.flex import flex_attention_recorded
from autopar.tracing.leaves.functions import function_leaves
from autopar.tracing.leaves.loss_owners import restored
from autopar.tracing.leaves.scripted import scripted_functions
from autopar.tracing.leaves.which import LeafPolicy
from autopar.tracing.leaves.written_around import check_writes
from autopar.tracing.libraries import DataFreePaths
from autopar.tracing.model_state.attributes import Attributes
from autopar.tracing.model_state.caches import WeakTensorRefs, forget, library_caches_empty, namespaces_restored
from autopar.tracing.model_state.carried_states import leave_out, mark_states
from autopar.tracing.model_state.left_behind import LeftBehind
from autopar.tracing.model_state.own_containers import containers_restored
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
from autopar.tracing.set_order import sets_in_order
from autopar.tracing.sizes import Traced as TracedNumbers
from autopar.tracing.torch_functions.batch_norms import batch_norms_traceable
from autopar.tracing.torch_functions.fused_layers import fused_layers_off
from autopar.tracing.torch_functions.inference import inference_as_no_grad
from autopar.tracing.torch_functions.regions import checkpoint_regions
from autopar.tracing.torch_functions.transforms import transformed_bodies
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
        states = self.inputs.states
        with self._set_up(), restored(reads.of_loss.values()):
            for argument, value in self.inputs.values(placeholders).items():
                if argument in states:
                    states[argument].put(self.model, value)
            left = LeftBehind(self.model, states.values(), reads.of_loss)
            with reads.noted(), draws_refused(self.model):
                returned = self._call(placeholders)
            left.write_buffers(self.options.policy, self.recorder, returned)
            if (fault := check_writes(self.graph, self.model, self.recorder.sharing)) is not None:
                self.calls.blame(*fault)
                raise fault[0]
            for error, path in self.recorder.unanswered:  # the model caught it and took its path for errors
                self.calls.blame(error, path)
                raise error
            policy = self.options.policy
            leaves = [self.model] if policy.functions else [*policy.failed, *self._module_leaves()]
            found = left.attributes(self.recorder, reads, leaves)
            kept = [one[:2] for one in found.set]
            outputs, out_spec = flattened(returned, "what forward returns")
            beside, set_spec = flattened([one.value for one in found.set], "what forward sets on modules")
            flat = tuple(self._output(output) for output in (*outputs, *beside))
            unseen = left.unread(reads)
            left_beside = left.beside(self.recorder, self.model, self.given)
        output = self.graph.output(flat)
        self.recorder.scope, self.recorder.region = (), ()
        self.recorder.annotate(output)
        output.meta[VAL] = fx.node.map_aggregate(flat, lambda v: v.meta[VAL] if isinstance(v, fx.Node) else v)
        if self.options.remove_inplace:
            functionalize(self.graph)
            as_linear_layers(self.graph)
        guards = take_guards(self.graph)
        if unseen and not self.inputs.same:  # a state that the call does not read does not distinguish calls
            self.inputs = leave_out(self.graph, self.inputs, unseen)
            own_key = matching.key_without(own_key, unseen)
            examples = {name: value for name, value in examples.items() if name not in unseen}
        set_outputs = found.outputs(out_spec.num_leaves)
        mark_states(self.graph, set_outputs)
        remove_dead_nodes(self.graph)
        merge_equal_constants(self.graph)
        place_shared_attributes(self.graph)
        reads_memory = self.recorder.reads_memory
        repeats, lie = matching.looks_of(examples, reads_memory=reads_memory)
        return Traced(
            self.graph,
            self.model,
            self.inputs,
            out_spec,
            self.attributes.constants,
            guards,
            order=self.order,
            types=self.calls.types,
            failures=self.options.policy.reasons(self.model),
            assumptions=tuple(self.recorder.finite.places),
            attributes_set=found.lost,
            left_beside=left_beside,
            plain_values=reads.values(
                self.model,
                leaves,
                [*kept, *((state.path, state.name) for state in states.values())],
            ),
            set_attributes=tuple(kept),
            of_loss={path: one for path, one in reads.of_loss.items() if isinstance(one, nn.Module)},
            set_outputs=set_outputs,
            new_states=tuple(found.states),
            may_be_states=found.may,
            made_of_constants=found.made,
            set_spec=set_spec,
            numbers_returned=frozenset(
                place for place, one in enumerate((*outputs, *beside)) if isinstance(one, UnknownNumber)
            ),
            own_key=(own_key, (repeats if self.inputs.same else (), lie)),
            reads_memory=reads_memory,
            entry=self.options.entry,
        )

    def _module_leaves(self) -> list[nn.Module]:
        names = dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "call_module")
        return [self.model.get_submodule(name) for name in names if name not in self.attributes.constants]

    @contextlib.contextmanager
    def _set_up(self) -> Iterator[None]:
        options, recorder = self.options, self.recorder
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.enter_context(inference_as_no_grad())
            stack.enter_context(one_process(recorder.where))
            stack.enter_context(huggingface.prepared(self.model))
            stack.enter_context(sets_in_order(self.model))
            stack.enter_context(library_caches_empty())
            stack.enter_context(namespaces_restored(self.model))
            stack.enter_context(containers_restored(self.model.modules()))
            stack.enter_context(self.attributes.swapped())
            stack.enter_context(checkpoint_regions(recorder, tagged=options.trace_act_ckpt))
            stack.enter_context(custom_functions(recorder))
            stack.enter_context(compiled_functions(recorder))
            stack.enter_context(scripted_functions(recorder))
            stack.enter_context(flex_attention_recorded(recorder))
            stack.enter_context(one_node_functions(recorder, options.one_node))
            stack.enter_context(function_leaves(recorder, self.model, options.policy.functions, self.called))
            stack.enter_context(experts_as_one(recorder))
            stack.enter_context(numbers_of_math.recorded())
            stack.enter_context(bodies_recorded(recorder))
            stack.enter_context(transformed_bodies(recorder))
            stack.enter_context(checks_noted(recorder))
            stack.enter_context(extremes_computed(recorder))
            stack.enter_context(unvalidated())
            stack.enter_context(batch_norms_traceable())
            stack.enter_context(fused_layers_off())
            stack.enter_context(overrides_active())
            stack.enter_context(options.paths.offered())
            stack.enter_context(self.calls.followed())
            stack.enter_context(recorder)
            yield

    def _placeholders(self) -> dict[str, torch.Tensor]:
        """A placeholder, and a data-free tensor for it, for every tensor input."""
        made: dict[str, torch.Tensor] = {}
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
            made[leaf.name] = free
        return made

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
