"""A line of figures for each optimizer step of a planned model, beside what the plan predicted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from autopar.calls.entries import FORWARD
from autopar.cluster import Cluster
from autopar.plans import Plan
from autopar.runtime.communication.collectives import waits
from autopar.runtime.live_storages import LiveStorages
from autopar.runtime.planned import Planned
from autopar.runtime.programs import Program
from autopar.runtime.stored.carried import planned_of
from autopar.user_warnings import warn

Line = dict[str, Any]
_MEASURED_STEP = 2  # counted from 0: optimizer state and buffers exist by the third step


def monitor(
    model: nn.Module,
    *,
    log: Callable[[Line], None] | None = None,
    every: int = 1,
    memory: bool = True,
    deviation: float = 0.1,
) -> Monitor:
    """Watch the training steps inside the `with` block, and log one line of JSON per step on rank 0.

        with autopar.monitor(model):
            for batch in loader:
                ...

    A step ends with `optimizer.step()` of an optimizer of the model. Its line has `step`, counted from 0; `seconds`
    since the one before, and `predicted_seconds`; `rows_per_s` and, for models of tokens, `tokens_per_s` of all ranks;
    `mfu`, the plan's FLOPs over the peak rate of all devices at its compute dtype (null where the plan's cluster has no
    such rate); `exposed_comm_seconds`, the time that this rank waited for collectives (null on GPUs, where streams
    wait: see the ranges "autopar: ..." in a `torch.profiler` trace); `peak_bytes` of this rank and
    `predicted_peak_bytes`. On GPUs the peak comes from the allocator. On a CPU the tensors of the third step are
    tracked, which makes that step slow, and other lines have null. Evaluation between steps counts in `seconds`, not in
    rates.

    Args:
        log: called with each line, on rank 0; None: print to standard error.
        every: log once in this many steps; figures are then means over them.
        memory: whether to measure the peak.
        deviation: warn, once, if the peak differs from its prediction by more than this share of it.
    """
    return Monitor(model, log, every, memory, deviation)


class Monitor:
    """What `monitor` returns; `last` is the newest line."""

    def __init__(
        self, model: nn.Module, log: Callable[[Line], None] | None, every: int, memory: bool, deviation: float
    ) -> None:
        self.last: Line | None = None
        self._model, self._planned = model, planned_of(model)
        self._log, self._every, self._memory, self._deviation = log or _printed, every, memory, deviation
        self._device = self._planned.rank.device
        self._step = 0
        self._warned = False
        self._live: LiveStorages | None = None
        self._handle: RemovableHandle | None = None
        self._begin()

    def __enter__(self) -> Monitor:
        self._handle = register_optimizer_step_post_hook(self._stepped)
        self._planned.observers.append(self._called)
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._planned.observers.remove(self._called)
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def _begin(self) -> None:
        """Begin a new span of steps, over which figures are averaged."""
        self._start, self._waited = time.perf_counter(), waits.seconds
        self._rows = self._tokens = self._flops = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _called(self, planned: Planned, program: Program, inputs: list[Any]) -> None:
        """Observe a call of the model: count its rows, tokens and FLOPs if it trains."""
        if not torch.is_grad_enabled():
            return
        if program.traced.entry == FORWARD:  # rows of submodule calls pass through forward too, or do not count
            rows, tokens = work_of(program, inputs, planned.rank.mesh.shape)
            self._rows, self._tokens = self._rows + rows, self._tokens + tokens
        self._flops += program.plan.predicted.flops // program.plan.micro_batches

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return
        peak_bytes = self._peak()
        self._step += 1
        if self._step % self._every == 0 or peak_bytes is not None:
            self.last = self._line(peak_bytes)
            if dist.get_rank() == 0 and self._step % self._every == 0:
                self._log(self.last)
        if peak_bytes is not None:
            self._compare(peak_bytes)
        if self._step % self._every == 0:
            self._begin()
        if self._memory and self._device.type != "cuda" and self._step == _MEASURED_STEP:
            self._live = LiveStorages(_tensors_between_steps(self._model, optimizer))
            self._live.__enter__()

    def _peak(self) -> int | None:
        if not self._memory:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        live, self._live = self._live, None
        if live is None:
            return None
        live.__exit__(None, None, None)
        return live.peak_bytes

    def _line(self, peak_bytes: int | None) -> Line:
        plan = self._plan
        seconds = time.perf_counter() - self._start
        steps = (self._step - 1) % self._every + 1
        rate = peak_rate(plan, self._model)
        on_cpu = self._device.type == "cpu"
        return {
            "step": self._step - 1,
            "seconds": round(seconds / steps, 6),
            "predicted_seconds": round(plan.predicted.step_seconds, 6),
            "rows_per_s": round(self._rows / seconds, 3),
            "tokens_per_s": round(self._tokens / seconds, 1) if self._tokens else None,
            "mfu": float(f"{self._flops / seconds / rate:.4g}") if rate else None,
            "exposed_comm_seconds": round((waits.seconds - self._waited) / steps, 6) if on_cpu else None,
            "peak_bytes": peak_bytes,
            "predicted_peak_bytes": plan.predicted.peak_bytes,
        }

    @property
    def _plan(self) -> Plan:
        """The plan of the training step: that of the first graph."""
        return self._planned.programs.first.plan

    def _compare(self, peak_bytes: int) -> None:
        predicted = self._plan.predicted.peak_bytes
        if self._warned or not predicted or abs(peak_bytes / predicted - 1) <= self._deviation:
            return
        self._warned = True
        warn(
            f"rank {dist.get_rank()}: the peak of a step is {peak_bytes} bytes, and the plan predicted {predicted} "
            f"({peak_bytes / predicted - 1:+.0%}; warned of from {self._deviation:.0%} on): the plan does not count "
            "tensors that the training loop keeps; please report any other difference"
        )


def work_of(program: Program, inputs: list[Any], mesh_shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and tokens that all ranks together process in one call.

    Rows are the first size of the first input; tokens are the elements of the first 2-D input of integers.
    """
    plan, nodes = program.plan, list(program.traced.graph.nodes)
    layouts = [p.outputs[0] for p in plan.nodes if nodes[p.position].op == "placeholder"]
    rows = tokens = 0
    for value, layout in zip(inputs, layouts, strict=True):
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        parts = layout.shards(mesh_shape) if plan.inputs == "local" else 1
        rows = rows or value.shape[0] * parts
        if value.ndim == 2 and not value.is_floating_point() and not value.is_complex():
            tokens = tokens or value.numel() * parts
    return rows, tokens


def peak_rate(plan: Plan, model: nn.Module) -> float | None:
    """Peak FLOPs per second of all devices of the plan together, in its compute dtype."""
    if not plan.cluster:
        return None
    cluster = Cluster.from_dict(plan.cluster)
    stored = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = plan.precision.get("compute") or str(stored)
    rate = cluster.device.flops_per_s.get(dtype.removeprefix("torch."))
    return rate * cluster.devices if rate else None


def _tensors_between_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that exist between steps: parameters, buffers, gradients and optimizer state."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    states: list[Mapping[str, Any]] = list(optimizer.state.values())
    tensors += [value for state in states for value in state.values() if isinstance(value, (torch.Tensor, DTensor))]
    return tensors


def _printed(line: Line) -> None:
    print(json.dumps(line), file=sys.stderr, flush=True)
