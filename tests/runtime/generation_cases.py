"""`generate` of a planned GPT-2 on real ranks, with a cache that grows and with one of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.runtime.model_class import ATTRIBUTE

NEW_TOKENS = 5
IDS = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(0))


def built() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double()


def planned(**options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(built(), {"input_ids": IDS, "labels": IDS}, mesh, constraints="tp", **options).eval()


def generated(model: Any, cache: str) -> list[list[int]]:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    return model.generate(IDS[:2, :6], **settings).tolist()


def twice(cache: str) -> dict[str, Any]:
    """The tokens of two runs, those of one process, and the graphs that the model had after each run."""
    model, alone = planned(), built().eval()
    programs = getattr(model, ATTRIBUTE).programs
    found: dict[str, Any] = {"alone": generated(alone, cache), "tokens": [], "graphs": []}
    for _ in range(2):
        found["tokens"].append(generated(model, cache))
        found["graphs"].append(len(programs))
    return found


def with_local_inputs() -> str:
    try:
        generated(planned(inputs="local"), "dynamic")
    except autopar.InputError as refused:
        return str(refused)
    return "no error"


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "dynamic": lambda: twice("dynamic"),
        "static": lambda: twice("static"),
        "local": with_local_inputs,
    }
}
