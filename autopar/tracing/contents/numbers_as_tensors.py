"""Functions that are given numbers read from unknown data: in the graph, tensors replace these numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.contents.unknown import DTYPES, UnknownNumber, has_unknown
from autopar.tracing.picked import new_rows
from autopar.tracing.pointwise import is_pointwise, plain_name
from autopar.tracing.targets import writes_its_first

if TYPE_CHECKING:
    from autopar.tracing.arguments import Arguments
    from autopar.tracing.recorder import Recorder

_MAKERS = {torch.tensor, torch.as_tensor, torch.scalar_tensor}
FULL: dict[Any, tuple[Any, int]] = {  # by function: the one that makes as many zeros, and the position of the number
    torch.full: (torch.zeros, 1),
    torch.full_like: (torch.zeros_like, 1),
    torch.Tensor.new_full: (torch.Tensor.new_zeros, 2),
}
_SCALING = ("alpha", "value")  # keywords that only take numbers, by which the second operand is multiplied
_SCALED = {"add", "sub", "subtract", "iadd", "isub", "addcmul", "addcdiv"}


def of_tensors(
    recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments
) -> Any:
    """The result of a function of unknown numbers, which are passed as tensors, in the dtype that numbers would give.

    NotImplemented where the function accepts no tensors in their place.
    """
    if func in _MAKERS and args and isinstance(args[0], UnknownNumber):
        own = torch.get_default_dtype() if args[0].kind is float else DTYPES[args[0].kind]
        with recorder.on():
            return args[0].tensor.to(kwargs.get("dtype") or own, copy=True)
    if (rows := new_rows.create_as_many_rows(recorder.trace_masks, func, args, kwargs)) is not NotImplemented:
        return rows
    if func in FULL:
        return _filled(recorder, func, args, kwargs)
    if (result := _multiplied(recorder, func, args, kwargs)) is not NotImplemented:
        return result
    written = func is torch.Tensor.__setitem__ and not has_unknown(args[1])
    if not (written or is_pointwise(plain_name(func))) or not has_unknown((args, kwargs)):
        return NotImplemented
    dtype: torch.dtype | None = None

    def as_tensor(number: UnknownNumber) -> torch.Tensor:
        if dtype is None or not dtype.is_floating_point or any(t.is_floating_point() for t in arguments.tensors):
            return number.tensor
        return recorder.record(torch.Tensor.to, number.tensor, dtype)  # beside integer tensors: not float64

    try:
        if not writes_its_first(func):
            with recorder.pausing():
                dtype = func(*arguments.data_free(args), **arguments.data_free(kwargs)).dtype
        args, kwargs = _bounds(recorder, plain_name(func), args, kwargs)
        args, kwargs = pytree.tree_map_only(UnknownNumber, as_tensor, (args, kwargs))
        result = recorder.record(func, *args, **kwargs)
    except TypeError:  # the op accepts only a number
        return NotImplemented
    return result if dtype is None or result.dtype == dtype else recorder.record(torch.Tensor.to, result, dtype)


def _multiplied(recorder: Recorder, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call with an unknown `alpha` or `value` multiplied into the second operand beforehand."""
    scale = next((key for key in _SCALING if isinstance(kwargs.get(key), UnknownNumber)), None)
    if scale is None or len(args) < 2 or plain_name(func) not in _SCALED:
        return NotImplemented
    with recorder.on():
        others = {key: value for key, value in kwargs.items() if key != scale}
        return func(args[0], args[1] * kwargs[scale], *args[2:], **others)


def _bounds(recorder: Recorder, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of `clamp` with both bounds as tensors, which torch requires if one is."""
    if name not in ("clamp", "clip"):
        return args, kwargs

    def bound(bound_value: Any) -> Any:
        return (
            recorder.record(torch.full, (), bound_value, dtype=DTYPES[type(bound_value)])
            if type(bound_value) in DTYPES
            else bound_value
        )

    return (*args[:1], *map(bound, args[1:])), {key: bound(value) for key, value in kwargs.items()}


def _filled(recorder: Recorder, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`torch.full` and the like with an unknown number: zeros that are filled with the number's tensor."""
    zeros, place = FULL[func]
    number = args[place] if len(args) > place else kwargs.get("fill_value")
    if not isinstance(number, UnknownNumber) or has_unknown(args[:place]):
        return NotImplemented
    named = {key: value for key, value in kwargs.items() if key != "fill_value"}
    if func is torch.full and named.get("dtype") is None:
        named["dtype"] = torch.get_default_dtype() if number.kind is float else DTYPES[number.kind]
    with recorder.on():
        return torch.fill(zeros(*args[:place], **named), number.tensor)
