"""The points of a step where the peak can be, by what lives at them (`cost.memory.lifetimes`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from autopar.graph import TensorRef

Moved = Callable[[TensorRef], TensorRef]


class Read(NamedTuple):
    """An op reads a tensor: `by` is its node, with the number of the input."""

    tensor: TensorRef
    by: TensorRef

    def moved(self, moved: Moved) -> Read:
        """The same read in an equal block."""
        return Read(moved(self.tensor), moved(self.by))


@dataclass(frozen=True)
class Point:
    """An op's forward or backward.

    `passing`: tensors of which values (or gradients) live, each as its maker lays it out; in backward, gradients of the
    op's outputs are among them. `made`: inputs whose gradients the op makes as tensors of their own, one entry for each
    such tensor (a sum with what other readers gave may be one more). `over`: gradients that are gone behind the op.
    `view`: the op makes nothing, and the point matters only where what it reads, or the gradient, is converted.

    Two kinds of gradients live otherwise than `passing` says where a read converts its tensor. `awaited`: what readers
    have given so far stays as they want the tensor until the last that wants it so has given its part; one entry for
    each tensor with a reader to come, with the next one. `apart`: a gradient that would be another's is a tensor of its
    own; with the read, and where one is to come that may share the conversion, which then is not made yet, with that.
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
