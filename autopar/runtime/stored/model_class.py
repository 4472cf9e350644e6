"""The class that a planned model gets: a subclass of the user's, with the user's signature."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar.errors import InputError
from autopar.runtime.calling.ambient import ambient_kept
from autopar.runtime.stored.structure import refuse_transforms
from autopar.runtime.weights.loaded_states import deal_out_state

ATTRIBUTE = "_autopar"
"""Name of the model's attribute that holds its `Planned`."""


def planned_class(user_class: type[nn.Module], extra_inputs: Sequence[str]) -> type[nn.Module]:
    """A subclass of the same name whose `forward` runs the plan.

    The class is replaced, and not `forward` on the instance: an instance's own `forward` would keep the first model
    alive in its deep copies, and hide the signature from code that inspects the class. `extra_inputs` (those of a loss
    that was traced in) are further keyword arguments.
    """

    @functools.wraps(user_class.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        refuse_transforms()
        with ambient_kept():
            return getattr(self, ATTRIBUTE).run(self, args, kwargs)

    signature = inspect.signature(user_class.forward)
    forward.__signature__ = _with_keywords(signature, extra_inputs)  # type: ignore[attr-defined]
    members: dict[str, Any] = {
        "forward": forward,
        "__module__": user_class.__module__,
        "__qualname__": user_class.__qualname__,
        "__doc__": user_class.__doc__,
    }
    if not hasattr(user_class, "no_sync"):
        members["no_sync"] = no_sync
    members["__reduce_ex__"] = _not_pickled
    members["__deepcopy__"] = _deep_copied(getattr(user_class, "__deepcopy__", None) or _copied(copy.deepcopy))
    if not hasattr(user_class, "__copy__"):
        members["__copy__"] = _copied(lambda state, memo: dict(state))
    members["zero_grad"] = _zero_grad(user_class)
    members["_load_from_state_dict"] = _load(user_class)
    if callable(getattr(user_class, "generate", None)):
        members["generate"] = _generate(user_class)
    subclass: type[nn.Module] = type(user_class)(user_class.__name__, (user_class,), members)  # type: ignore[misc]
    return subclass


@contextmanager
def no_sync(self: nn.Module) -> Iterator[None]:
    """For loops that accumulate gradients: those of calls made inside are kept unreduced, and reduced together with
    those of the first backward outside. Once this was used, the plan's `micro_batches` no longer counts."""
    with getattr(self, ATTRIBUTE).accumulation.no_sync():
        yield


def _not_pickled(self: nn.Module, protocol: Any) -> Any:
    raise InputError(
        "a planned model cannot be pickled (torch.save(model), multiprocessing): it holds one rank's shards and "
        "process groups. On every rank, autopar.export_full_state(model, folder) writes its weights for any model to "
        "load, and autopar.save_checkpoint what training needs to go on"
    )


def _copied(how: Callable[[Any, dict[int, Any]], Any]) -> Callable[..., nn.Module]:
    """A copy method that works as `copy` does for classes without one; `how`: copies the state."""

    def copied(self: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
        memo = {} if memo is None else memo
        copy_of_model: nn.Module = type(self).__new__(type(self))
        memo[id(self)] = copy_of_model
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        copy_of_model.__setstate__(how(state, memo))
        return copy_of_model

    return copied


def _deep_copied(how: Callable[[Any, dict[int, Any]], Any]) -> Callable[[nn.Module, dict[int, Any]], nn.Module]:
    """A deep copy whose structure is recorded at once, as loops may change a copy before they call it."""

    @functools.wraps(how)
    def copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        copy_of_model: nn.Module = how(self, memo)
        if (planned := getattr(copy_of_model, ATTRIBUTE, None)) is not None:
            planned.belong_to(copy_of_model, getattr(self, ATTRIBUTE))
        return copy_of_model

    return copied


def _zero_grad(user_class: type[nn.Module]) -> Callable[..., None]:
    @functools.wraps(user_class.zero_grad)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        getattr(self, ATTRIBUTE).accumulation.forget()
        user_class.zero_grad(self, *args, **kwargs)

    return zero_grad


def _load(user_class: type[nn.Module]) -> Callable[..., None]:
    """`_load_from_state_dict` of a class, with plain tensors (from a file or a plain model) dealt out before."""

    @functools.wraps(user_class._load_from_state_dict)
    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        deal_out_state(self, state_dict, prefix)
        user_class._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)

    return load


def _generate(user_class: Any) -> Callable[..., Any]:
    @functools.wraps(user_class.generate)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with getattr(self, ATTRIBUTE).whole_outputs():
            return user_class.generate(self, *args, **kwargs)

    return generate


def _with_keywords(signature: inspect.Signature, names: Sequence[str]) -> inspect.Signature:
    """The signature with further keyword-only parameters, before a final `**kwargs`."""
    parameters = list(signature.parameters.values())
    last = [parameters.pop()] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    further = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in names
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[*parameters, *further, *last])
