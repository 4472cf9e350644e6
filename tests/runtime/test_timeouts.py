"""The groups of a mesh's axes have the timeout that the user gave the default group, for every backend."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autopar.runtime.ranks import failures

HOURS, MINUTE = timedelta(hours=2), timedelta(minutes=1)


def group(timeout: timedelta) -> Any:
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timeout))
    return SimpleNamespace(_get_backend=lambda device: backend)


@pytest.mark.parametrize("default", [timedelta(minutes=30), timedelta(minutes=10)])
@pytest.mark.parametrize("given", [HOURS, MINUTE])
def test_the_users_timeout_is_that_of_every_axis(
    default: timedelta, given: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 10 minutes: NCCL
    monkeypatch.setattr(failures, "_DEFAULT_TIMEOUTS", (timedelta(minutes=30), timedelta(minutes=10)))
    axes, told = [group(default), group(given), group(HOURS + MINUTE)], []
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group(given)))
    monkeypatch.setattr(failures.c10d, "_set_pg_timeout", lambda timeout, axis: told.append((timeout, axis)))
    mesh: Any = SimpleNamespace(device_type="cpu", ndim=len(axes), get_group=lambda axis: axes[axis])
    failures.take_over_timeout(mesh)
    assert told == [(given, axes[0])], "one that was set otherwise stays"
