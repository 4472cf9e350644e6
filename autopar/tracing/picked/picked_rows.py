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
ALL_DIMS, ROW_NUMBERS = -1, -2  # values of `PickedRows.indices_of`
HARMLESS = 0.5
"""Fills rows that are not picked: its logarithm, root and quotients have finite values and gradients."""
FILLED, FINITE, ANY = 2, 1, 0
"""What rows that are not picked hold: HARMLESS (integers: 0), finite numbers, or anything."""


class RowMask:
    """A copy of a mask of unknown contents that picked rows, its complement, both also flat, and the rows' number."""

    def __init__(self, recorder: Recorder, mask: Tensor) -> None:
        self.recorder, self.node = recorder, recorder.node_of(mask)
        self._original, self._version = mask, mask._version
        with recorder.on():
            self.mask = mask.clone()  # the user may write into the original
            self.flat_mask = self.mask if mask.ndim == 1 else self.mask.flatten()
            self.complement = self.mask.logical_not()
            self.flat_complement = self.complement if mask.ndim == 1 else self.complement.flatten()
        self._count: Tensor | None = None
        self.min_count = 0  # lower bound of the number of picked rows
        self.asked_number: Any = None
        """The number of picked rows (an unknown number), once it was asked for."""

    @property
    def count(self) -> Tensor:
        """The number of picked rows as a tensor."""
        if self._count is None:
            with self.recorder.on(), torch.no_grad():
                self._count = self.flat_mask.sum()
        return self._count

    @property
    def number(self) -> Any:
        """The number of picked rows as a number."""
        if self.asked_number is None:
            with self.recorder.on():
                self.asked_number = self.count.item()
            if self.min_count and not isinstance(self.asked_number, int):
                self.asked_number.positive = self.asked_number.nonzero = True
        return self.asked_number

    def is_of(self, mask: Tensor) -> bool:
        """Whether a mask has these contents: the same tensor, unchanged, or computed alike (`labels >= 0`, twice)."""
        if mask is self._original:
            return mask._version == self._version
        return mask.shape == self.mask.shape and self.is_made_by(self.recorder.node_of(mask))

    def is_made_by(self, node: Any) -> bool:
        """Whether a node's result has the mask's contents; tensors that it was computed from must not be written."""
        read: set[fx.Node] = set()
        if not same_contents(self.node, node, read):
            return False
        nodes = self.recorder.nodes
        return all(tensor._version == 0 for tensor in self.recorder.alive if nodes.get(id(tensor)) in read)

    def rows_of(self, values: Tensor) -> PickedRows:
        """What is picked of a tensor whose first dims are those of the mask."""
        with self.recorder.on():
            number = HARMLESS if values.is_floating_point() or values.is_complex() else 0
            all_rows = filled(values, self.complement, number)
            all_rows = all_rows.flatten(0, self.mask.ndim - 1) if self.mask.ndim > 1 else all_rows
        return PickedRows(self, all_rows, unpicked_hold=FILLED)

    def indices(self) -> tuple[PickedRows, ...]:
        """The indices of the picked elements, one tensor for each dim."""
        with self.recorder.on():
            indices = []
            for dim, length in enumerate(self.mask.shape):
                along = torch.arange(length, device=self.mask.device)
                shown = along[(slice(None), *[None] * (self.mask.ndim - dim - 1))].expand(self.mask.shape)
                indices.append(PickedRows(self, shown.flatten(), indices_of=dim))
        return tuple(indices)


