"""Data distributed over ranks: training gives the same results as one process that reads batch after batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from call_cases import PRESETS, Net, built, whole
from large_cases import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autopar

ROWS = 4
MESHES = {2: (2,), 4: (2, 2)}


class Rows(Dataset[torch.Tensor]):
    """A dataset of random rows."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(count, 16, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Endless(IterableDataset[torch.Tensor]):
    """A dataset that is a stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from Rows(2).rows


def planned(preset: str | tuple[str, ...], inputs: str) -> nn.Module:
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()])
    example = {"x": torch.zeros(ROWS, 16, dtype=torch.float64)}
    return autopar.autoparallelize(built(), example, mesh, constraints=preset, inputs=inputs)


def train(model: nn.Module, batches: Callable[[int], Any]) -> list[float]:
    """Train two epochs; returns the loss of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        for batch in batches(epoch):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def trained(preset: str, inputs: str, count: int, drop_last: bool = False) -> dict[str, Any]:
    """Training with batches from the sampler, compared with one process that reads rows in the same order."""
    data, model, alone = Rows(count), planned(preset, inputs), built()
    rows = autopar.sampler(model, data, shuffle=True, seed=3, drop_last=drop_last)
    loader = DataLoader(data, sampler=rows, batch_size=rows.batch_size)

    def mine(epoch: int) -> Any:
        rows.set_epoch(epoch)
        assert len(rows) == len(list(rows))
        return loader

    def right(epoch: int) -> Any:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(3 + epoch))
        batches = order.split(ROWS)
        return [data.rows[batch] for batch in batches if len(batch) == ROWS or not drop_last]

    losses, expected = train(model, mine), train(alone, right)
    state = zip(model.parameters(), alone.parameters(), strict=True)
    return {
        "losses": len(losses),
        "loss_error": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "parameter_error": max((whole(a) - b).abs().max().item() for a, b in state),
    }


class Named(NamedTuple):
    x: torch.Tensor


def parts(inputs: str) -> dict[str, Any]:
    """A rank's part of a batch, for each form in which a batch can be passed, and its loss."""
    model, batch = planned((), inputs), Rows(ROWS).rows
    forms = autopar.local_batch(model, {"x": batch})["x"], *autopar.local_batch(model, [batch])
    forms = *forms, autopar.local_batch(model, Named(batch)).x
    part = autopar.local_batch(model, batch)
    last = autopar.local_batch(model, batch[: ROWS // 2]) if dist.get_world_size() == 2 else part
    pieces = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, part.contiguous())
    joined = torch.cat(pieces) if inputs == "local" else pieces[-1]
    return {
        "alike": all(torch.equal(form, part) for form in forms),
        "joined": torch.equal(joined, batch),
        "last": len(last),
        "loss_error": abs(model(part).item() - built()(batch).item()),
    }


def uneven_sampler() -> str:
    return refusal(lambda: autopar.sampler(planned("ddp", "local"), Rows(9)))


def uneven_batch() -> str:
    return refusal(lambda: autopar.local_batch(planned("ddp", "local"), {"x": torch.zeros(3, 16)}))


class Weighted(Net):
    """A model with an optional input that the example omits."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) if y is None else super().forward(x * y)


def another_input() -> float:
    """An input omitted in the example is sharded like the others if it has as many rows, and the model accepts it."""
    mesh, worst = init_device_mesh("cpu", MESHES[dist.get_world_size()]), 0.0
    for x, y in ((torch.randn(4, 16), torch.randn(4, 16)), (torch.randn(6, 16), torch.randn(16))):
        torch.manual_seed(3)
        alone = Weighted().double()
        model, batch = copy.deepcopy(alone), {"x": x.double(), "y": y.double()}
        autopar.autoparallelize(model, {"x": torch.zeros(4, 16).double()}, mesh, inputs="local")
        found = model(**autopar.local_batch(model, batch)), model(*autopar.local_batch(model, tuple(batch.values())))
        worst = max(worst, *((one - alone(**batch)).abs().item() for one in found))
    return worst


def target_outside() -> bool:
    """Entries that the model does not take are sharded like the model's inputs."""
    batch = {"x": torch.arange(4.0).view(4, 1).expand(4, 16), "target": torch.arange(4), "names": ["a", "b"]}
    mine = autopar.local_batch(planned("fsdp", "local"), batch)
    return mine["names"] == ["a", "b"] and mine["target"].tolist() == mine["x"][:, 0].tolist() != []


def too_many_inputs() -> str:
    return refusal(lambda: autopar.local_batch(planned("ddp", "local"), [torch.zeros(4, 16)] * 2))


def stream() -> str:
    return refusal(lambda: autopar.sampler(planned("ddp", "local"), Endless()))  # type: ignore[arg-type]


def no_plan() -> str:
    return refusal(lambda: autopar.local_batch(Net(), torch.zeros(4, 16)))


class Compared(nn.Module):
    """Compares rows with a table that has no batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (self.up(x) @ table.t()).logsumexp(-1).mean()


def passed_whole() -> str:
    x, table = torch.zeros(4, 16), torch.zeros(6, 8)
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()])
    model = autopar.autoparallelize(Compared(), {"x": x, "table": table}, mesh, inputs="local")
    return refusal(lambda: model(x[:2], table))


def rows_on_dim_one() -> list[str]:
    """Warnings of a first call whose batch is on dim 1, of later calls, and of a first call of another length."""
    mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()])
    models = [
        autopar.autoparallelize(nn.Linear(16, 8), {"input": torch.zeros(6, 8, 16)}, mesh, inputs="local")
        for _ in range(2)
    ]
    told = []
    for model, *shape in ((models[0], 6, 4), (models[0], 6, 2), (models[1], 3, 4)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(torch.zeros(*shape, 16))
        told += [str(one.message) for one in found if "rows of a batch" in str(one.message)]
    return told


def batches_part() -> tuple[int, str]:
    """Ranks pass different batches from the twelfth call on: the number of the failing call, and its error."""
    model = planned("ddp", "global")
    for call in range(1, 30):
        rows = torch.full((ROWS, 16), 1.0 + (dist.get_rank() if call > 11 else 0), dtype=torch.float64)
        told = refusal(lambda rows=rows: model(rows))
        if told != "no error":
            return call, told
    return 0, ""


RUNS: dict[str, tuple[str, int, bool]] = {
    "smaller_last": ("local", 10, False),
    "without_last": ("local", 11, True),
    "smaller_last_global": ("global", 10, False),
    "uneven_last_global": ("global", 11, False),
    "one_row_last_global": ("global", 9, False),
}
REFUSED = (uneven_sampler, uneven_batch, too_many_inputs, stream, no_plan, passed_whole)
PARTS = {f"parts-{inputs}": partial(parts, inputs) for inputs in ("local", "global")}
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{name}-{preset}": partial(trained, preset, *run) for name, run in RUNS.items() for preset in PRESETS}
    | PARTS
    | {case.__name__: case for case in REFUSED}
    | {"rows_on_dim_one": rows_on_dim_one, "batches_part": batches_part}
    | {"target_outside": target_outside, "another_input": another_input},
    4: {"two_axes-fsdp+tp": partial(trained, "fsdp+tp", "local", 16)} | PARTS,
}
