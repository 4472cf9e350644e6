"""Ops that cannot run on data-free tensors, because a shape depends on a tensor's contents.

Where these contents are known there are several ways. The op runs on real values; data-free indices replace a known
mask; or a size that is a known tensor (`x.view(t, -1)` with t from a grid of patches, `repeat_interleave(x, times)`) is
read, with a guard, and the call repeated with the number. A custom operator whose data-free kernel reads data gets a
trial run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.contents import masked
from autopar.tracing.contents.asking import ask
from autopar.tracing.contents.numbers_as_tensors import FULL
from autopar.tracing.leaves.custom_ops import outputs_of_operator
from autopar.tracing.picked.trace_masks import SELECTING
from autopar.tracing.targets import methods
from autopar.tracing.values import data_free_like

if TYPE_CHECKING:
    from autopar.tracing.arguments import Arguments
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
_NO_SIZES = {torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_REPEATING = methods("repeat_interleave")
_ASKED_FOR_A_NUMBER = "Tensor.item()"  # part of torch's message


class Again(Exception):
    """Repeat the call with these arguments, in which sizes are numbers now."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


def run_without_kernel(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments, error: Exception
) -> tuple[Any, Any]:
    """The data-free result and, if there is one, the real one; raises Again, or UnknownDataError from `error`."""
    known_values = recorder.known
    if func in masked.INDEXING and _is_open(recorder, masked.single_indices(args)):
        return func(*arguments.data_free(masked.at_zero(args))), None
    if _ASKED_FOR_A_NUMBER in str(error):  # a tensor was passed where a number is needed
        _again_with_numbers(recorder, args, kwargs)
        if func in FULL:
            _again_with_number(recorder, FULL[func][1], args, kwargs)
    real = None if arguments.unknown else known_values.run(func, args, kwargs, arguments.tensors, None, [])
    if real is not None:
        return pytree.tree_map_only(Tensor, data_free_like, real), real
    masks = masked.masks_in(args) if func in masked.INDEXING else []
    if masks and known_values.knows(masks):
        return func(*masked.with_indices(args, lambda mask: _picked(recorder, mask))), None
    if func in SELECTING and len(args) == 2 and known_values.knows([args[1]]):
        everything, mask = args[0] + torch.empty_like(args[1], dtype=args[0].dtype), args[1]
        if mask.shape != everything.shape:
            mask = recorder.record(Tensor.expand, mask, everything.shape)
        return everything.flatten()[: _picked(recorder, mask)].clone(), None
    repeated = _with_output_size(recorder, func, args, kwargs)
    if repeated is not None:
        raise Again(args, repeated)
    _again_with_numbers(recorder, args, kwargs)
    outputs = (
        None if arguments.unknown else outputs_of_operator(func, arguments.data_free(args), arguments.data_free(kwargs))
    )
    if outputs is not None:
        return outputs, None
    selected = None if arguments.unknown else recorder.trace_masks.selection(func, args, kwargs)
    if selected is not None:
        return selected, None
    name = getattr(func, "__name__", repr(func))
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    deciding = arguments.tensors
    if "torch.nonzero()" in reason or func in SELECTING:
        reason = "how many elements it picks depends on data"
        deciding = masks or deciding[-1:]
    elif _ASKED_FOR_A_NUMBER in reason:
        reason = "it needs a number, as for a size, and is given a tensor, which is data"
        deciding = [tensor for tensor in deciding if not tensor.ndim] or deciding
    description = f"{name} could not be computed on data-free tensors ({reason})"
    raise recorder.unknown(description, deciding=deciding) from error


def _again_with_numbers(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise Again if some of the arguments are known integer tensors."""
    numbers = as_numbers(recorder, (args, kwargs))
    if any(a is not b for a, b in zip(pytree.tree_leaves(numbers), pytree.tree_leaves((args, kwargs)), strict=True)):
        raise Again(*numbers)


def _again_with_number(recorder: Recorder, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise Again if the value to fill with is a tensor: with the number that it holds, which torch reads too."""
    value = args[place] if len(args) > place else kwargs.get("fill_value")
    if isinstance(value, Tensor):
        number = ask(recorder, Tensor.item, (value,), {})
        if len(args) > place:
            raise Again((*args[:place], number, *args[place + 1 :]), kwargs)
        raise Again(args, {**kwargs, "fill_value": number})


def as_numbers(recorder: Recorder, value: Any) -> Any:
    """Arguments with known 0-d integer tensors replaced by numbers; all others remain the same objects."""

    def number(value: Any) -> Any:
        if isinstance(value, slice):
            ends = value.start, value.stop, value.step
            read = [number(end) for end in ends]
            return value if all(a is b for a, b in zip(read, ends, strict=True)) else slice(*read)
        if not isinstance(value, Tensor) or value.ndim or value.dtype in _NO_SIZES or not recorder.known.knows([value]):
            return value
        return int(ask(recorder, Tensor.item, (value,), {}))

    return pytree.tree_map(number, value)


def _is_open(recorder: Recorder, indices: list[Tensor]) -> bool:
    """Whether some indices are no constants: the graph then indexes by the tensor, whatever its value at run time."""
    known_values = recorder.known
    return any(id(index) in known_values.guarded or not known_values.knows([index]) for index in indices)


def _picked(recorder: Recorder, mask: Tensor) -> int:
    """How many elements a known mask picks. It is read by `ask`, which sets a guard if the mask depends on an input."""
    return int(ask(recorder, Tensor.item, (recorder.record(torch.count_nonzero, mask),), {}))


def _with_output_size(recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords of `repeat_interleave` with `output_size` added, where the repeats are known."""
    if func not in _REPEATING or kwargs.get("output_size") is not None:
        return None
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    if not isinstance(repeats, Tensor) or not recorder.known.knows([repeats]):
        return None
    length = int(ask(recorder, Tensor.item, (recorder.record(torch.sum, repeats),), {}))
    if repeats.numel() == 1:
        dim = args[2] if len(args) > 2 else kwargs.get("dim")
        length *= args[0].numel() if dim is None else args[0].shape[dim]
    return {**kwargs, "output_size": length}
