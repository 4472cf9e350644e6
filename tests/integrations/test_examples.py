"""Each example trains on two processes with a sharded model, with the losses and weights of one plain process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from launch import selected
from running import run_alone, run_example

SLOW = pytest.mark.slow
TRAINER, SAVES = "with_trainer.py", ["--save-steps", "4"]
CASES = [
    pytest.param("with_accelerate.py", "tp", "", id="accelerate"),
    pytest.param(TRAINER, "fsdp", "trained/model.safetensors", id="trainer"),
    pytest.param("with_lora.py", "fsdp", "adapters/adapter_model.safetensors", id="lora", marks=SLOW),
    pytest.param("from_folder.py", "fsdp", "trained/model.safetensors", id="folder", marks=SLOW),
    pytest.param("with_lightning.py", "fsdp", "step=6.ckpt", id="lightning"),
    pytest.param("with_titan_config.py", "", "", id="titan", marks=SLOW),
]
LOGGED = "with_tensorboard.py"


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the files that the selected tests' examples wrote on one process, and their reports."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_alone(selected(request, "name"), folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, dict[str, Any]]]:
    """A folder with the files that an example wrote on two processes, and its report; each example runs once."""

    @functools.cache
    def run(name: str, scheme: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("two")
        words = [*(["--constraint", scheme] if scheme else []), *(SAVES if name == TRAINER else [])]
        return folder, run_example(name, folder, *words, processes=2)

    return run


@pytest.mark.parametrize(("name", "scheme", "saved"), CASES)
def test_two_processes_are_one(
    name: str,
    scheme: str,
    saved: str,
    alone: tuple[Path, dict[str, Any]],
    trained: Callable[[str, str], tuple[Path, dict[str, Any]]],
) -> None:
    folder, one = alone[0] / name, alone[1][name]
    where, two = trained(name, scheme)
    _check_same(one, two)
    if saved:
        ours, theirs = (_weights(place / saved) for place in (where, folder))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-5)


def _check_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert len(set(one["losses"])) == len(one["losses"]) >= 5
    assert one["held"] == 1 and two["held"] < 0.6  # the model was sharded


def _weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".ckpt":
        state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
        return state
    return load_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [LOGGED])
def test_tensorboard_has_what_was_logged(name: str, alone: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    result = run_example(name, tmp_path, "--constraint", "fsdp", processes=2)
    _check_same(alone[1][name], result)
    log = EventAccumulator(str(tmp_path / "tensorboard"))
    log.Reload()
    told = {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    assert told["loss"] == pytest.approx(result["losses"])
    assert len(told["step_seconds"]) == len(told["tokens_per_second"]) == 6
    assert set(told["predicted/step_seconds"]) == set(told["predicted/step_seconds"][:1])
    assert len(told["peak_bytes"]) == 2
    for measured in told["peak_bytes"]:
        assert measured == pytest.approx(told["predicted/peak_bytes"][0], rel=0.1)


@pytest.mark.slow
def test_the_trainer_resumes_where_it_was(
    trained: Callable[[str, str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, through = trained(TRAINER, "fsdp")
    checkpoint = folder / "checkpoint-4"
    words = ("--constraint", "fsdp", *SAVES, "--resume", str(checkpoint))
    resumed = run_example(TRAINER, tmp_path, *words, processes=2)
    assert resumed["losses"] == pytest.approx(through["losses"], rel=1e-6)  # the log is continued too
    files = [where / "trained" / "model.safetensors" for where in (folder, tmp_path)]
    first, second = map(load_file, files)
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=1e-5, atol=1e-7)
    assert (checkpoint / "model.safetensors").is_file()
