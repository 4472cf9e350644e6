"""Numbers that a forward draws from Python's or numpy's global generator: a graph would hold them fixed."""

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

_GENERATED = "<@"  # how their files are called: "<@beartype(Model.forward) at 0x...>"
_SHARES = {("random",), ("rand",), ("random_sample",), ("uniform",), ("uniform", 0, 1)}  # what draws from 0 to 1
_STATES = ("seed", "getstate", "setstate", "get_state", "set_state")


@contextlib.contextmanager
def draws_refused(model: nn.Module) -> Iterator[None]:
    """Inside, a draw by the user's own code is a DrawError with its line.

    Not by installed packages: they draw, for layers to drop, also where the share of these is zero (see `_Share`). Nor
    by code that a decorator generates to check types, which draws the element of a list to look at. Functions are found
    where the files of the model have them (`from random import random`) too, and where a generated function keeps them;
    what others draw shows in the generators.
    """
    expected = [_states()]

    def watched(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            where = places.current()
            if where and not places.is_installed(where) and not where.startswith(_GENERATED):
                raise _refusal(f"{name}()", where)
            result = draw(*args, **kwargs)
            expected[0] = _states()
            is_share = type(result) is float and (name, *args) in _SHARES and not kwargs
            return _Share(result) if is_share else result

        return drawn

    names = {id(draw): (name, draw) for module in _generators() for name, draw in _draws(module).items()}
    with contextlib.ExitStack() as stack:
        for module in (*_generators(), *_files_of(model)):
            found = [(key, *names[id(value)]) for key, value in vars(module).items() if id(value) in names]
            stack.enter_context(attributes_set(module, **{key: watched(name, draw) for key, name, draw in found}))
        for function in _generated(model):
            held = function.__kwdefaults__ or {}
            found = [(key, *names[id(value)]) for key, value in held.items() if id(value) in names]
            if found:
                stack.callback(setattr, function, "__kwdefaults__", held)
                function.__kwdefaults__ = {**held, **{key: watched(name, draw) for key, name, draw in found}}
        yield
    if _states() != expected[0]:
        raise _refusal("a function", "")


class _Share(float):
    """A number between 0 and 1 that a library draws. Compared with 0 or 1, which leave no choice, it answers."""

    def _is_above(self, other: float) -> bool:
        if 0 < other < 1:
            raise _refusal(f"a library (the chance is {other})", places.current())
        return other <= 0

    def __lt__(self, other: float) -> bool:
        return not self._is_above(other)

    def __gt__(self, other: float) -> bool:
        return self._is_above(other)

    __le__, __ge__ = __lt__, __gt__


def _refusal(what: str, where: str) -> DrawError:
    return DrawError(
        f"forward draws a number by {what} of Python or numpy, which all calls of the graph would share, and ranks "
        "would draw differently: draw with torch.rand in forward and choose with torch.where, or draw in the loop, "
        "alike on all ranks, and pass it as an argument",
        where=where,
    )


def _generators() -> list[ModuleType]:
    numpy = sys.modules.get("numpy")
    return [random] if numpy is None else [random, numpy.random]


def _draws(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The methods of the module's hidden generator, which stand in it as functions."""
    hidden = random._inst if module is random else sys.modules["numpy.random.mtrand"]._rand
    return {k: v for k, v in vars(module).items() if getattr(v, "__self__", None) is hidden and k not in _STATES}


def _files_of(model: nn.Module) -> list[ModuleType]:
    """The files in which modules of the model are defined."""
    found = [sys.modules.get(name) for name in dict.fromkeys(type(m).__module__ for m in model.modules())]
    return [file for file in found if file is not None]


def _generated(model: nn.Module) -> list[FunctionType]:
    """The functions that decorators generated around the methods of the model's classes, and around one another."""
    classes = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    waiting = [value for kind in classes for value in vars(kind).values() if isinstance(value, FunctionType)]
    seen = dict.fromkeys(waiting)
    while waiting:
        for cell in waiting.pop().__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that is not set yet, or no longer
                if isinstance(inner := cell.cell_contents, FunctionType) and inner not in seen:
                    seen[inner] = None
                    waiting.append(inner)
    return [function for function in seen if function.__code__.co_filename.startswith(_GENERATED)]


def _states() -> list[str]:
    return [repr(module.getstate() if module is random else module.get_state()) for module in _generators()]
