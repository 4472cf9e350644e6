"""Predicted speed of the chosen plan relative to the best known scheme, for full-size models on H100 nodes.

python scripts/bench/quality.py                # all models
python scripts/bench/quality.py llama vit      # models whose name contains one of the words

Meshes have 8, 64 and 512 devices, the batch grows with them; bf16 compute with fp32 master weights, 70 GiB per device.
Each scheme is represented by the best plan that it allows, with the same prices and budget. `ratio`: the chosen plan's
seconds over those of the fastest scheme that fits (below 1: faster), by the cost model; `simulated`: the same by the
simulator. `apart`: the largest relative difference between cost model and simulator over these plans.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from plan_speed import LLAMA_3_8B, LLAMA_3_70B, on_meta

from autopar import AutoparError, Cluster, InputError, Plan
from autopar.planning.simulation import simulated
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.report.tables import show_seconds, table
from autopar.sizes import show_bytes
from autopar.stopwatch import Stopwatch

BUDGET = "70GiB"
SCHEMES = ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp")
MESHES = {8: (8,), 64: (8, 8), 512: (64, 8)}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {  # config, tokens (or pixels) per sample, samples per device
    "llama-3-8b": (LLAMA_3_8B, 8192, 1),
    "llama-3-70b": (LLAMA_3_70B, 8192, 1),
    "gpt2-xl": ({"architectures": "GPT2LMHeadModel", "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1024, 8),
    "bert-large": (
        {
            "architectures": "BertForMaskedLM",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        512,
        16,
    ),
    "vit-large": (
        {
            "architectures": "ViTForImageClassification",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        224,
        64,
    ),
    "t5-large": (
        {
            "architectures": "T5ForConditionalGeneration",
            "d_model": 1024,
            "d_ff": 4096,
            "num_layers": 24,
            "num_heads": 16,
        },
        512,
        16,
    ),
    "mixtral-8x7b": ({"architectures": "MixtralForCausalLM"}, 4096, 1),
}


def inputs_of(model: transformers.PreTrainedModel, size: int, batch: int) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        labels = torch.empty(batch, dtype=torch.long, device="meta")
        return {"pixel_values": torch.empty(batch, 3, size, size, device="meta"), "labels": labels}
    ids = torch.empty(batch, size, dtype=torch.long, device="meta")
    named = {"input_ids": ids, "labels": ids}
    return named | {"decoder_input_ids": ids} if model.config.is_encoder_decoder else named


def plans(prepared: Prepared) -> Iterator[tuple[str, Plan | None]]:
    """The chosen plan, then that of each scheme for which the mesh has enough axes; None if it does not fit."""
    budget = prepared.request.memory_budget_bytes
    for scheme in ("", *SCHEMES):
        try:
            yield scheme, prepared.solve(memory_budget_bytes=budget, constraints=(scheme,) if scheme else ())
        except InputError:  # the scheme needs another mesh
            continue
        except AutoparError:
            if not scheme:
                raise
            yield scheme, None


def rows_of(name: str) -> Iterator[list[str]]:
    values, size, each = MODELS[name]
    model = on_meta(values)
    for devices, mesh in MESHES.items():
        begun = time.process_time()
        request = request_of(Cluster.preset("h100", mesh), BUDGET, "bf16")
        watch = Stopwatch()
        traced = trace_for(model, inputs_of(model, size, each * devices), None, request, watch)
        prepared = prepare(model, traced, request, watch)
        try:
            made = dict(plans(prepared))
        except AutoparError as error:
            yield [name, str(devices), "does not fit" if "no plan fits" in error.message else error.message]
            continue
        chosen = made.pop("")
        assert chosen is not None
        seconds = {scheme: plan.predicted.step_seconds for scheme, plan in made.items() if plan is not None}
        played = {scheme: simulated(prepared, plan).step_seconds for scheme, plan in made.items() if plan is not None}
        mine, mine_played = chosen.predicted.step_seconds, simulated(prepared, chosen).step_seconds
        pairs = [(mine, mine_played), *((seconds[scheme], played[scheme]) for scheme in seconds)]
        apart = max((predicted / other - 1 for predicted, other in pairs), key=abs)
        best = min(seconds, key=seconds.__getitem__, default=None)
        yield [
            name,
            str(devices),
            show_seconds(mine),
            show_bytes(chosen.predicted.peak_bytes),
            best or "none fits",
            f"{mine / seconds[best]:.3f}" if best else "",
            f"{mine_played / min(played.values()):.3f}" if played else "",
            f"{100 * apart:+.1f} %",
            " ".join(scheme for scheme, plan in made.items() if plan is None),
            f"{100 * chosen.certificate.gap:.2f} %",
            f"{time.process_time() - begun:.0f}",
        ]


def main(words: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    head = ["model", "devices", "step", "peak", "best scheme", "ratio", "simulated"]
    head += ["apart", "do not fit", "gap", "CPU s"]
    rows = []
    for name in MODELS:
        if not words or any(word in name for word in words):
            for row in rows_of(name):
                print(*row, sep="  ", file=sys.stderr, flush=True)
                rows.append(row + [""] * (len(head) - len(row)))
    print(*table(rows, "<>>><>>><>>", head=head, indent=0), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
