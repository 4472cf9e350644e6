"""A point of a step that can be the peak, described by the tensors that live at it (`cost.memory.lifetimes`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from autopar.graph import TensorRef

Moved = Callable[[TensorRef], TensorRef]


class Read(NamedTuple):
    """The read of a tensor by an op; `by`: the op's node and the number of the input."""

    tensor: TensorRef
    by: TensorRef

    def moved(self, moved: Moved) -> Read:
        """The same read in an equal block."""
        return Read(moved(self.tensor), moved(self.by))


@dataclass(frozen=True)
class Point:
    """An op's forward or backward.

    `passing`: tensors whose values (or gradients) live, each in its maker's layout; in backward with the gradients of
    the op's outputs. `made`: inputs for whose gradients the op makes a tensor, one entry for each (a sum with other
    readers' parts may be one more). `over`: gradients that are freed after the op. `view`: the op makes nothing, so the
    point matters only if what it reads, or a gradient, is converted.

    Where a read converts its tensor, two kinds of gradients live otherwise than `passing` says. `awaited`: the sum of
    parts so far stays in the layout that readers want until the last reader that wants this layout has given its part;
    by tensor, the next read in backward. `apart`: a gradient that would alias another is a tensor of its own; the read
    that converts it and, if there is one, the next read in backward, which may share the conversion (it is then made
    only after that).
    """

    node: fx.Node
    backward: bool
    passing: tuple[TensorRef, ...]
    made: tuple[int, ...] = ()
    over: tuple[TensorRef, ...] = ()
    view: bool = False
    awaited: tuple[Read, ...] = ()
    apart: tuple[tuple[Read, ...], ...] = ()

    def at(self, node: fx.Node, moved: Moved) -> Point:
        """The same point of an op of an equal block."""
        passing, over = (tuple(map(moved, refs)) for refs in (self.passing, self.over))
        awaited = tuple(read.moved(moved) for read in self.awaited)
        apart = tuple(tuple(read.moved(moved) for read in reads) for reads in self.apart)
        return replace(self, node=node, passing=passing, over=over, awaited=awaited, apart=apart)
