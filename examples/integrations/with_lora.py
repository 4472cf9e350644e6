"""Training adapters with peft: the base model is frozen, and autopar plans for that.

    torchrun --nproc-per-node 2 examples/integrations/with_lora.py
    python examples/integrations/with_lora.py            # the same losses on one process, without autopar

With --constraint fsdp (or tp), the plan follows that scheme.
"""

from __future__ import annotations

import small
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from small import BATCH, STEPS, Bytes, mesh_of_all, processes, small_model, whole_batch

from autopar import autoparallelize
from autopar.integrations.huggingface import save_pretrained


def main() -> None:
    options = small.arguments()
    torch.manual_seed(1)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(small_model(), adapters)
    if processes() > 1:
        model = autoparallelize(model, whole_batch(), mesh_of_all(), constraints=options.constraint)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data, losses = Bytes(), []
    for step in range(STEPS):
        rows = data.rows[step * BATCH : (step + 1) * BATCH]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_pretrained(model, options.out / "adapters")
    small.report(losses, model, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
