"""A model with an outside loss, on real ranks: predictions without the loss, and losses that change or train."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dtensor_support import DIFFERENTIATES_SCANS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar

ROWS, STEPS = 8, 3


class Smoothed(nn.Module):
    """Cross entropy multiplied by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.entropy = 1.0, nn.CrossEntropyLoss()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.factor * self.entropy(output, target)
        return loss


def built(features: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, features)).double()


def trained_and_evaluated(preset: str, inputs: str) -> float:
    """The largest difference of a loss or a prediction from one process."""
    seeds = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=seeds)
    target = torch.randint(0, 3, (ROWS,), generator=seeds)
    mesh, loss, worst = init_device_mesh("cpu", (dist.get_world_size(),)), Smoothed(), 0.0
    model, alone = built(), built()
    examples = {"input": x, "target": target}
    model = autopar.autoparallelize(model, examples, mesh, loss_fn=loss, constraints=preset, inputs=inputs)
    steps, own_steps = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    batch = autopar.local_batch(model, examples) if inputs == "local" else examples
    for step in range(STEPS):
        loss.factor, loss.entropy.label_smoothing = 1.0 - 0.25 * step, 0.1 * step
        found, expected = model(batch["input"], target=batch["target"]), loss(alone(x), target)
        found.backward()
        expected.backward()
        for each in (steps, own_steps):
            each.step()
            each.zero_grad()
        with torch.no_grad():
            predicted = model.eval()(batch["input"])
            wanted = alone(x)
        model.train()
        worst = max(worst, (found - expected).abs().item(), (whole(predicted) - wanted).abs().max().item())
    return worst


def half_a_call() -> str:
    """The error if a loss needs two arguments and one is given."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    examples = {"input": torch.zeros(ROWS, 4).double(), "target": torch.zeros(ROWS, 3), "weight": torch.ones(ROWS, 1)}

    def loss(output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * (output - target)).square().mean()

    model = autopar.autoparallelize(built(), examples, mesh, loss_fn=loss)
    try:
        model(examples["input"], target=examples["target"])
    except autopar.errors.AutoparError as error:
        return str(error)
    return "no error"


class Weighted(nn.Module):
    """A loss with its own weights; `leaf`: it reads values, so that it cannot be traced."""

    def __init__(self, leaf: bool) -> None:
        super().__init__()
        self.leaf, self.weight = leaf, nn.Parameter(torch.eye(3, dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        factor = 1 + float(output.detach().numpy().mean() > 9) if self.leaf else 1
        return nn.functional.cross_entropy(output @ self.weight, target) * factor + self.weight.square().sum()


def loss_trains(preset: str, leaf: bool) -> float:
    """The largest difference of a loss, or of the loss's own weights, from one process."""
    seeds = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=seeds)
    target = torch.randint(0, 3, (ROWS,), generator=seeds)
    mesh, loss, own_loss = init_device_mesh("cpu", (dist.get_world_size(),)), Weighted(leaf), Weighted(leaf)
    alone, worst, named = built(), 0.0, [preset, "leaf:_module_*"] if leaf else [preset]
    examples = {"input": x, "target": target}
    model = autopar.autoparallelize(built(), examples, mesh, loss_fn=loss, constraints=named)
    steps = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    own_steps = torch.optim.SGD([*alone.parameters(), *own_loss.parameters()], lr=0.1)
    for _ in range(STEPS):
        found, expected = model(x, target=target), own_loss(alone(x), target)
        found.backward()
        expected.backward()
        for each in (steps, own_steps):
            each.step()
            each.zero_grad()
        worst = max(worst, (found - expected).abs().item(), (loss.weight - own_loss.weight).abs().max().item())
    return worst


OF_OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "soft_margin": F.soft_margin_loss,
    "cosine": lambda a, b: F.cosine_embedding_loss(a, b, a[:, 0].sign()),
    "kl": lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
}


