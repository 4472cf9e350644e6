"""`autopar profile`: measures this machine with one process per device, as a cluster to plan with."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.status import Status

from autopar.arguments.environment import number_in
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
    seconds: Annotated[float, typer.Option(min=0.5, help="Time to spend, about.")] = 20.0,
    json: Annotated[bool, typer.Option("--json", help="Print the cluster as JSON.")] = False,
) -> None:
    """Measure this machine, for --cluster: the speed of compute, of memory and of every collective on each mesh axis.

    On one machine this starts the processes of the mesh by itself. For several, start it on each under torchrun:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m autopar.cli profile --mesh 2x8
    """
    check_folder("--out", out)
    under_torchrun = dist.is_torchelastic_launched()
    if mesh is None:
        ranks = number_in("WORLD_SIZE") if under_torchrun else max(torch.cuda.device_count(), 1)
        mesh = str(ranks)
    shape, names = mesh_shape(mesh), axis_words(axis_names)
    Cluster.preset("cpu", shape, names)  # raises InputError for an invalid mesh
    if under_torchrun:
        from autopar.profiling.calibrate import measure_as_rank  # imported late: it imports the runtime and DTensor

        measured = measure_as_rank(shape, names, seconds, _announce)
        if number_in("RANK", least=0) == 0:
            measured.save(out)
            _tell(measured, json)
        return
    with progress(f"starting {math.prod(shape)} processes ...") as status:
        _under_torchrun(math.prod(shape), out, mesh, axis_names, seconds, status)
    _tell(Cluster.load(out), json)
    print(f"cluster written to {out}", file=sys.stderr)


_MARK = "autopar: "  # prefix of progress lines among the other lines on the measuring processes' standard error
_RESTLESS = 0.3  # median spread, relative to the mean, above which the user is warned


def _announce(text: str) -> None:
    """Print progress on standard error, for a user of torchrun or for the `autopar profile` that started torchrun."""
    print(f"{_MARK}{text}", file=sys.stderr, flush=True)


def _under_torchrun(ranks: int, out: Path, mesh: str, axis_names: str | None, seconds: float, status: Status) -> None:
    devices = torch.cuda.device_count()
    if devices and ranks > devices:
        raise InputError(f"a mesh of {mesh} needs {ranks} GPUs, this machine has {devices}: use torchrun on several")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "autopar.cli", "profile", "--out", str(out), "--mesh", mesh, "--seconds", str(seconds)]
    command += ["--axis-names", axis_names] if axis_names is not None else []
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    errors: list[str] = []
    with subprocess.Popen(
        command, env={**os.environ, **threads}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith(_MARK):
                status.update(line.removeprefix(_MARK).strip())
            else:
                errors.append(line.strip())
    if run.returncode:
        lines = [line for line in errors if "Error" in line or line.startswith("error:")]
        raise AutoparError(f"measuring failed: {lines[0] if lines else ' '.join(errors)[-300:]}")


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
        ["matrix products", rates],
        ["attention", f"{100 * device.attention:.0f} % of that rate"],
        ["pointwise ops", show_amount(device.bytes_per_s, "B/s")],
        ["optimizer step", show_amount(device.update_bytes_per_s or device.bytes_per_s, "B/s")],
        ["least time of an op", show_seconds(device.launch_seconds)],
        *([["time per parameter", show_seconds(device.parameter_seconds)]] if device.parameter_seconds else []),
        *(row for axis in cluster.axes for row in _links(axis)),
        *([["variation", _spread(cluster)]] if cluster.spreads else []),
    ]
    say("\n".join(table(rows, "<<", indent=0)) + "\n")
    if cluster.spreads and statistics.median(cluster.spreads.values()) > _RESTLESS:
        print(
            "Repeated measurements differ a lot, as on a busy machine: measure again on an idle machine, or for longer "
            "(--seconds).",
            file=sys.stderr,
        )


def _links(axis: Axis) -> list[list[str]]:
    kinds = {
        "all-reduce": axis.bytes_per_s,
        "all-gather": axis.gather_bytes_per_s,
        "reduce-scatter": axis.scatter_bytes_per_s,
        "all-to-all": axis.all_to_all_bytes_per_s,
    }
    fixed = f"{show_seconds(axis.launch_seconds)} per collective and {show_seconds(axis.latency_seconds)} per hop"
    head = [f"axis {axis.name}", f"{axis.size} ranks, {fixed}"]
    return [head, *([f"  {kind}", show_amount(rate, "B/s")] for kind, rate in kinds.items() if rate)]


def _spread(cluster: Cluster) -> str:
    name, worst = max(cluster.spreads.items(), key=lambda item: item[1])
    return f"±{100 * statistics.median(cluster.spreads.values()):.0f} % in the median, ±{100 * worst:.0f} % for {name}"
