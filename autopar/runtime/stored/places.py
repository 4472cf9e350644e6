"""Where the tensors that programs read are kept: parameters, buffers, and constants of the trace."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.runtime.stored.parameters import holder_of

if TYPE_CHECKING:
    from autopar.runtime.programs import Program

Place = tuple[dict[str, Any], str]  # a dictionary, and the key in it


class Places:
    """The places of one model's tensors, found once for each program: a lookup by name at every call would be slow."""

    def __init__(self) -> None:
        self._by_program: dict[int, list[Place]] = {}

    def has(self, program: Program) -> bool:
        """Whether the places of a program were found."""
        return program.number in self._by_program

    def of(self, program: Program) -> list[Place]:
        """The places of all that a program reads, in the order of its state."""
        return self._by_program[program.number]

    def find(self, model: nn.Module, program: Program, device: torch.device, kept: Collection[int]) -> None:
        """Find a program's places, and forget those of all programs but the `kept` ones. Constants move to `device`."""
        self._by_program = {number: places for number, places in self._by_program.items() if number in kept}
        own = program.traced.constants
        constants = {name: v.to(device) for name, v in own.items() if isinstance(v, torch.Tensor)}
        self._by_program[program.number] = [
            (constants, name) if name in constants else holder_of(model, name) for name in program.lowered.state
        ]
