"""Numbers read from unknown data: `x.sum().item()` while tracing.

They can be used in arithmetic and comparisons, and where an op takes a number; each step is a node. Where Python needs
the value at once (a branch, a list index) it is refused, unless `torch._check` has told enough.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.tracing.contents.asserting import asserted
from autopar.tracing.contents.deciding import known_or_leaf
from autopar.tracing.patching import attributes_set

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool}
# Torch functions for Python's, where these do not accept tensors.
_FUNCTIONS: dict[Any, Any] = {
    operator.not_: torch.logical_not,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
    round: torch.round,
}
for _takes in (max, min):
    _FUNCTIONS[_takes] = lambda a, b, way=_takes.__name__: torch.where(b > a if way == "max" else b < a, b, a)
_OF_BOOLS = (operator.and_, operator.or_, operator.xor, operator.not_)
_STAND_IN = {int: 1, float: 1.0, bool: True}  # what meta kernels get: only the type matters


class UnknownNumber:
    """An int or float that is unknown while tracing. `positive`, `nonzero`: facts learned from `torch._check`."""

    def __init__(self, recorder: Recorder, node: fx.Node, kind: type) -> None:
        self.recorder, self.node, self.kind = recorder, node, kind
        self.whole: int | None = None  # the result of int(), if known
        self.positive = False
        self.nonzero = False
        self._tensor: torch.Tensor | None = None
        self._made_of: tuple[Callable[..., Any], tuple[Any, ...]] | None = None

    def read(self, tensor: torch.Tensor) -> None:
        """Note the one-element tensor that the number is read from."""
        self._tensor = tensor.detach().reshape(()).to(DTYPES[self.kind])

    @property
    def tensor(self) -> torch.Tensor:
        """The number as a 0-d tensor (int64, float64 or bool), computed in the graph without `.item()`."""
        if self._tensor is None:
            assert self._made_of is not None
            function, operands = self._made_of
            with self.recorder.on():
                values = [_as_python_has_it(operand, function, operands, self.kind) for operand in operands]
                self._tensor = _FUNCTIONS.get(function, function)(*values).to(DTYPES[self.kind])
        return self._tensor

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that the user's `isinstance(n, float)` is true
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return type(self) if caller.partition(".")[0] == "autopar" else self.kind

    @property
    def stand_in(self) -> Any:
        return _STAND_IN[self.kind]

    def __repr__(self) -> str:
        return f"<{self.kind.__name__} {self.node}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} met a number of a trace that is over")

    def _result_of(self, function: Callable[..., Any], *operands: Any, kind: type) -> Any:
        number = (UnknownBool if kind is bool else UnknownNumber)(
            self.recorder, self.recorder.number_node(function, operands, kind), kind
        )
        number._made_of = function, operands
        return number

    def _compare(self, function: Callable[[Any, Any], Any], other: Any) -> Any:
        """A comparison: an unknown truth value, or a plain one if `torch._check` has told enough."""
        if not isinstance(other, (int, float, UnknownNumber)):
            return NotImplemented
        if type(other) in (int, float) and other <= 0:
            if self.positive:
                return bool(function(1, other))
            if self.nonzero and other == 0 and function in (operator.eq, operator.ne):
                return function is operator.ne
        result = self._result_of(function, self, other, kind=bool)
        result.meaning = (function, self, other)
        return result

    def __eq__(self, other: object) -> Any:
        return self._compare(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compare(operator.ne, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, other)

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, other)

    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return self._result_of(operator.neg, self, kind=float if self.kind is float else int)

    def __abs__(self) -> Any:
        return self._result_of(operator.abs, self, kind=float if self.kind is float else int)

    def __round__(self, digits: int | None = None) -> Any:
        return self._refuse() if digits is not None else self._result_of(round, self, kind=int)

    def extreme(self, function: Callable[..., Any], a: Any, b: Any) -> Any:
        """The result of Python's `max` or `min` of two numbers, one of which is this one."""
        result = self._result_of(function, a, b, kind=float if _is_float((a, b)) else int)
        if function.__name__ == "max" and any(type(operand) in (int, float) and operand > 0 for operand in (a, b)):
            result.positive = result.nonzero = True
        return result

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __format__(self, how: str) -> str:  # forward may print it while it is traced
        return repr(self)

    def _refuse(self) -> Any:
        description = f"the value of {self!r}, a number that data tell, is needed (a branch on it, an index)"
        raise self.recorder.unknown(description, mend=known_or_leaf([self.node]))

    def __bool__(self) -> bool:
        if self.nonzero or self.positive:
            return True
        return bool(self._refuse())

    def __int__(self) -> int:
        return int(self._refuse()) if self.whole is None else self.whole

    __index__ = __int__

    def __float__(self) -> float:
        return float(self._refuse())