class PickedRows(Tensor):
    """Picked rows; they pass as a tensor in `isinstance`.

    `values`: all rows, of shape (rows, ...). `row_dim`: the dim that the rows lie along. `indices_of`: the dim of the
    mask whose indices these rows are; `ALL_DIMS` if their columns are the indices of all dims, `ROW_NUMBERS` if they
    count the rows.
    """

    row_dim = 0

    row_mask: RowMask
    values: Tensor  # type: ignore[assignment]
    indices_of: int | None

    @staticmethod
    def __new__(
        cls, row_mask: RowMask, values: Tensor, indices_of: int | None = None, unpicked_hold: int = ANY
    ) -> PickedRows:
        rows: PickedRows = Tensor._make_subclass(cls, _EMPTY)
        rows.row_mask, rows.values, rows.indices_of = row_mask, values, indices_of
        rows._unpicked_hold, rows._hold_version = unpicked_hold, values._version
        return rows

    def written(self, unpicked_hold: int) -> None:
        """Note a write into the rows, and what those that are not picked hold now."""
        self.indices_of, self._unpicked_hold, self._hold_version = None, unpicked_hold, self.values._version

    @property
    def unpicked_hold(self) -> int:
        """What the rows that are not picked hold."""
        return self._unpicked_hold if self.values._version == self._hold_version else ANY

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} met rows of a trace that is over")

    def _shape(self) -> Any:
        sizes = self.values.shape
        return (*sizes[: self.row_dim], self.row_mask.number, *sizes[self.row_dim + 1 :])

    def _device(self) -> torch.device:
        with self.row_mask.recorder.on():
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
        self.row_mask.recorder.trace_masks.record_call(Tensor.__setitem__, (self, index, value), {})

    def __len__(self) -> int:
        if self.row_dim:
            return len(self.values)
        raise self.unknown("len()")

    def __bool__(self) -> bool:
        raise self.unknown("__bool__")

    def __iter__(self) -> Iterator[Any]:
        if self.row_dim:
            return iter(self.unbind(0))
        raise self.unknown("__iter__")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<what a mask picks of {self.values.shape}>"

    __hash__ = object.__hash__

    def unknown(self, name: str = "__getitem__") -> UnknownDataError:
        description = f"{name} is given rows that a mask picked, and how many these are depends on data"
        return self.row_mask.recorder.unknown(description, deciding=[self.row_mask.mask])


def _called(member: Any) -> Any:
    return lambda self, *args, **kwargs: self.row_mask.recorder.trace_masks.record_call(member, (self, *args), kwargs)


def _read(name: str) -> property:
    return property(lambda self: self.row_mask.recorder.trace_masks.record_call(getter(name), (self,), {}))


def _property_of_values(name: str) -> property:
    return property(lambda self: getattr(self.values, name))


for _name in {name for name in dir(Tensor) if not name.startswith("_")} - set(vars(PickedRows)):
    # overridden, since torch's argument parsers would ask for unknown numbers
    setattr(PickedRows, _name, _called(_member) if callable(_member := getattr(Tensor, _name)) else _read(_name))
for _name in ("dtype", "ndim", "requires_grad", "layout", "is_cuda", "is_meta"):
    setattr(PickedRows, _name, _property_of_values(_name))
_EMPTY = torch.empty(0, device="meta")


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor, but not picked rows."""
    return isinstance(value, Tensor) and not isinstance(value, PickedRows)


def has_picked_rows(value: Any) -> bool:
    """Whether there are picked rows among arguments."""
    if isinstance(value, (tuple, list)):
        return any(map(has_picked_rows, value))
    if isinstance(value, dict):
        return any(map(has_picked_rows, value.values()))
    return isinstance(value, PickedRows)


def picked_rows_in(value: Any) -> list[PickedRows]:
    """The picked rows among arguments."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, PickedRows)]


def fill_unpicked(rows: PickedRows, fill: Any) -> Tensor:
    """All rows, with those that are not picked filled."""
    with rows.row_mask.recorder.on():
        return filled(rows.values, rows.row_mask.flat_complement, fill, rows.row_dim)


def filled(values: Tensor, mask: Tensor, number: Any, from_dim: int = 0) -> Tensor:
    """A copy with a number where a mask, of the dims from `from_dim` on, is true."""
    trailing = values.ndim - mask.ndim - from_dim
    return values.masked_fill(mask[(..., *[None] * trailing)] if trailing else mask, number)
