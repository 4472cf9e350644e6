"""Training with the Trainer of transformers: its loop, data loading, logging and saving, with autopar's plan.

    torchrun --nproc-per-node 2 examples/integrations/with_trainer.py
    python examples/integrations/with_trainer.py         # the same losses on one process, without autopar

With --constraint fsdp (or tp), the plan follows that scheme. --save-steps 3 writes checkpoints, from which --resume
FOLDER resumes.
"""

from __future__ import annotations

import small
import torch
import torch.distributed as dist
from small import BATCH, STEPS, Bytes, mesh_of_all, processes, small_model, whole_batch
from transformers import Trainer, TrainingArguments

from autopar import autoparallelize
from autopar.integrations.huggingface import PlannedTrainer


def main() -> None:
    options = small.arguments()
    arguments = TrainingArguments(
        output_dir=str(options.out),
        per_device_train_batch_size=BATCH // processes(),
        per_device_eval_batch_size=BATCH // processes(),
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or STEPS,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    model = small_model()
    if processes() > 1:
        model = autoparallelize(model, whole_batch(), mesh_of_all(), inputs="local", constraints=options.constraint)
        trainer = PlannedTrainer(model=model, args=arguments, train_dataset=Bytes(), eval_dataset=Bytes(2 * BATCH))
    else:
        trainer = Trainer(model=model, args=arguments, train_dataset=Bytes(), eval_dataset=Bytes(2 * BATCH))
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.out / "trained"))  # from_pretrained reads it on any number of processes
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    small.report([*losses, trainer.evaluate()["eval_loss"]], model, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
