"""What loops do with parts of a planned model, or with tensors beside it, on real ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from advice_cases import advised
from habit_cases import planned
from large_cases import refusal
from loop_cases import PRESETS, ROWS, Net, whole
from loop_op_cases import CASES as LOOP_OPS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autopar


def submodule_loaded() -> float:
    """One layer loads a state dict of plain tensors."""
    model = planned("fsdp")
    state = {
        name: torch.full(value.shape, 0.1, dtype=value.dtype)
        for name, value in nn.Linear(16, 32).double().state_dict().items()
    }
    model.get_submodule("up").load_state_dict(state)
    return max((whole(value) - 0.1).abs().max().item() for value in model.get_submodule("up").state_dict().values())


class Headed(nn.Module):
    """A head outside the planned body shares a weight with it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net().double()
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.body.up.weight


def tied_outside() -> list[str]:
    """The error of the first call of a planned body, and of a call after the head shares the new weight."""
    model = Headed()
    model.body = planned("fsdp", model.body)
    told = refusal(lambda: model.body(ROWS))
    model.head.weight = model.body.up.weight
    return [told, refusal(lambda: model.body(ROWS))]


def formatted() -> list[str]:
    """The norm of clipped gradients, formatted as loops log it."""
    model = planned("fsdp")
    model(ROWS).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    part = model.get_parameter("up.weight").grad.norm()
    return [f"{norm.item():.3f}", f"{norm:.3f}", refusal(lambda: f"{part:.3f}"), f"{part}"]


def compared() -> list[bool]:
    """`torch.equal` and `torch.allclose` with tensors of another layout, plain ones, and some that differ by rank."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(35.0).view(7, 5)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    model[0].weight.data = whole.clone()
    model = autopar.autoparallelize(model, {"input": torch.randn(4, 5)}, mesh, constraints="fsdp")
    weight, *others = model.parameters()
    rows, columns = (distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (0, 1))
    mine = whole + dist.get_rank()
    return [
        *(torch.equal(weight, other) for other in (weight, rows, columns, whole)),
        *(torch.allclose(other, weight) for other in (rows, columns, whole)),
        torch.allclose(weight, whole + 0.5, atol=1.0),
        torch.allclose(torch.ones(1), distribute_tensor(torch.ones(3), mesh, [Shard(0)])),
        *(not torch.equal(weight, other) for other in (rows + 1, columns + 1, mine, *others)),
        *(not torch.allclose(weight, other) for other in (rows + 1, columns + 1, mine)),
        not torch.equal(weight, DTensor.from_local(mine, mesh, [Replicate()], run_check=False)),
    ]


def in_place() -> dict[str, float]:
    """Ops in place on norms and sums of parts, and on a list with a plain tensor: how far from those on wholes."""
    planned("fsdp")
    numbers = torch.arange(1.0, 17.0).view(4, 4)
    sharded = distribute_tensor(numbers, init_device_mesh("cpu", (2,)), [Shard(0)])
    ops: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "clip": lambda x: x.norm(dim=0, keepdim=True).clamp_(min=25.0).mul_(0.01),
        "clamp_max_": lambda x: x.norm().clamp_max_(3.0),
        "abs_": lambda x: x.sum(0).neg().abs_(),
        "sqrt_": lambda x: x.sum().sqrt_().reciprocal_(),
        "rsqrt_": lambda x: x.square().sum(0).rsqrt_(),
        "log_": lambda x: x.amax(0).log_().pow_(2),
        "itself": lambda x: (norm := x.norm(), norm.clamp_min_(40.0))[0],
    }
    found = {name: (whole(op(sharded)) - op(numbers)).abs().max().item() for name, op in ops.items()}
    average, plain = sharded.clone(), torch.zeros(3)
    torch._foreach_lerp_([average, plain], [sharded * 3, torch.ones(3)], weight=0.5)
    found["average"] = (whole(average) - 2 * numbers).abs().max().item() + (plain - 0.5).abs().max().item()
    return found


class Given(torch.optim.SGD):
    """An optimizer whose step takes more arguments than torch's, and returns them."""

    def step(self, first: Any = None, *others: Any, **named: Any) -> Any:  # type: ignore[override]
        return first, others, named


