"""Known values: tensors that come from constants alone carry their real value beside the data-free one.

`arange`, `ones`, masks made from them: when Python asks such a tensor (`bool`, `item`, `all`), the trace has
the answer that an eager run would have had. Of values above `LIMIT` elements, and of what is made from these, it is
kept how they are computed. An input whose example was marked with `known` has a value too; what is read from it is a
guard.
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

LIMIT = 1 << 20


@dataclass(frozen=True)
class Known:
    """An example input whose contents the trace may read; each reading is checked again at run time."""

    tensor: torch.Tensor


def known(tensor: torch.Tensor) -> Known:
    """Mark an example as known: branches on its contents follow this example, and calls check that they still do."""
    return Known(tensor)


class KnownValues:
    """Real values by data-free tensor."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.deferred = Deferred()
        self._apart: dict[int, int] = {}  # cut from deferred ones, real storage of their own: version that they are of
        self.guarded: set[int] = set()  # tensors computed from a known input
        self.random: dict[int, int] = {}  # uniform random numbers and comparisons of them -> version when drawn
        self._ranges: dict[int, tuple[int, float, float]] = {}  # of uniform numbers: version when drawn, bounds
        self._nodes: dict[int, fx.Node] = {}
        self._state: set[int] = set()  # storages of buffers' values
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
        """`real` is the value of a data-free tensor that `node` made.

        `is_state`: of a buffer, known until written; `is_kept`: of another tensor that stays from call to call, too.
        """
        if real.numel() > LIMIT:
            if from_input:  # somebody has marked it
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
        """Whether the values are known or can be computed, or could before some of them were `written` just now."""
        return all(
            self._holds(t, i in written) if id(t) in self.values else self.deferred.knows(t)
            for i, t in enumerate(tensors)
        )

    def run(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], result: Any, written: list[int]
    ) -> Any:
        """`func` on real values; None where one is unknown, the function is random, or the result is large."""
        self._from_input = False
        tensors = tensors[:1] if func in AS_ANOTHER else tensors
        if not tensors and result is not None and not isinstance(result, (torch.Tensor, tuple, list)):
            return None
        counts = any(self._is_state(tensors[i]) for i in written)  # what a step writes, the next one finds changed
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
        """What looks into the storage of a value that is kept apart is apart as well."""
        for i in written:
            if id(tensors[i]) in self._apart:
                self._apart[id(tensors[i])] = tensors[i]._version
        storages = {t.untyped_storage()._cdata for t in tensors if id(t) in self._apart}
        for made in pytree.tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata in storages:
                self._apart[id(made)] = made._version

    def drawn(self, func: Any, args: Any, result: Any) -> Any:
        """The value of `rand() < p` where p leaves no doubt (a drop probability of 0); None where it is open."""
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
        # It lies in [low, high): every number there compares alike with a bound outside, and with high. Of those with
        # low, all but low itself, which one of 2^24 draws is: `rand(1) > p` asks of a chance of 0 like `rand(1) >= p`.
        at_low, answer = map(bool, func(torch.tensor([low, (low + high) / 2]), bound))
        return torch.full(result.shape, answer) if at_low == answer or result.numel() == 1 else None

    def whole_part(self, tensor: torch.Tensor) -> int | None:
        """What `int` makes of a random number where its bounds leave no doubt: `int(uniform_(0, 1))` is 0."""
        version, low, high = self._ranges.get(id(tensor), _NO_RANGE)
        certain = version == tensor._version and low >= 0 and math.floor(low) == math.ceil(high) - 1
        return math.floor(low) if certain else None

    def filled(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The value of `ones_like(x)` and the like, for which it does not matter what is in x; None for others."""
        if func not in FILLING or any(isinstance(v, torch.Tensor) for v in (*args[1:], *kwargs.values())):
            return None
        shape, strides, dtype = args[0].shape, args[0].stride(), args[0].dtype

        def fill() -> Any:  # the like of a transposed tensor is one, too
            return func(torch.empty_strided(shape, strides, dtype=dtype), *self._real(args[1:]), **self._real(kwargs))

        if result.numel() > (LIMIT >> 4 if result.is_floating_point() else LIMIT):
            self.deferred.put(result, fill, [])
            return None
        return fill()

    def answer(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[Any, bool]:
        """The answer to a question about known tensors, and whether it was read from a known input."""
        with torch.no_grad():
            found = func(*self._real(args), **self._real(kwargs))
        return found, any(id(t) in self.guarded for t in tensors)

    def _real(self, value: Any) -> Any:
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
        """Its storage is written: what nodes say of it is no longer true of their own moment."""
        for key in self._aliases(tensor):
            self._nodes[key].meta.pop(KNOWN, None)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Something unknown is written into a known tensor: every alias is unknown from now on."""
        self._unmark(tensor)
        for key in self._aliases(tensor):
            del self.values[key]


AS_ANOTHER = {f: name for name in ("expand", "view", "reshape") for f in methods(f"{name}_as")}
"""Functions that only ask for the shape of their second argument, by the names of those that are given it."""
_UNIT = (0.0, 1.0)
_NO_RANGE = (-1, 0.0, 0.0)
_UNIFORM = methods("rand", "rand_like", "uniform_")
_COMPARISONS = methods("lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__")
FILLING = methods("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
MADE_KNOWN = _UNIFORM | _COMPARISONS | FILLING  # of these something may be known though nothing is of their arguments
_CPU = torch.device("cpu")


def _is_large(result: Any) -> bool:
    return any(t.numel() > LIMIT for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
