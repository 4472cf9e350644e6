"""The experts of a mixture (transformers): one node a call, from tokens and their routes to the weighted sum.

Inside, tokens are sorted by expert: an order that depends on data and on all tokens, so no op in there could be split.
As a whole the experts split three ways: on the tokens, since each goes its own way; on the experts, each rank with some
of them, whose results are summands; within every expert. The library's own code runs, whichever of its
implementations the model is set to.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
# What transformers sets on every class that it gives a choice of implementations, and what holds where a version of it
# has no such word yet: of 5.3 all have the first two, of 5.20 all.
_MARKS = {
    "has_bias": None,
    "is_transposed": None,
    "has_gate": True,
    "is_concatenated": True,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}
_SKIPS = (5, 17)  # the version from which its implementations leave routes to no expert out, in gradients too
_COPYING = "batched_mm_experts_forward"  # transformers' own
_OF_MODULES = frozenset(nn.Module().__dict__)
_NAMES = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")


class Experts:
    """The call of a module of experts as a node's target: `experts(hidden, index, weights, *parameters)`.

    hidden (tokens, width), index and weights (tokens, k), parameters by `names`, as the module holds them. `held`: how
    many experts the parameters are for, if not all; routes are then numbered among them, those to others as `held`,
    with no weight.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], names: tuple[str, ...]) -> None:
        self.__name__ = self.__qualname__ = "experts"
        self.module, self.forward, self.names = module, forward, names
        self.options = {mark: bool(getattr(module, mark, otherwise)) for mark, otherwise in _MARKS.items()}
        self._plain, own = _plain_class(type(module)), [name for name in module.__dict__ if name not in _OF_MODULES]
        self._held = (*own, "training", *module._modules, *module._buffers)

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, *given: Tensor, held: int | None = None
    ) -> Tensor:
        parameters = dict(zip(self.names, given, strict=True))
        if hidden.device.type == "meta":
            return self._data_free(hidden, index, weights, parameters)
        twin = self._twin(parameters)
        if held is not None:
            skips = self.forward.__module__.startswith("transformers.integrations.") and _version() >= _SKIPS
            twin.num_experts, twin._is_expert_parallel = held, skips
            if not skips:  # as a model's own loop, which may not know them: they go to an expert, with no weight
                index = index.clamp(max=held - 1)
        return self.forward(twin, hidden, index, weights)

    def _twin(self, parameters: Mapping[str, Tensor]) -> Any:
        """The module with these parameters in place of its own."""
        if torch.compiler.is_compiling():
            return self._plain(self.module, self._held, parameters)
        twin = copy.copy(self.module)
        twin.__dict__["_parameters"] = dict(parameters)
        return twin

    def _data_free(self, hidden: Tensor, index: Tensor, weights: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """The same products, of the same sizes, as if every token went to the first expert; where each route takes a
        copy of its expert's weights, so it does here."""
        if getattr(self.forward, "__name__", "") == _COPYING:
            copied: Tensor = self.forward(self._twin(parameters), hidden, index, weights)
            return copied
        module, first = self._twin(parameters), {name: tensor[0] for name, tensor in parameters.items()}
        rows = hidden.repeat_interleave(index.shape[1], 0)
        for name in ("gate_up_proj" if self.options["has_gate"] else "up_proj", "down_proj"):
            weight = first[name] if self.options["is_transposed"] else first[name].t()
            rows = rows @ weight
            if f"{name}_bias" in first:
                rows = rows + first[f"{name}_bias"]
            if name != "down_proj":
                rows = module._apply_gate(rows) if self.options["has_gate"] else module.act_fn(rows)
        rows = rows * weights.reshape(-1, 1)
        return rows.view(*index.shape, hidden.shape[1]).sum(1).to(hidden.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experts) and self._kind() == other._kind()

    def __hash__(self) -> int:
        return hash(type(self.module))

    def _kind(self) -> tuple[Any, ...]:
        return (type(self.module), self.forward, self.names, self.options)


def _plain_class(module_class: type[nn.Module]) -> type:
    """A class with the methods of a module's that is no module: of these the compiler follows no copies, and torch
    2.11's not what lists their attributes."""

    def __init__(self: Any, module: nn.Module, held: Sequence[str], parameters: Mapping[str, Tensor]) -> None:
        for name in held:
            setattr(self, name, getattr(module, name))
        for name, value in parameters.items():
            setattr(self, name, value)

    own = [each for each in reversed(module_class.__mro__) if each not in nn.Module.__mro__]
    methods = {name: value for each in own for name, value in vars(each).items() if not name.startswith("__")}
    return type(module_class.__name__, (), {**methods, "__init__": __init__})


@contextlib.contextmanager
def experts_as_one(recorder: Recorder) -> Iterator[None]:
    """While inside, calls of transformers' experts are one node each, where they are of the common form."""
    library = sys.modules.get("transformers.integrations.moe")
    interface = getattr(library, "ExpertsInterface", None)
    find = getattr(interface, "get_interface", None)
    if interface is None or find is None:  # it is not there, or older than 5.3
        yield
        return

    def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        forward = find(self, implementation, default)

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            names = _parameter_names(module, args, kwargs) if recorder.is_recording() else None
            if names is None:
                return forward(module, *args, **kwargs)
            target = Experts(module, forward, names)
            return recorder.record_call(target, target, (*args, *(getattr(module, n) for n in names)), {})

        return run

    with attributes_set(interface, get_interface=get_interface):
        yield


def _parameter_names(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The module's parameters in order; None where the call is not of the common form."""
    if any(w is None and not hasattr(module, mark) for mark, w in _MARKS.items()) or kwargs or len(args) != 3:
        return None
    own = {name for name, _ in module.named_parameters()}
    if not own <= set(_NAMES) or getattr(module, "_is_expert_parallel", False):
        return None
    if not all(isinstance(a, Tensor) and a.dim() == 2 for a in args):
        return None
    if args[0].shape[0] != args[1].shape[0] or args[1].shape != args[2].shape:
        return None
    return tuple(name for name in _NAMES if name in own)


def _version() -> tuple[int, ...]:
    """Of transformers, whose experts were traced: its first two numbers."""
    return tuple(int(part) for part in sys.modules["transformers"].__version__.split(".")[:2])