def given_to_steps() -> dict[str, list[bool]]:
    """Whether steps get their arguments: for an optimizer without planned parameters, and for one with them."""
    model, loss = planned("ddp"), torch.ones(1)
    optimizers = Given([nn.Parameter(loss)], lr=0.1), Given(model.parameters(), lr=0.1)
    layer = model.get_submodule("up")
    closures = [optimizer.step(lambda *x: x, 1, scale=3) for optimizer in optimizers]
    return {
        "a tensor": [o.step(loss, 1, 2, scale=3) == (loss, (1, 2), {"scale": 3}) for o in optimizers],
        "a name": [o.step(closure=loss, scale=3) == (None, (), {"closure": loss, "scale": 3}) for o in optimizers],
        "nothing": [o.step() == (None, (), {}) for o in optimizers],
        "a layer": [o.step(layer, 1) == (layer, (1,), {}) for o in optimizers],
        "a closure": [first(4, 5) == (4, 5) and rest == [(1,), {"scale": 3}] for first, *rest in closures],
    }


def early_steps() -> list[str]:
    """Errors of steps while gradients wait: without a closure, and with closures that leave them waiting or not."""
    model = planned("fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def waits() -> None:
        with model.no_sync():
            model(ROWS).backward()

    waits()
    steps = (
        lambda: optimizer.step(),
        lambda: optimizer.step(waits),
        lambda: optimizer.step(closure=waits),
        lambda: optimizer.step(lambda: model(ROWS).backward()),
        lambda: optimizer.step(),
    )
    return [refusal(step) for step in steps]


def given_values(preset: str) -> list[str]:
    """Each rank loads or assigns its own values: the names of the loop's own tensors that this has changed."""
    model, own = planned(preset), float(dist.get_rank() + 1)

    def filled(like: nn.Module) -> dict[str, torch.Tensor]:
        return {name: torch.full(value.shape, own, dtype=value.dtype) for name, value in like.state_dict().items()}

    alone = Net().double()
    optimizers = [torch.optim.Adam(one.parameters()) for one in (model, alone)]
    for one, optimizer in zip((model, alone), optimizers, strict=True):
        one(ROWS).backward()
        optimizer.step()
    moments = optimizers[1].state_dict()
    for state in moments["state"].values():
        state["exp_avg"].fill_(own)
    whole_state, layer, data = filled(alone), filled(alone.up), torch.full((32, 16), own, dtype=torch.float64)
    model.load_state_dict(whole_state)
    model.get_submodule("up").load_state_dict(layer)
    optimizers[0].load_state_dict(moments)
    model.get_parameter("up.weight").data = data
    given = {**whole_state, **layer, "data": data}
    given |= {f"state {number}": state["exp_avg"] for number, state in moments["state"].items()}
    taken = [*model.parameters(), *(state["exp_avg"] for state in optimizers[0].state_dict()["state"].values())]
    assert all((whole(tensor) == 1).all() for tensor in taken), "values are rank 0's"
    return [name for name, tensor in given.items() if not (tensor == own).all()]


def saved_gradients(preset: str) -> list[str]:
    """The parameters whose gradient saves or copies more bytes than its own: a layer's gradients share one storage."""
    model = planned(preset)
    model(ROWS).backward()

    def size(value: Any) -> int:
        torch.save(value, file := io.BytesIO())
        return len(file.getvalue())

    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    more = [name for name, grad in grads.items() if size(grad) > size(grad.clone()) + 100]
    copies = {name: copy.deepcopy(grad).to_local() for name, grad in grads.items()}
    return more + [name for name, own in copies.items() if own.untyped_storage().nbytes() > own.numel() * 8]


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        case.__name__: case
        for case in (
            submodule_loaded,
            tied_outside,
            formatted,
            compared,
            in_place,
            given_to_steps,
            early_steps,
            advised,
            *LOOP_OPS,
        )
    }
    | {
        f"{case.__name__}-{preset}": partial(case, preset)
        for case in (given_values, saved_gradients)
        for preset in PRESETS
    }
}
