"""Training with PyTorch Lightning: its Trainer, autopar's plan as the strategy.

    torchrun --nproc-per-node 2 examples/integrations/with_lightning.py
    python examples/integrations/with_lightning.py       # the same losses on one process, without autopar

With --constraint fsdp (or tp), the plan follows that scheme. --save-steps 3 writes a checkpoint every three steps, and
--resume FILE resumes from one, which any number of processes may have written.
"""

from __future__ import annotations

from typing import Any

import lightning
import small
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small import BATCH, STEPS, Bytes, processes, small_model, whole_batch
from torch.utils.data import DataLoader, DistributedSampler

from autopar.integrations.lightning import PlannedStrategy


class Module(lightning.LightningModule):
    """The same module as without autopar."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.log("eval_loss", self.model(**batch).loss)

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        data, trainer = Bytes(), self.trainer
        rows: DistributedSampler[Any] = DistributedSampler(
            data, trainer.world_size, trainer.global_rank, shuffle=False
        )  # else Lightning shuffles
        return DataLoader(data, BATCH // trainer.world_size, sampler=rows)

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(Bytes(2 * BATCH), BATCH // self.trainer.world_size)  # the rows of one process

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Losses(Callback):
    """Collects the loss of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(outputs["loss"].item())


def main() -> None:
    options = small.arguments()
    strategy: Any = "auto"
    if processes() > 1:
        strategy = PlannedStrategy(whole_batch(), constraints=options.constraint)
    module, losses = Module(), Losses()
    saves = ModelCheckpoint(options.out, "{step}", every_n_train_steps=options.save_steps or STEPS, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=processes(),
        strategy=strategy,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[losses, saves],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=options.out,
    )
    trainer.fit(module, ckpt_path=options.resume)
    small.report([*losses.seen, trainer.callback_metrics["eval_loss"].item()], module, options.out)


if __name__ == "__main__":
    main()
