"""The search for a mesh of given devices: factorisations of their number into axes, each planned, from one trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.errors import AutoparError, InputError, budget_bounds
from autopar.planning.micro_batches import fastest
from autopar.planning.stages import Prepared
from autopar.plans import Plan


@dataclass(frozen=True)
class MeshResult:
    """The best plan on one mesh, or None where there is none; then `note` says why.

    The bounds are those of the `InfeasibleError`: `smallest_budget_bytes` is the smallest budget for which a plan was
    found (not the minimum where that takes too long to find), and below `budget_lower_bound_bytes` there is no plan.
    """

    mesh_shape: tuple[int, ...]
    plan: Plan | None
    smallest_budget_bytes: int | None = None
    budget_lower_bound_bytes: int | None = None
    note: str = ""


def factorisations(devices: int, most_axes: int) -> Iterator[tuple[int, ...]]:
    """The meshes of this many devices with one to `most_axes` axes, none of size one; the order of axes counts.

    Ranks fill a node along the last axis, so (2, 4) and (4, 2) connect their ranks by different links.

    >>> list(factorisations(8, 2))
    [(8,), (2, 4), (4, 2)]
    """
    yield (devices,)
    for axes in range(2, most_axes + 1):
        yield from _ordered(devices, axes)


def _ordered(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        if devices > 1:
            yield (devices,)
        return
    for first in range(2, devices // 2 + 1):
        if devices % first == 0:
            yield from ((first, *others) for others in _ordered(devices // first, axes - 1))


def planned_meshes(ready: Sequence[Prepared], preset: str, meshes: Sequence[tuple[int, ...]]) -> Iterator[MeshResult]:
    """The fastest plan of each mesh of devices of `preset`, in the given order.

    `ready`: one preparation for each candidate number of micro-batches. A mesh that does not fit a constraint (for
    example in its number of axes) gets a note; if none fits, the error is raised.
    """
    mistakes: list[InputError] = []
    for shape in meshes:
        cluster = Cluster.preset(preset, shape)
        try:
            _, plan = fastest(prepared.on(cluster) for prepared in ready)
        except InputError as error:
            mistakes.append(error)
            if len(mistakes) == len(meshes):
                raise mistakes[0] from None
            yield MeshResult(shape, None, note=error.message)
        except AutoparError as error:  # nothing fits, or the time limit was reached
            yield MeshResult(shape, None, note=error.message, **budget_bounds(error))
        else:
            yield MeshResult(shape, plan)


def ranked(results: Sequence[MeshResult]) -> list[MeshResult]:
    """Fastest first; meshes without a plan last, by the memory that they need."""

    def key(result: MeshResult) -> tuple[bool, float]:
        needs = float(result.smallest_budget_bytes or "inf")
        return result.plan is None, needs if result.plan is None else result.plan.predicted.step_seconds

    return sorted(results, key=key)
