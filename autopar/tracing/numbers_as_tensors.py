"""Functions that are given numbers read from unknown data: these are tensors to the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.pointwise import is_pointwise, plain_name
from autopar.tracing.targets import writes_its_first
from autopar.tracing.unknown import DTYPES, UnknownNumber, has_unknown

if TYPE_CHECKING:
    from autopar.tracing.arguments import Arguments
    from autopar.tracing.recorder import Recorder

_MAKERS = {torch.tensor, torch.as_tensor, torch.scalar_tensor}


def of_tensors(
    recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seen: Arguments
) -> Any:
    """What a function of numbers that are not known makes, given them as tensors, with the dtype that numbers lead to;
    NotImplemented where it takes no tensors in their place."""
    if func in _MAKERS and args and isinstance(args[0], UnknownNumber):
        own = torch.get_default_dtype() if args[0].kind is float else DTYPES[args[0].kind]
        with recorder.on():
            return args[0].tensor.to(kwargs.get("dtype") or own, copy=True)
    written = func is torch.Tensor.__setitem__ and not has_unknown(args[1])
    if not (written or is_pointwise(plain_name(func))) or not has_unknown((args, kwargs)):
        return NotImplemented
    dtype: torch.dtype | None = None

    def given(one: UnknownNumber) -> torch.Tensor:
        if dtype is None or not dtype.is_floating_point or any(t.is_floating_point() for t in seen.tensors):
            return one.tensor
        return recorder.record(torch.Tensor.to, one.tensor, dtype)  # beside whole numbers none is of double precision

    try:
        if not writes_its_first(func):
            with recorder.pausing():
                dtype = func(*seen.data_free(args), **seen.data_free(kwargs)).dtype
        args, kwargs = pytree.tree_map_only(UnknownNumber, given, (args, kwargs))
        made = recorder.record(func, *args, **kwargs)
    except TypeError:  # `add(alpha=)` takes a number alone
        return NotImplemented
    return made if dtype is None or made.dtype == dtype else recorder.record(torch.Tensor.to, made, dtype)
