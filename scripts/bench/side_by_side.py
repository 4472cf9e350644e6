"""Two models trained in one process; if both store parameters alike, in little more memory than one model needs."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from step_cases import Batch, Case, batch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import LiveStorages


class Trained:
    """A model with its optimizer and its batches."""

    def __init__(self, model: nn.Module, case: Case, whole: bool) -> None:
        self.model, self.case, self.whole = model, case, whole
        groups: dict[type, list[nn.Parameter]] = {}  # a fused call cannot mix DTensors and plain tensors
        for parameter in model.parameters():
            groups.setdefault(type(parameter.data), []).append(parameter)
        self.optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)
        self.lent: dict[torch.UntypedStorage, int] = {}

    def inputs(self, step: int) -> Batch:
        ranks = dist.get_world_size()
        if self.whole:
            return batch(self.case, step, ranks * self.case.rows)
        return batch(self.case, step, self.case.rows, dist.get_rank())

    def backward(self, inputs: Batch) -> float:
        loss = self.model(**inputs).loss
        loss.backward()
        return float(loss.detach())

    def step(self, inputs: Batch) -> float:
        loss = self.model(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())  # read last, since it synchronises with the device

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def lend_buckets(self, inputs: Batch) -> None:
        """From now on, free DistributedDataParallel's gradient buckets between steps; gradients are views of them.

        DistributedDataParallel keeps its buckets, and allocates the final ones in the second backward.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return
        for _ in range(2):
            self.backward(inputs)
            held = {parameter.grad.untyped_storage() for parameter in self.parameters() if parameter.grad is not None}
            self.optimizer.zero_grad()
        self.lent = {storage: storage.nbytes() for storage in held}
        for storage in self.lent:
            storage.resize_(0)

    @contextmanager
    def with_buckets(self) -> Iterator[None]:
        for storage, size_bytes in self.lent.items():
            storage.resize_(size_bytes)
        yield
        for storage in self.lent:
            storage.resize_(0)

    def seconds(self, step: int) -> float:
        inputs = self.inputs(step)
        with self.with_buckets():
            dist.barrier()
            start = time.perf_counter()
            self.step(inputs)
            dist.barrier()
            return time.perf_counter() - start

    def peak_bytes(self, step: int) -> int:
        inputs = self.inputs(step)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        with (
            self.with_buckets(),
            LiveStorages([*self.model.parameters(), *self.model.buffers(), *states, *inputs.values()]) as live,
        ):
            self.step(inputs)
        largest = torch.tensor(live.peak_bytes)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


Twins = list[tuple[nn.Parameter, nn.Parameter]]


@torch.no_grad()
def share_parameters(ours: nn.Module, theirs: nn.Module) -> Twins:
    """If each rank stores equal parts of every parameter in both models, let them share memory.

    Two models then need little more memory than one. Returns the pairs of parameters, [] if any is stored differently.
    """
    named = dict(ours.named_parameters())
    twins = [(named[name], its) for name, its in theirs.named_parameters()]
    alike = torch.tensor(all(local(own).shape == local(its).shape for own, its in twins))
    dist.all_reduce(alike, dist.ReduceOp.MIN)
    if not alike:
        return []
    for own, its in twins:
        if not torch.equal(local(own), local(its)):
            raise AssertionError("the models do not begin with the same values, this is no comparison")
        own._local_tensor = local(its.data)  # type: ignore[attr-defined]  # a DTensor's, which autopar stores
    return twins


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_stored(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Convert an entry of the other optimizer's state to the layout of `parameter`; a step count stays as it is."""
    if not value.ndim or not isinstance(parameter, DTensor):
        return local(value)
    return DTensor.from_local(
        local(value),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def warm(ours: Trained, theirs: Trained, steps: int, twins: Twins, *, mean: bool) -> None:
    """Warm-up steps, in which both models must have equal losses; they take turns to update shared `twins`.

    From the first update on, both optimizers also share the state of twins.
    """
    losses = []
    if twins:
        theirs.lend_buckets(ours.inputs(0))
    for step in range(steps):
        inputs = ours.inputs(step)
        if not twins:
            losses.append((ours.step(inputs), theirs.step(inputs)))
            continue
        updates = theirs if step % 2 else ours
        found = []
        for trained in (ours, theirs) if step % 2 else (theirs, ours):
            with trained.with_buckets():
                found.append(trained.step(inputs) if trained is updates else trained.backward(inputs))
                trained.optimizer.zero_grad()
        losses.append((found[0], found[1]) if step % 2 else (found[1], found[0]))
        if not step:
            for own, its in twins:
                state = ours.optimizer.state[own]
                theirs.optimizer.state[its] = {name: as_stored(its, value) for name, value in state.items()}
    check_losses(losses, mean=mean)


def check_losses(losses: Sequence[tuple[float, float]], *, mean: bool) -> None:
    """AssertionError unless both have equal losses; with `mean`, theirs is the loss of one rank's part of the batch."""
    for ours, theirs in losses:
        whole = torch.tensor(theirs)
        if mean:
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        if abs(ours - whole.item()) > 2e-3:
            raise AssertionError(f"losses differ, this is no comparison: {ours} and {whole.item()}")


def keep_freed_memory() -> None:
    """Let the C library keep freed memory, as GPU allocators do, so that steps have no page faults.

    Page faults took up to a tenth of a step, of the one model or the other, by the order in which they were built. The
    kept memory may be as large as that in use: see `return_freed_memory`.
    """
    _tell_allocator({_TRIM_THRESHOLD: 1 << 30, _MMAP_MAX: 0})


def return_freed_memory() -> None:
    """Let the C library return the memory of every larger tensor when it is freed, if models do not fit otherwise.

    Every step of both models then pays for the page faults of all its allocations.
    """
    _tell_allocator({_MMAP_THRESHOLD: 1 << 20})


def _tell_allocator(options: Mapping[int, int]) -> None:
    if sys.platform == "linux":
        for option, value in options.items():
            ctypes.CDLL(None).mallopt(option, value)


def tidy_memory() -> None:
    """Return the memory that building and planning used, so that no step has to."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # malloc.h
