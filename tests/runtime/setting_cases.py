"""Attributes that loops set on a model between calls, on real ranks, compared with the same loop in one process."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from loop_cases import ROWS, Net, Prepare, in_presets, trained, whole
from small_language import gpt2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.ranks import agreement


class Weights:
    """A config object, as libraries attach it to models."""

    def __init__(self) -> None:
        self.size, self.power = 0.1, [2.0]


class Staged(Net):
    """Depends on numbers, on a config and on plain tensors; the second stage adds a layer."""

    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.stage, self.config = 1.0, 1, Weights()
        self.norm, self.later = nn.BatchNorm1d(32), nn.Linear(4, 4)
        self.mask, self.act = torch.ones(4, dtype=torch.float64), torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.down(self.act(self.norm(self.up(x)))) * self.mask + self.shift
        if self.stage > 1:
            result = self.later(result)
        size = self.config.size * result.abs().mean()
        return (result ** self.config.power[0]).mean() * self.factor + size


def _set_between(prepare: Prepare, change: Callable[[Any, int], None]) -> list[torch.Tensor]:
    """Three steps; before each, `change` gets the model and the number of the step."""
    steps = iter(range(3))

    def loss(model: nn.Module) -> torch.Tensor:
        change(model, next(steps))
        return model(ROWS)

    return trained(prepare, loss, Staged)


def numbers_set(prepare: Prepare) -> list[torch.Tensor]:
    def change(model: Any, step: int) -> None:
        model.factor = 1.0 - 0.25 * step
        if step == 2:
            model.shift = 0.5  # overrides a class attribute

    return _set_between(prepare, change)


def stages_that_come_in(prepare: Prepare) -> list[torch.Tensor]:
    def change(model: Any, step: int) -> None:
        model.stage = 1 + step // 2

    return _set_between(prepare, change)


def functions_set(prepare: Prepare) -> list[torch.Tensor]:
    """Builtin functions, and one written in Python."""

    def change(model: Any, step: int) -> None:
        model.act = (torch.tanh, torch.nn.functional.gelu, torch.nn.functional.silu)[step]

    return _set_between(prepare, change)


def configs_set(prepare: Prepare) -> list[torch.Tensor]:
    def change(model: Any, step: int) -> None:
        if step == 1:
            model.config.size = 0.7
        if step == 2:
            model.config.power[0] = 4.0

    return _set_between(prepare, change)


def tensors_set(prepare: Prepare) -> list[torch.Tensor]:
    def change(model: Any, step: int) -> None:
        if step == 1:
            model.mask[0] = 0.0
        if step == 2:
            model.mask = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)

    return _set_between(prepare, change)


def layers_set(prepare: Prepare) -> list[torch.Tensor]:
    def change(model: Any, step: int) -> None:
        model.norm.momentum, model.norm.eps = 0.1 + 0.2 * step, 1e-5 * 10**step

    return _set_between(prepare, change)


def _planned() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(Staged().double(), {"x": ROWS}, mesh, constraints="ddp")


def set_to_and_fro() -> dict[str, Any]:
    model = _planned()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(6):
            model.factor = (1.0, 0.5)[step % 2]
            model(ROWS)
    return {
        "plans": len(model._autopar.programs),
        "told": [str(w.message) for w in told if "forward" in str(w.message)],
    }


def late_rank_told() -> list[str]:
    """One rank calls `autoparallelize` only after the other has reported that it waits."""
    store = dist.distributed_c10d._get_default_store().clone()
    agreement.WARNING_SECONDS, before = (0.1, 1e6)[dist.get_rank()], agreement.WARNING_SECONDS
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if dist.get_rank() == 1:
            store.wait(["waiting told"])
        else:
            threading.Thread(target=_answer, args=(told, store), daemon=True).start()
        try:
            _planned()
        finally:
            agreement.WARNING_SECONDS = before
    return [str(w.message) for w in told if "autoparallelize" in str(w.message)]


def _answer(told: list[warnings.WarningMessage], store: dist.Store) -> None:
    while not any("autoparallelize" in str(w.message) for w in told):
        time.sleep(0.01)
    store.set("waiting told", "")


class Recurrent(nn.Module):
    """Also keeps its parameters in a list, whose entries planning replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.unsqueeze(1))[0].square().mean()


