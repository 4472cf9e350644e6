"""The peak of allocated bytes during a training step, on one device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree


class PeakMemory:
    """On a GPU the allocator's own counter; on CPU what lives before the step and the profiler's record of it.

    `peak_bytes` is 0 until a step was measured. Gradients must not be alive between steps (`zero_grad` at the end).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0

    @contextmanager
    def measure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Mapping[str, torch.Tensor],
        *,
        when: bool = True,
    ) -> Iterator[None]:
        """Measure the step that runs inside, if `when`."""
        if not when:
            yield
        elif self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            states = [value for state in optimizer.state.values() for value in state.values()]
            before = _bytes([*model.parameters(), *model.buffers(), *states, *batch.values()])
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                yield
            self.peak_bytes = before + _peak(recorded)


def _bytes(values: Iterable[object]) -> int:
    """Bytes of the tensors' local storages, each counted once."""
    tensors = [value for value in pytree.tree_leaves(list(values)) if isinstance(value, torch.Tensor)]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}.values())


def _peak(recorded: profile) -> int:
    """The highest sum of what was allocated and not yet freed; frees of older memory are not in the record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["args"]["Ev Idx"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak
