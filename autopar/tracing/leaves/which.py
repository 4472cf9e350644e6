"""Which modules are leaves: one node each, not traced.

Policy `flat`: only declared types. `layers`: also the layers of torch.nn, and activations and Conv1D of transformers.
`LeafPolicy` also holds the modules that had to become leaves because they could not be traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

from torch import nn

Predicate = Callable[[nn.Module, str], bool]
LeafTypes = Sequence["type[nn.Module] | str"]

_RULES: dict[type[nn.Module], Callable[..., Any]] = {}


@contextlib.contextmanager
def leaf_rule(kind: type[nn.Module], rule: Callable[..., Any]) -> Iterator[None]:
    """While inside, modules of this type are leaves; `rule(module, *args, **kwargs)` makes their data-free output."""
    before = _RULES.get(kind)
    _RULES[kind] = rule
    try:
        yield
    finally:
        del _RULES[kind]
        if before is not None:
            _RULES[kind] = before


def rule_of(module: nn.Module) -> Callable[..., Any] | None:
    """The declared rule for a module's data-free output."""
    return _RULES.get(type(module))


@dataclass
class LeafPolicy:
    """`leaf_types` match by isinstance or dotted name, `exact_types` by type; `predicates` by type, or one for all.

    `failed`: modules that could not be traced, and why; `functions`: likewise for functions, of which those `in_root`
    could not where no submodule was running: their calls in submodules are traced.
    """

    policy: Literal["flat", "layers"] = "flat"
    leaf_types: LeafTypes = ()
    exact_types: frozenset[type[nn.Module]] = frozenset()
    non_leaf_types: tuple[type[nn.Module], ...] = ()
    predicates: Mapping[type[nn.Module], Predicate] | Predicate | None = None
    opened: Predicate | None = None  # layers that must be traced because of an option (the bias split)
    failed: dict[nn.Module, str] = field(default_factory=dict)
    functions: dict[FunctionType, str] = field(default_factory=dict)
    in_root: set[FunctionType] = field(default_factory=set)
    unrolled: dict[type[nn.Module], str] = field(default_factory=dict)  # types that unroll a loop: the error
    max_nodes: int = 40_000  # of a graph; beyond it, modules that unroll a loop become leaves

    def add_function(self, function: FunctionType, reason: str, *, in_root: bool) -> None:
        """Make a function a leaf from now on."""
        self.functions[function] = reason
        if in_root:
            self.in_root.add(function)

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """Whether a call of this module is one node."""
        kind = type(module)
        if module in self.failed or kind in _RULES or kind in self.exact_types or kind in self.unrolled:
            return True
        if self.non_leaf_types and isinstance(module, self.non_leaf_types):
            return False
        if any(_is_type(module, kind) for kind in self.leaf_types):
            return True
        if callable(self.predicates):
            if self.predicates(module, path):
                return True
        elif self.predicates and type(module) in self.predicates and self.predicates[type(module)](module, path):
            return True
        return self.policy == "layers" and is_layer(module) and not (self.opened and self.opened(module, path))

    def reasons(self, root: nn.Module) -> dict[nn.Module, str]:
        """Why modules had to become leaves."""
        looping = {m: self.unrolled[type(m)] for m in root.modules() if type(m) in self.unrolled}
        return {**looping, **self.failed}


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a layer of torch.nn (no container), or an activation or Conv1D of transformers."""
    home = type(module).__module__
    if home.startswith(("torch.nn", "torch.ao.nn")):
        return not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return (
        home == "transformers.activations"
        or f"{home}.{type(module).__qualname__}" == "transformers.pytorch_utils.Conv1D"
    )


def _is_type(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    return any(f"{t.__module__}.{t.__qualname__}" == kind for t in type(module).__mro__)
