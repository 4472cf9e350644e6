"""Regret on real ranks: the measured step of autopar's choice compared with the best of six measured plans.

    torchrun --standalone --nproc-per-node 2 scripts/bench/regret.py                     # a mesh of (2,)
    torchrun --standalone --nproc-per-node 4 scripts/bench/regret.py --mesh 2 2

The ranks profile themselves as `autopar profile` does; plans are made with the medians. Then all six plans of a model
run steps (forward, backward, fused AdamW, zero_grad) in rounds, in random order. `--twins` models run each plan: they
differ only in where their tensors are in memory, so their spread ("twins apart") shows the error of the measurement. A
plan's time is the median of its twins, a step's that of its slowest rank. CPU seconds are summed over a rank's threads;
wall-clock seconds stand beside them, and also depend on other programs on the same cores. autopar minimises the
seconds of `--clock`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import torch.distributed as dist
from predict_time import MODELS, Pair, Trained, median_cluster, told
from timing_ranks import start_rank, timing_options
from torch.distributed.device_mesh import init_device_mesh

from autopar import Cluster, Plan
from autopar.profiling.calibrate import measure_host
from autopar.report.tables import table

OWN = "own choice"
ONE_AXIS = [
    ("ddp", ("ddp",), False),
    ("fsdp", ("fsdp",), False),
    ("tp", ("tp",), False),
    ("ddp replay", ("ddp",), True),
    ("fsdp replay", ("fsdp",), True),
]
TWO_AXES = [(name, (name,), False) for name in ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp")]
Step = tuple[float, float]  # CPU seconds, wall seconds


def step_of(one: Trained) -> Step:
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    one.step()
    return time.process_time() - cpu, time.perf_counter() - wall


def measured(trained: Sequence[Trained], rounds: int, steps: int) -> list[tuple[float, float]]:
    """Median (CPU, wall) seconds of each model's steps; a step takes as long as its slowest rank."""
    taken: list[list[Step]] = [[] for _ in trained]
    chance = random.Random(0)
    for _ in range(rounds):
        order = list(range(len(trained)))
        chance.shuffle(order)
        for i in order:
            trained[i].step()
            taken[i] += [step_of(trained[i]) for _ in range(steps)]
    everyone: list[list[list[Step]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, taken)
    medians = []
    for ranks in zip(*everyone, strict=True):
        slowest = [(max(cpu for cpu, _ in step), max(wall for _, wall in step)) for step in zip(*ranks, strict=True)]
        medians.append((statistics.median(c for c, _ in slowest), statistics.median(w for _, w in slowest)))
    return medians


def rows_of(model: str, cluster: Cluster, twins: int, rounds: int, steps: int) -> list[list[str]]:
    others = TWO_AXES if len(cluster.shape) > 1 else ONE_AXIS
    pairs = [Pair(model, name, constraints, tight=tight) for name, constraints, tight in [*others, (OWN, (), False)]]
    trained = []
    for pair in pairs:
        for _ in range(twins):
            trained.append(Trained(pair, cluster))
            trained[-1].step()
        told(f"{model}, {pair.plan}: made")
    singly = measured(trained, rounds, steps)
    alike = [singly[i : i + twins] for i in range(0, len(singly), twins)]
    seconds = [tuple(map(statistics.median, zip(*of_twins, strict=True))) for of_twins in alike]
    best = min(seconds)[0], min(wall for _, wall in seconds)
    lines = []
    for first, of_twins, (cpu, wall) in zip(trained[::twins], alike, seconds, strict=True):
        predicted = first.plan.predicted.step_seconds
        over = [f"{100 * (taken / least - 1):+.1f} %" for taken, least in zip((cpu, wall), best, strict=True)]
        apart = f"{100 * (max(of_twins)[0] / min(of_twins)[0] - 1):.1f} %"
        figures = f"{1e3 * predicted:.0f}", f"{1e3 * cpu:.0f}", apart, over[0], f"{1e3 * wall:.0f}", over[1]
        lines.append([model, first.pair.plan, *figures])
    like = next((first.pair.plan for first in trained[:-twins] if _is_alike(first.plan, trained[-1].plan)), None)
    if like is not None:
        told(f"{model}: the own choice stores, sends and replays as {like} does")
    return lines


def _is_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans have equal storage, collectives and recompute: their times then differ by chance alone."""
    return (one.parameters, one.collectives, one.recompute) == (other.parameters, other.collectives, other.recompute)


def main() -> None:
    parser = timing_options(__doc__)
    parser.add_argument("--mesh", type=int, nargs="+", help="default: one axis of all ranks")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--profiles", type=int, default=3)
    parser.add_argument("--twins", type=int, default=3, help="models of each plan")
    options = parser.parse_args()
    start_rank()
    shape = tuple(options.mesh or [dist.get_world_size()])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{i}" for i in range(len(shape))))
    profiles = [
        measure_host(mesh, seconds=options.profile_seconds, clock=options.clock) for _ in range(options.profiles)
    ]
    lines = []
    for model in options.models:
        lines += rows_of(model, median_cluster(profiles), options.twins, options.rounds, options.steps)
        told("\n".join("  ".join(line) for line in lines[-6:]))
    if dist.get_rank() == 0:
        head = ["model", "plan", "predicted ms", "CPU ms", "twins apart", "over the best", "wall ms", "over the best"]
        print(*table(lines, "<<>>>>>>", head=head, indent=0), sep="\n")
        regrets = [float(line[5].removesuffix(" %")) for line in lines if line[1] == OWN]
        apart = statistics.median(float(line[4].removesuffix(" %")) for line in lines)
        print(f"\nRegret of the own choice in CPU seconds: {', '.join(f'{r:.1f} %' for r in regrets)}.")
        print(f"Models of one plan lie {apart:.1f} % apart (median).")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