def _arithmetic(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def compute(self: UnknownNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor) or not isinstance(other, (int, float, UnknownNumber)):
            return NotImplemented
        theirs = other.stand_in if isinstance(other, UnknownNumber) else other
        operands = (other, self) if reflected else (self, other)
        if function is operator.pow and isinstance(operands[1], UnknownNumber) and not _is_float(operands):
            return self._refuse()  # int or float, by the exponent's sign
        kind = float if isinstance(function(self.stand_in, theirs or 1), float) else int  # it may be traced
        return self._result_of(function, *operands, kind=kind)

    return compute


def _is_float(operands: tuple[Any, ...]) -> bool:
    kinds = (operand.kind if isinstance(operand, UnknownNumber) else type(operand) for operand in operands)
    return any(issubclass(kind, float) for kind in kinds)


def _as_python_has_it(operand: Any, function: Callable[..., Any], operands: tuple[Any, ...], kind: type) -> Any:
    """An operand converted as Python does: bools are integers in arithmetic, and integers beside floats are floats."""
    if not isinstance(operand, UnknownNumber):
        return operand
    if kind is float or _is_float(operands):
        return operand.tensor.double()
    return operand.tensor.long() if operand.kind is bool and function not in _OF_BOOLS else operand.tensor


def _bits(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: UnknownNumber, other: Any) -> Any:
        kinds = (self.kind, other.kind if isinstance(other, UnknownNumber) else type(other))
        return self._result_of(function, self, other, kind=int) if set(kinds) == {int} else NotImplemented

    return compute


for _name in ("and_", "or_", "xor"):
    for _way in ("", "r"):
        setattr(UnknownNumber, f"__{_way}{_name.strip('_')}__", _bits(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(UnknownNumber, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    setattr(UnknownNumber, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))


class UnknownBool(UnknownNumber):
    """An unknown truth value; `meaning`: the comparison that it is the result of, for `torch._check`."""

    meaning: tuple[Any, ...] | None = None

    def __bool__(self) -> bool:
        assumed = asserted()
        if assumed is not None:  # an assertion is assumed to hold, like `torch._check`
            return assumed
        return bool(self._refuse())

    def _combined(self, function: Callable[..., Any], other: Any, neutral: bool) -> Any:
        if isinstance(other, bool):
            return self if other is neutral else (not neutral)
        return self._result_of(function, self, other, kind=bool) if _is_bool(other) else NotImplemented

    def __and__(self, other: Any) -> Any:
        return self._combined(operator.and_, other, True)

    def __or__(self, other: Any) -> Any:
        return self._combined(operator.or_, other, False)

    def __xor__(self, other: Any) -> Any:
        if isinstance(other, bool):
            return self._result_of(operator.not_, self, kind=bool) if other else self
        return self._result_of(operator.xor, self, other, kind=bool) if _is_bool(other) else NotImplemented

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Any:  # `not` would need the value
        return self._result_of(operator.not_, self, kind=bool)

    __hash__ = object.__hash__


def _is_bool(other: Any) -> bool:
    return isinstance(other, UnknownBool)


@contextlib.contextmanager
def checks_noted(recorder: Recorder) -> Iterator[None]:
    """While inside, `torch._check` of an unknown comparison is assumed to hold, and what it tells is noted."""
    original = torch._check_with  # all forms of `torch._check` call it

    def check(error_type: Any, condition: Any, message: Any = None) -> None:
        if isinstance(condition, UnknownNumber):
            _believe(condition)
        else:
            original(error_type, condition, message)

    with attributes_set(torch, _check_with=check):
        yield


def _believe(condition: UnknownNumber) -> None:
    """Note what a comparison that is assumed to hold tells about its number."""
    meaning = getattr(condition, "meaning", None)
    if meaning is None:
        return
    function, number, bound = meaning
    if type(bound) not in (int, float):
        return
    if (function is operator.gt and bound >= 0) or (function is operator.ge and bound > 0):
        number.positive = number.nonzero = True
    if function is operator.ne and bound == 0:
        number.nonzero = True


def as_tensor(value: Any) -> torch.Tensor:
    """A number as a tensor, whether known or not."""
    if isinstance(value, UnknownNumber):
        value = value.recorder.record(torch.tensor, value)
    return torch.as_tensor(value)


def has_unknown(value: Any) -> bool:
    """Whether there are unknown numbers among arguments."""
    return any(isinstance(leaf, UnknownNumber) for leaf in pytree.tree_leaves(value))
