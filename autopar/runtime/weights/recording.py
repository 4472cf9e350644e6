"""Records what a constructor does to tensors while it runs without data: which op writes what, in which order.

A constructor draws random numbers in the order of its ops, and fills some tensors twice (a layer's own initialisation,
then the model's). To get its values without ever holding all of them, it first runs here on data-free tensors;
`replaying` then runs the ops again in the same order, with each tensor in memory only while it is needed.

The data-free tensors are fake tensors, not meta ones: torch's own init functions skip meta tensors, and libraries skip
initialisation on that device. `FakeTensorMode` is private, but torch has no other such tensors.
"""

from __future__ import annotations

import hashlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # private: for real values meanwhile

from autopar.errors import InputError
from autopar.runtime.calling.calls import place_of_frames

_DRAWN_WHOLE = ("_no_grad_trunc_normal_",)
"""Functions of torch.nn.init that draw until all numbers are in range, which depends on data: one step each."""
_READ: tuple[Any, ...] = (torch.Tensor.numpy, torch.Tensor.__array__)  # read a tensor's values
_RESIZED = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})  # change a tensor's memory: refused


@dataclass(frozen=True)
class View:
    """A strided tensor on one storage of the tape; `offset` and `stride` in elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Step:
    """One op, with views in place of tensors.

    `writes` are the arguments that it changes. `creates` has an entry for each flat tensor output, in order: its view
    if it has a new storage, else None. `random`: the op draws from a generator.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    writes: tuple[View, ...]
    creates: tuple[View | None, ...]
    random: bool

    def views(self) -> list[View]:
        """The views among its arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, View)]


@dataclass
class Tape:
    """Steps in order, the size in bytes of each storage, and the contents of storages that had values before."""

    steps: list[Step] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    constants: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def digest(self) -> str:
        """A digest that is equal for tapes with the same replay."""
        digest = hashlib.sha256()
        for step in self.steps:
            args, kwargs = pytree.tree_map_only(torch.Generator, lambda _: "generator", (step.args, dict(step.kwargs)))
            name = getattr(step.op, "_schema", None) or getattr(step.op, "__qualname__", "")
            digest.update(f"{name}{args}{sorted(kwargs.items())}{step.creates}".encode())
        for number, storage in self.constants.items():
            content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            digest.update(f"{number}".encode() + content.numpy().tobytes())
        return digest.hexdigest()


class Recording(TorchDispatchMode):
    """Active (through `recording`) while a constructor runs; `tape` is what it did, `view` where a tensor lies."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.tape = Tape()
        self._fakes = fakes
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # keeps storages alive, as they are known by their address

    def view(self, tensor: torch.Tensor) -> View:
        """The view of a tensor of the constructor."""
        number = self._number(tensor)
        return View(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor was made, or used, while recording."""
        return tensor.untyped_storage()._cdata in self._numbers

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor at this moment, computed; raises InputError if they depend on random numbers."""
        from autopar.runtime.weights.replaying import value_of

        value = value_of(self.tape, self.view(tensor))
        if value is None:
            raise self._refusal("reads the value of a random number")
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._data_free, (args, dict(kwargs or {})))
        if func is torch.ops.aten._local_scalar_dense.default:
            value = self.value(args[0])
            with _disable_current_modes():
                return value.item()
        if func is torch.ops.aten.set_.source_Tensor:  # only replaces the tensor's storage, nothing is computed
            return func(*args, **kwargs)
        if func._schema.name in _RESIZED:
            raise self._refusal(f"changes a tensor's memory ({func})")
        views = pytree.tree_map_only(torch.Tensor, self.view, (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return pytree.tree_map_only(torch.Tensor, self._data_free, self._computed(func, args, kwargs))
        if torch.Tag.inplace_view not in func.tags:
            written = _written(func, *views)
            self._write_down(func, views, written, out, torch.Tag.nondeterministic_seeded in func.tags)
        return out

    def whole(self, function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        """`function(tensor, ...)`, which changes its tensor in place, recorded as one step."""

        def written_down(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            views = pytree.tree_map_only(torch.Tensor, self.view, ((tensor, *args), kwargs))
            self._write_down(function, views, (views[0][0],), (), True)
            return tensor

        return written_down

    def _write_down(self, op: Any, views: Any, written: tuple[View, ...], out: Any, random: bool) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        creates = tuple(None if self.knows(t) else self.view(t) for t in tensors)
        if written or any(creates):
            self.tape.steps.append(Step(op, tuple(views[0]), views[1], written, creates, random))

    def _data_free(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for one with values, which are kept on the tape as they are now."""
        if self._fakes.is_our_fake(tensor):
            return tensor
        fake = self._fakes.from_tensor(tensor)
        if not self.knows(fake):
            if tensor.is_meta:
                raise self._refusal("uses a tensor of the meta device")
            number = self._number(fake)
            with _disable_current_modes():
                self.tape.constants[number] = tensor.detach().cpu().untyped_storage().clone()
        return fake

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result, computed on values, of an op whose output shape depends on data."""
        if any(argument.is_write for argument in func._schema.arguments if argument.alias_info is not None):
            raise self._refusal(f"runs {func}, whose result depends on data")
        real = pytree.tree_map_only(torch.Tensor, self.value, (args, kwargs))
        with _disable_current_modes():
            return func(*real[0], **real[1])

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.tape.sizes_bytes)
            self.tape.sizes_bytes.append(int(storage.nbytes()))
            self._held.append(storage)
        return number

    @staticmethod
    def _refusal(deed: str) -> InputError:
        return InputError(
            f"the model's initialisation {deed}, so that it cannot be run tensor by tensor: give the weights as files",
            where=place_of_frames(traceback.extract_stack()),
        )


class _Fakes(FakeTensorMode):
    """A mode that is not copied: deep copies of fake tensors belong to the mode of the original."""

    def __deepcopy__(self, memo: Any) -> _Fakes:
        return self


class _Reading(TorchFunctionMode):
    """Lets NumPy arrays be made of recorded tensors, from their computed values."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ:
            args = (self._recording.value(self._recording._data_free(args[0].detach())), *args[1:])
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def recording() -> Iterator[Recording]:
    """While inside, tensors are made without data on the CPU, and what happens to them is recorded."""
    fakes = _Fakes(allow_non_fake_inputs=True)
    recorder = Recording(fakes)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Deep copies ask for the address of a tensor's data; that fake tensors have none is the answer they need.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        patched: list[tuple[Any, str, Callable[[Any], Any]]] = [(torch.utils, "swap_tensors", _swapping)]
        patched += [(init, name, recorder.whole) for name in _DRAWN_WHOLE if hasattr(init, name)]
        for module, name, other in patched:
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, other(original))
        for mode in (fakes, recorder, _Reading(recorder)):
            stack.enter_context(mode)
        yield recorder


def _swapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.utils.swap_tensors`, with which modules are cast, made to work on fake tensors too."""

    def swapped(first: torch.Tensor, second: torch.Tensor) -> Any:
        if not isinstance(first, FakeTensor):
            return original(first, second)
        first.data, second.data = second.data, first.data
        return None

    return swapped


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[View, ...]:
    """The arguments that an op changes, by its schema."""
    written: list[View] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, View)]
    return tuple(written)
