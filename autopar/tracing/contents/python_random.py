"""Numbers that a forward draws from Python's or numpy's global generator; a graph would keep them constant."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from autopar.tracing import places
from autopar.tracing.errors import DrawError
from autopar.tracing.patching import attributes_set

_GENERATED = "<@"  # prefix of the file names of generated code: "<@beartype(Model.forward) at 0x...>"
_SHARES = {("random",), ("rand",), ("random_sample",), ("uniform",), ("uniform", 0, 1)}  # calls that draw from [0, 1)
_STATES = ("seed", "getstate", "setstate", "get_state", "set_state")


@contextlib.contextmanager
def draws_refused(model: nn.Module) -> Iterator[None]:
    """While inside, a draw by the user's own code raises a DrawError with its line.

    Installed packages may draw: they do so for layer drop even if its probability is zero (see `_Share`). So may code
    that a decorator generates to check types, which picks a list element to look at. Drawing functions are also
    replaced where the model's files import them (`from random import random`) and where generated functions keep them.
    Any other draw shows in the states of the generators afterwards.
    """
    expected = [_states()]

    def watched(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            place = places.current()
            if place and not places.is_installed(place) and not place.startswith(_GENERATED):
                raise _refusal(f"{name}()", place)
            result = draw(*args, **kwargs)
            expected[0] = _states()
            is_share = type(result) is float and (name, *args) in _SHARES and not kwargs
            return _Share(result) if is_share else result

        return drawn

    names = {id(draw): (name, draw) for module in _generators() for name, draw in _draws(module).items()}
    with contextlib.ExitStack() as stack:
        for module in (*_generators(), *_files_of(model)):
            drawing = [(key, *names[id(value)]) for key, value in vars(module).items() if id(value) in names]
            stack.enter_context(attributes_set(module, **{key: watched(name, draw) for key, name, draw in drawing}))
        for function in _generated(model):
            defaults = function.__kwdefaults__ or {}
            drawing = [(key, *names[id(value)]) for key, value in defaults.items() if id(value) in names]
            if drawing:
                stack.callback(setattr, function, "__kwdefaults__", defaults)
                function.__kwdefaults__ = {**defaults, **{key: watched(name, draw) for key, name, draw in drawing}}
        yield
    if _states() != expected[0]:
        raise _refusal("a function", "")


class _Share(float):
    """A number in [0, 1) that a library drew. It can be compared with 0 or 1, for which the result is certain."""

    def _is_above(self, other: float) -> bool:
        if 0 < other < 1:
            raise _refusal(f"a library (the chance is {other})", places.current())
        return other <= 0

    def __lt__(self, other: float) -> bool:
        return not self._is_above(other)

    def __gt__(self, other: float) -> bool:
        return self._is_above(other)

    __le__, __ge__ = __lt__, __gt__


def _refusal(function: str, place: str) -> DrawError:
    return DrawError(
        f"forward draws a number by {function} of Python or numpy, which all calls of the graph would share, and ranks "
        "would draw differently: draw with torch.rand in forward and choose with torch.where, or draw in the loop, "
        "alike on all ranks, and pass it as an argument",
        where=place,
    )


def _generators() -> list[ModuleType]:
    numpy = sys.modules.get("numpy")
    return [random] if numpy is None else [random, numpy.random]


def _draws(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The methods of the module's hidden generator object, which the module exports as functions."""
    hidden = random._inst if module is random else sys.modules["numpy.random.mtrand"]._rand
    return {k: v for k, v in vars(module).items() if getattr(v, "__self__", None) is hidden and k not in _STATES}


def _files_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the model's classes."""
    modules = [sys.modules.get(name) for name in dict.fromkeys(type(m).__module__ for m in model.modules())]
    return [file for file in modules if file is not None]


def _generated(model: nn.Module) -> list[FunctionType]:
    """The functions that decorators generated around methods of the model's classes, also around one another."""
    classes = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    waiting = [value for kind in classes for value in vars(kind).values() if isinstance(value, FunctionType)]
    functions = dict.fromkeys(waiting)
    while waiting:
        for cell in waiting.pop().__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty closure cell
                if isinstance(inner := cell.cell_contents, FunctionType) and inner not in functions:
                    functions[inner] = None
                    waiting.append(inner)
    return [function for function in functions if function.__code__.co_filename.startswith(_GENERATED)]


def _states() -> list[str]:
    return [repr(module.getstate() if module is random else module.get_state()) for module in _generators()]
