"""Where a call enters a model: its forward, that of one of its modules, or another method of either."""

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
        """The module whose method it is."""
        return model.get_submodule(self.path)

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """The bound method."""
        method: Callable[..., Any] = getattr(self.module(model), self.method)
        return method


FORWARD = Entry()


class StandIn:
    """What stands on an instance in the place of a user's method, and runs that or a plan of it."""


def of_model(entry: Entry) -> str:
    """What is called, in the words of messages.

    >>> of_model(FORWARD), of_model(Entry("encoder"))
    ('the model', "the model's 'encoder'")
    """
    return "the model" if entry == FORWARD else f"the model's '{entry}'"
