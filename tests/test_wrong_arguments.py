"""Wrong arguments are refused with their name and the expected form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Cluster, Plan
from autopar.errors import InputError, PlanMismatchError

MESH = Cluster.preset("cpu", (2,), axis_names=("dp",))
POSITIVE = "no amount of memory: it must be more than zero bytes, like '70GiB' or '80GB'"


class _Graph(nn.Module):
    def __init__(self, adjacency: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


_SPARSE = torch.eye(4).to_sparse()


def _asked() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Linear(8, 8), {"input": torch.empty(4, 8, device="meta")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": "x"}, "loss_fn is 'x': it must be callable .* for example loss_fn=lambda output, labels: "),
        ({"loss_fn": 3}, "loss_fn is 3: it must be callable"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss: give what is called, such as MSELoss\(\)"),
        ({"memory_budget": 0}, f"0 is {POSITIVE}"),
        ({"memory_budget": -5}, f"-5 is {POSITIVE}"),
        ({"memory_budget": "0"}, f"'0' is {POSITIVE}"),
        ({"memory_budget": "0GiB"}, f"'0GiB' is {POSITIVE}"),
        ({"memory_budget": "-3 GiB"}, f"'-3 GiB' is {POSITIVE}"),
        ({"precision": ["bf16"]}, r"precision \['bf16'\] is unknown"),
        ({"compiled": "no"}, "compiled is 'no': it must be True or False"),
        ({"solver": "glpk"}, "solver is 'glpk': it must be one of highs, cbc"),
        ({"constraints": "axis:dp != dp"}, "a role is given with = alone, not with !=; write 'axis:NAME = role' with"),
        ({"constraints": "axis:dp ~ dp"}, "a role is given with = alone, not with ~"),
        ({"constraints": "axis:pp = dp"}, "matches nothing: the mesh's axes are called dp, 0"),
        (
            {"constraints": ["ddp", "axis:0 = fsdp"]},
            "'ddp' and 'axis:0 = fsdp' both give axis 'dp' a role: keep one",
        ),
        ({"constraints": "fsdp recompute=full"}, r"is no preset .*options in brackets, 'fsdp\(zero=2\)'"),
        ({"constraints": "FSDP + TP"}, r"is no preset .* Did you mean 'fsdp\+tp'\?"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [autopar.plan, autopar.compare])
def test_options(call: Callable[..., Plan], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(*_asked(), MESH, **{"loss_fn": torch.sum, **options})


def test_what_is_asked_twice_is_asked_once() -> None:
    plans = [autopar.plan(*_asked(), MESH, constraints=texts, loss_fn=torch.sum) for texts in (["ddp"], ["ddp", "ddp"])]
    assert plans[0].nodes == plans[1].nodes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autopar.plan(*_asked(), (2, 4)), r"such as Cluster\.preset\('h100', \(2, 4\)\), not tuple"),  # type: ignore[arg-type]
        (lambda: autopar.plan(*_asked(), MESH, loss_fn=lambda output: None), "loss_fn returned None: it must return"),  # type: ignore[arg-type, return-value]
        (lambda: autopar.plan(_Graph(), {"x": torch.eye(4).to_mkldnn()}, MESH), "'x' is in the layout torch._mkldnn"),  # type: ignore[arg-type]
        (
            lambda: autopar.plan(_Graph(_SPARSE), {"x": torch.empty(4, 4)}, MESH),
            "'adjacency' of the model is in the layout",
        ),  # type: ignore[arg-type]
        (lambda: autopar.search(*_asked(), MESH, 2), "cluster preset of Cluster is unknown: use one of a100-80"),  # type: ignore[arg-type]
        (lambda: autopar.search(*_asked(), "cpu", 0), "devices is 0: it must be a whole number, 1 or more"),
        (lambda: autopar.search(*_asked(), "cpu", "8"), "devices is '8'"),  # type: ignore[arg-type]
        (lambda: autopar.simulate(*_asked(), "plan.json"), r"the plan is of str: give a Plan.* `Plan\.load` reads"),  # type: ignore[arg-type]
        (lambda: Cluster.preset("cpu", (2,), axis_names=3), r"mesh axis names \(3,\) must be non-empty"),  # type: ignore[arg-type]
        (lambda: Cluster.preset("cpu", (2,), devices_per_node="8"), "devices_per_node is '8'"),  # type: ignore[arg-type]
        (lambda: Cluster.preset("cpu", (2,), between_nodes=3), "network 3 is no text"),  # type: ignore[arg-type]
        (lambda: Cluster.load(None), "a cluster is read from a path, and NoneType is none"),  # type: ignore[arg-type]
        (lambda: Plan.load({}), "a plan is read from a path, and dict is none"),  # type: ignore[arg-type]
        (lambda: Plan.from_json(None), "a plan in JSON is text, not NoneType"),  # type: ignore[arg-type]
    ],
)
def test_others(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_arguments_of_what_runs() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh, (model, inputs) = init_device_mesh("cpu", (1,)), _asked()
        plan = autopar.plan(model, inputs, mesh)
        for wrong, options, message in (
            (model, {"loss_fn": "x"}, "loss_fn is 'x': it must be callable"),
            (model, {"plan": "plan.json"}, "the plan is of str: give a Plan"),
            (None, {}, "the model is of NoneType: it must be a torch.nn.Module"),
            (model, {"plan": plan, "micro_batches": 4}, "the plan has micro_batches=1, not 4: plan with that"),
            (model, {"plan": plan, "inputs": "local"}, "the plan has inputs='global', not 'local'"),
        ):
            with pytest.raises((InputError, PlanMismatchError), match=message):
                autopar.autoparallelize(wrong, inputs, mesh, **options)  # type: ignore[arg-type]
    finally:
        distributed.destroy_process_group()


def test_names_that_a_call_does_not_take_are_told_by_its_own() -> None:
    for call, further in ((autopar.compare, MESH), (autopar.search, "cpu")):
        with pytest.raises(
            TypeError, match=rf"^{call.__name__}\(\) got an unexpected keyword argument 'memory'; it takes"
        ):
            call(*_asked(), further, *([2] if call is autopar.search else []), memory="1GiB")  # type: ignore[operator]


def test_a_lazy_module_is_to_be_called_first() -> None:
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    with pytest.raises(InputError, match=r"'1\.weight' of a lazy module has no shape yet"):
        autopar.plan(lazy, {"input": torch.empty(4, 8)}, Cluster.preset("cpu", (2,)))
    lazy(torch.empty(4, 8))
    autopar.plan(lazy, {"input": torch.empty(4, 8)}, Cluster.preset("cpu", (2,)))
