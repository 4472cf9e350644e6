"""Planned models under `torch.compile(fullgraph=True)` on real ranks, compared with eager mode."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from applying import whole
from architecture_plans import with_cheap_links
from call_cases import Net
from loop_cases import ROWS, Clamped
from small_architectures import MODELS as MODELS_OF_ALL_KINDS
from small_language import gpt2, llama, losses_of, mixtral
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Cluster

STEPS = 3
NOT_COMPILED = {"hubert", "lstm"}  # torch.compile takes neither tensor-valued sizes of a CTC loss nor an LSTM
MESHES = {2: (2,), 4: (2, 2)}
PRESETS = {2: ("ddp", "fsdp", "tp"), 4: ("fsdp+tp",)}


# Models of experts have one layer: compiling two takes twice as long.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mixtral": functools.partial(mixtral, layers=1),
}


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def trained(build: Callable[[], nn.Module], preset: str, compiler: Any, **options: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()])
    model = autopar.autoparallelize(build(), batch(0), mesh, constraints=preset, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(model, fullgraph=True, backend=compiler) if compiler is not None else model
    return losses_of(run, optimizer, map(batch, range(STEPS))), whole(model)


def beside_eager(build: Callable[[], nn.Module], preset: str, backend: str, **options: Any) -> dict[str, Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    losses, state = trained(build, preset, None, **options)
    compiled_losses, compiled_state = trained(build, preset, counter, **options)
    return {
        "graphs": counter.frame_count,
        "losses": max(abs(a - b) for a, b in zip(losses, compiled_losses, strict=True)),
        "parameters": max((state[name] - compiled_state[name]).abs().max().item() for name in state),
    }


def another_kind_of_call() -> str:
    """Eval was never called before, and its plan cannot be made inside a compiled graph."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(gpt2(), batch(0), mesh, constraints="ddp")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(**batch(0)).loss.backward()
    model.eval()
    try:
        with torch.no_grad():
            compiled(**batch(0))
    except torch._dynamo.exc.Unsupported as refused:
        with torch.no_grad():
            model(**batch(0))
            compiled(**batch(0))  # makes the plan for eval
        return str(refused)
    return "no error"


def models_in_one_process() -> float:
    """Two models with parameters sharded on different dims: code that both run is recompiled for the second one."""
    torch._dynamo.reset()
    mesh, worst = init_device_mesh("cpu", (dist.get_world_size(),)), 0.0
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for preset in ("fsdp", "tp"):
        torch.manual_seed(0)
        model = autopar.autoparallelize(Net().double(), {"x": x}, mesh, constraints=preset)
        compiled = torch.compile(model, backend="eager")
        for mode in (True, False, True, False):
            model.train(mode)
            loss = compiled(x)
            loss.backward()
            worst = max(worst, abs(loss.item() - model(x).item()))
    return worst


class Normed(nn.Module):
    """Batch norm between two layers: with AdamW wrong gradients would hardly change the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def gradients_of_norms() -> float:
    """The largest difference of gradients compiled by Inductor from one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone, x = Normed().double(), torch.randn(8, 16, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(copy.deepcopy(alone), {"x": x}, mesh, constraints="ddp")
    torch.compile(model, fullgraph=True)(x).backward()
    alone(x).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((given(a.grad) - given(b.grad)).abs().max().item() for a, b in pairs)


def given(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def weights_written_first() -> float:
    """Forward clamps and averages weights before it reads them: the losses of two calls, and those of one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone, mesh = Clamped().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(copy.deepcopy(alone), {"x": ROWS}, mesh, constraints="fsdp")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    return max(abs(compiled(ROWS).item() - alone(ROWS).item()) for _ in range(2))


def default_device() -> float:
    """With a default device a torch function mode is active, which keeps some tensor methods from being compiled."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.set_default_device("cpu")
    try:
        model = autopar.autoparallelize(Net().double(), {"x": x}, mesh, constraints="fsdp")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        return abs(compiled(x).item() - model(x).item())
    finally:
        torch.set_default_device(None)


def tokens_are_sent() -> dict[str, Any]:
    """Experts are reached over links so slow that sending tokens is the best plan; it breaks the compiler's graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    cluster = Cluster.preset("cpu", (ranks,))
    axes = [dataclasses.replace(axis, latency_seconds=1e-12, bytes_per_s=1e7) for axis in cluster.axes]
    device = dataclasses.replace(cluster.device, launch_seconds=0.0)
    cluster = dataclasses.replace(cluster, device=device, axes=tuple(axes))
    pins = ["param:*experts* = S0", "activation:*mlp.experts = S0"]
    model = MODELS["mixtral"]()
    plan = autopar.plan(model, batch(0), cluster, constraints=pins, inputs="local")
    model = autopar.autoparallelize(model, batch(0), init_device_mesh("cpu", (ranks,)), plan=plan)
    counter, part = CompileCounterWithBackend("aot_eager"), autopar.local_batch(model, batch(1))
    found = []
    for run in (model, torch.compile(model, backend=counter)):
        loss = run(**part).loss
        loss.backward()
        found.append((loss.item(), [given(p.grad).clone() for p in model.parameters()]))
        model.zero_grad()
    (eager, gradients), (compiled, compiled_gradients) = found
    return {
        "sent": sum(node.local == "experts_exchanged" for node in plan.nodes),
        "graphs": counter.frame_count,
        "losses": abs(eager - compiled),
        "gradients": max((a - b).abs().max().item() for a, b in zip(gradients, compiled_gradients, strict=True)),
    }


def architectures() -> dict[str, float]:
    """How far the compiled loss of small architectures differs, sharded as on cheap links, in one graph each."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for name in sorted(MODELS_OF_ALL_KINDS.keys() - NOT_COMPILED):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = MODELS_OF_ALL_KINDS[name]()
        plan = autopar.plan(model, inputs, with_cheap_links((dist.get_world_size(),)))
        model = autopar.autoparallelize(model, inputs, mesh, plan=plan)
        losses = []
        for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
            returned = run(**inputs)
            loss = returned if isinstance(returned, torch.Tensor) else returned.loss
            loss.backward()
            losses.append(loss.item())
        found[name] = abs(losses[0] - losses[1])
    return found


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    ranks: {
        f"{name}-{preset}-{backend}": functools.partial(beside_eager, MODELS[name], preset, backend)
        for (name, preset), backend in itertools.product(
            itertools.product(MODELS, PRESETS[ranks]), ("aot_eager", "inductor")
        )
    }
    for ranks in MESHES
}
CASES[2]["dropout"] = functools.partial(beside_eager, functools.partial(gpt2, 0.1), "fsdp", "aot_eager")
CASES[2]["another_kind_of_call"] = another_kind_of_call
CASES[2]["models_in_one_process"] = models_in_one_process
CASES[2]["gradients_of_norms"] = gradients_of_norms
CASES[2]["default_device"] = default_device
CASES[2]["weights_written_first"] = weights_written_first
CASES[2]["architectures"] = architectures
CASES[2]["tokens_are_sent"] = tokens_are_sent
