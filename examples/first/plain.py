"""Trains a small GPT-2 on the bytes of torch's own source, on one process."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 256}
ends = {"bos_token_id": 0, "eos_token_id": 0}
config = GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config)
model.loss_type = "ForCausalLM"  # else transformers warns that it guesses
text = bytearray(Path(torch.__file__).read_bytes()[:512])
ids = torch.frombuffer(text, dtype=torch.uint8).view(8, 64).long()

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")
