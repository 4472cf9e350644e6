"""How one tensor and its gradient are distributed over the device mesh.

A `Layout` has one `Placement` per mesh axis:

====  =================================  ==============================
text  value over this axis               gradient over this axis
====  =================================  ==============================
R     replicated                         replicated (whole on each rank)
R+    replicated                         partial (the ranks' gradients are summands)
S1    sharded on tensor dim 1            sharded the same way
S1@3  sharded, strided with outer 3      sharded the same way
P     partial (the values are summands)  replicated
====  =================================  ==============================

**Digits.** Sharding dim `d` of length D over an axis of size n with `outer` o means: write an index
of the dim in mixed radix as (o, n, D/(o n)); the rank's coordinate on the axis is the middle digit.
`o = 1` is the ordinary contiguous shard. In a merged dim `(c h e)`, sharding `h` has `o = c`. Several
axes may shard one dim as long as their digits do not overlap: DTensor's plain order over axes 0 and 1
of sizes n0 and n1 is `o = 1` and `o = n0`. Only plain shards may be ragged (D not divisible): shards
are then `ceil(D / n)` long and the last ones shorter, as `torch.chunk` and DTensor cut them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from autopar.errors import LayoutError

Join = Literal["sum", "mean", "max", "min"]


@dataclass(frozen=True, order=True)
class Placement:
    """How a tensor is distributed over one mesh axis: see the table in the module's docstring."""

    kind: Literal["replicated", "sharded", "partial"]
    dim: int = -1
    outer: int = 1
    join: Join = "sum"
    partial_grad: bool = False

    def __str__(self) -> str:
        if self.kind == "replicated":
            return "R+" if self.partial_grad else "R"
        if self.kind == "sharded":
            return f"S{self.dim}" if self.outer == 1 else f"S{self.dim}@{self.outer}"
        return "P" if self.join == "sum" else f"P:{self.join}"

    __repr__ = __str__

    @property
    def is_sharded(self) -> bool:
        return self.kind == "sharded"

    @property
    def is_partial(self) -> bool:
        return self.kind == "partial"

    @property
    def is_replicated(self) -> bool:
        return self.kind == "replicated"

    @staticmethod
    def parse(text: str) -> Placement:
        """
        >>> Placement.parse("S1@3"), Placement.parse("R+"), Placement.parse("P:max")
        (S1@3, R+, P:max)
        """
        text = text.strip()
        if text == "R":
            return R
        if text == "R+":
            return R_PLUS
        if text == "P":
            return P
        if text.startswith("P:") and text[2:] in ("sum", "mean", "max", "min"):
            return Placement("partial", join=text[2:])  # type: ignore[arg-type]
        dim, _, outer = text[1:].partition("@")
        if text.startswith("S") and dim.isdigit() and (not outer or outer.isdigit()):
            return shard(int(dim), int(outer or 1))
        raise LayoutError(
            f"'{text}' is no placement: write R, R+, S<dim>, S<dim>@<outer>, P or P:max, with a comma between "
            "those of two axes"
        )


R = Placement("replicated")
R_PLUS = Placement("replicated", partial_grad=True)
P = Placement("partial")


def shard(dim: int, outer: int = 1) -> Placement:
    """The placement S`dim`@`outer`: the axis holds the digit of `dim` that has `outer` outer blocks."""
    return Placement("sharded", dim=dim, outer=outer)


class Digit(NamedTuple):
    """The digit of a tensor dim over which one mesh axis shards it; `size`: of the axis."""

    outer: int
    axis: int
    size: int


