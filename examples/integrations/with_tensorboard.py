"""A plain loop that logs to TensorBoard: loss, tokens per second, and predicted and measured step time and peak.

    torchrun --nproc-per-node 2 examples/integrations/with_tensorboard.py
    python examples/integrations/with_tensorboard.py     # the same losses on one process, without autopar
    tensorboard --logdir out/tensorboard

With --constraint fsdp (or tp), the plan follows that scheme. The peak is measured only every third step, because that
is slow on a CPU, where all tensors must be tracked.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import small
import torch
import torch.distributed as dist
from small import BATCH, SEQUENCE, STEPS, Bytes, mesh_of_all, processes, small_model, whole_batch

from autopar import autoparallelize
from autopar.integrations.tensorboard import TensorBoard

sys.path.append(str(Path(__file__).parents[1]))
from peak_memory import PeakMemory


def main() -> None:
    options = small.arguments()
    model: torch.nn.Module = small_model()
    planned = None
    if processes() > 1:
        planned = model = autoparallelize(model, whole_batch(), mesh_of_all(), constraints=options.constraint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = PeakMemory(next(model.parameters()).device)
    data, losses = Bytes(), []
    with TensorBoard(options.out / "tensorboard", planned) as board:
        for step in range(STEPS):
            rows = data.rows[step * BATCH : (step + 1) * BATCH]
            start, measured = time.perf_counter(), step % 3 == 2
            with memory.measure(model, optimizer, {"rows": rows}, when=measured):
                loss = model(input_ids=rows, labels=rows).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seconds = time.perf_counter() - start
            board.log(step, {"loss": loss, "step_seconds": seconds, "tokens_per_second": BATCH * SEQUENCE / seconds})
            if measured:
                board.log(step, {"peak_bytes": memory.peak_bytes})
    small.report(losses, model, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
