"""Planned models under accelerate and the Trainer of transformers.

Plan with `inputs="local"`: these libraries give every process its own part of the batch, and a planned model puts the
parts together where the plan wants them, also where several processes work on the same rows. The batch of a step is the
sum of the parts, as with data parallelism, and so are gradients: those of the mean over the whole batch.

A planned model moves its gradients itself. What would be done to it a second time is kept off by two marks:

- accelerate wraps no model in DDP (nor moves it, nor puts autocast around it) that says it is prepared already;
- the Trainer multiplies the loss by the number of processes, for DDP to divide it, unless the model takes no loss
  arguments; a planned model's loss is the global mean already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from autopar.errors import InputError
from autopar.runtime.model_class import ATTRIBUTE

Model = TypeVar("Model", bound=nn.Module)


def adopt(model: Model) -> Model:
    """Let accelerate and the Trainer leave a planned model as it is; the model itself is returned."""
    if not hasattr(model, ATTRIBUTE):
        raise InputError(
            f"this {type(model).__name__} is not planned: pass it through autoparallelize first, with inputs='local'"
        )
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    return model


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with whole tensors on the CPU of rank 0, empty elsewhere; every rank must call it.

    One tensor at a time is whole on every device. Tied tensors stay one.
    """
    writer = not dist.is_initialized() or dist.get_rank() == 0
    whole: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in whole:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole[id(tensor)] = full.detach().cpu() if writer else torch.empty(0)
        state[name] = whole[id(tensor)]
    return state if writer else {}


def save_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """`model.save_pretrained(folder)` for a planned model: every rank calls it, rank 0 writes, all wait for it.

    Works for models of transformers and of peft; `from_pretrained` reads the folder on any number of processes.
    """
    state = whole_state(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(str(folder), state_dict=state, **options)
    if dist.is_initialized():
        dist.barrier()


class PlannedTrainer(Trainer):
    """The Trainer for a planned model: trained as it is, saved whole by rank 0.

    `per_device_train_batch_size` is what one process passes, as ever. Checkpoints hold the model alone
    (`save_only_model`): the optimizer's state is in parts, which the Trainer cannot write.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, **options: Any) -> None:
        adopt(model)
        if getattr(model, ATTRIBUTE).programs[0].plan.inputs != "local":
            raise InputError("the Trainer gives every process its own part of the batch: plan with inputs='local'")
        if args.save_strategy != SaveStrategy.NO and not args.save_only_model:
            raise InputError(
                "the Trainer cannot checkpoint an optimizer whose state lies in parts: give TrainingArguments "
                "save_only_model=True, or save_strategy='no' and save with torch.distributed.checkpoint"
            )
        super().__init__(model=model, args=args, **options)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        state = whole_state(self.model) if state_dict is None else state_dict
        super()._save(output_dir, state_dict=state)
