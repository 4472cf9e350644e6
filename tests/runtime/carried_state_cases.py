"""State that forward carries in module attributes from call to call, on real ranks, compared with one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import carried_state_models as models
import torch
import torch.distributed as dist
from beside_one_process import pair
from loop_cases import PRESETS, whole
from torch import nn
from torch.utils import _pytree as pytree

import autopar

X = torch.linspace(-1, 1, 8 * 6 * 8, dtype=torch.float64).view(8, 6, 8).sin()
LEARNING = 0.1
EIGHT = ("Scratch", "Turned")  # models that need the same number of rows in each call


def states(model: nn.Module) -> list[torch.Tensor]:
    """All tensors in plain attributes and in buffers."""
    values = [v for m in model.modules() for n, v in (*vars(m).items(), *m._buffers.items()) if not n.startswith("_")]
    kept = [v for v in values if isinstance(v, (torch.Tensor, list, tuple, dict))]
    return [leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor)]


def forget(model: nn.Module) -> None:
    """Reset the carried state, as loops do between sequences."""
    for module in model.modules():
        if hasattr(module, "forget"):
            module.forget()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = whole(one.detach()), other.detach()
    assert one.shape == other.shape and one.dtype == other.dtype, (one.shape, other.shape, one.dtype, other.dtype)
    return (one - other).abs().max().item()


def step(planned: nn.Module, alone: nn.Module, call: Callable[[nn.Module], torch.Tensor]) -> float:
    """One training step of both models; the largest difference of losses, gradients and states."""
    losses = [call(planned), call(alone)]
    worst = apart(*losses)
    for loss in losses:
        loss.backward()
    for mine, its in zip(planned.parameters(), alone.parameters(), strict=True):
        worst = max(worst, apart(mine.grad, its.grad))
        for one in (mine, its):
            one.data.add_(one.grad, alpha=-LEARNING)
            one.grad = None
    mine, its = states(planned), states(alone)
    assert len(mine) == len(its)
    for one, other in zip(mine, its, strict=True):
        worst = max(worst, apart(one, its_rows(whole(one), other)))
    return worst


def its_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole state: all of it, or its rows along a dim that is shorter on the rank."""
    for dim, (mine, all_of_it) in enumerate(zip(one.shape, other.shape, strict=True)):
        if mine < all_of_it:
            return other.narrow(dim, mine * dist.get_rank(), mine)
    return other


def trained(name: str, preset: str) -> list[Any]:
    """Train on two sequences of three calls, then with fewer rows, then call without gradients; the largest difference
    and the number of graphs."""
    planned, alone = pair(models.MODELS[name], {"x": X}, preset)
    keys = [*planned.state_dict()]
    worst = 0.0
    for _ in range(2):
        for i in range(3):
            worst = max(worst, step(planned, alone, lambda model, i=i: model(X + i)))
        assert not any(hasattr(one, "full_tensor") for one in states(planned))
        for model in (planned, alone):
            forget(model)
    graphs = len(planned._autopar.programs)
    if name not in EIGHT:
        for i in range(2):
            worst = max(worst, step(planned, alone, lambda model, i=i: model(X[:6] + i)))
    assert [*planned.state_dict()] == keys
    with torch.no_grad():
        for i in range(3):
            rows = slice(0, 8 if name in EIGHT else 6)
            worst = max(worst, apart(planned.eval()(X[rows] + i), alone.eval()(X[rows] + i)))
    return [worst, graphs]


def own_rows(name: str) -> float:
    """Each rank passes its own rows, and holds its own rows of the states."""
    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    planned, alone = pair(models.MODELS[name], {"x": X}, "ddp", inputs="local")
    worst = 0.0
    for _ in range(2):
        for i in range(3):
            x = {planned: X[rows] + i, alone: X + i}
            worst = max(worst, step(planned, alone, lambda model, x=x: model(x[model])))
        for model in (planned, alone):
            forget(model)
    with torch.no_grad():
        for i in range(2):
            worst = max(worst, apart(planned.eval()(X[rows] + i), alone.eval()(X + i)))
    return worst


