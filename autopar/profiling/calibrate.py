"""Measures this machine's compute, memory and collectives, as a `Cluster`.

    autopar profile --mesh 2x2 --axis-names dp,tp --out cluster.json

All processes measure at the same time, because in training, too, they share cores, memory and network. Every figure is
a mean over repeats and ranks; the spread of the repeats is kept beside it. On a busy machine measuring may fall behind
schedule by more than the time given; then repeats become fewer, collectives of medium sizes are skipped, and the result
says so.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.arguments.environment import number_in
from autopar.cluster import Cluster
from autopar.cost.fitting import Sample, fit_axis
from autopar.errors import InputError
from autopar.hardware.devices import Axis, Device
from autopar.hardware.presets import gpu_overlap
from autopar.profiling import probes
from autopar.profiling.among_ranks import gathered, mean_over_ranks, together
from autopar.profiling.probes import Probe
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.ranks.leaving import leave_quietly

Clock = Literal["wall", "cpu"]
Work = tuple[Callable[[], Any], Callable[[], Any]]  # a matrix product, and pointwise ops
_SECONDS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_LEAST, _LEAST_IN_HASTE = 5, 2  # minimum number of repeats, on schedule and behind it
_STRETCH = 4  # at most so many rounds of work and a collective are timed as one
_ENDS = 2  # sizes of a collective (the extremes) that are always measured: a fit of latency and rate needs two


def measure_host(
    mesh: DeviceMesh | None = None,
    *,
    seconds: float = 6.0,
    clock: Clock = "wall",
    progress: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure the cluster of `mesh` within about `seconds`.

    `mesh` defaults to all ranks of the process group on one axis, or to this process alone where there is none.
    Every rank of the mesh must call it, and gets the same result: each figure is the mean over the ranks.
    `clock`: "cpu" counts CPU seconds of a rank, summed over its threads, for hosts whose cores other programs use too.
    `progress` is called with a text that says what is measured next.
    """
    if mesh is None and dist.is_initialized():
        mesh = init_device_mesh("cuda" if dist.get_backend() == "nccl" else "cpu", (dist.get_world_size(),))
    kind = "cpu" if mesh is None else mesh.device_type
    if kind not in probes.DTYPES:
        raise InputError(f"devices of type {kind!r} cannot be measured: use one of {', '.join(probes.DTYPES)}")
    return _Measuring(mesh, kind, seconds, clock, progress or (lambda text: None)).cluster()


