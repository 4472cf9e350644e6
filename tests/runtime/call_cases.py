"""Calls that differ from the traced one, on real ranks through `autoparallelize`, compared with one process."""

from __future__ import annotations

import copy
import gc
import io
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.programs import MAX_GRAPHS
from autopar.runtime.stored.carried import planned_of


class Net(nn.Module):
    """Two layers and the square of a power; the loss is a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))) ** 2).mean()


def built() -> Net:
    torch.manual_seed(3)
    return Net().double()


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def planned(preset: str, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(built(), {"x": rows()}, mesh, constraints=preset, **options)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(model: nn.Module, alone: nn.Module) -> float:
    """The largest difference between two models' gradients, over all ranks."""
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    worst = torch.stack([(whole(a.grad) - b.grad).abs().max() for a, b in pairs if b.grad is not None]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def local_inputs(preset: str) -> float:
    model, alone = planned(preset, inputs="local"), built()
    part = rows().chunk(dist.get_world_size())[dist.get_rank()]
    loss, right = model(part), alone(rows())
    loss.backward()
    right.backward()
    return max(error(model, alone), abs(loss.item() - right.item()))


def unfrozen_later(preset: str) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, alone = built(), built()
    model.up.weight.requires_grad_(False)
    autopar.autoparallelize(model, {"x": rows()}, mesh, constraints=preset)
    model(rows()).backward()
    model.zero_grad()
    model.get_parameter("up.weight").requires_grad_(True)
    model(rows()).backward()
    alone(rows()).backward()
    return error(model, alone)


def gradient_of_the_input(preset: str) -> float:
    model, alone = planned(preset), built()
    mine, right = rows().requires_grad_(), rows().requires_grad_()
    model(mine).backward()
    alone(right).backward()
    worst = (whole(mine.grad) - whole(right.grad)).abs().max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def inference_mode(preset: str) -> float:
    model, alone = planned(preset).eval(), built().eval()
    with torch.inference_mode():
        return abs(model(rows(4)).item() - alone(rows(4)).item())


def evaluation_needs_no_training_memory(preset: str) -> float:
    """Evaluation on a batch whose backward would exceed the budget that training fits in."""
    training = autopar.plan(built(), {"x": rows()}, autopar.Cluster.preset("cpu", shape=(dist.get_world_size(),)))
    model, alone = planned(preset, memory_budget=training.predicted.peak_bytes + 4096), built()
    model.eval()
    with torch.no_grad():
        return abs(model(rows(16)).item() - alone(rows(16)).item())


def copied_and_called_otherwise(preset: str) -> float:
    """A deep copy, used as an average of weights, may be the first to be called in some mode. It is freed when dropped,
    and the model itself can then be called in that mode."""
    model, alone = planned(preset), built()
    average, half = copy.deepcopy(model), copy.deepcopy(alone)
    with torch.no_grad():
        for mine, right in zip(average.parameters(), half.parameters(), strict=True):
            mine.mul_(0.5)
            right.mul_(0.5)
        worst = abs(average(rows(4)).item() - half(rows(4)).item())
    alive = weakref.ref(average)
    del average, mine
    gc.collect()
    assert alive() is None, "the graph of its call holds the copy"
    with torch.no_grad():
        return max(worst, abs(model(rows(4)).item() - alone(rows(4)).item()))


def copied_with_gradients(preset: str) -> float:
    """A copy in the middle of training, while gradients lie in buckets, starts without gradients, like a plain copy."""
    model, alone = planned(preset), built()
    for one in (model, alone):
        one(rows()).backward()
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save([p.grad for p in model.parameters()], file)
    file.seek(0)
    saved = [whole(gradient) for gradient in torch.load(file, weights_only=False)]
    assert all(torch.equal(a, whole(b.grad)) for a, b in zip(saved, model.parameters(), strict=True))
    model.zero_grad()
    own_copy = copy.deepcopy(alone)
    assert all(p.grad is None for p in (*copied.parameters(), *own_copy.parameters()))
    for one in (copied, own_copy):
        one(rows(4)).backward()
    return error(copied, own_copy)


class Kept(Net):
    """Selects rows by a mask; the trace reads their number."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x[keep])


def known_contents(preset: str) -> float:
    """The trace reads the contents of a mask; later calls have another mask, and then the first one again."""
    torch.manual_seed(3)
    alone = Kept().double()
    masks = [torch.arange(8) < 5, torch.arange(8) % 4 != 0]
    mesh, examples = init_device_mesh("cpu", (dist.get_world_size(),)), {"x": rows(), "keep": autopar.known(masks[0])}
    model = autopar.autoparallelize(copy.deepcopy(alone), examples, mesh, constraints=preset)
    for mask in (*masks, masks[0]):
        model(rows(), mask).backward()
        alone(rows(), mask).backward()
    return error(model, alone)


def anomalies(preset: str) -> float:
    """Anomaly detection works on the backward of a planned model, and finds a NaN."""
    model, alone = planned(preset), built()
    with torch.autograd.set_detect_anomaly(True):
        model(rows()).backward()
        alone(rows()).backward()
        difference = error(model, alone)
        with torch.no_grad():
            next(model.parameters()).mul_(math.nan)
        try:
            model(rows()).backward()
        except RuntimeError as found:
            return difference if "nan values" in str(found) else math.inf
    return math.inf


PRESETS = ("ddp", "fsdp", "tp")
KINDS: tuple[Callable[[str], float], ...] = (
    local_inputs,
    unfrozen_later,
    gradient_of_the_input,
    inference_mode,
    evaluation_needs_no_training_memory,
    copied_and_called_otherwise,
    copied_with_gradients,
    known_contents,
    anomalies,
)


def planned_twice() -> str:
    model = planned("ddp")
    try:
        autopar.autoparallelize(model, {"x": rows()}, init_device_mesh("cpu", (dist.get_world_size(),)))
    except autopar.InputError as refused:
        return str(refused)
    return "no error"


def more_kinds_than_are_kept() -> dict[str, Any]:
    """A copy is called in many ways, then the model in others; neither keeps evicted graphs alive."""
    model, alone = planned("ddp"), built()
    copied, programs = copy.deepcopy(model), planned_of(model).programs
    error, graphs = 0.0, []
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for kind in range(MAX_GRAPHS + 4):
            one, batch = (copied, model)[kind > 6], rows(2 * kind + 2)
            error = max(error, abs(one(batch).item() - alone(batch).item()))
            graphs.append(weakref.ref(programs[0].traced.graph))
        error = max(error, abs(copied(rows(2)).item() - alone(rows(2)).item()))
    gc.collect()
    alive = [kind for kind, graph in enumerate(graphs) if graph() is not None]
    return {
        "kept": len(programs),
        "alive": alive,
        "error": error,
        "told": len([w for w in told if "16 ways" in str(w)]),
    }


def in_use_all_along() -> dict[str, Any]:
    """One size recurs between more other sizes than the cache holds: how often it was planned, and whether the sampler
    still distributes batches of the planned size."""
    model, plans = planned("ddp", inputs="local"), []
    kept = planned_of(model)
    replan = kept.replan

    def counted(model: nn.Module, *call: Any) -> Any:
        plans.append(len(call[0][0]))
        return replan(model, *call)

    kept.replan = counted
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in range(MAX_GRAPHS + 2):
            model(rows(4))
            model(rows(2 * kind + 10))
    return {"planned": plans.count(8), "batch": autopar.sampler(model, range(16)).batch_size}  # type: ignore[arg-type]


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, tau: float | torch.Tensor = 1.0) -> torch.Tensor:
        return (self.layer(x) / tau).square().mean()


def numbers_that_change() -> dict[str, Any]:
    """Warnings where a number changes from call to call, also between two values; none for it as a tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(Tempered().double(), {"x": rows(8)}, mesh)
    taus = [0.9**step for step in range(5)]
    found: dict[str, Any] = {}
    for name, number in (("modes", lambda tau: round(tau)), ("numbers", float), ("tensors", torch.tensor)):
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses = [model(rows(8), tau=number(tau)).item() * number(tau) ** 2 for tau in taus if number(tau) > 0.6]
        found[name] = sum("'tau' changes from call to call (now" in str(w.message) for w in told)
        found["error"] = max(found.get("error", 0.0), max(abs(float(loss) / float(losses[0]) - 1) for loss in losses))
    return found


class Queued(nn.Module):
    """A loss against the rows of earlier calls, which stand in a queue from a pointer on."""

    def __init__(self, by_number: bool) -> None:
        super().__init__()
        self.layer, self.by_number = nn.Linear(16, 4), by_number
        self.register_buffer("queue", torch.ones(32, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, n = self.layer(x), len(x)
        loss = (y @ self.queue.clone().T).square().mean()
        if self.by_number:
            first = int(self.pointer)
            self.queue[first : first + n] = y.detach()
        else:
            self.queue.index_copy_(0, (self.pointer + torch.arange(n)) % len(self.queue), y.detach())
        self.pointer.copy_((self.pointer + n) % 32)
        return loss


def numbers_of_buffers() -> dict[str, Any]:
    """Warnings where forward reads a number that changes from a buffer; none where it computes with the buffer."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for by_number in (True, False):
        torch.manual_seed(0)
        alone = Queued(by_number).double()
        model = autopar.autoparallelize(copy.deepcopy(alone), {"x": rows(8)}, mesh)
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            errors = [abs(model(rows(8)).item() - alone(rows(8)).item()) for _ in range(4)]
        assert max(errors) < 1e-12, errors
        found[str(by_number)] = [str(w.message) for w in told if "reads a number" in str(w.message)]
    return found


def _case(kind: Callable[[str], float], preset: str) -> Callable[[], float]:
    return lambda: kind(preset)


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{kind.__name__}-{preset}": _case(kind, preset) for kind in KINDS for preset in PRESETS}
    | {
        "planned_twice": planned_twice,
        "more_kinds_than_are_kept": more_kinds_than_are_kept,
        "in_use_all_along": in_use_all_along,
        "numbers_that_change": numbers_that_change,
        "numbers_of_buffers": numbers_of_buffers,
    }
}
