"""The traced call: which arguments are inputs of the graph, which are fixed, and how a later call is matched to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.calls.entries import FORWARD, Entry
from autopar.calls.states import State, placeholder_name
from autopar.tracing.calls.containers import flattened
from autopar.tracing.calls.free_sizes import FreeSizes
from autopar.tracing.calls.names import check_names
from autopar.tracing.contents.known import Known
from autopar.tracing.errors import ArgumentError

_LAYOUTS = (torch.strided, torch.sparse_coo)  # of examples that can be planned


@dataclass(frozen=True)
class Leaf:
    """One tensor input: the placeholder's name, the argument that contains it, and its example."""

    name: str
    argument: str
    example: torch.Tensor
    known: bool = False


@dataclass(frozen=True)
class Argument:
    """One argument that holds tensors: its structure, and its leaves (a `Leaf` for tensors, else the fixed value)."""

    name: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


@dataclass
class Inputs:
    """Everything that a traced call was given. `fixed`: arguments taken as they are. `leaves`: of the placeholders.

    `same`: for a leaf that is the same tensor as an earlier one, the name of that; it has no placeholder then.
    `states`: by the names of their arguments, which come last.
    """

    signature: inspect.Signature
    arguments: dict[str, Argument]
    fixed: dict[str, Any]
    loss_names: tuple[str, ...] = ()
    model_names: frozenset[str] = frozenset()
    modules: tuple[nn.Module, ...] = ()
    sizes: FreeSizes = field(default_factory=FreeSizes)
    leaves: list[Leaf] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)

    def with_states(self, values: Mapping[State, Any], *, same_inputs: bool = False) -> Inputs:
        """The same inputs, with states and examples of their values added. `same_inputs` as in `gather`."""
        inputs = replace(
            self,
            arguments=dict(self.arguments),
            fixed=dict(self.fixed),
            leaves=list(self.leaves),
            same=dict(self.same),
            states=self.states | {state.argument: state for state in values},
        )
        for state, value in values.items():
            _add(inputs, state.argument, value, same_inputs)
        return inputs

    def without(self, names: Collection[str]) -> Inputs:
        """The same inputs without some states, which forward does not read in this kind of call."""
        return replace(
            self,
            arguments={name: argument for name, argument in self.arguments.items() if name not in names},
            fixed={name: value for name, value in self.fixed.items() if name not in names},
            leaves=[leaf for leaf in self.leaves if leaf.argument not in names],
            states={name: state for name, state in self.states.items() if name not in names},
        )

    def with_examples(self, tensors: Mapping[str, torch.Tensor]) -> Inputs:
        """The same inputs with other examples, by placeholder name; leaves that are not named keep theirs."""

        def with_example(leaf: Any) -> Any:
            is_named = isinstance(leaf, Leaf) and leaf.name in tensors
            return replace(leaf, example=tensors[leaf.name]) if is_named else leaf

        arguments = {n: replace(a, leaves=tuple(map(with_example, a.leaves))) for n, a in self.arguments.items()}
        return replace(self, arguments=arguments, leaves=[with_example(v) for v in self.leaves])

    def values(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with `tensors` (by placeholder name) in place of the leaves, and the fixed ones."""

        def value(leaf: Any) -> Any:
            return tensors[self.same.get(leaf.name, leaf.name)] if isinstance(leaf, Leaf) else leaf

        values = {a.name: pytree.tree_unflatten(list(map(value, a.leaves)), a.spec) for a in self.arguments.values()}
        return {**self.fixed, **values}


def gather(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    concrete_args: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    *,
    without_loss: bool = False,
    same_inputs: bool = False,
    entry: Entry = FORWARD,
) -> Inputs:
    """Sort the caller's examples and fixed values by the model's signature; ArgumentError names what does not fit.

    `without_loss`: inputs that only the loss needs are left out. `same_inputs`: equal example objects are one input.
    """
    signature = inspect.signature(entry.of(model))
    parameters = signature.parameters
    loss_names = loss_names_of(loss_fn)
    for kind, values in (("meta_args", meta_args), ("concrete_args", concrete_args)):
        if not isinstance(values, Mapping):
            names = ", ".join(f"{name!r}: ..." for name in list(parameters)[:3])
            raise ArgumentError(f"{kind} is of {type(values).__name__}: give values by name, as in {{{names}}}")
        check_names(kind, values, entry.module(model), parameters, loss_names)
    for name in meta_args.keys() & concrete_args.keys():
        raise ArgumentError(f"{name!r} is both an example (meta_args) and fixed (concrete_args): choose one")
    inputs = Inputs(signature, {}, {}, loss_names, modules=tuple(model.modules()))
    own = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    order = dict.fromkeys((*own, *meta_args, *concrete_args, *loss_names))  # each name once
    missing = []
    for name in order:
        if name in concrete_args:
            inputs.fixed[name] = _concrete(name, concrete_args[name])
        elif name in meta_args:
            _add(inputs, name, meta_args[name], same_inputs)
        elif name in parameters:
            parameter = parameters[name]
            if isinstance(parameter.default, torch.Tensor):
                _add(inputs, name, parameter.default)
            elif parameter.default is parameter.empty and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                missing.append(name)
        elif name in needed_by_loss(loss_fn) and not without_loss:
            missing.append(name)
    if missing:
        raise ArgumentError(
            f"{type(model).__name__} needs {', '.join(map(repr, missing))}: "
            "give an example in meta_args, or a value in concrete_args"
        )
    inputs.model_names = frozenset(n for n in order if n in parameters or n not in loss_names)
    return inputs


def leaf_names(name: str, value: Any) -> list[str]:
    """Names of the tensors in an argument: the argument's own name, or numbered names where it is a container."""
    tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, (torch.Tensor, Known))]
    return [name] if len(tensors) == 1 and tensors[0] is value else [f"{name}_{i}" for i in range(len(tensors))]


