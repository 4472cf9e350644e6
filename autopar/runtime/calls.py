"""What kind of call it is, told quickly: this runs at every call of the model."""

from __future__ import annotations

import os
import traceback
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.runtime.traces import Traced

_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))

Order = tuple[int | str, ...]
"""Where each placeholder's value stands in a call: a position, or a keyword."""


def call_key(modules: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Equal for two calls only if they run the same graph; None for a call with nested or unusual arguments.

    >>> key = call_key([], (torch.ones(2),), {"flag": True})
    >>> key == call_key([], (torch.zeros(2),), {"flag": True}), key == call_key([], (torch.ones(3),), {"flag": True})
    (True, False)
    """
    kinds: list[Hashable] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            kinds.append((value.shape, value.dtype))
        elif value is None or isinstance(value, (bool, int, float, str)):
            kinds.append((type(value), value))
        else:
            return None
    modes = (torch.is_grad_enabled(), *[module.training for module in modules])
    return modes, len(args), tuple(kwargs), tuple(kinds)


def order_of(traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
    """Where the placeholders' values stand in calls like this one, found by binding stand-ins of its tensors."""
    places: dict[int, int | str] = {}

    def stand_in(place: int | str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty_like(value, device="meta")
        places[id(made)] = place
        return made

    own = tuple(stand_in(i, value) for i, value in enumerate(args))
    named = {name: stand_in(name, value) for name, value in kwargs.items()}
    return tuple(places[id(value)] for value in traced.bind(own, named))


def place_of(error: BaseException) -> str:
    """ "file:line" of the innermost frame outside torch and autopar that an error came through; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def description(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What a call looks like, in text that is equal on ranks that call alike."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    words: list[object] = [torch.is_grad_enabled(), model.training, str(spec)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            words.append((tuple(leaf.shape), str(leaf.dtype)))
        else:
            words.append(leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__)
    return repr(words)
