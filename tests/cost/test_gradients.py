"""Costs of parameter gradients beside those of ops: against autograd, and by layout and number of micro-batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cluster import Cluster
from autopar.cost import annotate
from autopar.cost.gradients import gradient_seconds
from autopar.cost.memory.formulas import StepMemory
from autopar.graph import tensor_inputs
from autopar.layout import Layout
from autopar.precision import Precision
from autopar.strategies.strategy import Strategy
from autopar.tracing import trace

DEVICE = replace(Cluster.preset("cpu", (2,)).device, bytes_per_s=1e9, launch_seconds=1e-6)


def seconds(weight: str, micro_batches: int, *, train: bool = True, parameter_seconds: float = 0.0) -> float:
    """Seconds over all micro-batches, for the weight of a single product that reads it in layout `weight`."""
    model = nn.Linear(64, 32, bias=False)
    graph = trace(model, {"input": torch.empty(8, 64)}).graph
    annotate(graph)
    parameters = dict(model.named_parameters())
    memory = StepMemory(graph, parameters, (2,), Precision(), "adamw", micro_batches, "cpu", train)
    node = next(n for n in graph.nodes if any(memory.is_parameter(ref.node) for ref in tensor_inputs(n)))
    inputs = tuple(Layout.parse(weight if memory.is_parameter(ref.node) else "R") for ref in memory.inputs[node])
    strategy = Strategy(inputs, outputs=(Layout.parse("R"),), factors=("",))
    device = replace(DEVICE, parameter_seconds=parameter_seconds)
    return micro_batches * gradient_seconds(memory, node, strategy, device)


class Adding(TorchDispatchMode):
    """Counts the kernels of in-place additions, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add_.Tensor:
            self.moved_bytes += sum(tensor.nbytes for tensor in (*args, out))
            self.kernels += 1
        return out


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_adding_up_moves_what_autograd_moves(passes: int) -> None:
    model = nn.Linear(64, 32, bias=False)
    with Adding() as adding:
        for _ in range(passes):
            model(torch.ones(8, 64)).sum().backward()
    moves, launches = adding.moved_bytes / DEVICE.bytes_per_s, adding.kernels * DEVICE.launch_seconds
    assert adding.kernels == passes - 1
    assert seconds("R", passes) == pytest.approx(moves + launches)


def test_a_shard_adds_up_its_part() -> None:
    launches = 3 * DEVICE.launch_seconds
    assert seconds("S0", 4) - launches == pytest.approx((seconds("R", 4) - launches) / 2)


def test_every_micro_batch_hands_every_parameter_over_and_none_without_training() -> None:
    assert seconds("R", 4, parameter_seconds=1.0) == pytest.approx(4 + seconds("R", 4))
    assert seconds("R", 4, parameter_seconds=1.0, train=False) == 0.0
