"""Scalars of a training step: few bytes, but in a tiny model those by which a peak would exceed its prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autopar.cost.memory.weights import named_once
from autopar.graph import tensor_of

if TYPE_CHECKING:
    from autopar.cost.memory.formulas import StepMemory

_COUNTING = ("adamw", "adam", "adafactor", "muon")  # keep a number of steps for each parameter, muon not of matrices


def scalar_bytes(memory: StepMemory) -> dict[str, int]:
    """Bytes by part: the gradients of losses, with which `backward` begins and which it holds until it returns; and the
    numbers of steps that torch's optimizers keep as tensors, on the CPU unless they are fused."""
    losses = (tensor.nbytes for tensor in map(tensor_of, memory.savings.entered) if not tensor.dim())
    trained = memory.trained | {str(node.target) for node in memory.graph.nodes if memory.is_trainable(node)}
    counted = 0
    if memory.optimizer in _COUNTING and memory.device_kind == "cpu":
        once = (tensor for names, tensor in named_once(memory.parameters) if not trained.isdisjoint(names))
        counted = sum(memory.optimizer != "muon" or tensor.dim() != 2 for tensor in once)
    number = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return {
        "inputs and outputs": sum(losses) if memory.train else 0,
        "optimizer state": counted * number.itemsize,
    }
