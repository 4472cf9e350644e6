"""Errors of collectives: they name the collective, the rank and the step, where a backend reports a bare timeout.

A rank that dies closes its connections, and one that hangs makes the others' waits end with their process group's
timeout; the backend reports both without saying where. (NCCL ends the process itself, with a report of its own.)
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
from autopar.runtime.ranks.standing import compared, mine, notes_of_others

_DEFAULT_TIMEOUTS = tuple(one for one in (default_pg_timeout, default_pg_nccl_timeout) if one is not None)


@functools.cache
def count_steps() -> None:
    """Start counting the completed calls of `optimizer.step()`, of all optimizers; once a process."""

    def hook(*_: object) -> None:
        mine.steps += 1

    register_optimizer_step_post_hook(hook)


def count_steps_from(step: int) -> None:
    """Continue the count from the step at which a checkpoint was saved."""
    mine.steps = step


def failure(kind: str, group: str, tensor: torch.Tensor, error: Exception) -> CollectiveError:
    """The error for a collective that failed or timed out; `group`: the name of its process group."""
    process_group = c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    ranks = ", ".join(map(str, dist.get_process_group_ranks(process_group)[:8]))
    subject = f"{kind} of {tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')} over ranks {ranks}"
    return collective_error(f"{subject} ({process_group.group_desc})", error)


def collective_error(call: str, error: Exception) -> CollectiveError:
    """The error for a collective described by `call`, with what the other ranks were doing."""
    other_ranks = compared(notes_of_others())
    other_ranks = other_ranks and f". {other_ranks}"
    return CollectiveError(
        f"rank {dist.get_rank()} of {dist.get_world_size()}, after {mine.steps} calls of optimizer.step(): {call} did "
        f"not end: {str(error).strip()}. Another rank died or hangs, or is slower than the process group's timeout "
        f"(`init_process_group(timeout=...)`): look at the other ranks' logs for the first error{other_ranks}"
    )


def take_over_timeout(device_mesh: DeviceMesh) -> None:
    """Give the process groups of the mesh's axes the timeout that the user set for the default group.

    `DeviceMesh` creates them with torch's own default (30 minutes, 10 for NCCL), whatever `init_process_group` was
    given.
    """
    device, world = torch.device(device_mesh.device_type), dist.group.WORLD
    assert world is not None
    timeout = own_timeout(world, device)
    for axis in range(device_mesh.ndim):
        group = device_mesh.get_group(axis)
        own = own_timeout(group, device)
        if timeout is not None and own in _DEFAULT_TIMEOUTS and own != timeout:
            c10d._set_pg_timeout(timeout, group)  # torch has no public call for this


def own_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's backend for a device; None if the backend does not tell."""
    backend = group._get_backend(device)
    try:
        return getattr(getattr(backend, "options", None), "_timeout", None)
    except RuntimeError:  # since torch 2.14, for a backend without options
        return None
