"""Collectives that fail: which one it was, on which rank and after which step, in place of a timeout without a name.

A rank that dies closes its connections, and one that hangs lets the others' wait end after their process group's
timeout; both are told by the backend without saying where. (NCCL ends the process itself, with a report of its own.)
"""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.errors import CollectiveError
from autopar.runtime.ranks.standing import compared, mine, others

_DEFAULT_TIMEOUTS = tuple(one for one in (default_pg_timeout, default_pg_nccl_timeout) if one is not None)


@functools.cache
def count_steps() -> None:
    """From now on count the calls of `optimizer.step()` that ended, of all optimizers; once a process."""

    def hook(*_: object) -> None:
        mine.steps += 1

    register_optimizer_step_post_hook(hook)


def count_steps_from(step: int) -> None:
    """Go on counting where a checkpoint was saved."""
    mine.steps = step


def failure(kind: str, group: str, tensor: torch.Tensor, error: Exception) -> CollectiveError:
    """The error of a collective that did not end; `group`: the name of its process group."""
    found = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    ranks = ", ".join(map(str, dist.get_process_group_ranks(found)[:8]))
    what = f"{kind} of {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')} over ranks {ranks}"
    return told(f"{what} ({found.group_desc})", error)


def told(what: str, error: Exception) -> CollectiveError:
    """The error of some collective, described in words, with what the other ranks were about."""
    there = compared(others())
    there = there and f". {there}"
    return CollectiveError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}, after {mine.steps} calls of optimizer.step(): {what} did "
        f"not end: {str(error).strip()}. Another rank died or hangs, or is slower than the process group's timeout "
        f"(`init_process_group(timeout=...)`): look at the other ranks' logs for the first error{there}"
    )


def take_over_timeout(device_mesh: DeviceMesh) -> None:
    """Give the groups of the mesh's axes the timeout of the default group, as the user set it.

    `DeviceMesh` makes them with torch's own default (half an hour, ten minutes of NCCL), whatever
    `init_process_group` was told.
    """
    device, world = torch.device(device_mesh.device_type), dist.group.WORLD
    assert world is not None
    timeout = own_timeout(world, device)
    for axis in range(device_mesh.ndim):
        group = device_mesh.get_group(axis)
        own = own_timeout(group, device)
        if timeout is not None and own in _DEFAULT_TIMEOUTS and own != timeout:
            c10d._set_pg_timeout(timeout, group)  # there is no public call


def own_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's backend for a device; None of one that does not tell."""
    backend = group._get_backend(device)
    try:
        return getattr(getattr(backend, "options", None), "_timeout", None)
    except RuntimeError:  # since torch 2.14, of a backend without options
        return None
