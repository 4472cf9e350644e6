"""Training with accelerate: its loop and data loading, autopar's plan.

    torchrun --nproc-per-node 2 examples/integrations/with_accelerate.py
    python examples/integrations/with_accelerate.py      # the same losses on one process, without autopar

The lines that autopar adds are those under `if processes() > 1`. With --constraint fsdp (or tp), the plan follows that
scheme.
"""

from __future__ import annotations

import small
import torch
from accelerate import Accelerator
from small import BATCH, Bytes, mesh_of_all, processes, small_model, whole_batch
from torch.utils.data import DataLoader

from autopar import autoparallelize
from autopar.integrations.huggingface import adopt


def main() -> None:
    options = small.arguments()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = small_model()
    if processes() > 1:
        model = adopt(
            autoparallelize(model, whole_batch(), mesh_of_all(), inputs="local", constraints=options.constraint)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Bytes(), batch_size=BATCH // processes())  # the rows of one process
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    small.report(losses, model, options.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
