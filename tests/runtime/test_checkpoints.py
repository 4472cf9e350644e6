"""Checkpoints on real ranks: eight plans on two and four ranks, each saved and loaded under all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import ON_RANKS, PLANS, Net, go_on, restored, trained_by
from launch import launch

from autopar import InputError, load_checkpoint, save_checkpoint

Ranks = list[dict[str, Any]]
EXACT = 1e-9  # relative error in float64 after several AdamW steps


def value(ranks: Ranks, case: str) -> Any:
    """The result of a case, which must not fail on any rank."""
    for rank in ranks:
        assert "error" not in rank[case], rank[case]["traceback"]
    return ranks[0][case]["value"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def run(folder: Path, ranks: int, cases: list[str]) -> Ranks:
    return launch("checkpoint_cases.py", ranks, cases=cases, environment={"FOLDER": str(folder)})


@pytest.fixture(scope="module")
def saved_by_four(folder: Path) -> Ranks:
    return run(folder, 4, [f"save-{name}" for name in ON_RANKS[4]])


@pytest.fixture(scope="module")
def two(folder: Path, saved_by_four: Ranks) -> Ranks:
    """Two ranks save, and load what all have saved."""
    cases = [f"{verb}-{name}" for verb in ("save", "load") for name in ON_RANKS[2]]
    return run(folder, 2, [*cases, "untrained_and_frozen", "factored_states", "mistakes"])


@pytest.fixture(scope="module")
def loaded_by_four(folder: Path, two: Ranks) -> Ranks:
    return run(folder, 4, [f"load-{name}" for name in ON_RANKS[4]])


def check_loaded(loaded: Ranks, source: str, target: str) -> None:
    found = value(loaded, f"load-{target}")[source]
    assert found["step"] == 6
    assert found["different"] == []
    assert found["deviation"] == 0 if source == target else found["deviation"] < EXACT


@pytest.mark.parametrize("source", PLANS)
@pytest.mark.parametrize("target", ON_RANKS[2])
def test_loaded_by_two_ranks(source: str, target: str, two: Ranks) -> None:
    check_loaded(two, source, target)


@pytest.mark.slow
@pytest.mark.parametrize("source", PLANS)
@pytest.mark.parametrize("target", ON_RANKS[4])
def test_loaded_by_four_ranks(source: str, target: str, loaded_by_four: Ranks) -> None:
    check_loaded(loaded_by_four, source, target)


def test_training_goes_on_while_it_is_written(saved_by_four: Ranks, two: Ranks) -> None:
    for ranks in (saved_by_four, two):
        for name in (case for case in ranks[0] if case.startswith("save-")):
            assert value(ranks, name)["changed"] > 10


@pytest.mark.parametrize("source", PLANS)
def test_loaded_into_a_plain_model_on_one_process(
    source: str, two: Ranks, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value(two, "load-tp2")[source]
    monkeypatch.setenv("FOLDER", str(folder))
    model = Net().double()
    found = restored(source, model, *trained_by(model))
    assert found["different"] == []
    assert found["deviation"] < EXACT


def test_state_is_not_made_up(two: Ranks) -> None:
    found = value(two, "untrained_and_frozen")
    assert found["states"] == 0
    assert found["loaded"] == found["saved"]
    assert found["loaded states"] == found["saved states"] == 5  # five of six parameters: one is frozen


def test_states_of_other_shapes(two: Ranks) -> None:
    assert value(two, "factored_states") == []


def test_mistakes_are_told_on_every_rank(two: Ranks) -> None:
    first, second = (rank["mistakes"].get("value", rank["mistakes"]) for rank in two)
    expected = {
        "accumulated": "save after optimizer.step()",
        "step": "disagree about the step",
        "own disks": "on a filesystem that all machines see",
        "one rank": "rank 1 failed while collecting a checkpoint",
        "folder": "latest_checkpoint(folder)",
        "model": "lacks 2 of the model's parameters and buffers: weight, bias",
        "shape": "has shape (8, 8) here and (16, 8)",
        "kind": "has the state of AdamW, and the optimizer here is SGD",
        "groups": "1 groups of 6 parameters here, 2 groups of 3, 3 parameters saved",
        "extra": "has no extra_state ['loader']",
        "extra optimizer": "an optimizer of a planned model, 'second': give it with the other one",
        "extra places": "has tensors of extra_state['average']",
        "stale": "after autoparallelize",
    }
    assert first.keys() == second.keys() == expected.keys()
    for name, text in expected.items():
        assert text in first[name], name
        assert text in second[name] or (name == "one rank" and "cannot be kept in a checkpoint" in second[name]), name


def test_random_numbers_go_on(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002

    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(model, None, tmp_path, step=1).result()
    first = draw()
    assert draw() != first
    load_checkpoint(model, None, path, random_states=False)
    assert draw() != first
    load_checkpoint(model, None, path)
    assert draw() == first


def test_compiled_or_not(tmp_path: Path) -> None:
    """Saved from a compiled model with tied weights, loaded into one that is not compiled."""

    def tied(value: float) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].weight = model[0].weight
        torch.nn.init.constant_(model[0].weight, value)
        return model

    first, second = tied(1.0), tied(2.0)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    first(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = save_checkpoint(torch.compile(first, backend="eager"), optimizer, tmp_path, step=1).result()
    again = torch.optim.SGD(second.parameters(), lr=0.2, momentum=0.9)
    load_checkpoint(second, again, path)
    assert torch.equal(second[0].weight, first[0].weight) and second[0].weight is second[1].weight
    held = [o.state[m[0].weight]["momentum_buffer"] for o, m in ((optimizer, first), (again, second))]
    assert torch.equal(*held) and again.param_groups[0]["lr"] == 0.1


def test_one_process_goes_on(tmp_path: Path) -> None:
    """Also with background saving, without a process group."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer, scheduler = trained_by(model)
    go_on(model, optimizer, scheduler)
    saved = save_checkpoint(model, optimizer, tmp_path, step=6, extra_state={"s": scheduler}, asynchronous=True)
    path = saved.result()
    losses = go_on(model, optimizer, scheduler)
    again = Net().double()
    optimizer, scheduler = trained_by(again)
    assert load_checkpoint(again, optimizer, path, extra_state={"s": scheduler}) == 6
    assert go_on(again, optimizer, scheduler) == losses


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("folder model optimizer", "the model of a checkpoint is of (Posix|Windows)Path: "),
        ("model folder optimizer", "the optimizer of a checkpoint is of (Posix|Windows)Path: "),
        ("optimizer model folder", "the model of a checkpoint is of SGD: "),
        ("model model folder", "the optimizer of a checkpoint is of Linear: "),
    ],
)
def test_arguments_in_another_order_are_told(order: str, told: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    given: dict[str, Any] = {"model": model, "folder": tmp_path, "optimizer": torch.optim.SGD(model.parameters())}
    args: list[Any] = [given[name] for name in order.split()]
    for call in (lambda: save_checkpoint(*args, step=1), lambda: load_checkpoint(*args)):
        with pytest.raises(InputError, match=f"{told}the arguments are the model, its optimizer"):
            call()
