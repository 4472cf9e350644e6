"""Tied weights that accelerate's `init_empty_weights` has parted, on real ranks: what fills the model says so."""

from __future__ import annotations

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


CASES = {2: {"built": built, "loaded": loaded, "loaded_tied": loaded_tied}}
