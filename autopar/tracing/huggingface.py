"""What Hugging Face models need for tracing: hooked forwards bypassed, a warning muted, caches as pytrees."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.tracing.patching import attributes_set
from autopar.tracing.sizes import Traced


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """While inside, wrapped forwards are bypassed, and a warning that would read the contents of inputs is muted."""
    with bare_forward(model), _muted():
        yield


@contextlib.contextmanager
def bare_forward(model: nn.Module) -> Iterator[None]:
    """While inside, modules whose `forward` accelerate has wrapped run the original, kept in `_old_forward`."""
    wrapped = [(m, vars(m)["forward"]) for m in model.modules() if "_old_forward" in vars(m) and "forward" in vars(m)]
    for module, _ in wrapped:
        vars(module)["forward"] = vars(module)["_old_forward"]
    try:
        yield
    finally:
        for module, forward in wrapped:
            vars(module)["forward"] = forward


disable_hooked_forward = bare_forward


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    modeling = sys.modules.get("transformers.modeling_utils")
    name = "warn_if_padding_and_no_attention_mask"
    original = modeling and modeling.PreTrainedModel.__dict__.get(name)
    if modeling is None or original is None:
        yield
        return
    with attributes_set(modeling.PreTrainedModel, **{name: lambda self, *args, **kwargs: None}):
        yield


def register_caches() -> None:
    """Register the library's key-value caches as pytrees, so that they can be inputs and outputs of a graph."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None:
        return
    for kind in vars(caches).values():
        is_cache = isinstance(kind, type) and issubclass(kind, (caches.Cache, caches.CacheLayerMixin))
        if is_cache and kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind, _flatten, _unflatten, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}"
            )


class _Skeleton:
    """An object without the attributes that hold tensors or caches: the pytree context of a cache.

    Two are equal if a trace could not distinguish them: the same class, attribute names and plain values (for example
    how many tokens a sliding window has seen).
    """

    def __init__(self, kind: type, names: tuple[str, ...], values: dict[str, Any]) -> None:
        self.kind, self.names, self.values = kind, names, values
        self.plain = tuple((n, v) for n, v in values.items() if v is None or isinstance(v, (bool, int, float, str)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Skeleton) and (self.kind, self.names, self.plain) == (
            other.kind,
            other.names,
            other.plain,
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.names, self.plain))

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join([*self.names, *(f'{name}={value!r}' for name, value in self.plain)])})"


def _flatten(value: Any) -> tuple[list[Any], _Skeleton]:
    names = tuple(n for n, v in vars(value).items() if _is_filled(v))
    return [getattr(value, n) for n in names], _Skeleton(
        type(value), names, {n: v for n, v in vars(value).items() if n not in names}
    )


def _unflatten(children: Any, skeleton: _Skeleton) -> Any:
    value: Any = object.__new__(skeleton.kind)
    value.__dict__.update(skeleton.values)
    value.__dict__.update(zip(skeleton.names, children, strict=True))
    return value


def _is_filled(value: Any) -> bool:
    """Whether a value holds tensors, or cache layers that a trace would fill: copies of a cache must not share these.

    A traced size counts too (how many tokens a window has seen): each call computes its own.
    """
    if isinstance(value, Traced):
        return True
    _, spec = pytree.tree_flatten(value)
    return _holds_layers(spec) or any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value))


def _holds_layers(spec: pytree.TreeSpec) -> bool:
    return isinstance(spec.context, _Skeleton) or any(map(_holds_layers, spec.children()))
