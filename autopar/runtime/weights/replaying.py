"""Runs a tape again with data: each storage is in memory from the op that fills it to the last one that needs it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes  # private: for real values while recording

from autopar.runtime.weights.recording import Step, Tape, View

_OVERWRITES = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)
"""Ops whose result does not depend on the old content of their first argument."""
_EMPTY = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)


@dataclass(frozen=True)
class Slice:
    """The steps of a tape that wanted storages depend on, in order, each with the storages that are dead after it.

    `draws`: some step draws random numbers. `unfilled`: the wanted storages that no step gives a value.
    """

    steps: tuple[tuple[Step, frozenset[int]], ...]
    draws: bool
    unfilled: frozenset[int]


def slice_for(tape: Tape, wanted: Collection[int]) -> Slice:
    """The steps that must run for the storages `wanted`.

    If one of them draws random numbers, all steps that draw must run: each leaves the generator as the next one finds
    it.
    """
    steps = _needed(tape, wanted, all_draws=False)
    draws = any(step.random for step, _ in steps)
    if draws:
        steps = _needed(tape, wanted, all_draws=True)
    filled = {view.storage for step, _ in steps for view in step.writes} | set(tape.constants)
    filled |= {
        view.storage for step, _ in steps for view in step.creates if view is not None and _name(step) not in _EMPTY
    }
    return Slice(tuple(steps), draws, frozenset(wanted) - filled)


def _needed(tape: Tape, wanted: Collection[int], all_draws: bool) -> list[tuple[Step, frozenset[int]]]:
    live, needed = set(wanted), []
    for step in reversed(tape.steps):
        created = {view.storage for view in step.creates if view is not None}
        changed = {view.storage for view in step.writes} | created
        if not (changed & live or (all_draws and step.random)):
            continue
        overwritten = _overwritten(step, tape)
        reads = {view.storage for view in step.views()}
        needed.append((step, frozenset((reads | created) - live)))
        live -= created | overwritten
        live |= reads - overwritten
    return needed[::-1]


def _overwritten(step: Step, tape: Tape) -> set[int]:
    """The storage, if any, that a step overwrites completely without reading it."""
    if _name(step) not in _OVERWRITES and not (step.random and len(step.views()) == 1 and step.writes):
        return set()
    target, *others = step.views()
    whole = math.prod(target.shape) * target.dtype.itemsize == tape.sizes_bytes[target.storage]
    if not whole or not _dense(target) or any(other.storage == target.storage for other in others):
        return set()
    return {target.storage}


def _dense(view: View) -> bool:
    """Whether the elements of a view fill a range of memory without overlaps and gaps."""
    position = 1
    for stride, length in sorted(zip(view.stride, view.shape, strict=True)):
        if length != 1:
            if stride != position:
                return False
            position *= length
    return True


def _name(step: Step) -> str:
    schema = getattr(step.op, "_schema", None)
    return schema.name if schema is not None else ""


_DRAWN_IN_ORDER = frozenset({"aten::normal_", "aten::uniform_"})  # CPUs draw their numbers in memory order
PIECE_ELEMENTS = 1 << 22
"""Elements drawn at once of numbers that nothing reads: they are drawn only to advance the generator."""


def _is_spent(step: Step, dies: frozenset[int], tape: Tape, device: torch.device) -> bool:
    """Whether a step draws numbers that nothing reads, one after another in memory (on CPUs)."""
    if _name(step) not in _DRAWN_IN_ORDER or device.type != "cpu" or len(step.views()) != 1:
        return False
    (view,) = step.views()
    in_order = _dense(view) and list(view.stride) == sorted(view.stride, reverse=True)
    return view.storage in dies and view.storage in _overwritten(step, tape) and in_order


class Replay:
    """One run of a slice on a device; `place(number, replay)` is called for each wanted storage once it is final."""

    def __init__(self, tape: Tape, wanted: Collection[int], device: torch.device) -> None:
        self.tape, self.wanted, self.device = tape, frozenset(wanted), device
        self._storages: dict[int, torch.UntypedStorage] = {}

    @torch.no_grad()
    def run(self, steps: Slice, place: Callable[[int, Replay], None]) -> None:
        touches = Counter(number for step, _ in steps.steps for number in self._touched(step))
        for number in self.wanted - touches.keys():
            self._finish(number, place)
        for step, dies in steps.steps:
            if _is_spent(step, dies, self.tape, self.device):
                self._spend(step)
            else:
                self._execute(step)
            for number in self._touched(step):
                touches[number] -= 1
                if number in self.wanted and not touches[number]:
                    self._finish(number, place)
            for number in dies:
                self._storages.pop(number, None)

    def tensor(self, view: View) -> torch.Tensor:
        """The real tensor behind a view, as it is now."""
        storage = self._storages.get(view.storage)
        if storage is None:
            storage = self._storages[view.storage] = self._allocated(view.storage)
        return torch.empty(0, dtype=view.dtype, device=self.device).set_(storage, view.offset, view.shape, view.stride)

    def _execute(self, step: Step) -> None:
        args, kwargs = pytree.tree_map_only(View, self.tensor, (step.args, dict(step.kwargs)))
        if kwargs.get("device") is not None:
            kwargs["device"] = self.device
        out = step.op(*args, **kwargs)
        if not any(step.creates):
            return
        tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor, view in zip(tensors, step.creates, strict=True):
            if view is None:
                continue
            storage = tensor.untyped_storage()
            lies_alike = tuple(tensor.stride()) == view.stride and tensor.storage_offset() == view.offset
            if lies_alike and storage.nbytes() == self.tape.sizes_bytes[view.storage]:
                self._storages[view.storage] = storage
            else:  # on data the kernel has given its output other strides
                self.tensor(view).copy_(tensor)

    def _spend(self, step: Step) -> None:
        """Draw a step's numbers piece by piece. CPUs draw in blocks of 16 numbers, and fewer than 16 in another way."""
        view, *arguments = step.args
        remaining = math.prod(view.shape)
        scratch = torch.empty(min(remaining, PIECE_ELEMENTS + 16), dtype=view.dtype)
        while remaining:
            count = remaining if remaining < PIECE_ELEMENTS + 16 else PIECE_ELEMENTS
            step.op(scratch[:count], *arguments, **step.kwargs)
            remaining -= count

    def _allocated(self, number: int) -> torch.UntypedStorage:
        if number in self.tape.constants:
            source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.tape.constants[number])
            return source.to(self.device, copy=True).untyped_storage()
        return torch.empty(self.tape.sizes_bytes[number], dtype=torch.uint8, device=self.device).untyped_storage()

    def _finish(self, number: int, place: Callable[[int, Replay], None]) -> None:
        place(number, self)
        self._storages.pop(number, None)

    @staticmethod
    def _touched(step: Step) -> set[int]:
        return {view.storage for view in (*step.views(), *step.creates) if view is not None}


def value_of(tape: Tape, view: View) -> torch.Tensor | None:
    """The values of a tensor after the last step of the tape; None if they depend on random numbers."""
    steps = slice_for(tape, [view.storage])
    if steps.draws:
        return None
    values: list[Any] = []
    with _disable_current_modes():
        replay = Replay(tape, [view.storage], torch.device("cpu"))
        replay.run(steps, lambda _, run: values.append(run.tensor(view)))
    tensor: torch.Tensor = values[0]
    return tensor