def of_outputs(layout: str, name: str) -> float:
    """The largest difference of a gradient from one process, for a loss of two planned models' outputs."""
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), torch.randn(ROWS, 4, dtype=torch.float64)
    dist.broadcast(x, 0)
    examples: dict[str, torch.Tensor] = {"input": x}
    alone = [built(4), built(4)]
    with torch.no_grad():
        alone[1].get_parameter("0.weight").neg_()
    named = [f"output:* = {layout}"]
    models = [autopar.autoparallelize(copy.deepcopy(one), examples, mesh, constraints=named) for one in alone]
    gradients = []
    for student, teacher in (models, alone):
        with torch.no_grad():
            wanted = teacher(x)
        loss = OF_OUTPUTS[name](student(x), wanted)
        loss.backward()
        gradients.append([whole(p.grad) for p in student.parameters() if p.grad is not None])
    assert len(gradients[1]) == 4
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


OF_UNEVEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{name: loss for name, loss in OF_OUTPUTS.items() if name != "cosine"},
    "bce_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    "norms summed": lambda a, b: torch.stack([a.norm(), b.norm()]).sum(),
    "norms of rows": lambda a, b: a.norm(dim=1).sum() + a.norm(dim=0).mean(),
    "distances": lambda a, b: F.pairwise_distance(a, b).sum(),
    "all dims": lambda a, b: ((a - a.mean(dim=())) ** 2 + a.sum(dim=[], keepdim=True) * b.amax(dim=())).sum(),
    "norm of a product": lambda a, b: (a.T @ b).norm() + (a @ b.T).norm() + a.mean(0).norm(),
    "extremes": lambda a, b: a.max() * a.amax(0).sum() - a.min() * a.amin(dim=1, keepdim=True).sum() + b.abs().max(),
    "norms of extremes": lambda a, b: a.norm(inf) * a.norm(-inf) + a.norm(inf, dim=0).sum() + a.norm(inf, dim=1).sum(),
    "norms of lists": lambda a, b: a.sum() + sum(nn.utils.get_total_norm([a, b], order) for order in (inf, 1.0)),
}
if DIFFERENTIATES_SCANS:
    OF_UNEVEN["last dim scanned"] = lambda a, b: (a.cumsum(-1).exp() * a.logcumsumexp(-2)).sum()


def of_uneven(dim: int, name: str, *, rows: Sequence[int] = (5, 7)) -> float:
    """The largest difference of a value or its gradient, for two tensors of which ranks hold parts of unequal size."""
    mesh, seeds = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(2)
    autopar.autoparallelize(built(4), {"input": torch.zeros(ROWS, 4).double()}, mesh)
    tensors = [torch.randn(*rows, dtype=torch.float64, generator=seeds) for _ in range(2)]
    found = []
    for one, other in (tensors, [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in tensors]):
        loss = OF_UNEVEN[name](one.requires_grad_(), other)
        found.append([loss.detach(), *torch.autograd.grad(loss, one)])
    return max((a - whole(b)).abs().max().item() for a, b in zip(*found, strict=True))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{preset}, {inputs}": functools.partial(trained_and_evaluated, preset, inputs)
        for preset in ("ddp", "fsdp", "tp")
        for inputs in ("global", "local")
    }
    | {
        f"loss trains, {preset}, {leaf=}": functools.partial(loss_trains, preset, leaf)
        for preset, leaf in (("ddp", False), ("fsdp", True), ("tp", True))
    }
    | {
        f"{name} of outputs, {layout}": functools.partial(of_outputs, layout, name)
        for layout, name in (*(("S0", name) for name in OF_OUTPUTS), ("S1", "cosine"))
    }
    | {
        f"{name} of unlike parts of dim {dim}": functools.partial(of_uneven, dim, name)
        for dim in (0, 1)
        for name in OF_UNEVEN
    }
    | {
        f"{name} of a rank's whole dim {dim}": functools.partial(of_uneven, dim, name, rows=rows)
        for dim, rows in ((0, (1, 7)), (1, (5, 1)))
        for name in ("all dims", "norms of rows", "extremes", "norms of extremes", "norms of lists")
    }
    | {"half_a_call": half_a_call}
}
