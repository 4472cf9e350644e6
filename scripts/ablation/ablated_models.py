"""The models of the grids by name, on the meta device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from plan_speed import on_meta
from quality import MODELS as LARGE
from quality import inputs_of

_TINY = {"architectures": "GPT2LMHeadModel", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {  # config, tokens (or pixels) per sample, samples per device
    **LARGE,
    "gpt2-tiny": (_TINY, 64, 4),
}


def model_and_inputs(name: str, devices: int) -> tuple[transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    """A model, and the batch of a step on `devices` devices; "NAME/4" is the model with 4 layers.

    Raises SystemExit for an unknown name.
    """
    known, _, layers = name.partition("/")
    if known not in MODELS or (layers and not layers.isdigit()):
        raise SystemExit(f"model {name!r} is unknown: use one of {', '.join(MODELS)}, or NAME/4 for 4 layers of it")
    config, size, each = MODELS[known]
    if layers:
        key = next(key for key in ("n_layer", "num_hidden_layers", "num_layers") if key in config)
        config = {**config, key: int(layers)}
    model = on_meta(config)
    return model, inputs_of(model, size, each * devices)