def _add(inputs: Inputs, name: str, value: Any, same_inputs: bool = False) -> None:
    """Add an argument: fixed if it holds no tensor, else with a leaf for each of its tensors."""
    leaves, spec = flattened(value, f"argument {name!r}")
    tensors = [v for v in leaves if isinstance(v, (torch.Tensor, Known))]
    if not tensors and (spec.is_leaf() or leaves):
        inputs.fixed[name] = value
        return
    used_names = {*inputs.same, *(leaf.name for leaf in inputs.leaves)}
    names = iter(leaf_names(placeholder_name(name), value))
    argument_leaves: list[Any] = []
    for value in leaves:
        if isinstance(value, (torch.Tensor, Known)):
            is_known = isinstance(value, Known)
            leaf_name = next(names)
            while leaf_name in used_names:
                leaf_name += "_"
            leaf = Leaf(leaf_name, name, value.tensor if isinstance(value, Known) else value, is_known)
            if leaf.example.layout not in _LAYOUTS:
                raise ArgumentError(
                    f"the example of {name!r} is in the layout {leaf.example.layout}, which is not planned: pass it "
                    "as to_sparse_coo() or to_dense(), in every call"
                )
            if is_known and leaf.example.device.type == "meta":
                raise ArgumentError(f"the example of {name!r} is marked known but has no data (meta device)")
            used_names.add(leaf_name)
            first = next((v for v in inputs.leaves if v.example is leaf.example and v.known == is_known), None)
            if first is not None and same_inputs:
                inputs.same[leaf_name] = first.name
            else:
                inputs.leaves.append(leaf)
            argument_leaves.append(leaf)
        else:
            argument_leaves.append(value)
    inputs.arguments[name] = Argument(name, spec, tuple(argument_leaves))


def _concrete(name: str, value: Any) -> Any:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
            raise ArgumentError(
                f"concrete_args fixes {name!r} to a tensor without data (meta device): give it in meta_args"
            )
    return value


def loss_names_of(loss_fn: Callable[..., Any] | None) -> tuple[str, ...]:
    """The names of a loss's arguments besides the model's output."""
    if loss_fn is None:
        return ()
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # a builtin such as torch.mean has no signature: it gets only the output
        return ()
    names = [
        n
        for n, p in parameters.items()
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    if not names:
        raise ArgumentError("loss_fn takes no argument; its first is the model's output")
    return tuple(names[1:])


def needed_by_loss(loss_fn: Any) -> tuple[str, ...]:
    """The names of a loss's arguments, besides the model's output, that have no default."""
    names = loss_names_of(loss_fn)
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    parameters = inspect.signature(target).parameters if names else {}
    return tuple(name for name in names if parameters[name].default is inspect.Parameter.empty)
