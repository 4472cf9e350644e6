"""The experts of a mixture of experts (transformers): one node a call, from tokens and routes to weighted sums.

Inside, tokens are sorted by expert. This order depends on data and on all tokens, so no op in there could be sharded.
As a whole, the experts can be sharded in three ways: along tokens, which are independent; over experts, where each rank
holds some and results are partial sums; and within every expert. The library's own code runs, in whichever
implementation the model is set to.
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
# Attributes that transformers sets on every class with a choice of implementations, and the value where its version
# does not know one yet (None: all versions do). 5.3 has the first two, 5.20 has all.
_MARKS = {
    "has_bias": None,
    "is_transposed": None,
    "has_gate": True,
    "is_concatenated": True,
    "has_post_expert_norm": False,
    "_is_expert_parallel": False,
}
_SKIPS = (5, 17)  # the first version of transformers whose implementations skip routes to no expert, also in gradients
_COPYING = "batched_mm_experts_forward"  # an implementation of transformers
_OF_MODULES = frozenset(nn.Module().__dict__)
_NAMES = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")


class Experts:
    """The call of a module of experts as a node's target: `experts(hidden, index, weights, *parameters)`.

    hidden (tokens, width), index and weights (tokens, k), parameters by `names`, as the module has them.
    `local_experts`: the number of experts that the parameters are for, if not all; index then counts among these, and
    is `local_experts`, with weight 0, for routes to other experts."""

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], names: tuple[str, ...]) -> None:
        self.__name__ = self.__qualname__ = "experts"
        self.module, self.forward, self.names = module, forward, names
        self.options = {mark: bool(getattr(module, mark, otherwise)) for mark, otherwise in _MARKS.items()}
        self._plain, own = _plain_class(type(module)), [name for name in module.__dict__ if name not in _OF_MODULES]
        self._held = (*own, "training", *module._modules, *module._buffers)

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, *tensors: Tensor, local_experts: int | None = None
    ) -> Tensor:
        parameters = dict(zip(self.names, tensors, strict=True))
        if hidden.device.type == "meta":
            return self._data_free(hidden, index, weights, parameters)
        twin = self._twin(parameters)
        if local_experts is not None:
            skips = self.forward.__module__.startswith("transformers.integrations.") and _version() >= _SKIPS
            twin.num_experts, twin._is_expert_parallel = local_experts, skips
            if not skips:  # a model's own loop may not accept such routes: send them to an expert, with weight 0
                index = index.clamp(max=local_experts - 1)
        return self.forward(twin, hidden, index, weights)

    def _twin(self, parameters: Mapping[str, Tensor]) -> Any:
        """A copy of the module with these parameters."""
        if torch.compiler.is_compiling():
            return self._plain(self.module, self._held, parameters)
        twin = copy.copy(self.module)
        twin.__dict__["_parameters"] = dict(parameters)
        return twin

    def _data_free(self, hidden: Tensor, index: Tensor, weights: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Matrix products of the same sizes, as if every token went to the first expert.

        An implementation that copies an expert's weights for each route does so here, too.
        """
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
    """A class with a module class's methods that is no nn.Module: torch.compile supports no copies of modules, and
    that of torch 2.11 does not support listing their attributes."""

    def __init__(self: Any, module: nn.Module, attributes: Sequence[str], parameters: Mapping[str, Tensor]) -> None:
        for name in attributes:
            setattr(self, name, getattr(module, name))
        for name, value in parameters.items():
            setattr(self, name, value)

    own = [kind for kind in reversed(module_class.__mro__) if kind not in nn.Module.__mro__]
    methods = {name: value for kind in own for name, value in vars(kind).items() if not name.startswith("__")}
    return type(module_class.__name__, (), {**methods, "__init__": __init__})


@contextlib.contextmanager
def experts_as_one(recorder: Recorder) -> Iterator[None]:
    """While inside, calls of transformers' experts are one node each, if they have the common form."""
    library = sys.modules.get("transformers.integrations.moe")
    interface = getattr(library, "ExpertsInterface", None)
    find = getattr(interface, "get_interface", None)
    if interface is None or find is None:  # transformers is not imported, or older than 5.3
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
    """The names of the module's parameters in order; None if the call does not have the common form."""
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
    """Major and minor version of transformers, which has been imported if its experts were traced."""
    return tuple(int(part) for part in sys.modules["transformers"].__version__.split(".")[:2])
