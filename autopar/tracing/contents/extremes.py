"""`max(n, 1)`, `min(...)` and `len(rows)` of unknown numbers and picked rows; Python's own would need their values."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from autopar.tracing.contents.unknown import UnknownBool, UnknownNumber, has_unknown
from autopar.tracing.patching import attributes_set
from autopar.tracing.picked import new_rows
from autopar.tracing.picked.picked_rows import PickedRows

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
# Functions that take sizes, by owner.
_OF_SIZES: dict[Any, tuple[Callable[..., Any], ...]] = {
    torch: (torch.ones, torch.zeros, torch.empty, torch.full),
    Tensor: (Tensor.new_ones, Tensor.new_zeros, Tensor.new_empty, Tensor.new_full, Tensor.expand, Tensor.repeat),
}
_NUMBERS = (UnknownNumber, UnknownBool)
_WAYS: dict[str, Callable[..., Any]] = {"max": builtins.max, "min": builtins.min}
_MAY_BE_OPEN = {*_NUMBERS, Tensor, torch.nn.Parameter}  # types whose value may be unknown


@contextlib.contextmanager
def extremes_computed(recorder: Recorder) -> Iterator[None]:
    """While inside, Python's `max` and `min` of unknown numbers give an unknown number, and of 0-d tensors a tensor.

    Once a mask has picked rows, `len` of picked rows is their (unknown) number, which can be used as a size.
    """
    length = builtins.len

    def how_many(value: Any) -> Any:
        return value.row_mask.number if type(value) is PickedRows and not value.row_dim else length(value)

    with contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(attributes_set(builtins, len=how_many))
            for owner, makers in _OF_SIZES.items():
                sized = {maker.__name__: _as_long(recorder, maker) for maker in makers}
                stack.enter_context(attributes_set(owner, **sized))

        recorder.trace_masks.on_first_mask = begin
        chosen = {name: _choosing(recorder, original) for name, original in _WAYS.items()}
        stack.enter_context(attributes_set(builtins, **chosen))
        yield


def _as_long(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of such a function, which would convert its sizes to ints before a mode sees the call."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording() and has_unknown((args, kwargs.get("size"))):
            rows = new_rows.create_as_many_rows(recorder.trace_masks, original, args, kwargs)
            if rows is not NotImplemented:
                return rows
        return original(*args, **kwargs)

    return make


def _choosing(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Python's `max` or `min`, computed pairwise in the graph if unknown values are among the arguments."""

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        operands = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
        if kwargs or len(operands) < 2 or not any(type(operand) in _MAY_BE_OPEN for operand in operands):
            return original(*args, **kwargs)
        if not recorder.is_recording():
            return original(*args)
        return functools.reduce(functools.partial(_chosen, recorder, original), operands)

    return choose


def _chosen(recorder: Recorder, original: Callable[..., Any], a: Any, b: Any) -> Any:
    """The one of two values that Python would return, which is the first if they are equal."""
    open_ones = [operand for operand in (a, b) if _is_open(recorder, operand)]
    others = [operand for operand in (a, b) if not isinstance(operand, Tensor) and type(operand) not in _NUMBERS]
    if not open_ones or not all(
        isinstance(operand, (int, float)) and not isinstance(operand, bool) for operand in others
    ):
        return original(a, b)
    tensors = [operand for operand in (a, b) if isinstance(operand, Tensor)]
    if not tensors:
        return open_ones[0].extreme(original, a, b)
    dtype = tensors[0].dtype
    if dtype.is_complex or dtype == torch.bool or any(operand.ndim or operand.dtype != dtype for operand in tensors):
        return original(a, b)  # shape or dtype of the result would depend on the choice
    with recorder.on():
        first, second = (_as_operand(operand, dtype) for operand in (a, b))
        takes_second = second > first if original.__name__ == "max" else second < first
        return torch.where(takes_second, second, first)


def _is_open(recorder: Recorder, operand: Any) -> bool:
    if isinstance(operand, Tensor):
        return id(operand) in recorder.nodes and not recorder.known.can_tell([operand])
    return type(operand) in _NUMBERS


def _as_operand(operand: Any, dtype: torch.dtype) -> Any:
    """An operand beside tensors of this dtype, which does not change; a fraction beside integers stays a float."""
    if isinstance(operand, Tensor):
        return operand
    if type(operand) in _NUMBERS:
        return operand.tensor.to(dtype if dtype.is_floating_point or operand.kind is not float else torch.float64)
    return int(operand) if not dtype.is_floating_point and float(operand).is_integer() else operand
