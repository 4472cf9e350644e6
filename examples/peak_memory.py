"""The peak of allocated bytes during a training step, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from autopar.runtime.live_storages import LiveStorages

__all__ = ["LiveStorages", "PeakMemory"]


class PeakMemory:
    """Measures with the allocator's counter on a GPU, and on a CPU, which has none, by tracking live tensors.

    `peak_bytes` is 0 until a step is measured. `requested_bytes`: the peak of the bytes that tensors requested; the
    allocator's blocks are larger. Gradients must not be alive between steps (`zero_grad` at the end).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = self.requested_bytes = 0

    @contextmanager
    def measure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Mapping[str, torch.Tensor],
        *,
        when: bool = True,
    ) -> Iterator[None]:
        """Measure the step in the body if `when` is true."""
        if not when:
            yield
        elif self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            self.requested_bytes = torch.cuda.memory_stats(self.device)["requested_bytes.all.peak"]
        else:
            states = [value for state in optimizer.state.values() for value in state.values()]
            with LiveStorages([*model.parameters(), *model.buffers(), *states, *batch.values()]) as live:
                yield
            self.peak_bytes = self.requested_bytes = live.peak_bytes
