"""One device with the smallest budget: the first block recomputes, and the peak of a real step is the predicted one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import Cluster, InfeasibleError, Plan, autoparallelize, plan
from autopar.runtime.live_storages import LiveStorages

Tensor = torch.Tensor
BLOCKS, WIDTH, ROWS = 5, 64, 256


class Block(nn.Module):
    """Rotation by angles and a feed-forward layer, as in Llama's blocks, but without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.turned, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.turned(self.norm(x))
        x = x + y * cos + y.roll(WIDTH // 2, -1) * sin
        widened: Tensor = self.down(nn.functional.silu(self.up(x)))
        return x + widened


class Turning(nn.Module):
    """Blocks that read angles from buffers of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        angles = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x.square().mean()


class Given(Turning):
    """The same with angles as inputs."""

    def __init__(self) -> None:
        super().__init__()
        del self.cos, self.sin  # unread buffers would take memory beside the inputs

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x, cos, sin)
        return x.square().mean()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process only."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def planned(model: nn.Module, inputs: dict[str, Tensor], budget: int) -> Plan:
    return plan(model, inputs, Cluster.preset("cpu", (1,)), memory_budget=budget, optimizer="sgd")


def smallest_budget(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    with pytest.raises(InfeasibleError) as refused:
        planned(model, inputs, 1)
    assert refused.value.smallest_budget_bytes is not None
    return refused.value.smallest_budget_bytes


def rows() -> Tensor:
    return torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def test_buffers_of_all_blocks_need_no_larger_budget_than_inputs() -> None:
    """As inputs, the angles come before the first block, which is then equal to the others."""
    model, x = Turning(), rows()
    angles = {"cos": model.cos, "sin": model.sin}
    assert smallest_budget(model, {"x": x}) == smallest_budget(Given(), {"x": x} | angles)  # type: ignore[dict-item]


@pytest.mark.usefixtures("alone")
def test_a_step_at_the_smallest_budget_stays_within_it() -> None:
    model, x = Turning(), rows()
    budget = smallest_budget(model, {"x": x})
    made = planned(model, {"x": x}, budget)
    assert any(segment.name.startswith("blocks.0") for segment in made.recompute), "the first block is not recomputed"
    model = autoparallelize(model, {"x": x}, init_device_mesh("cpu", (1,)), plan=made)  # type: ignore[assignment]
    with LiveStorages([*model.parameters(), *model.buffers(), x]) as live:
        model(x).backward()
    assert live.peak_bytes <= budget
    assert live.peak_bytes == pytest.approx(made.predicted.peak_bytes, rel=0.01)
