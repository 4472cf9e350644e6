"""Plain values that a forward reads from its modules. They are constants of the graph, so calls check them.

Training loops set many such values: the weight of a loss term, the stage of a network that grows, a dropout's `p`, a
field of the config. While a model is traced, reads of attributes are noted for modules, objects that they hold, and the
loss function. Values are looked up after the trace, when everything that forward itself has set is restored.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.python.containers import elements, length
from autopar.tracing.leaves.loss_owners import Enclosed, owners_of
from autopar.tracing.patching import attributes_set

# Types of plain values: compared by identity, by value, and element by element.
_TOLD_BY_IDENTITY = FunctionType, BuiltinFunctionType, type
_NUMBERS = bool, int, float, complex, np.generic
_SCALARS = (*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, *_TOLD_BY_IDENTITY)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_PLAIN = (*_SCALARS, *_CONTAINERS, np.ndarray, torch.Tensor)
_KINDS = frozenset(_PLAIN)
_OTHERS = (nn.Module, torch.Tensor, MethodType, ModuleType)  # checked elsewhere, or not at all
_MODULES_OWN = frozenset((*vars(nn.Module()), *vars(nn.Module), "__class__"))
_LARGE = 256
"""Elements: larger containers are compared by identity and length. They are tables, which loops do not change."""
_UNKNOWN = object()
_SET = -1  # differs from any `id`

Place = tuple[str, tuple[str, ...]]
"""The path of a module, and the attribute names that lead from it to a value."""


class PlainReads:
    """The places of plain values that are read from a model's modules and its loss while it is traced."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._modules = {id(module): path for path, module in model.named_modules()}
        self._of_loss = {path: owner for path, owner in owners_of(loss_fn).items() if id(owner) not in self._modules}
        self._modules |= {id(owner): path for path, owner in self._of_loss.items() if isinstance(owner, nn.Module)}
        self._objects: dict[int, tuple[Any, Place]] = {}  # held by modules; kept alive, so that no id is reused
        self._places: dict[Place, None] = {}
        self._first: dict[Place, int] = {}  # by attribute: `id` of what was read first; `_SET` if set before
        self._patches = contextlib.ExitStack()
        self._patched: set[type] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """While inside, note what is read."""
        before: Any = nn.Module.__getattribute__
        registered: Any = nn.Module.__getattr__
        before_set: Any = nn.Module.__setattr__
        modules, note, first = self._modules, self._note, self._first

        def read(module: nn.Module, name: str) -> Any:
            value = before(module, name)
            if name not in _MODULES_OWN and (path := modules.get(id(module))) is not None and name[:2] != "__":
                first.setdefault((path, (name,)), id(value))
                note(value, path, (name,))
            return value

        def read_registered(module: nn.Module, name: str) -> Any:
            path = modules.get(id(module))
            value = None
            try:
                value = registered(module, name)
            finally:
                if path is not None:  # also if there is no such attribute
                    first.setdefault((path, (name,)), id(value))
            if value is None and name in module._buffers and path is not None:
                note(value, path, (name,))
            return value

        def set_one(module: nn.Module, name: str, value: Any) -> None:
            if (path := modules.get(id(module))) is not None:
                first.setdefault((path, (name,)), _SET)
            before_set(module, name, value)

        patches = {"__getattribute__": read, "__getattr__": read_registered, "__setattr__": set_one}
        with self._patches, attributes_set(nn.Module, **patches):
            for path, owner in self._of_loss.items():
                if isinstance(owner, Enclosed):
                    for name, value in owner.items():
                        if not isinstance(value, list):  # training loops collect results in lists
                            note(value, path, (name,))
                elif not isinstance(owner, nn.Module):
                    self._objects[id(owner)] = owner, (path, ())
                    self._follow(type(owner))
            yield

    def _note(self, value: Any, path: str, names: tuple[str, ...]) -> None:
        if type(value) in _KINDS or isinstance(value, _PLAIN):
            self._places[path, names] = None
        elif not isinstance(value, _OTHERS) and id(value) not in self._objects and _has_attributes(value):
            self._objects[id(value)] = value, (path, names)
            self._follow(type(value))

    def _follow(self, kind: type) -> None:
        """From now on note reads from objects of this type that the model holds."""
        if kind in self._patched or kind.__module__.partition(".")[0] in ("torch", "autopar"):
            return
        before: Any = kind.__getattribute__
        objects, note = self._objects, self._note

        def read(owner: Any, name: str) -> Any:
            value = before(owner, name)
            if not name.startswith("__") and (place_of_object := objects.get(id(owner))) is not None:
                _, (path, names) = place_of_object
                note(value, path, (*names, name))
            return value

        with contextlib.suppress(TypeError, AttributeError):  # types written in C
            self._patches.enter_context(attributes_set(kind, __getattribute__=read))
            self._patched.add(kind)

    def _state_of_loss(self) -> list[Place]:
        """The places of `training` and buffers of the loss's modules; those of the model are checked elsewhere."""
        modules = [(path, owner) for path, owner in self._of_loss.items() if isinstance(owner, nn.Module)]
        return [(path, (name,)) for path, owner in modules for name in ("training", *owner._buffers)]

    def began_with(self, path: str, name: str, value: Any) -> bool:
        """Whether forward read an attribute with this value (None for a missing one) before it set it."""
        return self._first.get((path, (name,))) == id(value)

    @property
    def of_loss(self) -> Mapping[str, Any]:
        """The objects that the loss reads from, by path: modules, other objects, closures."""
        return self._of_loss

    def has_read(self, path: str, name: str) -> bool:
        """Whether forward asked for an attribute before it set it."""
        return self._first.get((path, (name,)), _SET) != _SET

    def values(
        self, model: nn.Module, without: Iterable[nn.Module], set_attributes: Iterable[tuple[str, str]] = ()
    ) -> PlainValues:
        """The current values, without those of modules in `without` (leaves, whose own code runs at each call), and
        without the attributes `set_attributes` (calls set them or take them as inputs)."""
        leaves = {id(module) for leaf in without for module in leaf.modules()}
        modules = {path: module for path, module in model.named_modules() if id(module) not in leaves}
        modules |= self._of_loss
        values = {}
        set_by_calls = {(path, (name,)) for path, name in set_attributes}
        for path, names in (*self._places, *self._state_of_loss()):
            if (
                (path, names[:1]) not in set_by_calls
                and path in modules
                and _is_kept(modules[path], names, of_loss=path in self._of_loss)
            ):
                values[path, names] = _frozen(_value(modules[path], names))
        return PlainValues({place: value for place, value in values.items() if value is not _UNKNOWN}, self._of_loss)


