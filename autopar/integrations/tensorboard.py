"""TensorBoard: rank 0 writes the scalars of a training loop, and the plan's predictions beside them.

    with TensorBoard("runs/first", model) as board:
        for step, batch in enumerate(loader):
            ...
            board.log(step, {"loss": loss, "step_seconds": seconds, "tokens_per_second": tokens / seconds})

The tab "Custom scalars" shows measured and predicted step time in one picture, peak memory in another; "Text" the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard.writer import SummaryWriter
from typing_extensions import Self

from autopar.errors import InputError
from autopar.plans import Plan
from autopar.runtime.stored.carried import plan_of

_BESIDE = {"step": "step_seconds", "peak memory": "peak_bytes"}  # title of a picture: tag, shown with predicted/TAG


class TensorBoard:
    """A log of scalars in `folder`; every rank makes one and logs the same, rank 0 writes.

    `planned`: a planned model or a plan, whose predictions are logged at each step as `predicted/step_seconds` and
    `predicted/peak_bytes`, to compare with the scalars `step_seconds` and `peak_bytes`. None: no predictions.
    """

    def __init__(self, folder: str | Path, planned: nn.Module | Plan | None = None) -> None:
        plan = plan_of(planned) if isinstance(planned, nn.Module) else planned
        self._predicted = predicted(plan) if plan is not None else {}
        self._writer = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._writer = SummaryWriter(str(folder))
            if plan is not None:
                self._writer.add_text("plan", f"```\n{plan.explain()}\n```")
                pictures = {title: ["Multiline", [f"^{tag}$", f"predicted/{tag}"]] for title, tag in _BESIDE.items()}
                self._writer.add_custom_scalars({"measured and predicted": pictures})

    def log(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write numbers and tensors of one element by name; mappings in mappings are names joined by `/`.

        A DTensor is made whole, which every rank takes part in. Raises InputError for what is no scalar.
        """
        values = dict(_flat(scalars))
        if self._writer is not None:
            for name, value in {**values, **self._predicted}.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def predicted(plan: Plan) -> dict[str, float]:
    """The plan's predictions by their tags."""
    return {
        "predicted/step_seconds": plan.predicted.step_seconds,
        "predicted/peak_bytes": plan.predicted.peak_bytes,
    }


def _flat(scalars: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in scalars.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            yield name, (value.full_tensor() if isinstance(value, DTensor) else value).item()
        elif isinstance(value, (int, float)):
            yield name, float(value)
        else:
            kind = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputError(f"{name!r} is {kind}: TensorBoard takes numbers and tensors of one element")
