"""Tied weights separated by accelerate's `init_empty_weights`, on real ranks: filling the model reports it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from large_cases import differing, ids, llama, refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from weight_cases import folder

import autopar


def planned(*, tied: bool) -> nn.Module:
    with init_empty_weights():
        model = llama()
    if tied:
        model.tie_weights()  # type: ignore[operator]
    return autopar.autoparallelize(model, ids(), init_device_mesh("cpu", (dist.get_world_size(),)))


def built() -> str:
    return refusal(lambda: autopar.materialise(planned(tied=False)))


def loaded() -> str:
    with folder(lambda path: llama().save_pretrained(path)) as path:  # type: ignore[operator]
        return refusal(lambda: autopar.load_weights(planned(tied=False), path))


def loaded_tied() -> list[str]:
    alone, model = llama(), planned(tied=True)
    with folder(lambda path: alone.save_pretrained(path)) as path:  # type: ignore[operator]
        autopar.load_weights(model, path)
    return differing(model, alone)


class Sharing(nn.Module):
    """Two parameters on one storage: at the same offset, transposed, overlapping, or side by side."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        both = torch.randn(8, 8)
        of_b = {
            "one place": both[:4, :4],
            "the other way": both[:4, :4].t(),
            "in part": both[3:7, 3:7],
            "columns": both[:4, 4:],
            "rows": both[4:, :4],
        }
        self.a.weight.data, self.b.weight.data = both[:4, :4], of_b[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(x)).square().mean()


def shared() -> dict[str, str]:
    x, mesh = torch.ones(4, 4), init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        how: refusal(lambda how=how: autopar.autoparallelize(Sharing(how), {"x": x}, mesh, constraints="fsdp"))
        for how in ("one place", "the other way", "in part", "columns", "rows")
    }


CASES = {2: {"built": built, "loaded": loaded, "loaded_tied": loaded_tied, "shared": shared}}
