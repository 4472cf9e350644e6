"""A model that no process ever holds whole: made, trained, exported, and read again.

torchrun --nproc-per-node 2 large.py
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import autopar


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random sequences."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.ids = torch.randint(256, (32, 64), generator=drawn)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=256, use_cache=False)
batch = {name: torch.zeros(8, 64, dtype=torch.long) for name in ("input_ids", "labels")}
mesh = init_device_mesh("cpu", (2,))

with torch.device("meta"):
    model = LlamaForCausalLM(config)  # shapes, no memory
model = autopar.autoparallelize(model, batch, mesh, inputs="local", constraints="fsdp")
autopar.materialise(model)  # initial values, only for this process's shards
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

dataset = Rows()
rows = autopar.sampler(model, dataset, shuffle=True)
loader = DataLoader(dataset, sampler=rows, batch_size=rows.batch_size)
for epoch in range(2):
    rows.set_epoch(epoch)
    for part in loader:
        loss = model(**part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}  loss {loss.item():.4f}")

autopar.export_full_state(model, "trained")  # transformers reads this folder
again = autopar.from_pretrained("trained", batch, mesh, constraints="tp")
for name, mine in again.state_dict().items():
    theirs = model.state_dict()[name]
    torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), rtol=0, atol=0)
