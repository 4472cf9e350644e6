"""Settings of accelerate and the Trainer that cannot work are refused before training; what they save can be read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import InputError
from autopar.integrations.huggingface import PlannedTrainer, adopt, save_pretrained, whole_state

sys.path.insert(0, str(Path(__file__).parent))
from running import run_cases


def _model() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> object:
    """A process group of this process only."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo")
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _planned(mesh: object, inputs: str) -> nn.Module:
    ids = torch.zeros(2, 8, dtype=torch.long)
    return autopar.autoparallelize(_model(), {"input_ids": ids, "labels": ids}, mesh, inputs=inputs)  # type: ignore[arg-type]


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(InputError, match="is not planned"):
        adopt(_model())


def test_what_the_trainer_cannot_do_is_refused(alone: object, tmp_path: Path) -> None:
    plain = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(InputError, match="plan with inputs='local'"):
        PlannedTrainer(_planned(alone, "global"), plain)
    best = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, eval_strategy="steps", load_best_model_at_end=True, save_only_model=True
    )
    with pytest.raises(InputError, match="leave save_only_model out"):
        PlannedTrainer(_planned(alone, "local"), best)
    smooth = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, label_smoothing_factor=0.1)
    with pytest.raises(InputError, match="give it to autoparallelize as loss_fn"):
        PlannedTrainer(_planned(alone, "local"), smooth)
    half = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True)
    with pytest.raises(InputError, match="give autoparallelize precision='bf16'"):
        PlannedTrainer(_planned(alone, "local"), half)
    noise = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, neftune_noise_alpha=5.0)
    with pytest.raises(InputError, match="add the noise in forward"):
        PlannedTrainer(_planned(alone, "local"), noise)
    trainer = PlannedTrainer(_planned(alone, "local"), plain)
    with pytest.raises(InputError, match="holds no model in parts"):
        trainer._load_from_checkpoint(str(tmp_path))


def test_what_is_saved_can_be_read(alone: object, tmp_path: Path) -> None:
    model = _planned(alone, "global")
    state = whole_state(model)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]  # tied weights stay one tensor
    save_pretrained(model, tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


class AsInDiffusers(nn.Linear):
    """Saves its own `state_dict`, and takes no other."""

    def save_pretrained(self, folder: str, **kwargs: object) -> None:
        torch.save(self.state_dict(), Path(folder) / "weights.pt")


def test_a_model_that_saves_its_own_state_is_saved_whole(alone: Any, tmp_path: Path) -> None:
    model = autopar.autoparallelize(AsInDiffusers(4, 4), {"input": torch.ones(2, 4)}, alone)
    save_pretrained(model, tmp_path)
    saved = torch.load(tmp_path / "weights.pt")
    assert [type(tensor) for tensor in saved.values()] == [torch.Tensor] * 2
    assert "state_dict" not in vars(model)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Four rows, of which the later ones have fewer labels."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8) * (index + 1) % 32
        return {"input_ids": ids, "labels": torch.where(torch.arange(8) < 8 - 2 * index, ids, -100)}

    def whole(self) -> dict[str, torch.Tensor]:
        rows = [self[index] for index in range(len(self))]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _trainer(mesh: object, folder: Path, loss_fn: object = None, **more: torch.Tensor) -> PlannedTrainer:
    """A Trainer that makes one step of two backward passes."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
    )
    torch.manual_seed(0)
    model = _model()
    model.config.use_cache = False  # type: ignore[union-attr]
    ids = torch.zeros(2, 8, dtype=torch.long)
    examples = {"input_ids": ids, "labels": ids, **more}
    planned = autopar.autoparallelize(model, examples, mesh, inputs="local", loss_fn=loss_fn)  # type: ignore[arg-type]
    return PlannedTrainer(planned, arguments, train_dataset=Rows(), eval_dataset=Rows())


def test_labels_of_a_step_count_alike(alone: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    right = _model()(**Rows().whole()).loss.item()
    trainer = _trainer(alone, tmp_path, num_items_in_batch=torch.tensor(1.0))
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(right)
    means = _trainer(alone, tmp_path)
    with pytest.warns(autopar.AutoparWarning, match="unequally many labels"):
        means.train()
    assert means.state.log_history[0]["loss"] != pytest.approx(right, rel=1e-4)


def test_a_loss_may_take_the_labels_that_forward_takes(alone: object, tmp_path: Path) -> None:
    def smoothed(output: transformers.modeling_outputs.CausalLMOutputWithPast, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)  # type: ignore[union-attr]

    rows = Rows()
    torch.manual_seed(0)
    right = smoothed(_model()(rows.whole()["input_ids"]), rows.whole()["labels"]).item()
    found = _trainer(alone, tmp_path, smoothed).predict(rows)  # type: ignore[arg-type]
    assert found.metrics is not None and found.metrics["test_loss"] == pytest.approx(right)
    assert found.predictions.shape == (4, 8, 32)


@pytest.mark.slow
def test_the_trainer_on_two_processes_is_the_trainer_on_one(tmp_path: Path) -> None:
    """Accumulation, keeping the best checkpoint, resuming, saving; and one process resumes from what two have saved."""
    one = run_cases("trainer_cases.py", tmp_path / "one")
    two = run_cases("trainer_cases.py", tmp_path / "two", processes=2)
    again = run_cases("trainer_cases.py", tmp_path / "again", tmp_path / "two")
    assert one.keys() == two.keys()
    for name, losses in one.items():
        assert two[name] == pytest.approx(losses, rel=1e-4), name
    assert again["resumed from another"] == pytest.approx(one["resumed"], rel=1e-4)
    assert one["best"][-2] == pytest.approx(one["best"][-1]), "the weights of the best step are in the model again"
