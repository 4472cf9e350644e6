"""The demo: measures this machine, plans a GPT-2 for several processes under a tight memory budget, trains it with the
plan and on one process, and compares predictions with measurements, and the two loss curves.

./scripts/demo sets everything up and runs this.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from rich.console import Console
from rich.table import Table
from train_gpt2 import AXES, BATCH, HEADS, LAYERS, SEQUENCE, WIDTH, model_and_batch

from autopar import Cluster, InfeasibleError, Plan, plan
from autopar.sizes import show_bytes

HERE = Path(__file__).resolve().parent
console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def main() -> int:
    arguments = _arguments()
    begin = time.perf_counter()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    shape = (min(gpus, 4) if gpus else 4,)
    backend = f"{gpus} GPUs, NCCL" if gpus else f"{os.cpu_count()} cores, gloo"
    console.print(
        f"GPT-2 with {LAYERS} layers, width {WIDTH}, {HEADS} heads, sequences of {SEQUENCE} bytes, batches of {BATCH}, "
        f"on {math.prod(shape)} processes ({backend})"
    )

    _title("1. Measure this machine")
    cluster = _measure(shape, out / "host.json")
    _title("2. Plan")
    chosen = _plan(cluster)
    chosen.save(out / "plan.json")
    console.print(chosen.explain(), markup=False)
    _title(f"3. Train by the plan on {math.prod(shape)} processes")
    planned = _train(out / "planned.json", arguments.steps, shape, out / "plan.json")
    _title("4. Train on one process, without autopar")
    single = _train(out / "single.json", arguments.steps)
    _title("5. Compare")
    fine = _compare(chosen, planned, single)
    _picture(planned["losses"], single["losses"], math.prod(shape), out / "loss.png")
    console.print(
        f"Loss curves: {out / 'loss.png'}   plan: {out / 'plan.json'}   {time.perf_counter() - begin:.0f} s in all"
    )
    return 0 if fine else 1


def _title(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


def _measure(shape: tuple[int, ...], path: Path) -> Cluster:
    """Measure compute and communication of this machine's processes, all at the same time."""
    mesh = ["--mesh", "x".join(map(str, shape)), "--axis-names", ",".join(AXES[len(shape)])]
    _torchrun(["-m", "autopar.cli", "profile", *mesh, "--out", str(path)], math.prod(shape))
    cluster = Cluster.load(path)
    rate = cluster.device.flops_per_s["float32"] * cluster.device.efficiency / 1e9
    links = ", ".join(
        f"{axis.name} {axis.bytes_per_s / 1e9:.2f} GB/s, {axis.latency_seconds * 1e6:.0f} µs" for axis in cluster.axes
    )
    console.print(f"Each process: {rate:.1f} GFLOP/s in large products; {links}")
    return cluster


def _plan(cluster: Cluster) -> Plan:
    """A plan within 60 % of the peak memory of plain data parallelism; prints what other plans would need."""
    model, batch = model_and_batch()
    parallel = plan(model, batch, cluster, precision="fp32", constraints="ddp")
    budget = parallel.predicted.peak_bytes * 6 // 10
    console.print(f"Plain data parallelism would take {show_bytes(parallel.predicted.peak_bytes)} in each process.")
    try:
        plan(model, batch, cluster, precision="fp32", constraints="ddp", memory_budget=budget)
    except InfeasibleError as error:
        console.print(f"With a budget of {show_bytes(budget)} it is refused: {error}\n", markup=False)
    return plan(model, batch, cluster, precision="fp32", memory_budget=budget)


def _train(result: Path, steps: int, shape: tuple[int, ...] = (), plan_file: Path | None = None) -> dict[str, Any]:
    script = [str(HERE / "train_gpt2.py"), "--steps", str(steps), "--out", str(result)]
    if plan_file is None:
        _run([sys.executable, *script], threads=os.cpu_count() or 1)
    else:
        _torchrun([*script, "--mesh", "x".join(map(str, shape)), "--plan", str(plan_file)], math.prod(shape))
    return dict(json.loads(result.read_text()))


def _torchrun(words: Sequence[str], processes: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    _run([*launch, *words], threads=max(1, (os.cpu_count() or 1) // processes))


def _run(command: Sequence[str], threads: int) -> None:
    """Run a command with `threads` threads per process; its output goes to the terminal."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99", "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run(command, check=True, env={**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)})


def _compare(chosen: Plan, planned: dict[str, Any], single: dict[str, Any]) -> bool:
    """Print two tables; returns whether the loss fell and both curves agree."""
    tokens = BATCH * SEQUENCE
    predicted = chosen.predicted
    facts = Table("", "predicted", "measured", "one process, measured", title="A step", title_justify="left")
    facts.add_row(
        "seconds", *(f"{s:.3f}" for s in (predicted.step_seconds, planned["step_seconds"], single["step_seconds"]))
    )
    facts.add_row(
        "tokens/s",
        *(f"{tokens / s:,.0f}" for s in (predicted.step_seconds, planned["step_seconds"], single["step_seconds"])),
    )
    facts.add_row("peak memory", *map(show_bytes, (predicted.peak_bytes, planned["peak_bytes"], single["peak_bytes"])))
    facts.add_row("budget", show_bytes(chosen.memory_budget_bytes or 0), "", "")
    console.print(facts)

    a, b = planned["losses"], single["losses"]
    curves = Table("step", "by the plan", "one process", "difference", title="Loss, nats a byte", title_justify="left")
    for step in sorted({0, 1, 2, 5, *range(10, len(a), 10), len(a) - 1}):
        if step < len(a):
            curves.add_row(str(step + 1), f"{a[step]:.4f}", f"{b[step]:.4f}", f"{abs(a[step] - b[step]):.1e}")
    console.print(curves)
    fall = a[0] - sum(a[-5:]) / len(a[-5:])
    apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
    console.print(
        f"The loss fell by {fall:.2f} nats (mean of the last five steps); the curves differ by {apart:.1e} at most."
    )
    return fall >= 1.5 and apart < 0.01


def _picture(planned: Sequence[float], single: Sequence[float], processes: int, path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(planned) + 1)
    axes.plot(steps, single, color="#9aa5b1", linewidth=6, label="one process")
    axes.plot(steps, planned, color="#c2410c", linewidth=1.8, label=f"{processes} processes by autopar's plan")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="Byte-level GPT-2 on Python's standard library")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each of the two runs")
    parser.add_argument("--out", default="out/demo", help="folder for plan, results and picture")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
