"""Planned models under accelerate and the Trainer of transformers.

Plan with `inputs="local"`: these libraries give every process its own part of the batch, and a planned model puts the
parts together where the plan wants them, also where several processes work on the same rows. The batch of a step is the
sum of the parts, as with data parallelism, and so are gradients: those of the mean over the whole batch.

A planned model reduces its gradients itself. Two marks on the model keep the libraries from doing so again:

- accelerate does not wrap a model in DDP, move it or put autocast around it if the model is marked as prepared; the
  precision that accelerate is asked for must then be the plan's;
- the Trainer multiplies the loss by the number of processes, because DDP divides by it, unless the model is marked as
  taking no loss arguments; a planned model's loss is the global mean already.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments

from autopar.errors import InputError
from autopar.integrations.accelerate_precision import check_precision, let_accelerate_keep_precision
from autopar.integrations.accelerate_states import let_accelerate_keep_states, whole_state
from autopar.runtime.checkpoints.together import Together
from autopar.runtime.stored.carried import plan_of, planned_of
from autopar.runtime.stored.model_class import ATTRIBUTE
from autopar.user_warnings import warn

_PARTS, _SCHEDULER = "planned", "scheduler.pt"  # in a checkpoint's folder: the shards, and the scheduler's state
ITEMS = "num_items_in_batch"  # argument of transformers models: the divisor of the sum of the labels' losses
Model = TypeVar("Model", bound=nn.Module)


def adopt(model: Model) -> Model:
    """Mark a planned model, so that accelerate and the Trainer do not wrap or move it; returns the same model.

    accelerate's own checkpoints then hold whole tensors (`autopar.integrations.accelerate_states`), and its
    `mixed_precision` has to be the plan's (`autopar.integrations.accelerate_precision`). Outputs of the model have the
    rows that the process has passed: without gradients always, with gradients only if this needs no communication (else
    use `autopar.own_rows`).
    """
    if not hasattr(model, ATTRIBUTE):
        raise InputError(
            f"this {type(model).__name__} is not planned: pass it through autoparallelize first, with inputs='local'"
        )
    planned_of(model).returns_own_rows = True
    let_accelerate_keep_states()
    let_accelerate_keep_precision()
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    for module in model.modules():  # for a peft model, the Trainer looks at the model inside
        if module is model or hasattr(module, "accepts_loss_kwargs") or isinstance(module, PreTrainedModel):
            module.accepts_loss_kwargs = False
    return model


def save_pretrained(model: Any, folder: str | Path, **options: Any) -> None:
    """`model.save_pretrained(folder)` for a planned model: every rank calls it, rank 0 writes, all wait for it.

    Works for models of transformers, peft and diffusers; `from_pretrained` reads the folder on any number of processes.
    """
    together = Together("save_pretrained")
    state = whole_state(model)

    def write() -> None:
        model.state_dict = lambda *args, **kwargs: state  # diffusers asks the model, the others take an argument
        try:
            model.save_pretrained(str(folder), state_dict=state, **options)
        finally:
            del model.state_dict

    together.first_does(f"{folder} was written", write)


class PlannedTrainer(Trainer):
    """The Trainer for a planned model: it does not wrap the model, saves it whole on rank 0, and resumes from shards.

    `per_device_train_batch_size` is the rows of one process, as usual. A checkpoint holds the whole model, for other
    programs, and, unless `save_only_model` is set, a folder of `torch.distributed.checkpoint` with model, optimizer and
    the counter of random masks, from which training resumes on any mesh.

    The loss of a step is the mean over its batch, and with gradient accumulation the mean of those means. The plain
    Trainer takes the mean over all labels of the step, which differs where rows are padded (labels of -100). To get
    that mean, give the plan's examples `num_items_in_batch=torch.tensor(1.0)`, by which models of transformers divide.

    If the rows of an evaluation do not fill its last batch, accelerate repeats some. Predictions leave the repeated
    rows out; the loss counts them, and a warning says so.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, **options: Any) -> None:
        adopt(model)
        if plan_of(model).inputs != "local":
            raise InputError("the Trainer gives every process its own part of the batch: plan with inputs='local'")
        if args.label_smoothing_factor or options.get("compute_loss_func") is not None:
            raise InputError(
                "label_smoothing_factor and compute_loss_func make a loss outside the plan, of rows that other "
                "processes have: give it to autoparallelize as loss_fn (torch's cross_entropy has label_smoothing)"
            )
        if args.neftune_noise_alpha is not None:
            raise InputError(
                "neftune_noise_alpha adds noise in a hook of the embedding, and calls run the plan, not the modules: "
                "add the noise in forward"
            )
        for name in ("bf16", "fp16"):
            if getattr(args, name):
                check_precision(model, name, f"the Trainer has {name}=True")
        if args.load_best_model_at_end and args.save_only_model:
            raise InputError("load_best_model_at_end needs checkpoints in parts: leave save_only_model out")
        if args.label_names is None and (names := _labels_of(model)):
            args.label_names = names
        self._wants_outputs, self._told = False, False
        counted = _counts_items(model)
        if counted and not args.average_tokens_across_devices:
            raise InputError(f"average_tokens_across_devices=False, and the plan has {ITEMS}, of all: leave one out")
        super().__init__(model=model, args=args, **options)
        self.model_accepts_loss_kwargs = counted

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of a step and their number of labels. Warns once if batches differ in the number of labels: the
        mean of their losses is then not the mean over all labels."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        if not self.model_accepts_loss_kwargs and not self._told and _unlike(batches):
            self._told = True
            warn(
                "the batches of a step have unequally many labels, and its loss is the mean of theirs. For the mean "
                f"over all labels plan with {ITEMS}=torch.tensor(1.0) among the examples, if the model takes it"
            )
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """If the model was planned with a `loss_fn`, it returns the loss alone; its outputs are computed by a second
        call if predictions or metrics need them."""
        if not getattr(self.model, ATTRIBUTE).programs[0].traced.loss_names:
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None:  # the divisor of the loss
                inputs = {**inputs, ITEMS: num_items_in_batch}
            # Without num_items_in_batch, for which the Trainer would multiply the loss by the number of processes.
            return super().compute_loss(model, inputs, return_outputs)
        loss = model(**inputs)
        if not return_outputs:
            return loss
        left_out = {*_loss_names(self.model), *self.label_names}  # labels too: forward might compute a loss from them
        outputs = model(**{n: v for n, v in inputs.items() if n not in left_out}) if self._wants_outputs else {}
        return loss, {"loss": loss, **_by_name(outputs)}

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        self._wants_outputs = not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._wants_outputs = False

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        rows, batch = self.num_examples(dataloader), self.args.eval_batch_size * self.args.world_size
        if rows % batch and self.args.world_size > 1:
            warn(
                f"{rows} rows do not fill batches of {batch}: the last repeats {-rows % batch} of them, which count "
                "twice in the loss (not in predictions and metrics). Choose a batch that divides the rows"
            )
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Called by every rank; rank 0 writes, and all wait for it, since any of them may read the folder next."""
        super().save_model(output_dir, _internal_call=_internal_call)
        if dist.is_initialized():
            dist.barrier()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict=whole_state(self.model) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        model, optimizer = get_state_dict(self.model, self._plain_optimizer())
        state = {"model": model, "optimizer": optimizer, "random": self._random_state()}
        save(state, checkpoint_id=Path(output_dir, _PARTS), process_group=Together("PlannedTrainer's saving").group)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        state = {"model": get_model_state_dict(self.model)}
        load(
            state,
            checkpoint_id=_parts_of(resume_from_checkpoint),
            process_group=Together("PlannedTrainer's loading").group,
        )
        set_model_state_dict(self.model, state["model"])

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        optimizer = self._plain_optimizer()
        parts, masks = get_optimizer_state_dict(self.model, optimizer), self._random_state()
        group = Together("PlannedTrainer's loading").group
        load({"optimizer": parts, "random": masks}, checkpoint_id=_parts_of(checkpoint_folder), process_group=group)
        set_optimizer_state_dict(self.model, optimizer, parts)
        random = getattr(self.model, ATTRIBUTE).random
        if random is not None:
            random.load_state_dict(masks)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint_folder, _SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate around it."""
        optimizer: Any = self.optimizer
        plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return plain

    def _random_state(self) -> dict[str, torch.Tensor]:
        random = getattr(self.model, ATTRIBUTE).random
        state: dict[str, torch.Tensor] = random.state_dict() if random is not None else {}
        return state


