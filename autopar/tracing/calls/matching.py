"""Matching a later call to a trace: binding its arguments, checking guards, and the key of its kind of call."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.calls.looks import lie_of, repeated
from autopar.calls.states import without_states
from autopar.tracing.calls.free_sizes import FreeSizes
from autopar.tracing.calls.inputs import Inputs, Leaf
from autopar.tracing.errors import ArgumentError


def named_arguments(inputs: Inputs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those of the loss, and states, are taken from the keywords."""
    states = {n: kwargs[n] for n in inputs.states if n in kwargs}
    loss = {n: kwargs[n] for n in inputs.loss_names if n in kwargs and n not in inputs.signature.parameters}
    own = {n: v for n, v in without_states(kwargs).items() if n not in loss}
    try:
        bound = inputs.signature.bind(*args, **own)
    except TypeError as error:
        raise ArgumentError(f"the call does not fit the model's forward: {error}") from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if inputs.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return {**named, **loss, **states}


def bind(inputs: Inputs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The placeholders' values in order; raises ArgumentError where the call does not match the traced one."""
    named = named_arguments(inputs, args, kwargs)
    values: list[torch.Tensor] = []
    free_sizes: dict[int, int] = {}
    for name, argument in inputs.arguments.items():
        value = named.pop(name, _default(inputs, name))
        if argument.spec.is_leaf():  # a plain tensor, as nearly always
            _bind_one(inputs, argument.leaves[0], value, values, free_sizes)
            continue
        leaves, spec = pytree.tree_flatten(value)
        if len(leaves) != len(argument.leaves) or (spec != argument.spec and not _same_kind(spec, argument.spec)):
            raise ArgumentError(
                f"argument {name!r} was traced as {_describe(argument.spec)}, and is now {_describe(spec)}"
            )
        for leaf, leaf_value in zip(argument.leaves, leaves, strict=True):
            if isinstance(leaf, Leaf):
                _bind_one(inputs, leaf, leaf_value, values, free_sizes)
            elif not _equal(leaf, leaf_value):
                raise ArgumentError(f"argument {name!r} was traced with {leaf!r} in it, and now has {leaf_value!r}")
    for name, value in named.items():
        traced = inputs.fixed.get(name, _default(inputs, name))
        if not _equal(traced, value):
            raise ArgumentError(f"argument {name!r} was traced as {_short(traced)}, and is now {_short(value)}")
    return values


def key(
    inputs: Inputs,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[nn.Module],
    *,
    reads_memory: bool,
) -> tuple[Hashable, Hashable]:
    """Equal for two calls for which the same trace is valid, as far as Python's side of the call tells.

    Two parts: `key_of`, and then which tensors are the same object, with their memory layouts if `reads_memory`.
    """
    named = named_arguments(inputs, args, kwargs)
    return key_of(inputs, named, modules), looks_of(named, reads_memory=reads_memory)


def looks_of(named: Mapping[str, Any], *, reads_memory: bool) -> tuple[Hashable, Hashable]:
    """Which of the tensors among arguments are the same object; and all strides, if the trace asked for any."""
    tensors = [v for name in sorted(named) for v in pytree.tree_leaves(named[name]) if isinstance(v, torch.Tensor)]
    return repeated(tensors), tuple(map(lie_of, tensors)) if reads_memory else ()


def key_of(inputs: Inputs, named: Mapping[str, Any], modules: Sequence[nn.Module] | None = None) -> Hashable:
    """A key that is equal for calls of one kind, from the arguments by name."""
    grad = torch.is_grad_enabled()
    read = modules or inputs.modules
    trainable = tuple([p.requires_grad for m in read for p in m._parameters.values() if p is not None])
    parts: list[Hashable] = [grad, tuple([m.training for m in read]), trainable]
    for name in sorted(named):
        value = named[name]
        if isinstance(value, torch.Tensor):
            parts.append((name, _kind(value, grad)))
        elif not _equal(value, _default(inputs, name)):  # passing a default equals leaving it out
            leaves, spec = pytree.tree_flatten(value)
            parts.append((name, str(spec), tuple(_kind(v, grad) for v in leaves)))
    return tuple(parts)


def key_without(key: Hashable, names: Collection[str]) -> Hashable:
    """The key that `key_of` gives for a call without these arguments."""
    assert isinstance(key, tuple)
    return tuple(part for part in key if not (isinstance(part, tuple) and part and part[0] in names))


def _kind(value: Any, grad: bool) -> Hashable:
    """What distinguishes calls in a value: shape, dtype and need of a gradient for tensors, else type and value."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, grad and value.requires_grad)
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))  # by text: 0.0 differs from -0.0, and NaN equals itself
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value), value)


def _bind_one(inputs: Inputs, leaf: Leaf, value: Any, values: list[torch.Tensor], free_sizes: dict[int, int]) -> None:
    """Check an input and append it to the placeholders' values, unless it repeats an earlier input."""
    checked = _checked(leaf, value, inputs.sizes, free_sizes)
    if leaf.name not in inputs.same:
        values.append(checked)


def _checked(leaf: Leaf, value: Any, sizes: FreeSizes, free_sizes: dict[int, int]) -> torch.Tensor:
    """An input that fits the leaf; `free_sizes` collects the sizes of free dims, by group."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"input {leaf.name!r} was traced as a tensor, and is now {_short(value)}")
    if value.dtype != leaf.example.dtype:
        raise ArgumentError(f"input {leaf.name!r} was traced as {leaf.example.dtype}, and is now {value.dtype}")
    if not sizes.group and value.shape == leaf.example.shape:
        return value
    for dim, (size, traced_size) in enumerate(zip(value.shape, leaf.example.shape, strict=False)):
        group = sizes.group.get((leaf.name, dim))
        if (size != traced_size and group is None) or (
            group is not None and free_sizes.setdefault(group, size) != size
        ):
            break
    else:
        if value.ndim == leaf.example.ndim:
            return value
        dim = -1
    raise ArgumentError(
        f"input {leaf.name!r} was traced with shape {tuple(leaf.example.shape)}, and now has {tuple(value.shape)}",
        where=sizes.fixed.get((leaf.name, dim), ""),
    )


def _default(inputs: Inputs, name: str) -> Any:
    parameter = inputs.signature.parameters.get(name)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _equal(a: Any, b: Any) -> bool:
    """Whether a fixed value of the trace and that of a later call are the same."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.shape == b.shape
            and bool(torch.equal(a, b))
        )
    if isinstance(a, (float, complex)):
        return _kind(a, False) == _kind(b, False)
    return type(a) is type(b) and bool(a == b)


def _same_kind(a: pytree.TreeSpec, b: pytree.TreeSpec) -> bool:
    return a.type is b.type and str(a) == str(b)


def _describe(spec: pytree.TreeSpec) -> str:
    return (
        "a tensor or plain value"
        if spec.is_leaf()
        else f"{getattr(spec.type, '__name__', spec.type)} of {spec.num_leaves}"
    )


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:100]
