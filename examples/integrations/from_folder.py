"""Training a model from a folder of transformers; each process reads only its part of the weights.

    torchrun --nproc-per-node 2 examples/integrations/from_folder.py
    python examples/integrations/from_folder.py          # the same losses on one process, without autopar

One process first writes the folder with `save_pretrained`; yours would be a folder that you have downloaded. With
--constraint fsdp (or tp), the plan follows that scheme.
"""

from __future__ import annotations

from typing import Any

import small
import torch
import torch.distributed as dist
from small import BATCH, Bytes, mesh_of_all, processes, small_model, whole_batch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import autopar


def main() -> None:
    options = small.arguments()
    folder, trained = options.out / "start", options.out / "trained"
    data = Bytes()
    model: Any
    if processes() > 1:
        mesh = mesh_of_all()
        if dist.get_rank() == 0:
            small_model().save_pretrained(folder, max_shard_size="100KB")
        dist.barrier()
        model = autopar.from_pretrained(folder, whole_batch(), mesh, inputs="local", constraints=options.constraint)
        rows = autopar.sampler(model, data)
        loader = DataLoader(data, sampler=rows, batch_size=rows.batch_size)
    else:
        small_model().save_pretrained(folder, max_shard_size="100KB")
        model = LlamaForCausalLM.from_pretrained(folder).train()
        loader = DataLoader(data, batch_size=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if processes() > 1:
        autopar.export_full_state(model, trained)  # what `from_pretrained` reads
    else:
        model.save_pretrained(trained)
    small.report(losses, model, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
