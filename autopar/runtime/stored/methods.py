"""The code of a planned model's modules: checks that each has the class, forward and methods it was planned with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from autopar.calls.entries import StandIn
from autopar.errors import InputError


class Methods:
    """The code of a model's modules, by their names. The check is fast, as it runs at every call.

    Of the root, whose class and forward are the plan's, only what is set on the instance counts.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = list(modules.items())
        self._inner = [module for name, module in self._modules if name]
        self._kinds: list[type[nn.Module]] = list(map(type, self._inner))
        self._forwards = [(kind, kind.forward) for kind in dict.fromkeys(self._kinds)]
        self._own = [vars(module) for _, module in self._modules]
        self._lengths = list(map(len, self._own))
        self._set = [(owner, name, own[name]) for owner, own, name in self._set_on_instances()]

    def are_others(self) -> bool:
        """Whether code may have changed: an instance has more or fewer attributes, or known code was replaced."""
        return (
            list(map(type, self._inner)) != self._kinds
            or list(map(len, self._own)) != self._lengths
            or any(kind.forward is not forward for kind, forward in self._forwards)
            or any(vars(module).get(name) is not method for module, name, method in self._set)
        )

    def check(self, leaves: Collection[str]) -> None:
        """Raise InputError if code has changed, except in `leaves` and their submodules, whose own code runs."""
        self._check_kinds(leaves)
        self._check_forwards(leaves)
        self._check_set(leaves)

    def _check_kinds(self, leaves: Collection[str]) -> None:
        for (name, module), kind in zip(
            [named_module for named_module in self._modules if named_module[0]], self._kinds, strict=True
        ):
            if type(module) is not kind and not is_within(name, leaves):
                raise InputError(
                    f"'{name}' was a {kind.__name__} when the model was planned, and is a {type(module).__name__} now "
                    "(a parametrization does this); calls would still use the old one: change the model first, then "
                    "autoparallelize it"
                )
        self._kinds = list(map(type, self._inner))

    def _check_forwards(self, leaves: Collection[str]) -> None:
        before = dict(self._forwards)
        for name, module in self._modules:
            kind = type(module)
            if kind in before and kind.forward is not before[kind] and not is_within(name, leaves):
                raise _replaced(name, "forward")
        self._forwards = [(kind, kind.forward) for kind, _ in self._forwards]

    def _check_set(self, leaves: Collection[str]) -> None:
        before = {(id(module), name): function for module, name, function in self._set}
        current = {(id(module), name): own[name] for module, own, name in self._set_on_instances()}
        names = {id(module): name for name, module in self._modules}
        for key in before.keys() | current.keys():
            was, present = before.get(key), current.get(key)
            gives_way = present is None and isinstance(was, StandIn)  # the user's own method is back
            if was is not present and not gives_way and not is_within(names[key[0]], leaves):
                raise _replaced(names[key[0]], key[1])
        self._lengths = list(map(len, self._own))
        self._set = [(owner, name, own[name]) for owner, own, name in self._set_on_instances()]

    def _set_on_instances(self) -> Iterator[tuple[nn.Module, dict[str, Any], str]]:
        """Instance attributes that replace a function of the class."""
        for (path, module), own in zip(self._modules, self._own, strict=True):
            for name, value in own.items():
                if callable(value) and callable(getattr(type(module), name, None)) and (path or name != "forward"):
                    yield module, own, name


def is_within(name: str, leaves: Collection[str]) -> bool:
    return any(name == leaf or name.startswith(f"{leaf}.") for leaf in leaves)


def _replaced(path: str, name: str) -> InputError:
    where = f"'{path}'" if path else "the model"
    return InputError(
        f"the method {name} of {where} was replaced after the model was planned, and calls would still use the old "
        "one: change the model first, then autoparallelize it"
    )
