"""Calls of parts of a planned model: of its submodules, and of registered methods.

The plan is for calls of the model itself. A submodule that is called on its own, while its parameters are sharded, is a
call of another kind: it is traced and planned separately, with the parameters stored as they are, and it returns plain
tensors, which the code around it can use. The same holds for a registered method.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.arguments.near_names import did_you_mean
from autopar.calls.entries import Entry, StandIn
from autopar.errors import InputError
from autopar.runtime.calling.ambient import ambient_kept
from autopar.runtime.stored.model_class import ATTRIBUTE
from autopar.runtime.stored.structure import Structure, refuse_transforms


class Entered(StandIn):
    """Stands in for a user's method on the instance of a planned model or of its submodule, and runs a plan."""

    def __init__(
        self, model: nn.Module | None, module: nn.Module, entry: Entry, own: Callable[..., Any] | None
    ) -> None:
        self.model, self.module, self.entry = model, module, entry
        self.own = own  # what the instance had under this name; None: the class's method

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The user's method."""
        if self.own is not None:
            return self.own
        function = getattr(type(self.module), self.entry.method)
        if torch.compiler.is_compiling():  # torch 2.11 does not follow `__get__`
            return functools.partial(function, self.module)
        method: Callable[..., Any] = function.__get__(self.module)
        return method

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._runs_as_built(args, kwargs):
            return self.__wrapped__(*args, **kwargs)
        if self.model is None:
            raise InputError(
                f"a copy of '{self.entry}' of a planned model was called, whose parameters are one rank's shards: copy "
                "the whole planned model, and call that part of the copy"
            )
        refuse_transforms()
        with ambient_kept():
            return getattr(self.model, ATTRIBUTE).run(self.model, args, kwargs, self.entry)

    def _runs_as_built(self, args: Any, kwargs: Any) -> bool:
        """Whether the user's own code can run: in a leaf, where parameters are local tensors, in a trace, where they
        are data-free, and on DTensors (which a model may return), since a layer's parameters are DTensors too."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.entry.method == "forward" and tensors and all(isinstance(tensor, DTensor) for tensor in tensors):
            return True
        if not any(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            return True
        if torch.compiler.is_compiling():  # a compiler cannot trace the attribute below
            return False
        return bool(DTensor._op_dispatcher._allow_implicit_replication)  # as `implicit_replication()` sets it

    def __deepcopy__(self, memo: dict[int, Any]) -> Entered:
        """In a deep copy of the model, the same entry of the copy."""
        module = memo.get(id(self.module), self.module)
        return Entered(memo.get(id(self.model)), module, self.entry, copy.deepcopy(self.own, memo))


def let_submodules_be_called(model: nn.Module) -> None:
    """From now on a submodule that is called with plain tensors, while its parameters are DTensors, runs a plan."""
    for path, module in model.named_modules():
        if module is not model and not isinstance(module, torch.jit.ScriptModule):
            _enter(model, module, Entry(path))


def register_forward_method(module: nn.Module, method: str) -> None:
    """From now on, plan calls of this method of a planned model, or of one of its modules, like those of forward.

        autopar.register_forward_method(model, "encode")
        codes = model.encode(images)  # on every rank

    Otherwise the method's own code runs: each module that it calls is planned separately, and parameters that it reads
    are DTensors. Called on every rank. The method returns plain tensors: whole ones, or with `inputs="local"` the rows
    that the rank has passed, in dim 0 of every tensor that is as long as the first.

    Raises InputError for a module outside planned models, and for a method that its class does not have.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, Entered) and forward.model is not None:
        model, path = forward.model, forward.entry.path
    elif hasattr(module, ATTRIBUTE):
        model, path = module, ""
    else:
        raise InputError(
            f"this {type(module).__name__} is no part of a planned model: pass the model through autoparallelize first"
        )
    if method in ("forward", "__call__") or not callable(getattr(type(module), method, None)):
        named = (name for name in dir(type(module)) if not name.startswith("_"))
        raise InputError(
            f"{type(module).__name__} has no method {method!r} beside forward{did_you_mean(method, named)}"
        )
    if not isinstance(vars(module).get(method), Entered):
        _enter(model, module, Entry(path, method))
        getattr(model, ATTRIBUTE).structure = Structure(model)


def _enter(model: nn.Module, module: nn.Module, entry: Entry) -> None:
    own = vars(module)
    own[entry.method] = Entered(model, module, entry, own.get(entry.method))


@contextmanager
def as_built(model: nn.Module) -> Iterator[None]:
    """For the duration, modules have the user's methods again."""
    replaced = [
        (own, name, method)
        for module in model.modules()
        for own in [vars(module)]
        for name, method in own.items()
        if isinstance(method, Entered)
    ]
    for own, name, method in replaced:
        del own[name]
        if method.own is not None:
            own[name] = method.own
    try:
        yield
    finally:
        for own, name, method in replaced:
            own[name] = method
