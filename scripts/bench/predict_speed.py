"""CPU seconds to predict a given plan of Llama-3-70B on 1,024 devices: step time, memory over time, simulated step.

    python scripts/bench/predict_speed.py

The plan is made first (`plan_speed.py` measures planning) and converted to JSON and back. Then everything that a
prediction needs is done again, starting from the model on the meta device: trace, annotate, list strategies, price.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import transformers
from plan_speed import LLAMA_3_70B, on_meta

from autopar import Cluster
from autopar.planning.simulation import Restated
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.plans import Plan
from autopar.report.tables import table
from autopar.sizes import show_bytes
from autopar.stopwatch import Stopwatch

T = TypeVar("T")
MESH = (128, 8)
PLAN = ("fsdp+tp",)


def model() -> torch.nn.Module:
    return on_meta(LLAMA_3_70B | {"use_cache": False})


def prepared(given: torch.nn.Module, cluster: Cluster) -> Prepared:
    ids = torch.empty(512, 8192, dtype=torch.long, device="meta")
    request = request_of(cluster, precision="bf16")
    watch = Stopwatch()
    traced = trace_for(given, {"input_ids": ids, "labels": ids}, None, request, watch)
    return prepare(given, traced, request, watch)


def timed(rows: list[list[str]], name: str, work: Callable[[], T]) -> T:
    gc.collect()
    start = time.process_time()
    result = work()
    rows.append([name, f"{time.process_time() - start:.2f}"])
    return result


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cluster = Cluster.preset("h100", MESH, ("dp", "tp"))
    text = prepared(model(), cluster).solve(memory_budget_bytes=1 << 60, constraints=PLAN).to_json()
    rows: list[list[str]] = []
    given = timed(rows, "the model on the meta device", model)
    plan = timed(rows, "the plan from its file", lambda: Plan.from_json(text))
    ready = timed(rows, "trace, annotate, strategies", lambda: prepared(given, cluster))
    found = timed(rows, "the plan on its graph", lambda: Restated.of(ready, plan, cluster))
    prediction = timed(rows, "predicted seconds and bytes", found.predicted)
    step = timed(rows, "simulated step", found.simulated)
    rows.append(["all of it", f"{sum(float(row[1]) for row in rows):.2f}"])
    assert abs(prediction.step_seconds - plan.predicted.step_seconds) <= 1e-9 * prediction.step_seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(*table(rows, "<>", head=["Llama-3-70B on 128x8", "CPU s"], indent=0), sep="\n")
    seconds = f"{prediction.step_seconds:.2f} s predicted, {step.step_seconds:.2f} s simulated"
    print(f"step {seconds}; process {show_bytes(peak)}")


if __name__ == "__main__":
    main()
