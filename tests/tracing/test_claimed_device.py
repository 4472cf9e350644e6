"""The device that data-free tensors claim: it decides branches, and must not make graphs differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Cluster
from autopar.errors import UntraceableError
from autopar.fingerprints.fingerprint import fingerprint
from autopar.graph import target_name
from autopar.planning.stages import request_of, trace_for
from autopar.stopwatch import Stopwatch
from autopar.tracing import trace

X = torch.zeros(2, 4)


class Positions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1], device=x.device).to(x.device, x.dtype)
        return (x + at).tanh() if x.is_cuda else (x + at).sin()


def test_ranks_on_different_devices_of_a_node_have_one_graph() -> None:
    graphs = [trace(Positions(), {"x": X}, device=device).graph for device in ("cuda:0", "cuda:3", "cuda")]
    assert len({str(node.kwargs.get("device")) for graph in graphs for node in graph.nodes} - {"None"}) == 3
    assert len(set(map(fingerprint, graphs))) == 1


def test_a_model_is_planned_for_gpus_as_it_runs_there() -> None:
    """The model's tensors here are on the CPU or on the meta device."""
    for preset, op in (("h100", "tanh"), ("cpu", "sin")):
        for device in ("cpu", "meta"):
            request = request_of(Cluster.preset(preset, (2,)), precision="fp32")
            traced = trace_for(Positions(), {"x": X.to(device)}, None, request, Stopwatch())
            assert f"Tensor.{op}" in map(target_name, traced.graph.nodes)


class Sure(nn.Module):
    """A random draw against a bound that decides it, which the trace finds out by drawing numbers itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.rand([]) < 2 else x.tanh()


def test_a_default_device_is_not_that_of_the_traces_own_numbers() -> None:
    with torch.device("meta"):
        traced = trace_for(Sure(), {"x": X}, None, request_of(Cluster.preset("cpu", (2,))), Stopwatch())
    assert "Tensor.sin" in map(target_name, traced.graph.nodes)


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").lerp_(self.linear(x).mean(0), 0.1)
        return x - self.get_buffer("seen")


def test_dtypes_that_precision_made_differ_are_told_with_it() -> None:
    """bf16 compute is the default on GPUs."""
    with pytest.raises(UntraceableError, match=r"all but buffers is torch\.bfloat16 there: cast .*precision='fp32'"):
        trace_for(Running(), {"x": X}, None, request_of(Cluster.preset("h100", (2,))), Stopwatch())
    trace_for(Running(), {"x": X}, None, request_of(Cluster.preset("h100", (2,)), precision="fp32"), Stopwatch())


class Moved(nn.Module):
    """`product`: of a buffer added to what the layer gives, a function that torch has data-free kernels of mixed dtypes
    for."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.zeros(4, 4, 1)), product
        self.register_buffer("place", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x + self.place, self.weight)


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("linear", lambda x, w: nn.functional.linear(x, weight=w[..., 0])),
        ("matmul", lambda x, w: x @ w[..., 0]),
        ("mm", lambda x, w: torch.addmm(x, x, w[..., 0])),
        ("conv1d", lambda x, w: nn.functional.conv1d(x[..., None], w)),
    ],
)
def test_products_of_several_dtypes_are_refused_as_with_data(name: str, product: Any) -> None:
    told = rf"{name} needs tensors of one dtype, and is given some of torch\.float32 and of torch\.bfloat16; all but"
    with pytest.raises(UntraceableError, match=told) as found:
        trace_for(Moved(product), {"x": X}, None, request_of(Cluster.preset("h100", (2,))), Stopwatch())
    assert "test_claimed_device.py:" in str(found.value)
    trace_for(Moved(product), {"x": X}, None, request_of(Cluster.preset("cpu", (2,))), Stopwatch())
    with torch.autocast("cpu", torch.bfloat16):  # which casts them
        trace_for(
            Moved(product), {"x": X}, None, request_of(Cluster.preset("cpu", (2,)), precision="bf16"), Stopwatch()
        )
