"""The modules and parameters of a planned model: checks that none was replaced since it was planned.

For the modules' code, see `stored.methods`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import InputError
from autopar.runtime.stored.hooks_for_all import HooksForAll, refuse_backward_hooks_for_all
from autopar.runtime.stored.methods import Methods, is_within
from autopar.runtime.traces import Traced

_OF_INPUTS = ("make_inputs_require_grads", "make_inputs_require_grad")  # hooks of transformers and peft, by name
_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Structure:
    """The modules of a model when this is made. Checking whether one was replaced is fast, as every call does it."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = tuple(model.modules())
        self._names = {id(module): name for name, module in model.named_modules()}
        self._children = [
            (m, m._modules, dict(m._modules)) for m in self.modules if m._modules or isinstance(m, _CONTAINERS)
        ]
        self._hooks = [(m, getattr(m, kind)) for m in self.modules if m is not model for kind in _HOOKS]
        self._hook_counts = [len(hooks) for _, hooks in self._hooks]
        self._hooks_for_all = HooksForAll()
        self._methods = Methods(dict(model.named_modules()))
        self._copied_late = ""  # how the original was changed before this copy was made

    def of_copy(self, copied: nn.Module, traces: Iterable[Traced]) -> Structure:
        """The structure of a copy just made of this model; if the model was changed before, calls of the copy raise."""
        structure = Structure(copied)
        try:
            self.check(traces)
        except InputError as changed:
            structure._copied_late = changed.message
        return structure

    def check(self, traces: Iterable[Traced]) -> None:
        """Raise InputError if a module was replaced or removed, or added to a container that forward iterates over.
        Other modules may be added: the graph does not know them.

        Also if a hook was added to or removed from a submodule, or its code changed; not in modules that are ops of
        `traces`, whose own code runs.
        """
        if self._copied_late:
            raise InputError(self._copied_late)
        if not torch.compiler.is_compiling():
            self._hooks_for_all.check()
            if [len(hooks) for _, hooks in self._hooks] != self._hook_counts:
                self._check_hooks(_leaves(traces))
            if self._methods.are_others():
                self._methods.check(_leaves(traces))
        for module, children, before in self._children:
            if children != before:
                for name, child in before.items():
                    if child is not None and children.get(name) is not child:
                        path = ".".join(filter(None, [self._names[id(module)], name]))
                        raise InputError(
                            f"the module '{path}' was replaced or removed after the model was planned, and calls would "
                            "still use the old one: change the model first, then autoparallelize it"
                        )
                new = next((name for name in children if name not in before), None)
                if new is not None and isinstance(module, _CONTAINERS):
                    path = ".".join(filter(None, [self._names[id(module)], new]))
                    raise InputError(
                        f"the module '{path}' was added after the model was planned, and calls would leave it out: "
                        "change the model first, then autoparallelize it"
                    )

    def _check_hooks(self, leaves: Collection[str]) -> None:
        for (module, hooks), before in zip(self._hooks, self._hook_counts, strict=True):
            name = self._names[id(module)]
            if (
                len(hooks) != before
                and not is_within(name, leaves)
                and not _are_harmless(list(hooks.values())[before:])
            ):
                came = "registered on" if len(hooks) > before else "removed from"
                raise InputError(
                    f"a hook was {came} '{name}' after the model was planned, and calls run the plan, not the modules: "
                    "return from forward what the hook should see, or register it on the model itself"
                )
        self._hook_counts = [len(hooks) for _, hooks in self._hooks]


def _leaves(traces: Iterable[Traced]) -> set[str]:
    return {str(n.target) for traced in traces for n in traced.graph.nodes if n.op == "call_module"}


def _are_harmless(hooks: Sequence[Any]) -> bool:
    """Whether added hooks are those for inputs that `gradient_checkpointing_enable()` of transformers or peft adds."""
    return bool(hooks) and all(getattr(hook, "__name__", "") in _OF_INPUTS for hook in hooks)


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise InputError if submodules have backward hooks, or there are backward hooks for all modules."""
    refuse_backward_hooks_for_all()
    for name, module in model.named_modules():
        if module is not model and (module._backward_hooks or module._backward_pre_hooks):
            raise InputError(
                f"'{name}' has a backward hook, which would never run: calls run the plan, not the modules. Hooks of "
                "parameters run, and so does the backward of a torch.autograd.Function in forward"
            )


def refuse_transforms() -> None:
    """Raise InputError inside a transform of torch.func, in forward mode, or while torch.jit traces.

    None of these supports collectives.
    """
    if torch.compiler.is_compiling():  # a compiler traces the code before any transform
        return
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise InputError(
            "torch.jit.trace follows one process, and a planned model runs on all: write its weights with "
            "autopar.export_full_state, and trace a plain model that has loaded them"
        )
    # torch.func has no public way to ask whether one of its transforms is running
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise InputError(
            "a planned model was called inside a transform of torch.func (grad, vmap, jvp, jacrev, ...) or in forward-"
            "mode AD, which its collectives do not support: differentiate it with loss.backward() or "
            "torch.autograd.grad, or transform a model without a plan"
        )


def check_parameters(
    state: list[torch.Tensor],
    names: Sequence[str],
    stored: Mapping[str, tuple[Placement, ...]],
    before: list[torch.Tensor],
) -> None:
    """Raise InputError if a parameter was replaced by one that is not a DTensor, or has another layout than planned.

    Otherwise ranks would train copies that differ, or take one shard for another. `before`: the state that was checked
    last, which is then set to `state`; while they are the same, nothing is checked again.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and len(before) == len(state) and all(map(operator.is_, state, before)):
        return
    for tensor, name in zip(state, names, strict=True):
        if isinstance(tensor, DTensor) and name in stored and tensor.placements != stored[name]:
            raise InputError(
                f"the parameter '{name}' was replaced after the model was planned, by one with "
                f"placements {list(tensor.placements)} instead of {list(stored[name])}: tie weights before "
                "autoparallelize"
            )
        constant = name.startswith(("_constant_", "_module_"))  # unregistered attributes of the model
        own = name in stored or (isinstance(tensor, nn.Parameter) and not constant)
        if own and not isinstance(tensor, DTensor):
            raise InputError(
                f"the parameter '{name}' was replaced after the model was planned, by one that is not a DTensor: write "
                "values into the old one, with copy_ or load_state_dict, and give functional_call tensors that are "
                "computed from the model's own parameters"
            )
    if not compiling:
        before[:] = state
