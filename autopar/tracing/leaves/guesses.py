"""Guesses in place of data, for calls that ask for the contents of data-free tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.tracing.contents import masked
from autopar.tracing.contents.asserting import asserted
from autopar.tracing.targets import DATA_QUESTIONS
from autopar.tracing.values import result_like

Tensor = torch.Tensor
_AS_ARRAYS = (Tensor.numpy, Tensor.__array__)
_QUESTIONS = 1_000  # answers by a guess in one run
_SMALL_FOR_AN_OP = 1 << 25  # elements of all operands of an op that runs on random data


class Guesses(TorchFunctionMode):
    """Answers questions about data with a guess, `_QUESTIONS` times at most: a loop may end only by data."""

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self.answer, self._asked = answer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and (assumed := asserted()) is not None:
            return assumed
        if func in DATA_QUESTIONS and args and isinstance(args[0], Tensor):
            self._asked += 1
            if self._asked > _QUESTIONS:
                raise NotImplementedError(f"no guess ends a loop that has asked for data {_QUESTIONS:,} times")
            if func in _AS_ARRAYS:  # of the tensor's shape: e.g. scipy's assignment depends on that of its costs
                kind = args[0].dtype if args[0].dtype != torch.bfloat16 else torch.float32
                return torch.full(args[0].shape, int(self.answer), dtype=kind).numpy()
            like = torch.full(args[0].shape if func is Tensor.tolist else (1,), int(self.answer), dtype=args[0].dtype)
            if func in (
                Tensor.tolist,
                Tensor.item,
                Tensor.__bool__,
                Tensor.__int__,
                Tensor.__float__,
                Tensor.__index__,
            ):
                return func(like)
            return self.answer
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                raise
            if func in masked.INDEXING and masked.masks_in(args):
                return func(*masked.with_indices(args, lambda mask: int(self.answer)))
            if func in masked.INDEXING and masked.single_indices(args):
                return func(*masked.at_zero(args))
            if getattr(func, "__name__", "") == "nonzero" and not kwargs:
                return torch.empty((int(self.answer), args[0].ndim), dtype=torch.int64, device="meta")
            return _run_op_for_real(func, args, kwargs, int(self.answer))


def _run_op_for_real(func: Any, args: Any, kwargs: Any, least: int) -> Any:
    """The result of an op without data-free kernel on random data of at least `least`, if operands are small."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not tensors or sum(t.numel() for t in tensors) > _SMALL_FOR_AN_OP:
        raise NotImplementedError(f"{getattr(func, '__name__', func)} needs data, and more than a trial may have")

    def real(tensor: Tensor) -> Tensor:
        return (torch.rand(tensor.shape) + least).to(tensor.dtype)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        args, kwargs = pytree.tree_map_only(Tensor, real, (args, kwargs))
        result = func(*args, **{key: "cpu" if key == "device" else value for key, value in kwargs.items()})
    return pytree.tree_map_only(Tensor, result_like, result)