class _Measuring:
    def __init__(
        self, mesh: DeviceMesh | None, kind: str, seconds: float, clock: Clock, progress: Callable[[str], None]
    ) -> None:
        self.mesh, self.kind, self.progress = mesh, kind, progress
        self.clock = _SECONDS[clock]
        self.spreads: dict[str, float] = {}
        self.stores = kind == "cpu" and mesh is not None  # whether to measure the overhead per stored parameter
        self.busy_axes = 0 if mesh is None else sum(size > 1 for size in mesh.shape)
        self.steps = len(probes.DTYPES[kind]) + 4 + 2 * self.stores + self.busy_axes
        self.links = 0.0 if mesh is None or mesh.size() == 1 else seconds / 2
        self.share = (seconds - self.links) / self.steps
        self.told = 0
        self.begun, self.due = time.perf_counter(), seconds  # `due`: the schedule so far, and `seconds` of delay
        self.hasty = False

    def cluster(self) -> Cluster:
        device = self._device()
        axes = (Axis("axis0", 1, 0.0, device.bytes_per_s),) if self.mesh is None else self._axes(self.mesh, device)
        ranks = 1 if self.mesh is None else self.mesh.size()
        threads = f", {torch.get_num_threads()} threads each" if self.kind == "cpu" else ""
        clock = ", in CPU seconds" if self.clock is time.process_time else ""
        haste = ", with few repeats as the machine was busy" if self.hasty else ""
        source = f"measured by {ranks} processes{threads}{clock}, torch {torch.__version__}{haste}"
        return Cluster(device, axes, source, self.spreads)

    def _device(self) -> Device:
        """Measure this process's device, while the other ranks measure theirs."""
        kind = self.kind
        together()
        rates = {}
        for dtype in probes.DTYPES[kind]:
            rates[str(dtype).removeprefix("torch.")] = self._rate(self._product(dtype))
        compared = rates["bfloat16" if kind == "cuda" else "float32"]
        attention, pointwise, launches, update = (
            self._rate(make(kind)) for make in (probes.attention, probes.pointwise, probes.launch, probes.update)
        )
        parameters = self._parameter_seconds(self.mesh) if self.stores and self.mesh is not None else 0.0
        (memory,) = mean_over_ranks([float(_memory_bytes(kind))])
        processors = probes.processors(kind)
        return Device(
            name=torch.cuda.get_device_name() if kind == "cuda" else "cpu",
            kind=kind,
            memory_bytes=int(memory),
            flops_per_s=rates,
            bytes_per_s=pointwise,
            efficiency=1.0,  # the rates are measured, not peak
            launch_seconds=1 / launches,
            overlap=gpu_overlap(processors) if kind == "cuda" else 0.0,
            processors=processors,
            attention=attention / compared,
            update_bytes_per_s=update,
            parameter_seconds=parameters,
        )

    def _parameter_seconds(self, mesh: DeviceMesh) -> float:
        """The overhead in seconds of a parameter that a plan stores as DTensor, compared with a plain parameter."""
        stored, plain = probes.parameters(mesh)
        return max(0.0, 1 / self._rate(stored) - 1 / self._rate(plain))

    def _product(self, dtype: torch.dtype) -> Probe:
        """The largest square product that fits the time 16 times, as estimated from the one of half its size."""
        chosen, *larger = probes.products(self.kind, dtype)
        for probe in larger:
            chosen.run()
            if 8 * 16 * max(gathered(self._timed(chosen.run))) > self.share:
                break
            chosen = probe
        return chosen

    def _rate(self, probe: Probe) -> float:
        """The amount of a probe's work that one device does per second; the same figure on every rank."""
        self._tell(probe.name)
        probe.run()
        count = self._repeats(self._timed(probe.run), self.share, 1000)
        return probe.amount / self._mean(probe.name, [max(self._timed(probe.run), 1e-9) for _ in range(count)])

    def _axes(self, mesh: DeviceMesh, device: Device) -> tuple[Axis, ...]:
        """Fit each axis to its measured collectives, during which all groups of the axis communicate at once."""
        local = LocalMesh.of(mesh)
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        axes = []
        for name, size, group in zip(names, local.shape, local.groups, strict=True):
            if size == 1:
                axes.append(Axis(name, 1, 0.0, device.bytes_per_s))
                continue
            self._tell(f"collectives of axis {name}")
            calls, between = probes.collectives(mesh.device_type, size, group), probes.between(mesh.device_type)
            share = self.links / self.busy_axes / len(calls)
            samples = []
            for number, equal_calls in enumerate(calls):
                if number >= _ENDS and self._is_late():
                    break
                timed = self._within_work if self.kind == "cpu" else self._apart
                times = timed([run for _, _, run in equal_calls], between, share)
                for (kind, count, _), seconds in zip(equal_calls, times, strict=True):
                    samples.append(Sample(kind, count, self._mean(f"{name}: {kind} of {count} bytes", seconds)))
            axes.append(fit_axis(name, size, samples))
        return tuple(axes)

    def _within_work(self, calls: Sequence[Callable[[], Any]], between: Work, seconds: float) -> list[list[float]]:
        """Times of each collective in `calls`: by how much a round of work takes longer if the collective follows it.

        gloo's threads share cores and caches with the ranks' own, so a collective also slows the work down, and it
        waits for the last rank: it costs more than by itself, above all if it is small. After a collective, all ranks
        do the same kind of work at once, and share memory bandwidth in pointwise ops; ranks that never synchronise
        drift apart. To model that, in the runs without collectives every other rank starts with the other kind of work.
        """
        assert self.mesh is not None
        drifted = between[::-1] if sum(self.mesh.get_coordinate() or ()) % 2 else between

        def stretch(run: Callable[[], Any] | None, length: int) -> float:
            work = (*(between if run else drifted),) * 2
            together()
            begin = self.clock()
            for _ in range(length):
                for piece in work:
                    piece()
                if run is not None:
                    run()
            return (self.clock() - begin) / length

        begin = time.perf_counter()
        for run in calls:
            stretch(run, 1)
        once = max(gathered(time.perf_counter() - begin))
        length = max(1, min(_STRETCH, int(0.4 / once)))
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(self._repeats(length * once, seconds, 20)):
            alone = stretch(None, length)
            for seconds_of_call, run in zip(times, calls, strict=True):
                seconds_of_call.append(max(stretch(run, length) - alone, 1e-7))
        return times

    def _apart(self, calls: Sequence[Callable[[], Any]], between: Work, seconds: float) -> list[list[float]]:
        """Times of collectives on a device whose compute they do not slow down: each is timed by itself."""
        return [self._together_timed(run, between, seconds / len(calls)) for run in calls]

    def _together_timed(self, run: Callable[[], Any], between: Work, seconds: float) -> list[float]:
        """Times of a collective; every rank makes as many calls as the slowest rank has time for.

        Untimed work and a barrier precede each call, as a step, too, computes between collectives. Called in a row,
        small collectives would take less than half the time, with threads awake and data in caches.
        """
        run()
        begin = time.perf_counter()
        self._meet(between)
        run()
        times = []
        for _ in range(self._repeats(time.perf_counter() - begin, seconds, 100)):
            self._meet(between)
            times.append(self._timed(run))
        return times

    def _repeats(self, once: float, seconds: float, most: int) -> int:
        """The number of calls of `once` seconds that every rank makes: as many as fit, within a minimum and `most`."""
        self.due += seconds
        least = _LEAST_IN_HASTE if self._is_late() else _LEAST
        return max(least, min(most, int(seconds / max(*gathered(once), 1e-7))))

    def _is_late(self) -> bool:
        """Whether any rank is behind schedule; if so, the result's `source` says that the machine was busy."""
        late = any(gathered(time.perf_counter() - self.begun > self.due))
        self.hasty |= late
        return late

    def _meet(self, between: Work) -> None:
        for piece in between:
            self._timed(piece)
        together()

    def _mean(self, name: str, values: Sequence[float]) -> float:
        """The mean over values and ranks; records the spread, half the interquartile range relative to the mean.

        A step is a sum of such calls, hence the mean. It leaves out the slowest tenth, which something else held up.
        """
        low, _, high = statistics.quantiles(values, n=4)
        usual = sorted(values)[: max(1, len(values) - len(values) // 10)]
        mean, apart = mean_over_ranks([statistics.fmean(usual), (high - low) / 2])
        self.spreads[name] = apart / mean
        return mean

    def _timed(self, run: Callable[[], Any]) -> float:
        """Seconds of one call, until the device has finished the kernels that it launched."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
        begin = self.clock()
        run()
        if self.kind == "cuda":
            torch.cuda.synchronize()
        return self.clock() - begin

    def _tell(self, measurement: str) -> None:
        self.told += 1
        self.progress(f"measuring {measurement} ({self.told} of {self.steps}) ...")


def _memory_bytes(kind: str) -> int:
    """Bytes that one process may allocate: on a GPU, free memory (without the CUDA context, which exists by now) and
    what torch has reserved; on a CPU, its share of the memory of the host, or of the container if that is less."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return total // number_in("LOCAL_WORLD_SIZE", ranks)


def measure_as_rank(
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    seconds: float,
    progress: Callable[[str], None] | None = None,
) -> Cluster:
    """Called by every process under torchrun: starts the process group, measures the mesh, ends the process group.

    Raises InputError (on every rank) if the mesh does not have as many ranks as there are processes.
    """
    leave_quietly()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(number_in("LOCAL_RANK", 0, least=0))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        if torch.Size(shape).numel() != dist.get_world_size():
            text = "x".join(map(str, shape))
            raise InputError(f"a mesh of {text} is not one of {dist.get_world_size()} processes")
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        return measure_host(mesh, seconds=seconds, progress=progress if dist.get_rank() == 0 else None)
    finally:
        dist.destroy_process_group()
