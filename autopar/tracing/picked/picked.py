"""Rows that a mask of unknown contents picks: `logits[mask]`, `x[mask.nonzero()]`, `masked_select`.

How many there are depends on data, so no data-free tensor can represent them. Instead all rows are kept, with the mask.
Ops that treat each row by itself run on all rows; rows that are not picked hold a harmless number; and ops that combine
rows (a sum, a mean, a loss) leave these out. So losses over masked tokens, labelled nodes or valid pixels are recorded
op by op, and sharded like any other. Asking for what only the picked rows can tell raises UnknownDataError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.tracing.picked.same_contents import same_contents
from autopar.tracing.targets import getter

if TYPE_CHECKING:
    from autopar.tracing.errors import UnknownDataError
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
EACH, ROW = -1, -2  # values of `Picked.places`
HARMLESS = 0.5
"""Fills rows that are not picked: its logarithm, root and quotients have finite values and gradients."""
FILLED, FINITE, ANY = 2, 1, 0
"""What rows that are not picked hold: HARMLESS (integers: 0), finite numbers, or anything."""


class Pick:
    """A copy of a mask of unknown contents that picked rows, its complement, both also flat, and the rows' number."""

    def __init__(self, recorder: Recorder, mask: Tensor) -> None:
        self.recorder, self.node = recorder, recorder.node_of(mask)
        self._given, self._version = mask, mask._version
        with recorder.on():
            self.mask = mask.clone()  # the user may write into the original
            self.rows = self.mask if mask.ndim == 1 else self.mask.flatten()
            self.others = self.mask.logical_not()
            self.other_rows = self.others if mask.ndim == 1 else self.others.flatten()
        self._count: Tensor | None = None
        self.least = 0  # lower bound of the number of picked rows
        self.counted: Any = None
        """The number of picked rows (an unknown number), once it was asked for."""

    @property
    def count(self) -> Tensor:
        """The number of picked rows as a tensor."""
        if self._count is None:
            with self.recorder.on(), torch.no_grad():
                self._count = self.rows.sum()
        return self._count

    @property
    def number(self) -> Any:
        """The number of picked rows as a number."""
        if self.counted is None:
            with self.recorder.on():
                self.counted = self.count.item()
            if self.least and not isinstance(self.counted, int):
                self.counted.positive = self.counted.nonzero = True
        return self.counted

    def is_of(self, mask: Tensor) -> bool:
        """Whether a mask has these contents: the same tensor, unchanged, or computed alike (`labels >= 0`, twice)."""
        if mask is self._given:
            return mask._version == self._version
        return mask.shape == self.mask.shape and self.is_made_by(self.recorder.node_of(mask))

    def is_made_by(self, node: Any) -> bool:
        """Whether a node's result has the mask's contents; tensors that it was computed from must not be written."""
        read: set[fx.Node] = set()
        if not same_contents(self.node, node, read):
            return False
        nodes = self.recorder.nodes
        return all(tensor._version == 0 for tensor in self.recorder.alive if nodes.get(id(tensor)) in read)

    def of(self, values: Tensor) -> Picked:
        """What is picked of a tensor whose first dims are those of the mask."""
        with self.recorder.on():
            number = HARMLESS if values.is_floating_point() or values.is_complex() else 0
            kept = filled(values, self.others, number)
            kept = kept.flatten(0, self.mask.ndim - 1) if self.mask.ndim > 1 else kept
        return Picked(self, kept, holds=FILLED)

    def indices(self) -> tuple[Picked, ...]:
        """The indices of the picked elements, one tensor for each dim."""
        with self.recorder.on():
            made = []
            for dim, length in enumerate(self.mask.shape):
                along = torch.arange(length, device=self.mask.device)
                shown = along[(slice(None), *[None] * (self.mask.ndim - dim - 1))].expand(self.mask.shape)
                made.append(Picked(self, shown.flatten(), places=dim))
        return tuple(made)


