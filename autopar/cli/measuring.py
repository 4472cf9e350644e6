"""`autopar profile`: measures the machine at hand, one process a device, as a cluster to plan with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from autopar.calibrate import measure_as_rank
from autopar.cli.output import check_folder, progress, say, say_json
from autopar.cli.question import axis_words, mesh_shape
from autopar.cluster import Axis, Cluster
from autopar.errors import AutoparError, InputError
from autopar.report.tables import show_amount, show_seconds, table
from autopar.sizes import show_bytes


def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write, JSON.")] = Path("cluster.json"),
    mesh: Annotated[
        str | None, typer.Option(help="Processes along each axis, like 8 or 4x8. Default: one for each GPU, else one.")
    ] = None,
    axis_names: Annotated[str | None, typer.Option(help="Names of the mesh axes: dp,tp.")] = None,
    seconds: Annotated[float, typer.Option(min=0.5, help="Time to spend, about.")] = 6.0,
    json: Annotated[bool, typer.Option("--json", help="Print the cluster as JSON.")] = False,
) -> None:
    """Measure this machine: what a process computes and moves, and what every mesh axis sends.

    On one machine this starts the processes of the mesh by itself. For several, start it on each under torchrun:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m autopar.cli profile --mesh 2x8
    """
    check_folder("--out", out)
    under_torchrun = dist.is_torchelastic_launched()
    if mesh is None:
        ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else max(torch.cuda.device_count(), 1)
        mesh = str(ranks)
    shape, names = mesh_shape(mesh), axis_words(axis_names)
    Cluster.preset("cpu", shape, names)  # raises for what is no mesh
    if under_torchrun:
        measured = measure_as_rank(shape, names, seconds)
        if int(os.environ["RANK"]) == 0:
            measured.save(out)
            _tell(measured, json)
        return
    with progress(f"measuring with {math.prod(shape)} processes ..."):
        _under_torchrun(math.prod(shape), out, mesh, axis_names, seconds)
    _tell(Cluster.load(out), json)
    print(f"cluster written to {out}", file=sys.stderr)


def _under_torchrun(ranks: int, out: Path, mesh: str, axis_names: str | None, seconds: float) -> None:
    devices = torch.cuda.device_count()
    if devices and ranks > devices:
        raise InputError(f"a mesh of {mesh} needs {ranks} GPUs, this machine has {devices}: use torchrun on several")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "autopar.cli", "profile", "--out", str(out), "--mesh", mesh, "--seconds", str(seconds)]
    command += ["--axis-names", axis_names] if axis_names is not None else []
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line or line.startswith("error:")]
        raise AutoparError(f"measuring failed: {lines[0] if lines else done.stderr.strip()[-300:]}")


def _tell(cluster: Cluster, json: bool) -> None:
    if json:
        say_json(cluster.to_dict())
        return
    device = cluster.device
    rates = ", ".join(
        f"{show_amount(rate * device.efficiency, 'FLOP/s')} {dtype}" for dtype, rate in device.flops_per_s.items()
    )
    rows = [
        ["device", device.name],
        ["memory", show_bytes(device.memory_bytes)],
        ["products", rates],
        ["moves", show_amount(device.bytes_per_s, "B/s")],
        ["op at least", show_seconds(device.launch_seconds)],
        *([f"axis {axis.name}", _link(axis)] for axis in cluster.axes),
    ]
    say("\n".join(table(rows, "<<", indent=0)) + "\n")


def _link(axis: Axis) -> str:
    return f"{axis.size} ranks, {show_amount(axis.bytes_per_s, 'B/s')}, {show_seconds(axis.latency_seconds)} a hop"
