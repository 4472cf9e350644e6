"""An op of PyTorch's test database as a model: some of its tensors are parameters, and the result is a loss."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

NO_PARAMETERS = 3  # values of `turn`; otherwise every other floating tensor (0 or 1) or each one (2) is a parameter
# the first dtype that an op supports is used
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
COMPLEX = (torch.complex128, torch.complex64)


class OneOp(nn.Module):
    """A function of tensors, some of which are parameters, and a loss of all that it returns."""

    def __init__(self, function: Any, given: Any, finish: Any, turn: int) -> None:
        super().__init__()
        self.function, self.finish = function, finish
        leaves, self.spec = pytree.tree_flatten(given)
        self.leaves: list[Any] = list(leaves)
        self.inputs: dict[str, torch.Tensor] = {}
        floating = 0
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            self.leaves[i] = name = Name(f"t{i}")
            if leaf.is_floating_point() or leaf.is_complex():
                floating += 1
                if turn == 2 or floating % 2 == turn:
                    self.register_parameter(name, nn.Parameter(leaf.detach()))
                    continue
            self.inputs[name] = leaf.detach()
        self.weights = 0
        for i, made in enumerate(self.returned(self.inputs)):
            count = made.numel()
            weight = torch.cos(torch.arange(count, dtype=torch.float64) * 1.7 + i).reshape(made.shape)
            self.register_buffer(f"w{i}", weight)
            self.weights = i + 1

    def returned(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        values = [
            (tensors[leaf] if leaf in tensors else getattr(self, leaf)) if isinstance(leaf, Name) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        found = self.finish(self.function(*args, **kwargs))
        made = [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
        return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in made]

    def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
        total: Any = 0.0
        for i, made in enumerate(self.returned(tensors)):
            finite = torch.nan_to_num(made.double(), nan=0.3, posinf=1.7, neginf=-1.1)
            total = total + (finite * getattr(self, f"w{i}")).sum()
        return total


class Name(str):
    """A placeholder for a tensor among an op's arguments."""

    __slots__ = ()


def eager(model: OneOp) -> list[torch.Tensor]:
    """The loss and the gradients; leaves the model unchanged."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    loss = model(**model.inputs)
    found = [loss.detach()] if isinstance(loss, torch.Tensor) else []
    if found and loss.requires_grad:
        loss.backward()
    for parameter in model.parameters():
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    return [torch.view_as_real(t) if t.is_complex() else t for t in found]


@functools.cache
def database() -> tuple[Sequence[Any], Any]:
    """The list of ops, and the module whose S, M and L determine the sizes of most samples."""
    stands_in = importlib.util.find_spec("expecttest") is None  # only torch's own tests need expecttest
    if stands_in:
        made: Any = types.ModuleType("expecttest")
        made.TestCase = unittest.TestCase
        sys.modules["expecttest"] = made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as database
    if stands_in:
        del sys.modules["expecttest"]
    # the original sets a seed, which hides random draws
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return database.op_db, database


@contextlib.contextmanager
def sized(module: Any, sizes: dict[str, int]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in sizes}
    for name, size in sizes.items():
        setattr(module, name, size)
    try:
        yield
    finally:
        for name, size in before.items():
            setattr(module, name, size)


def samples(op: Any, most: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[tuple[int, Any]]:
    """At most `most` of an op's samples, evenly spaced from first to last."""
    taken = op.supported_dtypes("cpu")
    dtype = next(d for d in dtypes if d in taken)
    torch.manual_seed(0)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    count = min(most, len(found))
    for i in sorted({round(k * (len(found) - 1) / max(count - 1, 1)) for k in range(count)}):
        yield i, found[i]


def function_of(op: Any, form: str) -> Any:
    """The op as a function, as a method, or in place on a copy of its input; None if it has no such form."""
    if form == "method":
        return op.method_variant
    if form == "in place" and op.inplace_variant is not None:
        return lambda first, *args, **kwargs: op.inplace_variant(first.clone(), *args, **kwargs)
    return op.op if form == "function" else None
