"""The result of a trace: the graph, and how to call it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from autopar.calls.entries import FORWARD, Entry
from autopar.calls.states import State
from autopar.fingerprints.fingerprint import fingerprint
from autopar.graph import FIRST_WRITES, REGION, SCOPE, VAL
from autopar.ops.first_writes import write_into
from autopar.tracing.calls import matching
from autopar.tracing.calls.guards import Guards
from autopar.tracing.calls.inputs import Inputs
from autopar.tracing.model_state.changed_state import FoundStates, LostChanges, SetByCalls
from autopar.tracing.model_state.plain_reads import PlainValues
from autopar.tracing.order import ExecutionOrder
from autopar.tracing.scopes import Scope


@dataclass
class Traced:
    """A traced model.

    `graph`: its output node holds a flat tuple, from which `out_spec` rebuilds what the model returned. `root`: the
    module that `get_attr` and `call_module` targets refer to, except those in `constants`, which the trace made.
    `order`: what ran, in order. `types`: module types by path. `failures`: modules that had to be leaves, and why.
    `assumptions`: places where activations are assumed to be finite. `plain_values`: plain values that forward has read
    from modules. `reads_memory`: whether forward has asked for a tensor's memory layout. `entry`: what was called.
    `own_key`: the key of the traced call; `other_keys`: keys of other calls for which the trace is valid as well.
    `set_by_calls`, `found_states`, `lost`: what forward changes in its modules. `numbers_returned`: places of flat
    outputs that stand for numbers.
    """

    graph: fx.Graph
    root: nn.Module
    inputs: Inputs
    out_spec: pytree.TreeSpec
    constants: dict[str, Any] = field(default_factory=dict)
    guards: Guards = field(default_factory=lambda: Guards(None, ()))
    order: ExecutionOrder | None = None
    types: dict[str, type[nn.Module]] = field(default_factory=dict)
    failures: dict[nn.Module, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    numbers_returned: frozenset[int] = frozenset()
    set_by_calls: SetByCalls = field(default_factory=SetByCalls)
    found_states: FoundStates = field(default_factory=FoundStates)
    lost: LostChanges = field(default_factory=LostChanges)
    plain_values: PlainValues = field(default_factory=lambda: PlainValues({}))
    own_key: tuple[Hashable, Hashable] = (None, None)
    other_keys: list[Hashable] = field(default_factory=list)
    reads_memory: bool = False
    entry: Entry = FORWARD

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Inputs that only the loss takes, if a loss was traced."""
        return self.inputs.loss_names

    @property
    def numbers(self) -> dict[str, int | float]:
        """Arguments of the traced call that are numbers: a call with another value is a different kind of call."""
        return {name: value for name, value in self.inputs.fixed.items() if type(value) in (int, float)}

    @property
    def numbers_read(self) -> dict[str, int | float]:
        """Numbers that forward read from tensors of known contents, by the question and its place in the model."""
        return {f"{g.question}() at {g.place}": g.answer for g in self.guards.guards if type(g.answer) in (int, float)}

    def of(self, model: nn.Module) -> Traced:
        """This trace for `model`, a copy of the root. It no longer refers to the root, and has no execution order."""
        inputs = replace(self.inputs, modules=tuple(model.modules()))
        return replace(self, root=model, inputs=inputs, order=None, failures={})

    def bind(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
        """The placeholders' values for a call, in order; raises InputError where it is not the traced call."""
        values = matching.bind(self.inputs, args, kwargs or {})
        self.guards.check(values, self.attribute)
        return values

    def key(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, model: nn.Module | None = None
    ) -> tuple[Hashable, Hashable]:
        """Everything that a trace would read from Python for this call: equal keys mean equal graphs.

        `model`: the copy of the root whose training flags count (default: the root).
        """
        modules = self.inputs.modules if model is None else tuple(model.modules())
        return matching.key(self.inputs, args, kwargs or {}, modules, reads_memory=self.reads_memory)

    def does_as(self, other: Traced) -> bool:
        """Whether `other` is also valid for this trace's call, because both traces compute the same.

        The calls may differ only in which inputs are the same tensor, and in memory layouts.
        """
        if self.own_key[0] != other.own_key[0] or self.out_spec != other.out_spec or other.inputs.same:
            return False
        if not self.set_by_calls.same_as(other.set_by_calls):
            return False
        if self.numbers_returned != other.numbers_returned:
            return False
        if (
            self.reads_values
            or other.reads_values
            or not _equal_constants(self._constants_read(), other._constants_read())
        ):
            return False
        if self.states != other.states:
            return False
        node_of = {str(n.target): n for n in other.graph.nodes if n.op == "placeholder"}
        node_of_first = {node_of[name]: node_of[first] for name, first in self.inputs.same.items()}
        return fingerprint(self.graph) == fingerprint(other.graph, node_of_first)

    def _constants_read(self) -> dict[str, Any]:
        """The constants that nodes name; not modules that forward creates (a loss), of which only ops are nodes."""
        targets = [f"{node.target}." for node in self.graph.nodes if node.op in ("get_attr", "call_module")]
        return {name: v for name, v in self.constants.items() if any(t.startswith(f"{name}.") for t in targets)}

    @property
    def reads_values(self) -> bool:
        """Whether `bind` must look at the contents of its arguments: the trace read a known input."""
        return self.guards.graph is not None

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """What the model returns, from the flat outputs of the graph."""
        return pytree.tree_unflatten(self._as_returned(leaves, 0, self.out_spec.num_leaves), self.out_spec)

    def _as_returned(self, leaves: Sequence[Any], first: int, behind: int) -> list[Any]:
        """The flat outputs from `first` to `behind`; tensors that stand for numbers become numbers."""
        places = range(first, behind)
        return [leaves[place].item() if place in self.numbers_returned else leaves[place] for place in places]

    def set_on(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Set the attributes that forward sets on the modules of a model, from the flat outputs of the graph."""
        self.set_by_calls.set_on(model, self._as_returned(leaves, self.out_spec.num_leaves, len(leaves)))

    @property
    def set_outputs(self) -> Mapping[int, tuple[str, str]]:
        """Flat outputs that are tensors of attributes that calls set (`SetByCalls.outputs`)."""
        return self.set_by_calls.outputs

    @property
    def states(self) -> Mapping[str, State]:
        """Attributes of modules that calls take as arguments and set, by the names of these arguments."""
        return self.inputs.states

    def attribute(self, name: str) -> Any:
        """The parameter, buffer, submodule or constant that a node's target names."""
        if name in self.constants:
            return self.constants[name]
        value: Any = self.root
        for part in name.split("."):
            value = getattr(value, part)
        return value

    @cached_property
    def gm(self) -> fx.GraphModule:
        """The graph as a module that takes the placeholders' values and returns what the model returns."""
        targets = {
            str(n.target): self.attribute(str(n.target))
            for n in self.graph.nodes
            if n.op in ("get_attr", "call_module")
        }
        self.graph.set_codegen(_Rebuilding(self.rebuild))
        module = fx.GraphModule(targets, self.graph, class_name=type(self.root).__name__)
        module.train(self.root.training)
        written = [(n.target, n.meta[FIRST_WRITES]) for n in self.graph.nodes if FIRST_WRITES in n.meta]
        if written:
            module.register_forward_pre_hook(lambda *_: self._write_first(written))
        return module

    def _write_first(self, written: Sequence[tuple[Any, Any]]) -> None:
        for name, writes in written:
            write_into(self.attribute(str(name)), writes, self.attribute)

    # ---- questions about nodes

    def find(self, target: str) -> list[fx.Node]:
        """The nodes with this target: the name of a function, method, parameter or module."""
        return [n for n in self.graph.nodes if _name(n.target) == target]

    def find_one(self, target: str) -> fx.Node:
        """The only node with this target."""
        (node,) = self.find(target)
        return node

    def val(self, node: fx.Node) -> Any:
        """A node's data-free value."""
        return node.meta[VAL]

    def region(self, node: fx.Node) -> tuple[int, ...]:
        """The path of checkpoint regions a node is in."""
        return node.meta[REGION]

    def scope(self, node: fx.Node) -> Scope:
        """The innermost module that was running when a node was made."""
        stack = node.meta[SCOPE]
        return Scope(stack[-1][0], self.types[stack[-1][0]]) if stack else Scope("", None)

    def scope_stack(self, node: fx.Node) -> list[str]:
        """Paths of the modules that were running, the root first."""
        return ["", *(path for path, _ in node.meta[SCOPE])]

    @property
    def scopes(self) -> dict[str, Scope]:
        """The scope of every node, by its name."""
        return {n.name: self.scope(n) for n in self.graph.nodes}

    def under(self, path: str) -> list[fx.Node]:
        """Nodes made inside the module at `path`."""
        return [n for n in self.graph.nodes if any(p == path for p, _ in n.meta[SCOPE])]


def _equal_constants(constants: Mapping[str, Any], other_constants: Mapping[str, Any]) -> bool:
    """Whether two traces have equal constants: the same objects, or tensors with equal contents."""
    return constants.keys() == other_constants.keys() and all(
        value is other_constants[name]
        or (
            isinstance(value, torch.Tensor)
            and isinstance(other_constants[name], torch.Tensor)
            and value.dtype == other_constants[name].dtype
            and not value.is_meta
            and torch.equal(value, other_constants[name])
        )
        for name, value in constants.items()
    )


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target)).strip("_")


class _Rebuilding(CodeGen):
    """Code generation whose `return` rebuilds the model's result from the flat outputs."""

    def __init__(self, rebuild: Any) -> None:
        super().__init__()
        self.rebuild = rebuild

    def generate_output(self, output_args: Any, **options: Any) -> str:
        return f"return _rebuild({super().generate_output(output_args, **options).removeprefix('return ')})"

    def process_outputs(self, outputs: Any) -> Any:
        return self.rebuild(outputs)

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [("_rebuild", self.rebuild)]
