"""Measuring a host's device and links: by one process, and by two ranks together."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Axis, Cluster
from autopar.cost import collective_seconds
from autopar.cost.collectives import KINDS
from autopar.cost.fitting import Sample, fit_axis
from autopar.errors import InputError
from autopar.profiling import calibrate, probes
from autopar.profiling.calibrate import measure_as_rank, measure_host

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
TRUE = [
    Axis("x", 2, 5e-5, 1e9, 1e-4, 8e8),
    Axis("x", 4, 0.0, 2e8, 3e-4, 2e8),
    Axis("x", 8, 4e-6, 2e11, 2e-5, 5e10),
    Axis("x", 16, 1e-5, 2e10, 0.0, 2e10),
    Axis("x", 2, 1e-4, 2e9, 5e-4, 1.3e9, gather_bytes_per_s=1.2e9, scatter_bytes_per_s=1.1e9),
]


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("true", TRUE)
def test_a_fit_finds_the_axis_that_made_the_samples(true: Axis, noise: float) -> None:
    draw = random.Random(0)
    samples = [
        Sample(kind, size, collective_seconds(kind, size, true) * draw.uniform(1 - noise, 1 + noise))
        for kind in KINDS
        for size in SIZES
    ]
    found = fit_axis("x", true.size, samples)
    for kind in KINDS:
        for size in SIZES:
            seconds = collective_seconds(kind, size, true)
            assert collective_seconds(kind, size, found) == pytest.approx(seconds, rel=0.01 + 4 * noise)
    assert min(found.latency_seconds, found.launch_seconds) >= 0


def test_a_fit_of_pure_noise_is_still_an_axis() -> None:
    samples = [Sample(kind, size, 1e-3 / (1 + i)) for kind in KINDS for i, size in enumerate(SIZES)]
    found = fit_axis("x", 2, samples)
    assert found.bytes_per_s > 0
    assert min(found.latency_seconds, found.launch_seconds) >= 0


@given(seconds=st.lists(st.floats(1e-5, 1.0), min_size=16, max_size=16))
def test_whatever_is_measured_an_all_reduce_lies_between_its_halves(seconds: list[float]) -> None:
    cases = [(kind, size) for kind in KINDS for size in SIZES]
    found = fit_axis("x", 4, [Sample(*case, taken) for case, taken in zip(cases, seconds, strict=True)])
    for size in SIZES:
        scatter, whole = (collective_seconds(kind, size, found) for kind in ("reduce_scatter", "all_reduce"))
        gather = collective_seconds("all_gather", size / 4, found)
        assert scatter <= whole * (1 + 1e-9)
        assert whole <= (scatter + gather) * (1 + 1e-9)


@pytest.mark.slow  # the two tests below also measure
def test_a_host_alone() -> None:
    cluster = measure_host(seconds=0.3)
    assert cluster.shape == (1,)
    assert all(rate > 0 for rate in cluster.device.flops_per_s.values())
    assert cluster.device.attention > 0
    assert cluster.device.update_bytes_per_s
    assert {"float32 products", "attention", "pointwise", "launches", "optimizer"} <= cluster.spreads.keys()
    assert all(spread >= 0 for spread in cluster.spreads.values())
    assert 1e-7 < cluster.device.launch_seconds < 1e-2
    assert cluster.device.bytes_per_s > 1e8


def torchrun(*words: str, ranks: int = 2) -> "subprocess.CompletedProcess[str]":
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(Path(__file__).with_name("calibrating_ranks.py"))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, script, *words], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow  # one file written by two ranks: tests/cli also measures them
def test_two_ranks_get_the_same_cluster(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    done = torchrun("--mesh", "1x2", "--axis-names", "dp,tp", "--seconds", "0.5", "--out", str(out))
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(out)
    assert [Cluster.load(f"{out}.{rank}") for rank in (0, 1)] == [cluster, cluster]
    assert (cluster.shape, cluster.axis_names, cluster.device.kind) == ((1, 2), ("dp", "tp"), "cpu")
    assert "tp: all_to_all of 33554432 bytes" in cluster.spreads
    assert "measuring attention (4 of 10)" in done.stderr
    assert "measuring collectives of axis tp (10 of 10)" in done.stderr
    assert cluster.device.parameter_seconds > 0
    small, large = (collective_seconds("all_reduce", size, cluster.axes[1]) for size in (1 << 10, 1 << 26))
    assert 0 < small < large


def test_a_busy_machine_is_measured_with_fewer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def slow(name: str) -> Callable[[str], probes.Probe]:
        def run() -> None:
            calls[name] += 1
            time.sleep(0.2)

        return lambda kind: probes.Probe(name, 1.0, run)

    for name in ("attention", "pointwise", "launch", "update"):
        monkeypatch.setattr(probes, name, slow(name))
    monkeypatch.setattr(probes, "products", lambda kind, dtype: [probes.product(kind, dtype, 128)])
    cluster = measure_host(seconds=0.6)
    assert calls["update"] == 2 + 2 < 2 + 5, "one to warm up, one to see how many fit, and then two in place of five"
    assert "few repeats" in cluster.source and cluster.spreads["update"] >= 0


def test_of_times_that_are_mostly_hidden_the_spread_is_one_of_their_mean() -> None:
    """The time of a collective beside compute is a difference, and may be 0 in most repeats, as the median was."""
    measuring = calibrate._Measuring(None, "cpu", 1.0, "wall", print)
    mean = measuring._mean("all_reduce", [1e-7] * 60 + [8e-3] * 40)
    assert mean == pytest.approx(30 / 90 * 8e-3, rel=1e-3)
    assert measuring.spreads == {"all_reduce": pytest.approx(4e-3 / mean, rel=1e-3)}


def test_cpu_seconds_of_a_process_are_its_own() -> None:
    """The CPU clock measures this process only, while others use the same cores."""
    cluster = measure_host(seconds=0.3, clock="cpu")
    assert "in CPU seconds" in cluster.source
    assert Cluster.from_dict(cluster.to_dict()).spreads == cluster.spreads


@pytest.mark.gpu
def test_every_gpu_of_this_machine(tmp_path: Path) -> None:
    """NCCL under torchrun: one rank for each GPU, all on one axis."""
    count, out = torch.cuda.device_count(), tmp_path / "cluster.json"
    done = torchrun("--mesh", str(count), "--seconds", "20", "--out", str(out), ranks=count)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(out)
    device = cluster.device
    assert (cluster.shape, device.kind) == ((count,), "cuda")
    assert device.name == torch.cuda.get_device_name()
    assert device.processors == torch.cuda.get_device_properties().multi_processor_count
    assert device.flops_per_s["bfloat16"] > device.flops_per_s["float32"]
    assert 0.1 < device.attention < 1.5


def test_a_mesh_of_other_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match="4x8 is not one of 1 processes"):
        measure_as_rank((4, 8), None, 1.0)
