"""One rank that makes each mistake in turn, and records the error that it got and after how long."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations.neftune import neftune_post_forward_hook

import autopar
from autopar.integrations.huggingface import adopt


class Mismatched(nn.Module):
    """The sizes of its layers do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).mean()


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(torch.relu(self.up(x.view(8, 16)))).pow(2).mean() * scale


class Tied(Net):
    """The sizes of its layers allow one shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 16)


class Dropping(Net):
    """Has an attribute (the dropout rate) that loops set."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(self.dropout(x), scale)


class Widening(Net):
    """Needs more memory once its attribute `copies` is set."""

    copies = 1

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(torch.sin(x.repeat(self.copies, 1)).view(-1, 8, 16).mean(0), scale)


X = torch.ones(8, 16)


def budget_too_small(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Net(), {"x": X}, mesh, memory_budget="1KiB")


def later_call_does_not_fit(mesh: DeviceMesh) -> None:
    needed = autopar.plan(Widening(), {"x": X}, mesh).predicted.peak_bytes
    model = autopar.autoparallelize(Widening(), {"x": X}, mesh, memory_budget=needed + 4096)
    model(X)
    model.copies = 1024
    model(X)


def call_beside_a_given_plan_does_not_fit(mesh: DeviceMesh) -> None:
    needed = autopar.plan(Widening(), {"x": X}, mesh).predicted.peak_bytes
    plan = autopar.plan(Widening(), {"x": X}, mesh, memory_budget=needed + 4096)
    model = autopar.autoparallelize(Widening(), {"x": X}, mesh, plan=plan)
    model(X)
    model.copies = 1024
    model(X)


def plan_for_another_optimizer(mesh: DeviceMesh) -> None:
    plan = autopar.plan(Net(), {"x": X}, mesh, optimizer="sgd")
    autopar.autoparallelize(Net(), {"x": X}, mesh, plan=plan)  # without an argument the plan's own optimizer counts
    autopar.autoparallelize(Net(), {"x": X}, mesh, plan=plan, optimizer="adam")


def plan_of_another_model(mesh: DeviceMesh) -> None:
    plan = autopar.plan(Net(32), {"x": X}, mesh)
    autopar.autoparallelize(Net(16), {"x": X}, mesh, plan=plan)


def plan_of_another_mesh(mesh: DeviceMesh) -> None:
    plan = autopar.plan(Net(), {"x": X}, autopar.Cluster.preset("cpu", shape=(4,)))
    autopar.autoparallelize(Net(), {"x": X}, mesh, plan=plan)


