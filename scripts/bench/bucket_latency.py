"""Latency of buckets that plans leave out of their seconds, if parameters move by several kinds of conversions.

    python scripts/bench/bucket_latency.py

Each bucket of the plan is priced again by itself. The sum of what the plan counts less is an upper bound of the error
of its step time, since compute would hide a part of it.
"""

from __future__ import annotations

import torch
import transformers
from plan_speed import LLAMA_3_8B, on_meta

from autopar import Cluster, plan
from autopar.cost.collectives import collective_seconds
from autopar.plans import Plan
from autopar.report.tables import show_seconds, table

GPT_350M = {"architectures": "GPT2LMHeadModel", "n_layer": 24, "n_embd": 1024, "n_head": 16}
GPT_1300M = GPT_350M | {"n_embd": 2048}
CASES = [  # name, config, batch, sequence, mesh
    ("gpt 350M", GPT_350M, 512, 256, (16, 4)),
    ("gpt 350M", GPT_350M, 512, 256, (32, 8)),
    ("gpt 350M", GPT_350M, 512, 256, (8, 4, 8)),
    ("gpt 1.3B", GPT_1300M, 128, 1024, (8, 8)),
    ("llama-3-8b", LLAMA_3_8B, 64, 8192, (8, 8)),
    ("llama-3-8b", LLAMA_3_8B, 512, 8192, (64, 8)),
]


def not_counted(made: Plan, cluster: Cluster) -> float:
    alone = (c.count * collective_seconds(c.kind, c.bytes, cluster.axes[c.axis]) - c.seconds for c in made.collectives)
    return sum(seconds for seconds in alone if seconds > 0)


def main() -> None:
    transformers.logging.set_verbosity_error()
    lines = []
    for name, config, batch, sequence, shape in CASES:
        model, cluster = on_meta(config), Cluster.preset("h100", shape)
        ids = torch.empty(batch, sequence, dtype=torch.long, device="meta")
        for constraints in ("", "hsdp", "fsdp", "fsdp(recompute=full)"):
            examples = {"input_ids": ids, "labels": ids}
            made = plan(model, examples, cluster, constraints=constraints or (), memory_budget="70GiB")
            missing, step = not_counted(made, cluster), made.predicted.step_seconds
            figures = show_seconds(step), show_seconds(missing), f"{100 * missing / step:.1f} %", f"{len(made.buckets)}"
            lines.append([name, "x".join(map(str, shape)), constraints or "own choice", *figures])
    head = ["model", "mesh", "plan", "step", "not counted", "of it", "buckets"]
    print(*table(lines, "<<<>>>>", head=head, indent=0), sep="\n")


if __name__ == "__main__":
    main()
