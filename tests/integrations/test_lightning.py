"""Under Lightning's Trainer a plan accumulates, is built on meta, saved and resumed; what cannot work is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from autopar import InputError
from autopar.integrations.lightning import PlannedStrategy

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "integrations"
# Lightning's own warnings, about its loaders, its logging and pytrees
pytestmark = pytest.mark.filterwarnings("ignore")


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


class Module(lightning.LightningModule):
    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.model = Mean()
        if beside:
            self.head = nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.model(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process as torchrun starts it, for Lightning."""
    words = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    for name, value in {**words, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "one"}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _fit(strategy: PlannedStrategy, module: Module, **words: Any) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=1, strategy=strategy, **quiet, **words)
    trainer.fit(module, DataLoader(torch.ones(4, 4), 4))


EXAMPLE = {"x": torch.empty(4, 4)}


def _saving(folder: Path, steps: int, *, weights: bool) -> lightning.Trainer:
    """A Trainer that saves after its first step."""
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_weights_only=weights)
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        strategy=PlannedStrategy(EXAMPLE),
        logger=False,
        enable_progress_bar=False,
        callbacks=[saves],
    )


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_validated_after_training(weights: bool, alone: None, tmp_path: Path) -> None:
    rows = DataLoader(torch.ones(8, 4), 4)
    module, trainer = Module(), _saving(tmp_path, 2, weights=weights)
    trainer.fit(module, rows)
    trainer.optimizers[0].param_groups[0]["lr"] = 0.25
    losses = [trainer.validate(module, rows, ckpt_path=tmp_path / f"step={n}.ckpt", verbose=False) for n in (1, 2)]
    assert losses[0][0]["loss"] > losses[1][0]["loss"] == pytest.approx(module.model(torch.ones(4, 4)).item())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_training_does_not_go_on_from_weights(alone: None, tmp_path: Path) -> None:
    rows = DataLoader(torch.ones(4, 4), 4)
    _saving(tmp_path, 1, weights=True).fit(Module(), rows)
    with pytest.raises(InputError, match="weights alone"):
        _saving(tmp_path, 2, weights=True).fit(Module(), rows, ckpt_path=tmp_path / "step=1.ckpt")


def test_it_trains(alone: None) -> None:
    module = Module()
    before = module.model.layer.weight.detach().clone()
    _fit(PlannedStrategy(EXAMPLE), module)
    weight: Any = module.model.layer.weight
    assert not torch.equal(weight.full_tensor(), before)


@pytest.mark.parametrize(
    ("options", "beside", "words", "told"),
    [
        ({"module": "net"}, False, {}, "Module has no submodule 'net': name the one to plan"),
        ({}, True, {}, r"2 trained parameters \('head.weight' is one\) are outside of 'model'"),
        ({}, False, {"precision": "bf16-mixed"}, "the Trainer has precision='bf16-mixed': pass it to PlannedStrategy"),
        ({}, False, {"callbacks": [StochasticWeightAveraging(0.1)]}, "copies the module before it is planned"),
        ({"mesh_shape": (2, 2)}, False, {}, "a mesh of 2x2 has 4 processes and there are 1"),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], beside: bool, words: dict[str, Any], told: str, alone: None
) -> None:
    with pytest.raises(InputError, match=told):
        _fit(PlannedStrategy(EXAMPLE, **options), Module(beside), **words)


@pytest.mark.parametrize(("name", "told"), [("inputs", "its own part"), ("micro_batches", "accumulate_grad_batches")])
def test_what_is_the_trainers_is_not_asked_twice(name: str, told: str) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(InputError, match=f"takes no {name}: .*{told}"):
        PlannedStrategy(EXAMPLE, **options)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """Two processes resume from what one has saved, and the other way round."""
    one = _cases(tmp_path / "one")
    two = _cases(tmp_path / "two", tmp_path / "one", processes=2)
    again = _cases(tmp_path / "three", tmp_path / "two")
    for name, losses in one.items():
        assert two[name] == pytest.approx(losses, rel=1e-5), name
        assert len(losses) >= 3
    for losses in (two["resumed from parts"], two["resumed from another"], again["resumed from another"]):
        assert losses == pytest.approx(one["resumed"], rel=1e-5)
    assert (tmp_path / "two" / "parts" / "step=3.ckpt").is_dir()


def _cases(folder: Path, *others: Path, processes: int = 1) -> dict[str, list[float]]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(HERE / "lightning_cases.py"), str(folder)]
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([*command, *map(str, others)], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-6000:]
    cases: dict[str, list[float]] = json.loads((folder / "cases.json").read_text())
    return cases
