"""Ops without a rule in the table, and mixtures of experts, planned and run on real ranks, against one process."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.planning.leaf_requests import LeafWarning
from autopar.runtime.stored.model_class import ATTRIBUTE
from autopar.strategies import NoRuleWarning

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
from promotion import Promotion


class Scaled(torch.autograd.Function):
    """Multiplies each row by a weight, with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Unruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)
        self.weight = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(Scaled.apply(self.up(x), self.weight)) ** 2).mean()


def error(model: nn.Module, alone: nn.Module, losses: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest difference of loss and gradients from one process."""
    found = [(losses[0] - losses[1]).abs().detach()]
    for (name, mine), (_, right) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert (mine.grad is None) == (right.grad is None), name
        if right.grad is not None:
            whole = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            found.append((whole - right.grad).abs().max())
    return torch.stack(found).max().item()


def discovered(constraint: str) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Unruled().double()
    torch.manual_seed(3)
    alone = Unruled().double()
    x = torch.randn(8, 16, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoRuleWarning)
        autopar.autoparallelize(
            model, {"x": x}, init_device_mesh("cpu", (dist.get_world_size(),)), constraints=constraint
        )
    losses = model(x), alone(x)
    for loss in losses:
        loss.backward()
    return {"error": error(model, alone, losses), "factors": factors(model, "Scaled")}


def factors(model: nn.Module, op: str) -> list[str]:
    """The factors that the plan splits the ops of a name on."""
    (program,) = getattr(model, ATTRIBUTE).programs
    return sorted({name for node in program.plan.nodes if node.target.endswith(op) for name in node.factors})


def mixture(count: int) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, num_local_experts=count, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).double()
    model.set_experts_implementation("batched_mm")  # the grouped kernel does not support float64
    return model


SPLITS = {"rows": "ddp", "features": "activation:up = S1"}
SUMMANDS = "activation:model.layers.*.mlp.experts = P"
KINDS: dict[str, tuple[int, list[str]]] = {  # factor that the experts are split on -> number of experts, constraints
    "t": (4, ["ddp"]),
    "e": (4, [SUMMANDS, "param:*.experts.* = S0"]),
    "f": (3, [SUMMANDS]),  # two ranks cannot share three experts
}


def experts(kind: str) -> dict[str, Any]:
    count, constraints = KINDS[kind]
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    with Promotion():
        model, alone = mixture(count), mixture(count)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        autopar.autoparallelize(model, {"input_ids": ids, "labels": ids}, mesh, constraints=constraints)
        losses = tuple(m(input_ids=ids, labels=ids).loss for m in (model, alone))
        for loss in losses:
            loss.backward()
    return {"error": error(model, alone, losses), "factors": factors(model, "experts")}


class RoutedModules(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)) for _ in range(4))

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        done = torch.zeros_like(hidden)
        for number in routes.unique().tolist():
            rows, places = torch.where(routes == number)
            done.index_add_(0, rows, self[number](hidden[rows]) * weights[rows, places, None])
        return done


class RoutedStack(nn.Module):
    """The last expert returns its input unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.rand(3, 8, 16) / 4), nn.Parameter(torch.rand(3, 16, 8) / 4)

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        done = torch.zeros_like(hidden)
        for number in routes.unique().tolist():
            rows, places = torch.where(routes == number)
            given = hidden[rows]
            if number < len(self.up):
                given = torch.tanh(given @ self.up[number].t()) @ self.down[number].t()
            done.index_add_(0, rows, given * weights[rows, places, None])
        return done


class Mixture(nn.Module):
    """The first feature of a row selects its expert."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.experts = RoutedModules() if kind == "modules" else RoutedStack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routes, weights = x[:, :1].round().long(), x[:, 1:2].sigmoid()
        hidden = self.first(x)
        return (self.last(hidden + self.experts(hidden, routes, weights)) ** 2).mean()


def routed(kind: str) -> dict[str, Any]:
    """The first rank's rows go to experts 0 and 1, the second's to the last one, which has no weights in a stack."""
    torch.manual_seed(3)
    model = Mixture(kind).double()
    alone = copy.deepcopy(model)
    x = torch.randn(8, 16, dtype=torch.float64)
    x[:, 0] = torch.tensor([0, 1, 1, 0, 3, 3, 3, 3])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeafWarning)
        autopar.autoparallelize(model, {"x": x}, mesh, constraints="fsdp")
    losses = model(x), alone(x)
    for loss in losses:
        loss.backward()
    return {"error": error(model, alone, losses), "factors": factors(model, "routed")}


def _case(run: Callable[[str], Any], kind: str) -> Callable[[], Any]:
    return lambda: run(kind)


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"discovered-{name}": _case(discovered, constraint) for name, constraint in SPLITS.items()}
    | {f"experts-{kind}": _case(experts, kind) for kind in KINDS}
    | {f"routed-{kind}": _case(routed, kind) for kind in ("modules", "stack")}
}