def through_calls(inputs: str, preset: str = "ddp") -> float:
    """Backward of the sum of three calls' losses, then the same again, with states whose graph has been freed."""
    planned, alone = pair(models.Undetached, {"x": X}, preset, inputs=inputs)
    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4) if inputs == "local" else slice(0, 8)
    worst = 0.0
    for _ in range(2):
        worst = max(
            worst, step(planned, alone, lambda m: sum(m((X[rows] if m is planned else X) + i) for i in range(3)))
        )
        for model in (planned, alone):
            model.h = model.h.detach()
    return worst


def compiled() -> float:
    planned, alone = pair(models.Stacked, {"x": X}, "ddp")
    for i in range(2):
        step(planned, alone, lambda model, i=i: model(X + i))
    fast, worst = torch.compile(planned, fullgraph=True, backend="aot_eager"), 0.0
    called = {planned: fast, alone: alone}
    for i in range(5):
        if i == 3:
            for model in (planned, alone):
                forget(model)
        worst = max(worst, step(planned, alone, lambda model, i=i: called[model](X + i)))
    return worst


def checkpointed() -> float:
    """Compared with a model without checkpointing: in eager mode recomputation would advance the state again."""
    planned, _ = pair(models.Checkpointed, {"x": X}, "fsdp")
    _, alone = pair(models.Stacked, {"x": X}, "fsdp")
    return max(step(planned, alone, lambda model, i=i: model(X + i)) for i in range(3))


def copied() -> float:
    """A copy carries its own state."""
    planned, alone = pair(models.Stacked, {"x": X}, "ddp")
    step(planned, alone, lambda model: model(X))
    others = [copy.deepcopy(planned), copy.deepcopy(alone)]
    worst = step(planned, alone, lambda model: model(X + 1))
    return max(worst, *(step(*others, lambda model, i=i: model(X - i)) for i in range(2)))


def on_its_own() -> float:
    """A submodule that is called alone continues from the state that the model's calls left, and vice versa."""
    planned, alone = pair(models.Stacked, {"x": X}, "ddp")
    worst = 0.0
    for i in range(2):
        worst = max(worst, step(planned, alone, lambda model, i=i: model(X + i)))
        with torch.no_grad():
            worst = max(worst, apart(planned.cells[0](X - i), alone.cells[0](X - i)))
    return worst


def whole_rows_refused() -> str:
    """Setting a whole state is refused where each rank holds its own rows."""
    planned, _ = pair(models.Stacked, {"x": X}, "ddp", inputs="local")
    x = X[4 * dist.get_rank() :][:4]
    planned(x)
    planned.cells[0].h = torch.zeros(8, 8, dtype=torch.float64)
    try:
        planned(x)
    except autopar.InputError as error:
        return str(error)
    return "nothing was raised"


def evaluated_first(inputs: str) -> float:
    """An attribute that the planned call (eval) reads but does not set becomes a state once training sets it."""
    planned, alone = pair(lambda: models.Averaging().eval(), {"x": X}, "ddp", inputs=inputs)
    mine = X if inputs == "global" else X[4 * dist.get_rank() :][:4]
    worst = 0.0
    for i in range(3):
        x = {planned: mine + i, alone: X + i}
        with torch.no_grad():
            worst = max(worst, apart(planned.eval()(x[planned]), alone.eval()(x[alone])))
        planned.train(), alone.train()
        worst = max(worst, step(planned, alone, lambda model, x=x: model(x[model])))
    return worst


def read_late(inputs: str) -> float:
    planned, alone = pair(models.Late, {"x": X, "begins": True}, "fsdp", inputs=inputs)
    mine = X if inputs == "global" else X[4 * dist.get_rank() :][:4]
    worst = 0.0
    for _ in range(2):
        x = {planned: mine, alone: X}
        worst = max(worst, step(planned, alone, lambda m, x=x: m(x[m], True) + m(x[m] + 1) + m(x[m] + 2)))
    return worst