def another_shape(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    model(torch.ones(6, 16))


def different_global_batches(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    model(X + dist.get_rank())


def different_rows(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh, inputs="local")
    model(torch.ones(4 + 2 * dist.get_rank(), 16))


def different_modes(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    model.train(dist.get_rank() == 0)(X)


def different_values(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Dropping(), {"x": X}, mesh)
    model(X)
    model.dropout.p = 0.1 * (1 + dist.get_rank())
    model(X)


def unknown_argument(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Net(), {"x": X, "labels": X}, mesh)


def mesh_too_large(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Net(), {"x": X}, init_device_mesh("cpu", (2 * dist.get_world_size(),)))


def mesh_too_small(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Net(), {"x": X}, init_device_mesh("cpu", (1,)))


def one_rank_differs(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Net(16 * (1 + dist.get_rank())), {"x": X}, mesh)


def one_rank_fails(mesh: DeviceMesh) -> None:
    wrong = {"y": X} if dist.get_rank() == 1 else {"x": X}
    autopar.autoparallelize(Net(), wrong, mesh)


def one_rank_has_other_code(mesh: DeviceMesh) -> None:
    """The class has the same code on both ranks, but its file differs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "own_net.py")
        file.write_text(inspect.getsource(Net).join(["from torch import nn\nimport torch\n", f"#{dist.get_rank()}\n"]))
        spec = importlib.util.spec_from_file_location("own_net", file)
        assert spec is not None and spec.loader is not None
        sys.modules["own_net"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        autopar.autoparallelize(module.Net(), {"x": X}, mesh)


def one_rank_has_a_plan(mesh: DeviceMesh) -> None:
    plan = autopar.plan(Net(), {"x": X}, mesh)
    autopar.autoparallelize(Net(), {"x": X}, mesh, plan=plan if dist.get_rank() else None)


def one_rank_has_other_options(mesh: DeviceMesh) -> None:
    """Otherwise rank 0's options would apply to all ranks."""
    autopar.autoparallelize(Net(), {"x": X}, mesh, memory_budget=["1GiB", "2GiB"][dist.get_rank()])


def ranks_at_different_calls(mesh: DeviceMesh) -> None:
    """One saves, the other looks for a checkpoint: their collectives would get each other's data."""
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            autopar.save_checkpoint(model, None, folder, step=1)
        else:
            autopar.latest_checkpoint(folder)


def broken_forward(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Mismatched(), {"x": X}, mesh)


def early_optimizer(mesh: DeviceMesh) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autopar.autoparallelize(model, {"x": X}, mesh)(X)
    optimizer.step()


def no_mesh(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Net(), {"x": X}, mesh.size())  # type: ignore[arg-type]


def examples_without_names(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(Net(), (X,), mesh)  # type: ignore[arg-type]


def wrapped_before(mesh: DeviceMesh) -> None:
    autopar.autoparallelize(nn.parallel.DistributedDataParallel(Net()), {"x": X}, mesh)


def sharded_before(mesh: DeviceMesh) -> None:
    model = Net()
    fully_shard(model)
    autopar.autoparallelize(model, {"x": X}, mesh)


def parameters_shared(mesh: DeviceMesh) -> None:
    """Two models share a parameter, and one of them is planned already."""
    actor, critic = Net(), Net()
    critic.down.weight = actor.down.weight
    autopar.autoparallelize(actor, {"x": X}, mesh)
    autopar.autoparallelize(critic, {"x": X}, mesh)


def noise_in_a_hook(mesh: DeviceMesh) -> None:
    """As NEFTune of transformers does in training."""
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    model(X)
    model.up.register_forward_hook(neftune_post_forward_hook)
    model(X)


def saved_on_one_rank(mesh: DeviceMesh) -> None:
    """As scripts of accelerate do with a plain model; the other rank makes a different call."""
    model = adopt(autopar.autoparallelize(Net(), {"x": X}, mesh))
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            Accelerator(cpu=True).get_state_dict(model)
        else:
            autopar.latest_checkpoint(folder)


def module_replaced(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    model(X)
    model.down = nn.Linear(16, 4)
    model(X)


def module_added(mesh: DeviceMesh) -> None:
    class Growing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.ModuleList()

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            for layer in self.more:
                x = layer(x.view(8, 16))
            return super().forward(x, scale)

    model = autopar.autoparallelize(Growing(), {"x": X}, mesh)
    model(X)
    model.more.append(nn.Linear(16, 16))
    model(X)


def parameter_replaced(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    model(X)
    model.down.bias = nn.Parameter(torch.zeros(4))
    model(X)


def weights_tied_late(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(
        Tied(), {"x": X}, mesh, constraints=["param:up.weight = S0", "param:down.weight = S1"]
    )
    model(X)
    model.down.weight = model.up.weight
    model(X)


def optimizer_for_plain_tensors(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh, constraints="fsdp", optimizer="adafactor")
    optimizer = torch.optim.Adafactor(model.parameters())
    model(X).backward()
    optimizer.step()


def optimizer_that_writes_by_masks(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh, constraints="fsdp")
    optimizer = torch.optim.Rprop(model.parameters())
    model(X).backward()
    optimizer.step()


def submodule_copied(mesh: DeviceMesh) -> None:
    model = autopar.autoparallelize(Net(), {"x": X}, mesh)
    copy.deepcopy(model.up)(X)


def model_pickled(mesh: DeviceMesh) -> None:
    torch.save(autopar.autoparallelize(Net(), {"x": X}, mesh), io.BytesIO())


MISTAKES: list[Callable[[DeviceMesh], None]] = [
    budget_too_small,
    call_beside_a_given_plan_does_not_fit,
    plan_for_another_optimizer,
    plan_of_another_model,
    plan_of_another_mesh,
    later_call_does_not_fit,
    another_shape,
    different_global_batches,
    different_rows,
    different_modes,
    different_values,
    unknown_argument,
    mesh_too_large,
    mesh_too_small,
    one_rank_differs,
    one_rank_fails,
    one_rank_has_other_code,
    one_rank_has_a_plan,
    one_rank_has_other_options,
    ranks_at_different_calls,
    broken_forward,
    early_optimizer,
    no_mesh,
    examples_without_names,
    wrapped_before,
    sharded_before,
    parameters_shared,
    noise_in_a_hook,
    saved_on_one_rank,
    module_replaced,
    module_added,
    parameter_replaced,
    weights_tied_late,
    optimizer_for_plain_tensors,
    optimizer_that_writes_by_masks,
    submodule_copied,
    model_pickled,
]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    met: dict[str, dict[str, object]] = {}
    for mistake in MISTAKES:
        torch.manual_seed(0)
        start = time.monotonic()
        try:
            mistake(mesh)
            met[mistake.__name__] = {"kinds": [], "message": "no error"}
        except Exception as error:
            told = "\n".join([str(error), *getattr(error, "__notes__", [])])
            met[mistake.__name__] = {"kinds": [kind.__name__ for kind in type(error).__mro__], "message": told}
        met[mistake.__name__]["seconds"] = time.monotonic() - start
        Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(met))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
