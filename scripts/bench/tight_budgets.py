"""Planning under binding budgets: CPU seconds, gap and step time, from the smallest budget up to one that is slack.

python scripts/bench/tight_budgets.py                # all models
python scripts/bench/tight_budgets.py llama vit      # models whose name contains one of the words

`smallest`: the smallest budget that has a plan, as the error for a budget of 1 MiB says, and the seconds until then.
`free`: the peak without a binding budget. `at`: the position of a budget between these two. `step`: relative to the
plan without a binding budget. Models are those of `quality.py`, at full size on an H100 preset; bf16 compute with fp32
master weights, a minute each.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator

import transformers
from plan_speed import on_meta
from quality import MODELS, inputs_of

from autopar import Cluster, InfeasibleError, Plan
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.report.tables import table
from autopar.sizes import show_bytes
from autopar.stopwatch import Stopwatch

MESHES = (8,), (2, 4), (8, 8)
BETWEEN = (0.02, 0.1, 0.3, 0.6)
NONE = 2**60  # bytes: a budget that never binds


def solved(prepared: Prepared, budget: int) -> tuple[Plan, float]:
    """The plan, and the CPU seconds of the solve."""
    begun = time.process_time()
    return prepared.solve(memory_budget_bytes=budget), time.process_time() - begun


def smallest_of(prepared: Prepared) -> tuple[int, float]:
    """The smallest budget that has a plan, and the CPU seconds until it is known."""
    begun = time.process_time()
    try:
        prepared.solve(memory_budget_bytes=2**20)
    except InfeasibleError as error:
        if error.smallest_budget_bytes is None:
            raise
        return error.smallest_budget_bytes, time.process_time() - begun
    raise AssertionError("nothing of these models fits one MiB")


def rows_of(name: str, shape: tuple[int, ...]) -> Iterator[list[str]]:
    values, size, each = MODELS[name]
    model = on_meta(values)
    request = request_of(Cluster.preset("h100", shape), precision="bf16")
    watch = Stopwatch()
    traced = trace_for(model, inputs_of(model, size, each * math.prod(shape)), None, request, watch)
    prepared = prepare(model, traced, request, watch)
    where = [name, "x".join(map(str, shape))]
    smallest, seconds = smallest_of(prepared)
    yield [*where, "smallest", show_bytes(smallest), f"{seconds:.1f}", "", ""]
    free, seconds = solved(prepared, NONE)
    peak = free.predicted.peak_bytes
    yield [*where, "free", show_bytes(peak), f"{seconds:.1f}", f"{100 * free.certificate.gap:.2f} %", "1.000"]
    for part in BETWEEN:
        budget = int(smallest + part * (peak - smallest))
        plan, seconds = solved(prepared, budget)
        ratio = plan.predicted.step_seconds / free.predicted.step_seconds
        gap = f"{100 * plan.certificate.gap:.2f} %"
        yield [*where, f"{100 * part:.0f} %", show_bytes(budget), f"{seconds:.1f}", gap, f"{ratio:.3f}"]


def main(words: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    rows = []
    for name in MODELS:
        for shape in MESHES:
            if not words or any(word in name for word in words):
                for row in rows_of(name, shape):
                    print(*row, sep="  ", file=sys.stderr, flush=True)
                    rows.append(row)
    head = ["model", "mesh", "at", "budget", "CPU s", "gap", "step"]
    print(*table(rows, "<<>>>>>", head=head, indent=0), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