def asked_by_the_loop(inputs: str) -> float:
    """A loss that the loop makes of a state: where ranks have their own rows, gradients are averaged."""
    planned, alone = pair(models.Undetached, {"x": X}, "ddp", inputs=inputs)
    x = {planned: X if inputs == "global" else X[4 * dist.get_rank() :][:4], alone: X}
    worst = 0.0
    for i in range(2):
        for model in (planned, alone):
            losses = [model(x[model] + i + call) + model.h.square().mean() for call in range(2)]
            sum(losses).backward()
            model.h = model.h.detach()
        for mine, its in zip(planned.parameters(), alone.parameters(), strict=True):
            worst = max(worst, apart(mine.grad, its.grad))
            mine.grad = its.grad = None
    return worst


def partly_reset(inputs: str) -> float:
    """Between calls the loop zeroes some rows of the state, in place or by assignment, as at the end of an episode."""
    planned, alone = pair(models.Stacked, {"x": X}, "fsdp", inputs=inputs)
    rows = slice(0, 8) if inputs == "global" else slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    going, worst = torch.arange(8, dtype=torch.float64).remainder(3).sign()[:, None], 0.0
    for i in range(4):
        x = {planned: X[rows] + i, alone: X + i}
        worst = max(worst, step(planned, alone, lambda model, x=x: model(x[model])))
        for model, mine in ((planned, going[rows]), (alone, going)):
            model.cells[0].h = model.cells[0].h * mine
            model.cells[1].h.mul_(mine)
    return worst


def of_a_loss() -> list[float]:
    """A loss function carries its own state, and planning leaves that unchanged."""
    losses = models.Scaled(), models.Scaled()
    planned, alone = pair(partial(nn.Linear, 8, 8), {"input": X}, "ddp", loss_fn=losses[0])
    kept = [losses[0].average.item(), float(losses[0].count is None)]
    worst = 0.0
    for i in range(4):
        call = {planned: planned, alone: lambda x: losses[1](alone(x))}
        worst = max(worst, step(planned, alone, lambda model, i=i, call=call: call[model](X + i)))
        worst = max(worst, *(apart(*pair) for pair in zip(*map(states, losses), strict=True)))
    return [worst, *kept]


def told(build: type[nn.Module], calls: int = 2) -> list[str]:
    """The warnings of a few calls, or the error."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            planned, _ = pair(build, {"x": X}, "ddp")
            for i in range(calls):
                planned(X + i)
        except autopar.AutoparError as error:
            return [str(error)]
    return [str(one.message) for one in found if issubclass(one.category, autopar.AutoparWarning)]


def set_otherwise_on_ranks() -> str:
    """The error if the loop sets a state to a different value on each rank."""
    planned, _ = pair(models.Stacked, {"x": X}, "ddp")
    planned(X)
    planned.cells[0].h = torch.full((8, 8), float(dist.get_rank()), dtype=torch.float64)
    try:
        planned(X)
    except autopar.AutoparError as error:
        return str(error)
    return "nothing was raised"


TOLD = {f"told-{one.__name__}": partial(told, one) for one in (models.Lstm, models.Deciding, models.Appending)}
GRID = {f"{name}-{preset}": partial(trained, name, preset) for name in models.MODELS for preset in PRESETS}
OWN = {f"own_rows-{name}": partial(own_rows, name) for name in models.MODELS}
LATER = {
    f"{case.__name__}-{inputs}": partial(case, inputs)
    for case in (evaluated_first, read_late, asked_by_the_loop, partly_reset)
    for inputs in ("global", "local")
}
THROUGH = {f"through-{inputs}": partial(through_calls, inputs) for inputs in ("global", "local")}
OTHERS: tuple[Callable[[], Any], ...] = (
    compiled,
    checkpointed,
    copied,
    on_its_own,
    whole_rows_refused,
    of_a_loss,
    set_otherwise_on_ranks,
)
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {**GRID, **OWN, **THROUGH, **LATER, **TOLD, **{case.__name__: case for case in OTHERS}}
}
