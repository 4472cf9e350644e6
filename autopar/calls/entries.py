"""The entry of a call: the model's forward, that of one of its modules, or another method of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Entry:
    """A method of the module at `path`; by default the model's own forward.

    >>> str(Entry("encoder")), str(Entry("", "encode")), str(Entry("vae", "decode"))
    ('encoder', 'encode()', 'vae.decode()')
    """

    path: str = ""
    method: str = "forward"

    def __str__(self) -> str:
        return self.path if self.method == "forward" else f"{self.path}.{self.method}()".removeprefix(".")

    def module(self, model: nn.Module) -> nn.Module:
        """The module that has the method."""
        return model.get_submodule(self.path)

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """The bound method."""
        method: Callable[..., Any] = getattr(self.module(model), self.method)
        return method


FORWARD = Entry()


class StandIn:
    """An object that replaces a user's method on an instance, and runs either that method or a plan of it."""


def of_model(entry: Entry) -> str:
    """The entry in the words of messages.

    >>> of_model(FORWARD), of_model(Entry("encoder"))
    ('the model', "the model's 'encoder'")
    """
    return "the model" if entry == FORWARD else f"the model's '{entry}'"