class Picked(Tensor):
    """Picked rows; they pass as a tensor in `isinstance`.

    `values`: all rows, of shape (rows, ...). `places`: the dim of the mask whose indices these rows are; `EACH` if
    their columns are the indices of all dims, `ROW` if they count the rows. `at`: the dim that the rows lie along.
    """

    at = 0

    pick: Pick
    values: Tensor  # type: ignore[assignment]
    places: int | None

    @staticmethod
    def __new__(cls, pick: Pick, values: Tensor, places: int | None = None, holds: int = ANY) -> Picked:
        made: Picked = Tensor._make_subclass(cls, _EMPTY)
        made.pick, made.values, made.places = pick, values, places
        made._holds, made._as_of = holds, values._version
        return made

    def written(self, holds: int) -> None:
        """Note a write into the rows, and what those that are not picked hold now."""
        self.places, self._holds, self._as_of = None, holds, self.values._version

    @property
    def holds(self) -> int:
        """What the rows that are not picked hold."""
        return self._holds if self.values._version == self._as_of else ANY

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} met rows of a trace that is over")

    def _shape(self) -> Any:
        sizes = self.values.shape
        return (*sizes[: self.at], self.pick.number, *sizes[self.at + 1 :])

    def _device(self) -> torch.device:
        with self.pick.recorder.on():
            return self.values.device

    shape = property(_shape)
    device = property(_device)

    def dim(self) -> int:
        return self.values.dim()

    def is_floating_point(self) -> bool:
        return self.values.is_floating_point()

    def is_complex(self) -> bool:
        return self.values.is_complex()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.pick.recorder.picks.call(Tensor.__setitem__, (self, index, value), {})

    def __len__(self) -> int:
        if self.at:
            return len(self.values)
        raise self.unknown("len()")

    def __bool__(self) -> bool:
        raise self.unknown("__bool__")

    def __iter__(self) -> Iterator[Any]:
        if self.at:
            return iter(self.unbind(0))
        raise self.unknown("__iter__")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<what a mask picks of {self.values.shape}>"

    __hash__ = object.__hash__

    def unknown(self, name: str = "__getitem__") -> UnknownDataError:
        what = f"{name} is given rows that a mask picked, and how many these are depends on data"
        return self.pick.recorder.unknown(what, deciding=[self.pick.mask])


def _called(member: Any) -> Any:
    return lambda self, *args, **kwargs: self.pick.recorder.picks.call(member, (self, *args), kwargs)


def _read(name: str) -> property:
    return property(lambda self: self.pick.recorder.picks.call(getter(name), (self,), {}))


def _alike(name: str) -> property:
    return property(lambda self: getattr(self.values, name))


for _name in {name for name in dir(Tensor) if not name.startswith("_")} - set(vars(Picked)):
    # overridden, since torch's argument parsers would ask for unknown numbers
    setattr(Picked, _name, _called(_member) if callable(_member := getattr(Tensor, _name)) else _read(_name))
for _name in ("dtype", "ndim", "requires_grad", "layout", "is_cuda", "is_meta"):
    setattr(Picked, _name, _alike(_name))
_EMPTY = torch.empty(0, device="meta")


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor, but not picked rows."""
    return isinstance(value, Tensor) and not isinstance(value, Picked)


def any_in(value: Any) -> bool:
    """Whether there are picked rows among arguments."""
    if isinstance(value, (tuple, list)):
        return any(map(any_in, value))
    if isinstance(value, dict):
        return any(map(any_in, value.values()))
    return isinstance(value, Picked)


def all_in(value: Any) -> list[Picked]:
    """The picked rows among arguments."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Picked)]


def masked(picked: Picked, fill: Any) -> Tensor:
    """All rows, with those that are not picked filled."""
    with picked.pick.recorder.on():
        return filled(picked.values, picked.pick.other_rows, fill, picked.at)


def filled(values: Tensor, where: Tensor, number: Any, at: int = 0) -> Tensor:
    """A copy with a number where a mask, of the dims from `at` on, is true."""
    beside = values.ndim - where.ndim - at
    return values.masked_fill(where[(..., *[None] * beside)] if beside else where, number)
