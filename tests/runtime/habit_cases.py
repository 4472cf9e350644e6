"""Common idioms of training scripts with parameters and optimizer states, on real ranks, against one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from large_cases import refusal
from loop_cases import ROWS, SGD, Net, Prepare, in_presets, trained, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar


def weights_put_back(prepare: Prepare) -> list[torch.Tensor]:
    """Sharpness-aware minimisation as in its best known implementation, which restores the weights."""

    def loss(model: nn.Module) -> torch.Tensor:
        model(ROWS).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        before = [p.data.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        model.zero_grad()
        found = model(ROWS)
        for p, old in zip(model.parameters(), before, strict=True):
            p.data = old
        return found.clone()

    return trained(prepare, loss)


def steps_by_hand(prepare: Prepare) -> list[torch.Tensor]:
    class Step(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.data = p.grad.data.clamp(-0.01, 0.01)
                    p.data = p.data - 0.1 * p.grad.data

    return trained(prepare, lambda model: model(ROWS), optimize=Step)


def parameters_as_a_vector(prepare: Prepare) -> list[torch.Tensor]:
    def loss(model: nn.Module) -> torch.Tensor:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())
        return model(ROWS)

    return trained(prepare, loss)


def data_of_a_plain_tensor(prepare: Prepare) -> list[torch.Tensor]:
    def loss(model: nn.Module) -> torch.Tensor:
        for p in model.parameters():
            seed = torch.Generator().manual_seed(p.ndim)
            p.data = torch.randn(p.shape, dtype=p.dtype, generator=seed)
        return model(ROWS)

    return trained(prepare, loss)


def values_drawn_again(prepare: Prepare) -> list[torch.Tensor]:
    """Weights are initialised anew, once with generators that differ by rank; noise is added, also to gradients."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.trunc_normal_(module.bias, std=0.1)

    def loss(model: nn.Module) -> torch.Tensor:
        # rank 0's numbers are used
        torch.manual_seed(5 + dist.get_rank() if isinstance(model.up.weight, DTensor) else 5)
        model.apply(init)
        torch.manual_seed(6)
        model.down.reset_parameters()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.01).mul_(nn.functional.dropout(torch.ones_like(p), 0.1))
                p.add_(torch.empty_like(p).uniform_(0, 0.01)).mul_(torch.bernoulli(torch.full_like(p, 0.9)))
        return model(ROWS)

    return trained(prepare, loss)


def values_read(prepare: Prepare) -> list[torch.Tensor]:
    """Values as scripts read them for logs and files."""

    def loss(model: nn.Module) -> torch.Tensor:
        listed = torch.tensor(model.up.weight.tolist(), dtype=torch.float64)
        return model(ROWS) * listed.norm() * float(model.down.weight.detach().cpu().numpy().sum())

    return trained(prepare, loss)


def hooks_and_flags_of_parameters(prepare: Prepare) -> list[torch.Tensor]:
    """Scripts flag parameters and register hooks on them before planning: flags exclude some from weight decay, hooks
    scale gradients."""

    def tripled(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(3.0)

    def flagged(model: nn.Module) -> nn.Module:
        model.up.weight._no_weight_decay = True
        model.down.weight.register_hook(lambda gradient: gradient * 0.5)
        removed = model.up.weight.register_hook(lambda gradient: gradient * 0.0)
        model.down.bias.register_post_accumulate_grad_hook(tripled)
        model = prepare(model)
        removed.remove()
        return model

    def by_flag(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        groups = [[p for p in listed if hasattr(p, "_no_weight_decay") is flag] for flag in (True, False)]
        assert all(groups)
        return SGD([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], weight_decay=0.5)

    return trained(flagged, lambda model: model(ROWS), optimize=by_flag)


def state_of_one_process(prepare: Prepare) -> list[torch.Tensor]:
    """Training begun in one process continues from the state that it wrote by torch.save."""
    pairs = ((torch.optim.AdamW, torch.optim.AdamW), (torch.optim.Adafactor, autopar.Adafactor))
    return [tensor for before, after in pairs for tensor in _gone_on(prepare, before, after)]


def _gone_on(prepare: Prepare, before: Any, after: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    begun = Net().double()
    optimizer = before(begun.parameters(), lr=1e-2)
    begun(ROWS).backward()
    optimizer.step()
    state = copy.deepcopy({"model": begun.state_dict(), "optimizer": optimizer.state_dict()})

    def loaded(model: nn.Module) -> nn.Module:
        model = prepare(model)
        model.load_state_dict(state["model"])
        return model

    def resumed(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = after(parameters, lr=1e-2)
        made.load_state_dict(state["optimizer"])
        return made

    return trained(loaded, lambda model: model(ROWS), optimize=resumed)


class Halves(nn.Module):
    """Returns tensors that a plan may leave sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": torch.tanh(self.layer(x))}


def one_model_after_another(prepare: Prepare) -> list[torch.Tensor]:
    """A generator followed by a discriminator: the gradient reaches both."""
    torch.manual_seed(4)
    first = prepare(Halves().double())
    optimizer = SGD(first.parameters())

    def loss(model: nn.Module) -> torch.Tensor:
        optimizer.step()
        optimizer.zero_grad()
        return model(**first(ROWS))

    return [*trained(prepare, loss), *(whole(p.detach()) for p in first.parameters())]


KINDS: tuple[Callable[[Prepare], list[torch.Tensor]], ...] = (
    weights_put_back,
    steps_by_hand,
    parameters_as_a_vector,
    data_of_a_plain_tensor,
    values_drawn_again,
    values_read,
    hooks_and_flags_of_parameters,
    state_of_one_process,
    one_model_after_another,
)


def planned(preset: str, model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = model or Net().double()
    return autopar.autoparallelize(model, {"x": ROWS}, mesh, constraints=preset, **options)


def shards_of_rank_zero() -> list[str]:
    """Every rank loads what rank 0 alone has saved: a model, then its optimizer."""
    model = planned("fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    model(ROWS).backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        path = Path(folder[0], "shards.pt")
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()
        state = torch.load(path)
        dist.barrier()  # before rank 0 removes its folder
    return [
        refusal(lambda: model.load_state_dict(state["model"])),
        refusal(lambda: optimizer.load_state_dict(state["optimizer"])),
    ]


def own_shards() -> bool:
    """Each rank loads what it has saved itself."""
    model = planned("fsdp")
    before = [whole(p).clone() for p in model.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "own.pt"))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(torch.load(Path(folder, "own.pt")))
    return all(torch.equal(whole(p), old) for p, old in zip(model.parameters(), before, strict=True))


def data_of_another_shape() -> str:
    model = planned("fsdp")
    parameter = model.get_parameter("up.weight")
    assert isinstance(parameter, DTensor)
    return refusal(lambda: setattr(parameter, "data", torch.zeros(2, 2, dtype=torch.float64)))


REFUSED = (data_of_another_shape, shards_of_rank_zero)
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: in_presets(*KINDS) | {case.__name__: case for case in (*REFUSED, own_shards)}
}
