"""A mesh axis' latency and bandwidth, fitted to measured collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.cluster import Axis
from autopar.cost.collectives import collective_seconds


class Sample(NamedTuple):
    """One measured collective: its kind, what one device handed in, and how long it took."""

    kind: str
    input_bytes: int
    seconds: float


def fit_axis(name: str, size: int, samples: Sequence[Sample]) -> Axis:
    """The axis whose `collective_seconds` come nearest to `samples` in relative error, all three figures >= 0.

    seconds = launch + hops * latency + sent / rate is linear in (launch, latency, 1 / rate): least squares, every
    sample weighted by 1 / seconds. all_to_all has a rate of its own, fitted after the others.

    >>> true = Axis("tp", 4, latency_seconds=1e-5, bytes_per_s=1e9, launch_seconds=1e-4)
    >>> kinds, sizes = ("all_reduce", "all_gather", "reduce_scatter"), (1 << 10, 1 << 20, 1 << 24)
    >>> samples = [Sample(k, b, collective_seconds(k, b, true)) for k in kinds for b in sizes]
    >>> found = fit_axis("tp", 4, samples)
    >>> round(found.bytes_per_s / 1e9, 6), round(found.latency_seconds * 1e5, 6), round(found.launch_seconds * 1e4, 6)
    (1.0, 1.0, 1.0)
    """
    ring = [s for s in samples if s.kind != "all_to_all"] or list(samples)
    columns = np.array([_terms(sample, size) for sample in ring])
    seconds = np.array([sample.seconds for sample in ring])
    launch, latency, per_byte = _non_negative(columns / seconds[:, None])
    if per_byte <= 0:  # so fast that noise hides it: believe the largest sample
        largest = max(range(len(ring)), key=lambda i: columns[i][2])
        per_byte = seconds[largest] / columns[largest][2]
    exchange = [s for s in samples if s.kind == "all_to_all"]
    rates = []
    for sample in exchange:
        _, hops, sent = _terms(sample, size)
        moving = sample.seconds - launch - hops * latency
        if moving > sample.seconds / 2:  # the others say more of latency
            rates.append(sent / moving)
    rate = float(np.median(rates)) if rates else None
    return Axis(name, size, latency, 1 / per_byte, launch, rate)


def _terms(sample: Sample, size: int) -> tuple[float, float, float]:
    """What multiplies launch, latency and 1 / rate in `collective_seconds`."""
    hops = collective_seconds(sample.kind, 0, Axis("", size, 1.0, 1.0))
    sent = collective_seconds(sample.kind, sample.input_bytes, Axis("", size, 0.0, 1.0))
    return 1.0, hops, sent


def _non_negative(columns: np.ndarray) -> tuple[float, float, float]:
    """Least squares of columns @ x = 1 with x >= 0: the best of the solutions on every set of columns that has one."""
    best, figures = np.inf, np.zeros(3)
    for count in (3, 2, 1):
        for chosen in itertools.combinations(range(3), count):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
            error = float(np.square(part @ found - 1).sum())
            if (found >= 0).all() and error < best:
                best, figures = error, np.zeros(3)
                figures[list(chosen)] = found
    launch, latency, per_byte = map(float, figures)
    return launch, latency, per_byte