def plans_of_recurrent_layers() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = autopar.autoparallelize(Recurrent().double(), {"x": ROWS}, mesh, constraints="ddp")
    for _ in range(3):
        model(ROWS)
    return len(model._autopar.programs)


def checkpointing_enabled_late() -> float:
    """As the Trainer of transformers does it: flags of modules, a config field, and a hook for inputs."""
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = autopar.autoparallelize(gpt2(), {"input_ids": ids, "labels": ids}, mesh, constraints="fsdp")
    before = model(input_ids=ids, labels=ids).loss.item()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return abs(loss.item() - before)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))).square().mean()


def synchronised_norms(prepare: Prepare) -> list[torch.Tensor]:
    """The planned model has `SyncBatchNorm`, one process `BatchNorm`: torch runs the former only on GPUs."""

    def converted(model: nn.Module) -> nn.Module:
        planned = prepare(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)))
        return planned if hasattr(planned, "_autopar") else model

    return trained(converted, lambda model: model(ROWS), Normed)


class Prototypes(nn.Module):
    """The norm is called for all rows, which are sharded, and for a few rows that ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        few, all_of_them = self.encode(x[:5]), self.encode(x)
        return torch.cdist(all_of_them, few + 1).square().mean()


def norm_called_twice(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS), Prototypes)


class Pooled(Net):
    """Two means, one for each of two ranks: the dim has local length 1, but `squeeze` must not drop it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.tanh(self.up(x)).view(2, 4, 32).mean(1, keepdim=True)
        return self.down(mean.squeeze() + mean.squeeze(1).squeeze(0)).square().mean()


def lone_dims_dropped(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS), Pooled)


class Tracked(nn.Module):
    """Instance norms that track running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.spread, self.down = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 2, 1)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.spread(x.unsqueeze(1))))).square().mean()


def norms_of_rows(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS), Tracked)


def norms_of_local_micro_batches() -> float:
    """Running statistics of two micro-batches, of which each rank passes its own rows, and results in eval mode."""
    torch.manual_seed(3)
    alone, ranks = Tracked().double(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    options: Any = {"constraints": "ddp", "inputs": "local", "micro_batches": 2}
    model = autopar.autoparallelize(copy.deepcopy(alone), {"x": ROWS[:4]}, mesh, **options)
    for rows in ROWS.split(4):
        model(rows.chunk(ranks)[dist.get_rank()]).backward()
        alone(rows).backward()
    pairs = zip(model.buffers(), alone.buffers(), strict=True)
    worst = [(whole(mine) - right).abs().max().item() for mine, right in pairs]
    for each in (model, alone):
        each.eval()
    with torch.no_grad():
        local = model(ROWS[:4].chunk(ranks)[dist.get_rank()])
        return max(*worst, (whole(local) - alone(ROWS[:4])).abs().item())


def norms_updated(prepare: Prepare) -> list[torch.Tensor]:
    """After stochastic weight averaging, whose update temporarily sets the momentum of norms to None."""
    torch.manual_seed(3)
    model = prepare(Normed().double())
    model(ROWS).backward()
    torch.optim.swa_utils.update_bn([ROWS, 2 * ROWS.flip(0), ROWS + 1], model)
    return [whole(model(ROWS).detach()), *(whole(buffer) for buffer in model.buffers())]


KINDS = (
    synchronised_norms,
    norm_called_twice,
    lone_dims_dropped,
    norms_of_rows,
    norms_updated,
    numbers_set,
    stages_that_come_in,
    functions_set,
    configs_set,
    tensors_set,
    layers_set,
)
ALONE = (
    set_to_and_fro,
    plans_of_recurrent_layers,
    checkpointing_enabled_late,
    late_rank_told,
    norms_of_local_micro_batches,
)
CASES: dict[int, dict[str, Callable[[], Any]]] = {2: in_presets(*KINDS) | {case.__name__: case for case in ALONE}}
