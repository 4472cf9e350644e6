"""Loss scaling, and the dtype in which gradients are reduced, on real ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from call_cases import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar

PRESETS = ("ddp", "fsdp", "tp")
HALF = autopar.Precision(compute=torch.float16, reduction=torch.float32)
# `OVERFLOWS`: the step whose sums overflow; `SPOILT`: the step in which one rank's gradient gets an infinity
STEPS, OVERFLOWS, SPOILT = 6, 2, 4


class Net(nn.Module):
    """A mean over the batch of squares in float32. The first parameter is a scalar, which no plan shards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))) * self.scale).float().pow(2).mean()


class Cast(Net):
    """The same under autocast, which the trace records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def built(kind: type[Net] = Net) -> Net:
    torch.manual_seed(3)
    return kind()


def rows(step: int) -> torch.Tensor:
    """Rows of which only the last rank's overflow."""
    made = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    if step == OVERFLOWS:
        made[4:] *= 300
    return made


def own_rows(step: int) -> torch.Tensor:
    return rows(step).chunk(dist.get_world_size())[dist.get_rank()]


def planned(preset: str, kind: type[Net] = Net, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(built(kind), {"x": rows(0)}, mesh, constraints=preset, **options)


def scaled(model: nn.Module, x: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """Train with a gradient scaler: the scales, and the steps that changed no parameter."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scales, skipped = [], []
    for step in range(STEPS):
        before = [whole(p).clone() for p in model.parameters()]
        scaler.scale(model(x(step))).backward()
        if step == SPOILT:
            spoil(model)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if all(torch.equal(old, whole(p)) for old, p in zip(before, model.parameters(), strict=True)):
            skipped.append(step)
    return {"scales": scales, "skipped": skipped, "state": [whole(p).detach() for p in model.parameters()]}


def spoil(model: nn.Module) -> None:
    """Put an infinity into a gradient: on the last rank alone if it is sharded, since replicas are equal."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    split = [g for g in gradients if isinstance(g, DTensor) and any(p.is_shard() for p in g.placements)]
    if not split or dist.get_rank() == dist.get_world_size() - 1:
        gradient = (split or gradients)[0]
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.view(-1)[0] = float("inf")


def scaler(preset: str) -> dict[str, Any]:
    local = preset != "tp"
    model = planned(preset, precision=HALF, inputs="local" if local else "global")
    found = scaled(model, own_rows if local else rows)
    right = scaled(Halved(built()), rows)
    errors = [(a - b).abs().max().item() for a, b in zip(found.pop("state"), right.pop("state"), strict=True)]
    return {**found, "error": max(errors), "expected": right}


class Halved(nn.Module):
    """A model in one process that casts parameters where they are used, as the plan does."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = {name: p.half() for name, p in self.net.named_parameters()}
        loss: torch.Tensor = torch.func.functional_call(self.net, halves, (x.half(),))
        return loss


class Reduced(TorchDispatchMode):
    """Records the dtypes of reductions over ranks of more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("_c10d_functional::") and "reduce" in name and args[0].numel() > 1:
            self.found.add(str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def reduction(preset: str, dtype: torch.dtype) -> list[str]:
    precision = autopar.Precision(compute=torch.bfloat16, reduction=dtype)
    model = planned(preset, precision=precision)
    model(rows(0))  # checks that are made only once
    loss = model(rows(0))
    with Reduced() as reduced:
        loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return sorted(reduced.found)


def autocast(preset: str) -> float:
    model, alone = planned(preset, Cast), built(Cast)
    for one in (model, alone):
        one(rows(0)).backward()
    errors = [(whole(a.grad) - whole(b.grad)).abs().max() / whole(b.grad).abs().max() for a, b in _pairs(model, alone)]
    worst = torch.stack(errors).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


class Norms(nn.Module):
    """Norms with running statistics in a model that is read in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.batch = nn.Conv1d(2, 8, 3, bias=False), nn.BatchNorm1d(8)
        self.each = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x.view(len(x), 2, 8))
        return self.batch(x).tanh() * self.each(x).sigmoid()


def norms(preset: str) -> list[float]:
    """By how much outputs (in training and in evaluation), gradients and statistics in bfloat16 are off the largest."""
    torch.manual_seed(3)
    alone, x = Norms(), rows(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(
        copy.deepcopy(alone), {"x": x}, mesh, precision="bf16", constraints=(preset, "output:* = R")
    )
    found: list[list[torch.Tensor]] = []
    for one in (model, alone):
        output = one(x)
        (output * x[:, None, :6]).sum().backward()
        found.append([output, *(whole(p.grad) for p in one.parameters()), *one.buffers(), one.eval()(x)])
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True)]


def _pairs(model: nn.Module, alone: nn.Module) -> Any:
    return zip(model.parameters(), alone.parameters(), strict=True)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"scaler-{preset}": functools.partial(scaler, preset) for preset in PRESETS}
    | {f"autocast-{preset}": functools.partial(autocast, preset) for preset in PRESETS}
    | {f"norms-{preset}": functools.partial(norms, preset) for preset in PRESETS}
    | {
        f"{name}-{preset}": functools.partial(reduction, preset, dtype)
        for name, dtype in DTYPES.items()
        for preset in ("ddp", "fsdp")
    }
}
