"""Fits a mesh axis' latency and bandwidths to measured collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.cluster import Axis
from autopar.cost.collectives import KINDS, collective_seconds


class Sample(NamedTuple):
    """One measured collective: its kind, what one device handed in, and how long it took."""

    kind: str
    input_bytes: int
    seconds: float


def fit_axis(name: str, size: int, samples: Sequence[Sample]) -> Axis:
    """The axis whose `collective_seconds` fit `samples` best in relative error, with all figures >= 0.

    The model is seconds = launch + hops * latency + sent / rate, with one rate for each kind: linear in launch, latency
    and 1 / rate. It is solved by least squares with weights 1 / seconds. Rates are then adjusted such that
    reduce_scatter <= all_reduce <= reduce_scatter + all_gather, which noise may violate.

    >>> true = Axis("tp", 4, 1e-5, 1e9, 1e-4, all_to_all_bytes_per_s=5e8, gather_bytes_per_s=7e8)
    >>> sizes = (1 << 10, 1 << 20, 1 << 24)
    >>> samples = [Sample(kind, b, collective_seconds(kind, b, true)) for kind in KINDS for b in sizes]
    >>> found = fit_axis("tp", 4, samples)
    >>> round(found.bytes_per_s / 1e9, 6), round(found.gather_bytes_per_s / 1e9, 6)
    (1.0, 0.7)
    >>> round(found.latency_seconds * 1e5, 6), round(found.launch_seconds * 1e4, 6)
    (1.0, 1.0)
    """
    kinds = [kind for kind in KINDS if any(sample.kind == kind for sample in samples)]
    columns = np.array([_terms(sample, size, kinds) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    launch, latency, *per_byte = _non_negative(columns / seconds[:, None])
    rates: dict[str, float] = {}
    for i, kind in enumerate(kinds):
        if per_byte[i] <= 0:  # too fast to be seen in the noise: take the rate of the largest sample
            largest = max((j for j, s in enumerate(samples) if s.kind == kind), key=lambda j: columns[j][2 + i])
            per_byte[i] = seconds[largest] / columns[largest][2 + i]
        rates[kind] = float(1 / per_byte[i])
    ring = rates.get("all_reduce") or next(iter(rates.values()))
    gather, scatter = rates.get("all_gather"), rates.get("reduce_scatter")
    if gather and scatter:
        scatter = max(scatter, ring / 2)
        ring = max(ring, 2 / (1 / scatter + 1 / gather))
    return Axis(
        name,
        size,
        launch_seconds=launch,
        latency_seconds=latency,
        bytes_per_s=ring,
        all_to_all_bytes_per_s=rates.get("all_to_all"),
        gather_bytes_per_s=gather,
        scatter_bytes_per_s=scatter,
    )


def _terms(sample: Sample, size: int, kinds: Sequence[str]) -> list[float]:
    """The coefficients of launch, latency and each kind's 1 / rate in `collective_seconds`."""
    hops = collective_seconds(sample.kind, 0, Axis("", size, 1.0, 1.0))
    sent = collective_seconds(sample.kind, sample.input_bytes, Axis("", size, 0.0, 1.0))
    return [1.0, hops, *(sent if kind == sample.kind else 0.0 for kind in kinds)]


def _non_negative(columns: np.ndarray) -> list[float]:
    """Least squares of columns @ x = 1 with x >= 0, by enumeration: for every subset of the columns the unconstrained
    solution, and the best of those that are not negative."""
    best, figures, width = np.inf, np.zeros(columns.shape[1]), columns.shape[1]
    for count in range(width, 0, -1):
        for chosen in itertools.combinations(range(width), count):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
            error = float(np.square(part @ found - 1).sum())
            if (found >= 0).all() and error < best:
                best, figures = error, np.zeros(width)
                figures[list(chosen)] = found
    return [float(figure) for figure in figures]
