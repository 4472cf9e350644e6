"""The arguments of one call of a model, sorted as `plan` takes them: examples of inputs, and fixed values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.calls.entries import FORWARD, Entry
from autopar.planning.stages import LossFunction
from autopar.tracing import known
from autopar.tracing.calls.inputs import loss_names_of, needed_by_loss


def sorted_arguments(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: LossFunction | None,
    known_names: Collection[str] = (),
    entry: Entry = FORWARD,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`meta_args` and `concrete_args` of a call, by name, including the loss's extra inputs.

    `known_names`: examples that become `known` where they have data, so that a trace may read their contents.
    """
    values = _by_name(entry.of(model), args, kwargs, loss_fn)
    examples = {name: value for name, value in values.items() if _is_example(value)}
    examples |= {
        name: pytree.tree_map(_with_known_contents, examples[name]) for name in known_names if name in examples
    }
    return examples, {name: value for name, value in values.items() if name not in examples}


def _with_known_contents(leaf: Any) -> Any:
    return known(leaf) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" else leaf


def is_without_loss(loss_fn: LossFunction | None, names: Collection[str]) -> bool:
    """Whether none of a call's arguments is one that the loss needs, so that it is a call for predictions.

    Always False for a loss that needs only the model's output, since the arguments then do not tell.
    """
    needed = needed_by_loss(loss_fn)
    return bool(needed) and not any(name in names for name in needed)


def _is_example(value: Any) -> bool:
    """Whether an argument belongs to `meta_args`: it holds tensors, or is an empty container for some (a cache)."""
    leaves, spec = pytree.tree_flatten(value)
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves) or not (leaves or spec.is_leaf())


def _by_name(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_fn: LossFunction | None
) -> dict[str, Any]:
    """A call's arguments by name, with `**kwargs` flattened; extra inputs of the loss are taken from the keywords."""
    extra = loss_names_of(loss_fn)
    own = {name: value for name, value in kwargs.items() if name not in extra}
    forward = inspect.signature(called)
    named: dict[str, Any] = {}
    for name, value in forward.bind(*args, **own).arguments.items():
        parameter = forward.parameters[name]
        named.update(value if parameter.kind is parameter.VAR_KEYWORD else {name: value})
    return {**named, **{name: kwargs[name] for name in extra if name in kwargs}}
