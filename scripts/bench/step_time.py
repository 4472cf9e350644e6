"""Step time and peak memory of autopar and of hand-written parallelism, in interleaved pairs on real ranks.

    torchrun --standalone --nproc-per-node 2 scripts/bench/step_time.py                # small models, seconds each
    torchrun --standalone --nproc-per-node 2 scripts/bench/step_time.py --model gpt2 --only ddp --pairs 20

A pair is one step of each (forward, backward, the same fused AdamW, zero_grad) in one process, in alternating order,
between barriers. The table gives the median over pairs of autopar's time divided by the other's, with a 95 % bootstrap
interval, and the peak bytes of live tensors on the worst rank.

=====  =========================================  ===========================================================
name   autopar                                    by hand
=====  =========================================  ===========================================================
ddp    constraints="ddp", batch split by rank     DistributedDataParallel
fsdp   constraints="fsdp", batch split by rank    fully_shard for each block
tp     constraints="tp", batch on every rank      parallelize_module (Llama alone)
sp     the same                                   parallelize_module with sequence parallelism (Llama alone)
=====  =========================================  ===========================================================

With `--own`, autopar chooses its own plan, without these constraints.

Batches are text: the reference pages of Python's own documentation (`pydoc_data.topics`), one token per byte.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from autopar import autoparallelize
from autopar.report.tables import table
from autopar.sizes import show_bytes

sys.path.insert(0, str(Path(__file__).parent))
from by_hand import BY_HAND
from side_by_side import Trained, keep_freed_memory, return_freed_memory, share_parameters, tidy_memory, warm
from step_cases import CASES, batch, build


def compare(name: str, kind: str, own: bool, pairs: int, warm_up: int) -> list[str]:
    """One row of the table; `own`: autopar is not constrained to the kind."""
    case, ranks = CASES[name], dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    parts = kind not in ("tp", "sp")
    example = batch(case, 0, ranks * case.rows)
    pins = () if own else "tp" if kind == "sp" else kind
    model = autoparallelize(build(case), example, mesh, constraints=pins, inputs="local" if parts else "global")
    count = sum(parameter.numel() for parameter in model.parameters())
    tidy_memory()
    plain = build(case)
    ours, theirs = Trained(model, case, not parts), Trained(BY_HAND[kind](plain, case.blocks, mesh), case, not parts)
    twins = share_parameters(model, plain)
    tidy_memory()
    warm(ours, theirs, warm_up, twins, mean=parts)
    tidy_memory()
    times = []
    for step in range(pairs):
        order = (ours, theirs) if step % 2 else (theirs, ours)
        seconds = {id(trained): trained.seconds(warm_up + step) for trained in order}
        times.append((seconds[id(ours)], seconds[id(theirs)]))
    peaks = ours.peak_bytes(0), theirs.peak_bytes(0)
    low, middle, high = median_with_interval([a / b for a, b in times])
    return [
        f"{name} ({count / 1e6:.3g} M)",
        "own" if own else str(pins),
        BY_HAND[kind].__name__,
        f"{statistics.median(a for a, _ in times):.3f}",
        f"{statistics.median(b for _, b in times):.3f}",
        f"{middle:.3f}",
        f"{low:.3f} to {high:.3f}",
        show_bytes(peaks[0]),
        show_bytes(peaks[1]),
    ]


def median_with_interval(ratios: Sequence[float], draws: int = 10_000) -> tuple[float, float, float]:
    """The median of the ratios between the bounds of its 95 % interval, by bootstrap over pairs."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], statistics.median(ratios), medians[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=CASES, help="default: gpt2-small, and llama-small for tp")
    parser.add_argument("--only", choices=BY_HAND, action="append", help="one of the comparisons (may be repeated)")
    parser.add_argument("--own", action="store_true", help="leave the choice of the plan to the planner")
    parser.add_argument("--lean", action="store_true", help="give freed memory back at once: slower, for large models")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    options = parser.parse_args()
    (return_freed_memory if options.lean else keep_freed_memory)()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    rows = []
    for kind in options.only or BY_HAND:
        name = options.model or ("llama-small" if kind in ("tp", "sp") else "gpt2-small")
        if kind in ("tp", "sp") and not name.startswith("llama"):
            raise SystemExit("parallelize_module shards nn.Linear, which GPT-2 has not: take a Llama for tp and sp")
        rows.append(compare(name, kind, options.own, options.pairs, options.warm_up))
        if dist.get_rank() == 0:
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        head = ["model", "plan", "by hand", "autopar s", "by hand s", "ratio", "95 %", "autopar peak", "by hand peak"]
        print(*table(rows, "<<<>>>>>>", head=head, indent=0), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
