"""What the Trainer of Lightning does with a planned model beyond steps, on the ranks of one launch.

    torchrun --nproc-per-node 2 lightning_cases.py FOLDER [FOLDER OF ANOTHER RUN]

or `python lightning_cases.py ...` for one process. Writes the losses of each case to FOLDER/cases.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from small import STEPS, processes, whole_batch
from with_lightning import Losses, Module

from autopar.integrations.lightning import PlannedStrategy


def fit(
    folder: Path, resume: Path | None = None, *others: Callback, meta: bool = False, parts: bool = False, **words: Any
) -> list[float]:
    """The losses of a run that saves a checkpoint after its third step."""
    if processes() > 1:
        words["strategy"] = PlannedStrategy(whole_batch(), constraints="fsdp", save_distributed_checkpoint=parts)
    losses = Losses()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes(),
        max_steps=STEPS,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=[losses, saves, *others],
        **quiet,
        **words,
    )
    with torch.device("meta" if meta and processes() > 1 else "cpu"):
        module = Module()
    torch.manual_seed(0)  # as in the constructor: parameters on meta are initialised in `fit`
    trainer.fit(module, ckpt_path=resume)
    return losses.seen


class Thawing(BaseFinetuning):
    """The blocks are trained from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model.model.layers)

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.model.layers, optimizer)


def main() -> None:
    folder, others = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    saved = folder / "whole" / "step=3.ckpt"
    losses = {
        "whole": fit(folder / "whole"),
        "accumulated": fit(folder / "accumulated", accumulate_grad_batches=2),
        "built on meta": fit(folder / "meta", meta=True),
        "in parts": fit(folder / "parts", parts=True),
        "resumed": fit(folder / "again", saved),
        "thawed": fit(folder / "thawed", None, Thawing(), limit_train_batches=3),
    }
    if processes() > 1:
        losses["resumed from parts"] = fit(folder / "again", folder / "parts" / "step=3.ckpt", parts=True)
    for other in others:
        losses["resumed from another"] = fit(folder / "again", other / "whole" / "step=3.ckpt")
    if int(os.environ.get("RANK", 0)) == 0:
        (folder / "cases.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
