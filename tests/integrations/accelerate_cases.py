"""accelerate's own checkpoints of a model, planned where there are several processes.

    torchrun --nproc-per-node 2 accelerate_cases.py FOLDER [FOLDER OF ANOTHER RUN]

or `python accelerate_cases.py ...` for one process. Writes what each case gave to FOLDER/cases.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from small import BATCH, STEPS, Bytes, mesh_of_all, processes, small_model, whole_batch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import autopar
from autopar import InputError, autoparallelize, own_rows
from autopar.integrations.huggingface import adopt


def tied(seed: int, dropout: float) -> LlamaForCausalLM:
    """The small model of the examples, with tied weights."""
    config = small_model().config
    config.tie_word_embeddings, config.attention_dropout = True, dropout
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


PLANS: dict[tuple[str, float, str | None], autopar.Plan] = {}  # each plan is made once


class Run:
    """A model in training; with its own `seed` its values differ until they are loaded."""

    def __init__(
        self, accelerator: Accelerator, seed: int, preset: str, dropout: float = 0.0, precision: str | None = None
    ) -> None:
        self.accelerator, model = accelerator, tied(seed, dropout)
        if processes() > 1:
            key = preset, dropout, precision
            options: Any = {"inputs": "local", "constraints": preset, "precision": precision}
            options = {"plan": PLANS[key]} if key in PLANS else options
            model = adopt(autoparallelize(model, whole_batch(), mesh_of_all(), **options))
            PLANS[key] = autopar.plan_of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        loader = DataLoader(Bytes(), batch_size=BATCH // processes())
        prepared: Any = accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared

    def losses(self, begin: int, end: int) -> list[float]:
        found = []
        for step, batch in enumerate(self.loader):
            if begin <= step < end:
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                found.append(loss.item())
        return found


def accelerate(**options: Any) -> Accelerator:
    # otherwise the scheduler steps once for each process
    return Accelerator(cpu=True, step_scheduler_with_optimizer=False, **options)


def resumed(folder: Path, preset: str, dropout: float = 0.0) -> list[float]:
    accelerator = accelerate()
    run = Run(accelerator, 1, preset, dropout)
    accelerator.load_state(str(folder))
    return run.losses(STEPS // 2, STEPS)


def saved(folder: Path, preset: str, *, safe: bool = True, dropout: float = 0.0) -> list[float]:
    """The losses of a run that saves a checkpoint in the middle and continues."""
    accelerator = accelerate()
    run = Run(accelerator, 0, preset, dropout)
    run.losses(0, STEPS // 2)
    accelerator.save_state(str(folder), safe_serialization=safe)
    return run.losses(STEPS // 2, STEPS)


def loaded_by_hooks(folder: Path) -> bool:
    """Hooks may save and load models themselves, and remove them from accelerate's lists."""
    accelerator = accelerate()
    run = Run(accelerator, 0, "fsdp", 0.3)
    kept: list[dict[str, Any]] = []

    def save(models: list[Any], weights: list[Any], place: str) -> None:
        kept.extend({name: value.clone() for name, value in model.state_dict().items()} for model in models)
        weights.clear()

    def load(models: list[Any], place: str) -> None:
        while models:
            models.pop().load_state_dict(kept[0])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(str(folder))
    first = run.losses(0, 1)
    accelerator.load_state(str(folder))
    return first == run.losses(0, 1) and not (folder / "model.safetensors").exists()


def files_of_weights(folder: Path) -> bool:
    """Whether `save_model` and `get_state_dict` give whole tensors that a plain model can load."""
    accelerator = accelerate()
    run = Run(accelerator, 0, "fsdp")
    accelerator.save_model(run.model, str(folder))
    state = accelerator.get_state_dict(run.model)
    if not accelerator.is_main_process:
        return not state
    right, written = tied(0, 0.0).state_dict(), load_file(folder / "model.safetensors")
    named = all(torch.equal(state[name], tensor) for name, tensor in right.items())
    return named and all(torch.equal(tensor, right[name]) for name, tensor in written.items())


def outside(preset: str) -> tuple[list[float], list[int]]:
    """A loss that the loop computes from the model's result; then predictions, gathered as in accelerate's examples."""
    accelerator = accelerate()
    run, losses, predicted = Run(accelerator, 0, preset), [], []
    for batch in run.loader:
        logits = run.model(input_ids=batch["input_ids"]).logits
        rows = own_rows(run.model, logits) if processes() > 1 else logits
        loss = F.cross_entropy(rows.flatten(0, 1), batch["labels"].flatten())
        accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    run.model.eval()
    for batch in run.loader:
        with torch.no_grad():
            found = run.model(**batch).logits.argmax(-1)
        predictions, labels = accelerator.gather_for_metrics((found, batch["labels"]))
        predicted += [len(predictions), int((predictions == labels).sum()), int(predictions.sum())]
    return losses, predicted


def half(preset: str) -> tuple[list[float], list[str], str]:
    """Losses under `mixed_precision="bf16"`, dtypes of the model's results, and the error for a plan without it."""
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = accelerate(mixed_precision="bf16")
    refused = ""
    if processes() > 1:
        try:
            Run(accelerator, 0, preset)
        except InputError as error:
            refused = str(error)
    run = Run(accelerator, 0, preset, precision="bf16")
    with torch.no_grad():
        returned = run.model(**next(iter(run.loader)))
    dtypes = [str(value.dtype) for value in (returned.loss, returned.logits, *run.model.parameters())]
    return run.losses(0, STEPS), sorted(set(dtypes)), refused


def main() -> None:
    folder, others = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    found: dict[str, Any] = {}
    for preset in ("ddp", "fsdp", "tp")[: 3 if processes() > 1 else 1]:
        for safe in (True, False):
            place = folder / f"{preset}-{safe}"
            found[f"{preset}-{safe}"] = saved(place, preset, safe=safe), resumed(place, preset)
    if processes() > 1:  # one process draws other masks
        found["dropout"] = saved(folder / "masks", "fsdp", dropout=0.3), resumed(folder / "masks", "fsdp", 0.3)
    for preset in ("ddp", "fsdp", "tp")[: 3 if processes() > 1 else 1]:
        found[f"outside-{preset}"] = outside(preset)
    for other in others:
        found["of another run"] = resumed(other / "ddp-True", "fsdp")
    found["hooks"] = loaded_by_hooks(folder / "hooks")
    found["weights"] = files_of_weights(folder / "weights")
    found["half"] = half("fsdp")
    if int(os.environ.get("RANK", 0)) == 0:
        (folder / "cases.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
