"""The cases of real ranks on a device other than the CPU, where a tensor in the wrong place is an error.

`tests/equality` runs whole models on it, without making it the default device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).parent))
from launch import launch
from other_device import BACKENDS, NAME, ON_GPUS, SHARED, build, can_be_built

pytestmark = pytest.mark.timeout(1200)

# With the device's backend only, as in `init_process_group("nccl")`, ranks exchange metadata over the device too.
WORKERS = {"rank_cases": NAME, "call_cases": BACKENDS, "loop_cases": BACKENDS, "large_cases": NAME, "leaf_cases": NAME}
NOT_HERE = {"load_checkpoint": "reads what four ranks wrote", "ranks_disagree": "exchanges text between CPUs"}
TOLERANCE = 1e-6  # some cases are in float32
LOOSE = {"mixed_precision": 0.02}


# One case of each kind in `rank_cases`.
QUICK = ("dp", "tp+recompute", "fsdp+regather", "in_buckets", "accumulation", "other_calls", "mixed_precision")


@functools.cache
def results(worker: str, backends: str, cases: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    return launch(f"{worker}.py", 2, backends=backends, cases=cases)


def deviations(value: Any, name: str = "error") -> Iterator[float]:
    """All numbers that a case returns, or returns under the key "error": differences from one process."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from deviations(inner, key)
    elif isinstance(value, float) and "error" in name:
        yield value


@pytest.mark.skipif(not can_be_built(), reason="the other device needs a C++ compiler and ninja")
def test_some_cases_pass_on_another_device() -> None:
    build()
    cases_pass("rank_cases", WORKERS["rank_cases"], QUICK)


@pytest.mark.slow
@pytest.mark.skipif(not can_be_built(), reason="the other device needs a C++ compiler and ninja")
@pytest.mark.parametrize("worker", WORKERS)
def test_cases_pass_on_another_device(worker: str) -> None:
    build()
    cases_pass(worker, WORKERS[worker])


@pytest.mark.gpu
@pytest.mark.parametrize("worker", WORKERS)
def test_cases_pass_on_gpus(worker: str) -> None:
    """Two ranks, which share a GPU if there is only one."""
    build(device=False)
    cases_pass(worker, ON_GPUS if WORKERS[worker] == BACKENDS else f"cuda:{SHARED}")


def cases_pass(worker: str, backends: str, cases: tuple[str, ...] | None = None) -> None:
    failed = []
    for rank, found in enumerate(results(worker, backends, cases)):
        assert len(found) > 5
        for name, result in found.items():
            if name in NOT_HERE:
                continue
            if "error" in result:
                failed.append(f"rank {rank}, {name}: {result['traceback']}")
            # the negation also catches NaN
            elif far := [d for d in deviations(result["value"]) if not d < LOOSE.get(name, TOLERANCE)]:
                failed.append(f"rank {rank}, {name}: off by {far}")
    assert not failed, "\n".join(failed)
