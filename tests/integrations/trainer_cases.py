"""What the Trainer of transformers does with a planned model beyond steps, on the ranks of one launch.

    torchrun --nproc-per-node 2 trainer_cases.py FOLDER [FOLDER OF ANOTHER RUN]

or `python trainer_cases.py ...` for one process, which runs without autopar unless another run is given. Writes the
results of each case to FOLDER/cases.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from small import BATCH, Bytes, mesh_of_all, processes, small_model, whole_batch
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from autopar import autoparallelize
from autopar.integrations.huggingface import PlannedTrainer

SAVED, STEPS = 2, 4


class Padded(Bytes):
    """Rows with different numbers of labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        kept = torch.arange(len(row["labels"])) < 8 + 5 * index % 50
        return row | {"labels": torch.where(kept, row["labels"], -100)}


def trainer_of(
    folder: Path,
    *,
    planned: bool,
    steps: int = STEPS,
    model: nn.Module | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    rows: type[Bytes] = Bytes,
    **words: Any,
) -> Trainer:
    """A Trainer that accumulates two backward passes for each step and saves every second step.

    `loss_fn`: a loss of the model's result.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // processes() // 2,
        per_device_eval_batch_size=BATCH // processes() // 2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVED,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **words,
    )
    model, half = model or small_model(), {name: ids[: BATCH // 2] for name, ids in whole_batch().items()}
    data = {"train_dataset": rows(), "eval_dataset": rows(2 * BATCH)}
    half |= {"num_items_in_batch": torch.tensor(1.0)} if rows is Padded else {}
    if not planned:
        kind = Trainer if loss_fn is None else type("OwnLoss", (Trainer,), {"compute_loss": _computed(loss_fn)})
        return kind(model=model, args=arguments, **data)
    model = autoparallelize(model, half, mesh_of_all(), inputs="local", constraints="fsdp", loss_fn=loss_fn)
    return PlannedTrainer(model=model, args=arguments, **data)


def _computed(loss_fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A loss function in the form that the Trainer's documentation gives for custom losses."""

    def compute_loss(self: Trainer, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(inputs["input_ids"])
        loss = loss_fn(outputs, inputs["labels"])
        return (loss, {"loss": loss, "logits": outputs}) if return_outputs else loss

    return compute_loss


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def best(folder: Path, *, planned: bool) -> list[float]:
    """Losses of a run whose learning rate grows too large, so that its best step is not its last; then the kept
    one's."""
    words = {"eval_strategy": "steps", "eval_steps": SAVED, "load_best_model_at_end": True}
    trainer = trainer_of(folder, planned=planned, **words)
    trainer.args.learning_rate = 0.3
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated[0] < evaluated[-1], "the last step is the best, so this shows nothing"
    return [*losses(trainer), trainer.evaluate()["eval_loss"], evaluated[0]]


def resumed(folder: Path, *, planned: bool) -> list[float]:
    """Two steps, then two more in another trainer from the last checkpoint in the folder."""
    trainer_of(folder, planned=planned, steps=SAVED).train()
    again = trainer_of(folder, planned=planned)
    again.train(resume_from_checkpoint=True)
    return losses(again)


def saved(folder: Path, *, planned: bool) -> list[float]:
    """`save_model`, and the loss of the folder's model in one process."""
    trainer = trainer_of(folder, planned=planned)
    trainer.train()
    trainer.save_model(str(folder / "kept"))
    with torch.no_grad():
        batch = {name: ids[: BATCH // 2] for name, ids in Bytes()[:BATCH].items()}
        plain = LlamaForCausalLM.from_pretrained(folder / "kept")
        return [*losses(trainer), float(plain(**batch).loss)]


def predicted(folder: Path, *, planned: bool) -> list[float]:
    """Predictions for rows that do not fill the last batch: their number, and one logit of each."""
    found: Any = trainer_of(folder, planned=planned).predict(Bytes(BATCH + 1)).predictions  # type: ignore[arg-type]
    logits = found[0] if isinstance(found, tuple) else found
    return [float(len(logits)), *map(float, logits[:, -1, 0])]


def padded(folder: Path, *, planned: bool) -> list[float]:
    """Losses and gradient norms if batches of a step have different numbers of labels, then an evaluation loss."""
    trainer = trainer_of(folder, planned=planned, rows=Padded)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return [*losses(trainer), *norms, trainer.evaluate()["eval_loss"]]


def adapted(folder: Path, *, planned: bool) -> list[float]:
    """Losses and gradient norms of a model of which only adapters are trained."""
    torch.manual_seed(0)
    model = get_peft_model(small_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    trainer = trainer_of(folder, planned=planned, model=model)
    trainer.train()
    return [*losses(trainer), *(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)]


class Logits(nn.Module):
    """A model without its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids).logits
        return logits


def own_loss(folder: Path, *, planned: bool) -> list[float]:
    def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    words = {} if planned else {"label_names": ["labels"]}  # a plan knows the arguments of its loss
    trainer = trainer_of(folder, planned=planned, model=Logits(), loss_fn=smoothed, **words)
    trainer.train()
    told: Any = trainer.predict(Bytes(BATCH + 1))  # type: ignore[arg-type]
    sums = [float(told.predictions.sum()), float(told.label_ids.sum()), *map(float, told.predictions[:, -1, 0])]
    return [*losses(trainer), trainer.evaluate()["eval_loss"], *sums]


def main() -> None:
    folder, others = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    planned = processes() > 1 or bool(others)
    if planned:
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
            os.environ.setdefault(name, str(value))
        dist.init_process_group("gloo")
    found = {case.__name__: case(folder / case.__name__, planned=planned) for case in CASES}
    for other in others:
        trainer = trainer_of(folder / "other", planned=planned)
        trainer.train(resume_from_checkpoint=str(other / "saved" / f"checkpoint-{SAVED}"))
        found["resumed from another"] = losses(trainer)
    if int(os.environ.get("RANK", 0)) == 0:
        (folder / "cases.json").write_text(json.dumps(found))
    if planned:
        dist.destroy_process_group()


CASES = (best, resumed, saved, predicted, padded, adapted, own_loss)

if __name__ == "__main__":
    main()