def _loss_names(model: nn.Module) -> tuple[str, ...]:
    """The arguments of the `loss_fn` that the model was planned with, except those that forward also takes."""
    traced = getattr(model, ATTRIBUTE).programs[0].traced
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters  # the user's own
    return tuple(name for name in traced.loss_names if name not in parameters)


def _counts_items(model: nn.Module) -> bool:
    """Whether the model was planned with `ITEMS`; InputError if its loss does not read that."""
    graph = getattr(model, ATTRIBUTE).programs[0].traced.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder" and node.target == ITEMS]
    if placeholders and not placeholders[0].users:
        raise InputError(
            f"the loss of {type(model).__name__} does not read {ITEMS}: leave it out of the examples; the loss of a "
            "step is then the mean of those of its batches"
        )
    return bool(placeholders)


def _unlike(batches: Sequence[Any]) -> bool:
    """Whether the batches differ in their numbers of labels."""
    if len(batches) < 2:  # counting would synchronise with the device
        return False
    labels = [batch.get("labels") if isinstance(batch, Mapping) else None for batch in batches]
    return (
        len({int(batch_labels.ne(-100).sum()) for batch_labels in labels if isinstance(batch_labels, torch.Tensor)}) > 1
    )


def _labels_of(model: nn.Module) -> list[str]:
    """The arguments of `_loss_names` that were among the plan's examples."""
    graph = getattr(model, ATTRIBUTE).programs[0].traced.graph
    examples = {node.target for node in graph.nodes if node.op == "placeholder"}
    return [name for name in _loss_names(model) if name in examples]


def _by_name(outputs: Any) -> dict[str, Any]:
    """A model's outputs by name, without the loss, as the Trainer expects them."""
    if isinstance(outputs, Mapping):
        return {name: value for name, value in outputs.items() if name != "loss"}
    if isinstance(outputs, tuple | list):
        return {str(i): value for i, value in enumerate(outputs)}
    return {"logits": outputs}


def _parts_of(folder: str) -> Path:
    parts = Path(folder, _PARTS)
    if not parts.is_dir():
        raise InputError(
            f"{folder} holds no model in parts ({_PARTS}/): training resumes from what PlannedTrainer wrote without "
            "save_only_model"
        )
    return parts
