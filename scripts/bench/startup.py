"""Seconds from launch to the end of the first step on real ranks, and those of planner and runtime on up to 1,024.

    python scripts/bench/startup.py                          # 2, 4 and 8 ranks; 8, 64 and 1,024 with the fake group
    python scripts/bench/startup.py --ranks 2 --fake 8,1024

Real ranks: one torchrun on this host (gloo) with a small GPT-2 and the preset fsdp. `launch` is the time until a rank's
script runs, `import` the imports of torch, transformers and autopar, `group` the process group and the mesh; `plan` and
`apply` are parts of `autoparallelize` (other ranks wait there for rank 0), `step` is the first step. Seconds are those
of rank 0; `CPU s` are those of all ranks together, which depend less on the load of the machine.

Fake group: torch's process group for tests, in one process that is rank 0; collectives return at once. The table shows
the work of this rank in CPU seconds, and the number of process groups made, which must be one per axis for any number
of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

START = time.time()
ROOT = Path(__file__).resolve().parents[2]
_STEPS = 10  # of which the time of one is the mean
STAGES = ("launch", "import", "group", "plan", "apply", "step")


def on_rank(launched: float, out: Path) -> None:
    """Run as one of the real ranks, and write the time at which each stage ended."""
    ends = [launched, START]
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    ends.append(time.time())
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ends.append(time.time())
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (8, 64))
    batch = {"input_ids": ids, "labels": ids}
    plan = autopar.plan(small_gpt2(), batch, mesh, constraints="fsdp") if dist.get_rank() == 0 else None
    text = [plan.to_json() if plan is not None else ""]
    dist.broadcast_object_list(text)
    ends.append(time.time())
    model = autopar.autoparallelize(small_gpt2(), batch, mesh, plan=autopar.Plan.from_json(text[0]))
    optimizer = torch.optim.AdamW(model.parameters())
    ends.append(time.time())
    model(**batch).loss.backward()
    optimizer.step()
    ends.append(time.time())
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {stage: end - begin for stage, begin, end in zip(STAGES, ends[:-1], ends[1:], strict=True)}
    found["CPU s"] = used.ru_utime + used.ru_stime
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def small_gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512, n_positions=64, use_cache=False)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def on_fake_ranks(ranks: int) -> dict[str, float]:
    """Seconds of the work of rank 0 on a mesh of (ranks / 8, 8), with one row of the batch per rank."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public one

    import autopar
    from autopar.stopwatch import Stopwatch

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    watch = Stopwatch()
    with watch.stage("mesh"):
        mesh = init_device_mesh("cpu", (ranks // 8, 8), mesh_dim_names=("dp", "tp"))
    config = transformers.LlamaConfig(num_hidden_layers=4, hidden_size=128, intermediate_size=256, vocab_size=512)
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim, config.use_cache = 16, False
    model = transformers.LlamaForCausalLM(config)
    example = torch.zeros(ranks, 64, dtype=torch.int64)
    groups = len(dist.distributed_c10d._world.pg_map)
    options = {"constraints": "fsdp+tp", "inputs": "local"}
    with watch.stage("plan"):
        plan = autopar.plan(model, {"input_ids": example, "labels": example}, mesh, **options)  # type: ignore[arg-type]
    with watch.stage("apply"):
        autopar.autoparallelize(model, {"input_ids": example, "labels": example}, mesh, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = {"input_ids": example[:1], "labels": example[:1]}
    for step in range(1 + _STEPS):
        with watch.stage("steps" if step else "first step"):
            model(**rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    made = len(dist.distributed_c10d._world.pg_map) - groups
    dist.destroy_process_group()
    return watch.seconds | {"a step": watch.seconds["steps"] / _STEPS, "groups": made, "mesh groups": groups}


def launched(ranks: int) -> list[str]:
    """Launch real ranks; one row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--worker", str(time.time()), folder]
        subprocess.run(command, env=environment(), check=True, capture_output=True)
        found = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
    first = found[0]
    cells = [first[stage] for stage in STAGES]
    cpu_seconds = sum(rank["CPU s"] for rank in found)
    return [str(ranks), *(f"{s:.2f}" for s in cells), f"{sum(cells):.2f}", f"{cpu_seconds:.1f}"]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", default="2,4,8", help="real ranks, with commas between")
    parser.add_argument("--fake", default="8,64,1024", help="ranks of the fake group, multiples of 8")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--faked", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        on_rank(float(options.worker[0]), Path(options.worker[1]))
        return
    if options.faked:
        print(json.dumps(on_fake_ranks(options.faked)))
        return
    from autopar.report.tables import table

    rows = [launched(int(ranks)) for ranks in options.ranks.split(",") if ranks]
    if rows:
        head = ["ranks", *STAGES, "all", "CPU s"]
        print(*table(rows, ">" * len(head), head=head, indent=0), "", sep="\n", flush=True)
    rows = []
    for ranks in filter(None, options.fake.split(",")):
        command = [sys.executable, __file__, "--faked", ranks]
        text = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout
        found = json.loads(text.splitlines()[-1])
        seconds = [f"{found[name]:.3f}" for name in ("mesh", "plan", "apply", "first step", "a step")]
        rows.append([ranks, *seconds, str(found["mesh groups"]), str(found["groups"])])
    if rows:
        head = ["fake ranks", "mesh", "plan", "apply", "first step", "a step", "groups of the mesh", "made since"]
        print(*table(rows, ">" * len(head), head=head, indent=0), sep="\n")


if __name__ == "__main__":
    main()
