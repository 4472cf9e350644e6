"""Numbers that a forward draws from Python's or numpy's global generator: a graph would hold them fixed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import nn

from autopar.tracing import places
from autopar.tracing.errors import DrawError
from autopar.tracing.patching import attributes_set

_STATES = ("seed", "getstate", "setstate", "get_state", "set_state")


@contextlib.contextmanager
def draws_refused(model: nn.Module) -> Iterator[None]:
    """Inside, a draw by the user's own code is a DrawError with its line.

    Not by installed packages: they draw, for layers to drop, also where the share of these is zero. Functions are found
    where the model's files have them (`from random import random`) too; what others draw shows in the generators.
    """
    expected = [_states()]

    def watched(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            where = places.current()
            if where and not places.is_installed(where):
                raise _refusal(f"{name}()", where)
            result = draw(*args, **kwargs)
            expected[0] = _states()
            return result

        return drawn

    names = {id(draw): (name, draw) for module in _generators() for name, draw in _draws(module).items()}
    with contextlib.ExitStack() as stack:
        for module in (*_generators(), *_files_of(model)):
            found = [(key, *names[id(value)]) for key, value in vars(module).items() if id(value) in names]
            stack.enter_context(attributes_set(module, **{key: watched(name, draw) for key, name, draw in found}))
        yield
    if _states() != expected[0]:
        raise _refusal("a function", "")


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
    """The user's own files in which modules of the model are defined."""
    found = [sys.modules.get(name) for name in dict.fromkeys(type(m).__module__ for m in model.modules())]
    return [file for file in found if file is not None and not places.is_installed(getattr(file, "__file__", "") or "")]


def _states() -> list[str]:
    return [repr(module.getstate() if module is random else module.get_state()) for module in _generators()]
