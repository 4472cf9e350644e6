"""Four more steps of planned.py, starting where the last run of this script ended.

A run can resume from the checkpoint of a run with another number of processes.
"""

import os
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import autoparallelize, latest_checkpoint, load_checkpoint, save_checkpoint

torch.manual_seed(0)
sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 256}
ends = {"bos_token_id": 0, "eos_token_id": 0}
config = GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config)
model.loss_type = "ForCausalLM"  # else transformers warns that it guesses
text = bytearray(Path(torch.__file__).read_bytes()[:512])
ids = torch.frombuffer(text, dtype=torch.uint8).view(8, 64).long()

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
found = latest_checkpoint("checkpoints")
plan = found.plan_for(mesh) if found else None  # None for another mesh: plan again
model = autoparallelize(model, {"input_ids": ids, "labels": ids}, mesh, plan=plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = load_checkpoint(model, optimizer, found) if found else 0

for step in range(first, first + 4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")

save_checkpoint(model, optimizer, "checkpoints", step=first + 4)
