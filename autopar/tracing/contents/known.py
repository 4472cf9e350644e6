"""Known values: tensors that are computed from constants only have their real value beside the data-free one.

Examples are `arange`, `ones`, and masks made from them. When Python asks for such a tensor's contents (`bool`, `item`,
`all`), the trace has the answer of an eager run. For values of more than `LIMIT` elements, and those computed from
them, only how to compute them is kept (`deferred`). An input whose example was marked with `known` has a value too;
what is read from it becomes a guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import KNOWN
from autopar.ops.random_ops import is_random_operator
from autopar.tracing.contents.deferred import Deferred
from autopar.tracing.targets import RANDOM, methods

LIMIT = 1 << 20  # elements of a value that is kept


@dataclass(frozen=True)
class Known:
    """An example input whose contents the trace may read; each reading is checked at run time."""

    tensor: torch.Tensor


def known(tensor: torch.Tensor) -> Known:
    """Mark an example as known: branches on its contents follow this example, and calls check that they still do."""
    return Known(tensor)


class KnownValues:
    """Real values of data-free tensors."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.deferred = Deferred()
        self._apart: dict[int, int] = {}  # by id: version of values cut from deferred ones, in own storage
        self.guarded: set[int] = set()  # tensors computed from a known input
        self.random: dict[int, int] = {}  # by id: version of uniform random numbers, and comparisons of these
        self._ranges: dict[int, tuple[int, float, float]] = {}  # of uniform numbers: version, bounds
        self._nodes: dict[int, fx.Node] = {}
        self._state: set[int] = set()  # storages of the values of buffers
        self._from_input = False

    def put(
        self,
        tensor: torch.Tensor,
        real: torch.Tensor,
        node: fx.Node,
        *,
        from_input: bool = False,
        is_state: bool = False,
        is_kept: bool = False,
    ) -> None:
        """Set the real value of a data-free tensor that `node` made.

        `is_state`: it belongs to a buffer, and is known until written; `is_kept`: likewise another tensor that persists
        between calls.
        """
        if real.numel() > LIMIT:
            if from_input:  # the user marked it as known
                self.guarded.add(id(tensor))
                self.deferred.put(tensor, lambda: real, [real])
            return
        if is_state or is_kept:
            self._state.add(real.untyped_storage()._cdata)
        from_input = from_input or is_state
        self.values[id(tensor)] = real
        self._nodes[id(tensor)] = node
        if from_input or self._from_input:
            self.guarded.add(id(tensor))
        else:
            node.meta[KNOWN] = real

    def knows(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(id(t) in self.values and self._holds(t) for t in tensors)

    def can_tell(self, tensors: Sequence[torch.Tensor], written: Sequence[int] = ()) -> bool:
        """Whether the values are known or can be computed, or could before those in `written` were written."""
        return all(
            self._holds(t, i in written) if id(t) in self.values else self.deferred.knows(t)
            for i, t in enumerate(tensors)
        )

    def run(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], result: Any, written: list[int]
    ) -> Any:
        """`func` on real values; None where a value is unknown, the function is random, or the result is large."""
        self._from_input = False
        tensors = read_by(func, tensors)
        if func in _TYPED_AS_ANOTHER:  # a data-free tensor as the example would make the result data-free too
            args, kwargs = (args[0], *map(_typed, args[1:])), {name: _typed(one) for name, one in kwargs.items()}
        if not tensors and result is not None and not isinstance(result, (torch.Tensor, tuple, list)):
            return None
        counts = any(self._is_state(tensors[i]) for i in written)  # the next step finds it changed
        if func in RANDOM or is_random_operator(func) or counts or not self.can_tell(tensors, written):
            for i in written:
                self._forget(tensors[i])
            return None
        self._from_input = any(id(t) in self.guarded for t in tensors)
        is_late = not all(id(t) in self.values for t in tensors)
        if _is_large(result) or (is_late and not isinstance(result, torch.Tensor)):
            for i in written:
                self._forget(tensors[i])
            if not written and isinstance(result, torch.Tensor) and all(result is not t for t in tensors):
                self._defer(func, args, kwargs, tensors, result)
            self._from_input = False
            return None
        for i in written:
            self._unmark(tensors[i])
        with torch.no_grad():
            real = func(*self._real(args), **self._real(kwargs))
        if is_late:
            real = real.clone()
            self._apart[id(result)] = result._version
        elif self._apart:
            self._follow(tensors, written, result)
        return real

    def _defer(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], result: torch.Tensor) -> None:
        if self._from_input:
            self.guarded.add(id(result))
        reals = [self.values[id(t)] for t in tensors if id(t) in self.values]
        self.deferred.put(result, lambda: func(*self._real(args), **self._real(kwargs)), [*tensors, *reals])

    def _holds(self, tensor: torch.Tensor, is_written: bool = False) -> bool:
        version = self._apart.get(id(tensor))
        return version is None or version == tensor._version - is_written

    def _follow(self, tensors: list[torch.Tensor], written: list[int], result: Any) -> None:
        """Mark results that share storage with a value cut from a deferred one as being such values too."""
        for i in written:
            if id(tensors[i]) in self._apart:
                self._apart[id(tensors[i])] = tensors[i]._version
        storages = {t.untyped_storage()._cdata for t in tensors if id(t) in self._apart}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in storages:
                self._apart[id(tensor)] = tensor._version

    def drawn(self, func: Any, args: Any, result: Any) -> Any:
        """The value of `rand() < p` where p leaves no doubt (a drop probability of 0); None otherwise."""
        if func in _UNIFORM and isinstance(result, torch.Tensor):
            self.random[id(result)] = result._version
            low, high = [*args[1:3], *_UNIT[len(args[1:3]) :]] if func is torch.Tensor.uniform_ else _UNIT
            if type(low) in (int, float) and type(high) in (int, float) and low < high:
                self._ranges[id(result)] = (result._version, low, high)
        if func not in _COMPARISONS or len(args) != 2 or self.random.get(id(args[0])) != args[0]._version:
            return None
        self.random[id(result)] = result._version
        version, low, high = self._ranges.get(id(args[0]), _NO_RANGE)
        bound = args[1]
        is_open = type(bound) not in (int, float) or low < bound < high
        if version != args[0]._version or is_open or result.numel() > LIMIT:
            return None
        # A draw lies in [low, high), so comparisons with a bound outside, or with high, have a certain result. With
        # low as the bound, only a draw of exactly low (one of 2^24) differs: for a single number that is ignored, so
        # that `rand(1) > p` is treated like `rand(1) >= p` for a probability of 0.
        at_low, answer = map(bool, func(torch.tensor([low, (low + high) / 2]), bound))
        return torch.full(result.shape, answer) if at_low == answer or result.numel() == 1 else None

    def whole_part(self, tensor: torch.Tensor) -> int | None:
        """`int()` of a random number where its bounds leave no doubt: `int(uniform_(0, 1))` is 0."""
        version, low, high = self._ranges.get(id(tensor), _NO_RANGE)
        certain = version == tensor._version and low >= 0 and math.floor(low) == math.ceil(high) - 1
        return math.floor(low) if certain else None

    def filled(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The value of `ones_like(x)` and similar calls, which does not depend on x's contents; None for others."""
        if func not in FILLING or any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves((args[1:], kwargs))):
            return None
        shape, strides, dtype = args[0].shape, args[0].stride(), args[0].dtype

        def fill() -> Any:  # with the strides of x, as `ones_like` of a transposed tensor is transposed
            return func(torch.empty_strided(shape, strides, dtype=dtype), *self._real(args[1:]), **self._real(kwargs))

        if result.numel() > (LIMIT >> 4 if result.is_floating_point() else LIMIT):
            self.deferred.put(result, fill, [])
            return None
        return fill()

    def answer(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[Any, bool]:
        """The answer to a question about known tensors, and whether it depends on a known input."""
        with torch.no_grad():
            answer = func(*self._real(args), **self._real(kwargs))
        return answer, any(id(t) in self.guarded for t in tensors)

    def _real(self, value: Any) -> Any:
        """Arguments with real values in place of data-free tensors, and the CPU in place of other devices."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.values and self.deferred.knows(value):
                return self.deferred.value(value)
            return self.values.get(id(value), value)
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, slice):
            return slice(self._real(value.start), self._real(value.stop), self._real(value.step))
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            items = [self._real(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {k: (_CPU if k == "device" and v is not None else self._real(v)) for k, v in value.items()}
        return value

    def _aliases(self, tensor: torch.Tensor) -> list[int]:
        real = self.values.get(id(tensor))
        if real is None:
            return []
        storage = real.untyped_storage()._cdata
        return [key for key, value in self.values.items() if value.untyped_storage()._cdata == storage]

    def _is_state(self, tensor: torch.Tensor) -> bool:
        real = self.values.get(id(tensor))
        return real is not None and real.untyped_storage()._cdata in self._state

    def _unmark(self, tensor: torch.Tensor) -> None:
        """Remove KNOWN from all aliases' nodes: the storage is written, and no longer holds their results."""
        for key in self._aliases(tensor):
            self._nodes[key].meta.pop(KNOWN, None)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Something unknown is written into a known tensor: all its aliases become unknown."""
        self._unmark(tensor)
        for key in self._aliases(tensor):
            del self.values[key]


_TYPED_AS_ANOTHER = methods("to", "type_as")
AS_ANOTHER = methods("expand_as", "view_as", "reshape_as") | _TYPED_AS_ANOTHER
"""Functions that use only the shape or the dtype of their second argument."""
_UNIT = (0.0, 1.0)
_NO_RANGE = (-1, 0.0, 0.0)  # for tensors without one: no tensor has version -1
_UNIFORM = methods("rand", "rand_like", "uniform_")
_COMPARISONS = methods("lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__")
FILLING = methods("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor")
MADE_KNOWN = _UNIFORM | _COMPARISONS | FILLING  # their results may be known although their arguments are not
_CPU = torch.device("cpu")


def read_by(func: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the tensors given to a function, those whose contents its result depends on."""
    return tensors[:1] if func in AS_ANOTHER else tensors


def _typed(value: Any) -> Any:
    return torch.empty(0, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _is_large(result: Any) -> bool:
    return any(t.numel() > LIMIT for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