@dataclass(frozen=True, order=True)
class Layout:
    """One `Placement` per mesh axis.

    >>> layout = Layout.parse("S0, R+")
    >>> layout.local_shape((8, 3), (2, 4)), str(layout.gradient())
    ((4, 3), 'S0,P')
    """

    placements: tuple[Placement, ...]

    @staticmethod
    def parse(text: str) -> Layout:
        return Layout(tuple(Placement.parse(part) for part in text.split(",")))

    @staticmethod
    def replicated(axes: int) -> Layout:
        """Replicated over every one of `axes` mesh axes."""
        return Layout((R,) * axes)

    def __str__(self) -> str:
        return ",".join(map(str, self.placements))

    __repr__ = __str__

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # layouts are dict keys in the innermost loops of the solver
        return hash(self.placements)

    def __getitem__(self, axis: int) -> Placement:
        return self.placements[axis]

    def __len__(self) -> int:
        return len(self.placements)

    def replace(self, axis: int, placement: Placement) -> Layout:
        """This layout with another placement on one axis."""
        return Layout((*self.placements[:axis], placement, *self.placements[axis + 1 :]))

    def value(self) -> Layout:
        """The layout of the value alone: R+ becomes R."""
        return Layout(tuple(R if p.is_replicated else p for p in self.placements))

    def gradient(self) -> Layout:
        """The gradient's layout, read as that of a value: S stays S, R+ becomes P, R and P become R."""
        turn = {"replicated": R, "partial": R}
        return Layout(tuple(p if p.is_sharded else P if p.partial_grad else turn[p.kind] for p in self.placements))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return all(p.is_replicated for p in self.placements)

    @property
    def is_partial(self) -> bool:
        return any(p.is_partial for p in self.placements)

    def digits(self, dim: int, mesh_shape: Sequence[int]) -> tuple[Digit, ...]:
        """The digits over which axes shard tensor dim `dim`, outermost first."""
        return _digits(self, dim, tuple(mesh_shape))

    def is_plain(self, mesh_shape: Sequence[int]) -> bool:
        """Whether DTensor can store it: nothing is partial, and each dim has contiguous shards in mesh-axis order."""
        if self.is_partial:
            return False
        for dim in {p.dim for p in self.placements if p.is_sharded}:
            position = 1
            for digit in sorted(self.digits(dim, mesh_shape), key=lambda d: d.axis):
                if digit.outer != position:
                    return False
                position *= digit.size
        return True

    def is_legal(self, shape: Sequence[int], mesh_shape: Sequence[int], *, ragged: bool = False) -> bool:
        """Whether a tensor of this shape can have this layout; `ragged` admits uneven plain shards."""
        for dim in {p.dim for p in self.placements if p.is_sharded}:
            if not 0 <= dim < len(shape):
                return False
            digits = self.digits(dim, mesh_shape)
            position = 1
            for digit in digits:
                if digit.outer % position:
                    return False
                position = digit.outer * digit.size
            if shape[dim] % position and not (ragged and _plain(digits)):
                return False
        return True

    def local_shape(
        self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Shape of the shard at `coordinate` (default: the first rank, which holds the largest shard)."""
        local = list(shape)
        for dim in {p.dim for p in self.placements if p.is_sharded}:
            digits = self.digits(dim, mesh_shape)
            split = math.prod(d.size for d in digits)
            if local[dim] % split == 0:
                local[dim] //= split
            else:
                local[dim] = _ragged(shape[dim], digits, coordinate)[1]
        return tuple(local)

    def shards(self, mesh_shape: Sequence[int]) -> int:
        """The number of distinct shards of the value."""
        return math.prod(n for p, n in zip(self.placements, mesh_shape, strict=True) if p.is_sharded)


@lru_cache(maxsize=1 << 16)
def _digits(layout: Layout, dim: int, mesh_shape: tuple[int, ...]) -> tuple[Digit, ...]:
    digits = [
        Digit(p.outer, axis, mesh_shape[axis])
        for axis, p in enumerate(layout.placements)
        if p.is_sharded and p.dim == dim
    ]
    return tuple(sorted(digits))


def _plain(digits: Sequence[Digit]) -> bool:
    position = 1
    for digit in digits:
        if digit.outer != position:
            return False
        position *= digit.size
    return True


def _ragged(length: int, digits: Sequence[Digit], coordinate: Sequence[int] | None) -> tuple[int, int]:
    """(start, length) of an uneven plain shard, cut axis by axis as DTensor does."""
    if not _plain(digits):
        raise LayoutError(
            f"a dim of {length} does not divide by {[d.size for d in digits]}; only plain shards may be ragged"
        )
    start = 0
    for digit in digits:
        step = -(-length // digit.size)
        index = coordinate[digit.axis] if coordinate is not None else 0
        begin = min(index * step, length)
        length = min(step, length - begin)
        start += begin
    return start, length


def fills(length: int, cuts: Sequence[int]) -> bool:
    """Whether no shard is empty if axes of sizes `cuts` shard a dim of `length` one after the other, evenly or not.

    >>> fills(9, (4,)), fills(10, (4,))
    (False, True)
    """
    lengths = {length}
    for ranks in cuts:  # `lengths`: those of all shards so far; only the last shard may be shorter
        steps = {whole: -(-whole // ranks) for whole in lengths}
        lengths = {piece for whole, step in steps.items() for piece in (step, whole - (ranks - 1) * step)}
        if min(lengths) <= 0:
            return False
    return True


def take_shard(tensor: Any, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Any:
    """The shard of a whole `tensor` that the rank at `coordinate` holds; partial axes count as replicated.

    It is differentiable, and for plain shards a view, which allocates nothing.

    >>> import torch
    >>> take_shard(torch.arange(6), Layout.parse("S0@3"), (2,), (1,))
    tensor([1, 3, 5])
    """
    for dim in sorted({p.dim for p in layout.placements if p.is_sharded}):
        digits = layout.digits(dim, mesh_shape)
        length = tensor.shape[dim]
        if length % math.prod(d.size for d in digits) or _plain(digits):
            start, count = _ragged(length, digits, coordinate)
            tensor = tensor.narrow(dim, start, count)
            continue
        radix, position = [], 1
        for digit in digits:
            radix += [digit.outer // position, digit.size]
            position = digit.outer * digit.size
        head, tail = tuple(tensor.shape[:dim]), tuple(tensor.shape[dim + 1 :])
        tensor = tensor.reshape(*head, *radix, length // position, *tail)
        for k in reversed(range(len(digits))):
            tensor = tensor.select(dim + 2 * k + 1, coordinate[digits[k].axis])
        tensor = tensor.reshape(*head, length // math.prod(d.size for d in digits), *tail)
    return tensor
