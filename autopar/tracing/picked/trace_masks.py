"""The masks of a trace that pick rows, and how calls that pick rows or take picked rows are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from autopar.tracing.picked.picked_rows import ALL_DIMS, PickedRows, RowMask, is_plain, picked_rows_in
from autopar.tracing.targets import methods

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
SELECTING = methods("masked_select")
COUNTING = methods("nonzero", "argwhere") | {torch.where}
_BEFORE_INPUT = {"condition", "sorted_sequence", "n"}  # arguments of `where`, `searchsorted` and `polygamma`


class TraceMasks:
    """The masks of a trace that have picked rows."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.masks: list[RowMask] = []
        self.derived: dict[Any, RowMask] = {}  # masks of concatenated or flattened rows, by their parts
        self.on_first_mask: Callable[[], Any] = lambda: None  # called when the first rows are picked
        self.maybe_shared: set[Any] = set()  # storages of rows that other results may or may not share
        self.multiplied_mask: RowMask | None = None
        """The mask whose rows were multiplied by a matrix. A second such mask probably means several experts, which
        run on few rows each and should not run on all rows."""

    def __bool__(self) -> bool:
        return bool(self.masks)

    def of(self, mask: Tensor) -> RowMask:
        """The row mask of a mask; an earlier one with the same contents is reused."""
        for row_mask in self.masks:
            if row_mask.is_of(mask):
                return row_mask
        if not self.masks:
            self.on_first_mask()
        self.masks.append(RowMask(self.recorder, mask))
        return self.masks[-1]

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function of picked rows; UnknownDataError if it needs to know which rows are picked."""
        from autopar.tracing.picked.recording_functions import RECORDING_FUNCTIONS

        first = picked_rows_in((args, kwargs))[0]
        name = getattr(func, "__name__", repr(func))
        if self.recorder.paused:
            raise first.unknown(name)
        kwargs = {{"axis": "dim"}.get(key, key): value for key, value in kwargs.items()}
        if not args and isinstance(kwargs.get("input"), PickedRows) and _BEFORE_INPUT.isdisjoint(kwargs):
            args = (kwargs.pop("input"),)
        for record in RECORDING_FUNCTIONS:
            result = record(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        raise first.unknown(name)

    def selection(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `x[mask]`, `masked_select`, `nonzero` or `torch.where(mask)` picks; None for any other call."""
        if func in COUNTING and len(args) == 1 and isinstance(args[0], Tensor):
            return self._indices(func, args[0], kwargs)
        if len(args) != 2 or kwargs or not isinstance(args[0], Tensor):
            return None
        values, index = args
        if func in SELECTING:
            if not _is_mask(index):
                return None
            with self.recorder.on():
                shape = torch.broadcast_shapes(values.shape, index.shape)
                values, index = values.expand(shape), index if index.shape == shape else index.expand(shape)
            return self.of(index).rows_of(values) if index.ndim else None
        if func is not Tensor.__getitem__:
            return None
        parts = index if isinstance(index, tuple) else (index,)
        masks = [place for place, part in enumerate(parts) if _is_mask(part) and part.ndim]
        if len(masks) != 1 or not _plain([*parts[: masks[0]], *parts[masks[0] + 1 :]]):
            return None
        from autopar.tracing.picked import across

        return across.picked_by_index(self, values, parts, masks[0])

    def _indices(self, func: Any, mask: Tensor, kwargs: dict[str, Any]) -> Any:
        """The indices that `nonzero`, `argwhere` or `torch.where(mask)` returns."""
        if not mask.ndim or kwargs.keys() - {"as_tuple"}:
            return None
        if mask.dtype != torch.bool:
            with self.recorder.on():
                mask = mask != 0
        row_mask = self.of(mask)
        indices = row_mask.indices()
        if func is torch.where or kwargs.get("as_tuple"):
            return indices
        with self.recorder.on():
            columns = torch.stack([rows.values for rows in indices], 1)
        return PickedRows(row_mask, columns, indices_of=ALL_DIMS)


def _is_mask(value: Any) -> bool:
    return is_plain(value) and value.dtype == torch.bool


def _plain(parts: list[Any]) -> bool:
    return all(part is None or part is Ellipsis or isinstance(part, (slice, int)) for part in parts)
