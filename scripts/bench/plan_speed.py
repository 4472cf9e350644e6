"""CPU seconds of each planning stage and peak memory, for full-size models on an H100 preset; each in a fresh process.

python scripts/bench/plan_speed.py             # all cases
python scripts/bench/plan_speed.py llama gpt2  # cases whose name contains one of the words
python scripts/bench/plan_speed.py --time-limit 600 llama    # a longer time limit, for a busy machine

Forward: the model's own forward on data-free tensors, without autopar. GiB: peak resident memory. Variables: those of
the ILP after equal blocks share theirs. Step: the plan's predicted step time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GPT2 = {"architectures": "GPT2LMHeadModel"}  # the default config is the 124 M model
LLAMA_3_8B = {
    "architectures": "LlamaForCausalLM",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
DEEPSEEK_V3 = {"architectures": "DeepseekV3ForCausalLM"}  # the default config is the 671 B model
T5_SMALL = {"architectures": "T5ForConditionalGeneration"}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], int, int, str]] = {  # config, mesh, sequence, batch, budget
    "gpt2 8": (GPT2, (8,), 1024, 64, "70GiB"),
    "gpt2 2x4": (GPT2, (2, 4), 1024, 64, "70GiB"),
    "t5-small 2x4": (T5_SMALL, (2, 4), 512, 64, "70GiB"),
    "llama-3-8b 64": (LLAMA_3_8B, (64,), 8192, 64, "70GiB"),
    "llama-3-8b 8x8": (LLAMA_3_8B, (8, 8), 8192, 64, "70GiB"),
    "llama-3-8b 8x8, 40GiB": (LLAMA_3_8B, (8, 8), 8192, 64, "40GiB"),  # needs recompute
    "llama-3-8b 4x4x4": (LLAMA_3_8B, (4, 4, 4), 8192, 64, "70GiB"),
    "llama-3-8b 1x8": (LLAMA_3_8B, (1, 8), 8192, 1, "70GiB"),
    "llama-3-8b 8x8, one text": (LLAMA_3_8B, (8, 8), 32768, 1, "70GiB"),
    "llama-3-8b 2048x8": (LLAMA_3_8B, (2048, 8), 8192, 16384, "70GiB"),
    "llama 2 layers 8x8": (LLAMA_3_8B | {"num_hidden_layers": 2}, (8, 8), 8192, 64, "70GiB"),
    "llama 128 layers 8x8": (LLAMA_3_8B | {"num_hidden_layers": 128}, (8, 8), 8192, 64, "1000GiB"),  # not binding
    "llama 2 layers 4x4x4": (LLAMA_3_8B | {"num_hidden_layers": 2}, (4, 4, 4), 8192, 64, "70GiB"),
    "llama 128 layers 4x4x4": (LLAMA_3_8B | {"num_hidden_layers": 128}, (4, 4, 4), 8192, 64, "1000GiB"),
    "llama-3-70b 32x8": (LLAMA_3_70B, (32, 8), 8192, 256, "75GiB"),
    "deepseek-v3 64x8": (DEEPSEEK_V3, (64, 8), 4096, 64, "75GiB"),
}


def on_meta(values: dict[str, Any]) -> PreTrainedModel:
    """The model of a config, on the meta device."""
    import torch
    import transformers

    architecture = getattr(transformers, values["architectures"])
    config = architecture.config_class.from_dict({k: v for k, v in values.items() if k != "architectures"})
    with torch.device("meta"):
        made: PreTrainedModel = architecture(config)
    return made


def run_case(name: str, time_limit: float = 60) -> dict[str, Any]:
    """Plan one case in this process: seconds by stage, and the peak of resident memory."""
    import torch
    import transformers

    from autopar import Cluster, plan

    transformers.logging.set_verbosity_error()
    values, mesh, sequence, batch, budget = CASES[name]
    model = on_meta(values)
    ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    cluster = Cluster.preset("h100", mesh)
    cpu = _cpu_seconds()
    inputs = {"input_ids": ids, "labels": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    made = plan(model, inputs, cluster, memory_budget=budget, precision="bf16", time_limit=time_limit)
    planned = _cpu_seconds()
    by_itself = not hasattr(model.config, "n_routed_experts")  # routing to experts depends on data
    with torch.no_grad():
        if by_itself:
            model(**inputs)
    return {
        "stages": dict(made.planning_seconds),
        "cpu_seconds": planned - cpu,
        "forward_seconds": _cpu_seconds() - planned if by_itself else None,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "variables": made.size.variables,
        "step_seconds": made.predicted.step_seconds,
        "peak_bytes": made.predicted.peak_bytes,
        "gap": made.certificate.gap,
    }


def _cpu_seconds() -> float:
    """User and system time of this process and of the solver processes that it started."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(words: list[str], time_limit: float) -> None:
    from autopar.report.tables import show_seconds, table

    results = {}
    for name in CASES:
        if not words or any(word in name for word in words):
            command = [sys.executable, __file__, "--time-limit", str(time_limit), "--case", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
    stages = list(dict.fromkeys(stage for result in results.values() for stage in result["stages"]))
    rows = [
        [
            name,
            *(f"{result['stages'].get(stage, 0):.1f}" for stage in stages),
            f"{result['cpu_seconds']:.1f}",
            "" if result["forward_seconds"] is None else f"{result['forward_seconds']:.1f}",
            f"{result['rss_bytes'] / 2**30:.2f}",
            f"{result['variables']:,}",
            show_seconds(result["step_seconds"]),
            f"{100 * result['gap']:.2f} %",
        ]
        for name, result in results.items()
    ]
    shown = ["rules" if stage == "strategies" else stage for stage in stages]
    head = ["CPU seconds", *shown, "all", "forward", "GiB", "variables", "step", "gap"]
    print(*table(rows, "<" + ">" * (len(stages) + 6), head=head, indent=0, width=140), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--time-limit", type=float, default=60)
    parser.add_argument("--case", choices=list(CASES), help="this one alone, in this process, as JSON")
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(run_case(asked.case, asked.time_limit)))
    else:
        main(asked.words, asked.time_limit)
