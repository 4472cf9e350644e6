"""Compares a model under a plan on simulated ranks with the model in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from simulated_mesh import SimulatedMesh
from torch import nn

from autopar.layout import Layout, take_shard
from autopar.plans import Plan
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.lowering.lowering import Rank, lower
from autopar.tracing import Traced

CPU = torch.device("cpu")


def deviation(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    traced: Traced,
    plan: Plan,
) -> float:
    """The largest difference of loss and gradients over all ranks, relative to 1 + the tensor's largest absolute value.

    The loss is the model's result, or its first element.
    """
    # forward may write into buffers
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    result = model(**inputs)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    if loss.requires_grad:
        loss.backward()
    whole = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    storage: dict[str, Layout] = {p.name: p.storage for p in plan.parameters}
    shape = plan.mesh_shape

    def one(mesh: LocalMesh) -> list[float]:
        lowered = lower(traced.graph, plan, Rank(mesh, CPU, {}))
        state = {}
        for name in lowered.state:
            tensor = traced.attribute(name)
            part = take_shard(tensor.detach(), storage[name], shape, mesh.coordinate) if name in storage else tensor
            state[name] = part.detach().clone().requires_grad_(tensor.requires_grad)
        values = [inputs[node.name] for node in traced.graph.nodes if node.op == "placeholder"]
        key = (torch.tensor(7),) if lowered.takes_key else ()
        # None: no transit, so every bucket is converted where it is read
        mine = lowered.module(*values, *state.values(), None, *key)[0]
        errors = [_relative(mine.detach(), loss.detach())]
        if mine.requires_grad:
            mine.backward()
        for name, part in state.items():
            if part.requires_grad and name in whole:
                expected = take_shard(whole[name], storage[name], shape, mesh.coordinate)
                errors.append(_relative(part.grad if part.grad is not None else torch.zeros_like(part), expected))
        return errors

    return max(max(errors) for errors in SimulatedMesh(shape).run(one).values())


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.numel():
        return 0.0
    alike = (found == expected) | (found.isnan() & expected.isnan())  # also equal infinities and NaNs
    scale = 1 + expected.abs().nan_to_num(0, posinf=0).max()
    far: float = (torch.where(alike, 0, (found - expected).abs()).max() / scale).item()
    return math.inf if math.isnan(far) else far  # `max` of Python numbers may skip a NaN
