"""Arguments of calls as hashable values that differ for any two different constants."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from autopar.leaf_calls import LeafCall

PLAIN = (int, str, bool, type(None), torch.dtype, torch.device)


def frozen(value: Any, read: Callable[[fx.Node], Hashable]) -> Hashable:
    """A hashable form of a node's argument: nodes are replaced by `read(node)`, constants are paired with their types.

    >>> frozen((1, [2.0, True]), lambda node: "%")
    ('tuple', (<class 'int'>, 1), ('list', (<class 'float'>, '2.0'), (<class 'bool'>, True)))
    """
    if isinstance(value, fx.Node):
        return read(value)
    if type(value) in PLAIN:
        return type(value), value  # 1 and True are equal, and not the same constant
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *[frozen(item, read) for item in value])
    if isinstance(value, LeafCall):
        return value.kind
    if isinstance(value, dict):
        return tuple((key, frozen(item, read)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", frozen(value.start, read), frozen(value.stop, read), frozen(value.step, read))
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # tells 0.0 from -0.0, which are equal
    try:
        hash(value)
    except TypeError:
        return ("id", id(value))
    return (type(value), value)