class PlainValues:
    """Plain values by their places in a model and its loss."""

    def __init__(self, values: dict[Place, Any], of_loss: Mapping[str, Any] | None = None) -> None:
        self._values, self._of_loss = values, of_loss or {}

    def on(self, model: nn.Module) -> Callable[[], dict[str, Any]]:
        """A fast check of `model` (or a copy of it): a function that returns the values that have changed, by name."""
        modules = {**self._of_loss, **dict(model.named_modules())}
        quick: dict[str, dict[str, Any]] = {}  # by module: scalars in the instance's own `__dict__`
        for (path, names), value in self._values.items():
            if names[0] in vars(modules[path]) and isinstance(value, _SCALARS) and len(names) == 1:
                quick.setdefault(path, {})[names[0]] = value
        looks = []
        for path, values in quick.items():
            twice = (*values.values(), *values.values())  # twice, since an itemgetter of a single name returns no tuple
            looks.append((vars(modules[path]), operator.itemgetter(*values, *values), twice, [*map(type, twice)]))
        others = [
            (modules[path], names, value)
            for (path, names), value in self._values.items()
            if len(names) > 1 or names[0] not in quick.get(path, ())
        ]

        def are_alike() -> bool:
            try:
                for own, get, values, kinds in looks:
                    current = get(own)
                    if current != values or [*map(type, current)] != kinds:  # 1 is not 1.0
                        return False
            except Exception:  # missing, or not comparable any more
                return False
            return all(_same(_frozen(_value(module, names)), value) for module, names, value in others)

        def changed() -> dict[str, Any]:
            if are_alike():
                return {}
            current = {place: _value(modules[place[0]], place[1]) for place in self._values}
            return {
                ".".join(filter(None, [path, *names])): current[path, names]
                for (path, names), value in self._values.items()
                if not _same(_frozen(current[path, names]), value)
            }

        return changed


class _Identity:
    """A tensor or large container, equal only to itself.

    Tensors are referenced weakly, as a trace may have made one that nobody keeps; lists do not allow weak references.
    """

    def __init__(self, value: Any, length: int = 0) -> None:
        self._value: Callable[[], Any] = (lambda: value) if isinstance(value, _CONTAINERS) else weakref.ref(value)
        self._length = length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or other._length != self._length:
            return False
        mine = self._value()
        return mine is not None and other._value() is mine

    __hash__ = None  # type: ignore[assignment]


def _same(current: Any, before: Any) -> bool:
    return current is before or (type(current) is type(before) and bool(current == before))


def _is_kept(module: nn.Module, names: tuple[str, ...], *, of_loss: bool) -> bool:
    """Whether a value is one that the user may change: no registered tensor, and no property or function of a class.

    A buffer that is None counts, since a tensor set in its place would be read. A tensor that the loss registers counts
    as well: it is a constant of the graph, so replacing it is a change.
    """
    owner = module if len(names) == 1 else _value(module, names[:-1])
    kind: type = type(owner)
    if _is_of_class(kind, names[-1]):
        return False
    if of_loss or not isinstance(owner, nn.Module):
        return True
    return names[-1] not in owner._parameters and owner._buffers.get(names[-1]) is None


def _has_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


@functools.cache
def _is_of_class(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), (property, staticmethod))


def _value(module: nn.Module, names: tuple[str, ...]) -> Any:
    value: Any = module
    for name in names:
        value = getattr(value, name, _UNKNOWN)
    return value


def _frozen(value: Any) -> Any:
    """A value in a form that later values can be compared with; `_UNKNOWN` if it is not plain."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, torch.Tensor):
        return _UNKNOWN if isinstance(value, nn.Parameter) else _Identity(value)
    if isinstance(value, np.ndarray):
        if value.size > _LARGE or value.dtype.hasobject:
            return _Identity(value)
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, _CONTAINERS):
        if length(value) > _LARGE:
            return _Identity(value, length(value))
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else elements(value)
        pairs = value.items() if isinstance(value, dict) else enumerate(ordered)
        return type(value), [(key, inner) for key, element in pairs if (inner := _frozen(element)) is not _UNKNOWN]
    return _UNKNOWN
