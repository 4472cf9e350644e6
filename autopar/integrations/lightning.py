"""PyTorch Lightning: a strategy that plans a submodule of the LightningModule; the Trainer works as usual.

    trainer = Trainer(devices=2, strategy=PlannedStrategy(examples, memory_budget="70GiB"))

Every process loads its own part of the batch with the Trainer's samplers, as under DDP; the plan combines the parts
where it needs to. The loss is that of the whole batch on each process; other outputs of the submodule have the rows of
the process. Clipping, accumulation, schedulers, callbacks and loggers are Lightning's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import Unpack

from autopar.api import autoparallelize
from autopar.errors import InputError
from autopar.planning.stages import RequestOptions
from autopar.runtime.stored.carried import planned_of
from autopar.runtime.stored.model_class import ATTRIBUTE
from autopar.runtime.weights.materialising import materialise

_AVERAGING = tuple(  # callbacks that copy the module before it is planned, and are refused
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "WeightAveraging")
    if hasattr(callbacks, name)  # older releases lack WeightAveraging
)
_RANDOM = "autopar_random"  # key in a checkpoint: the state of the generator of random masks


class PlannedStrategy(ModelParallelStrategy):
    """Trains `lightning_module.<module>` under a plan on all processes.

    Args:
        meta_args: example inputs of the submodule, by name, for one batch of all processes together.
        module: path of the submodule that holds all trained parameters.
        mesh_shape: the shape of the mesh; default: one axis of all processes.
        axis_names: names of the mesh axes.
        save_distributed_checkpoint: False: rank 0 writes one file, in the format of a single device, so that either can
            read the other's. True: every rank writes its shards, into a folder.
        options: those of `autopar.plan`, except `inputs` (always "local") and `micro_batches` (the Trainer's
            `accumulate_grad_batches`).

    A submodule on the meta device gets its initial values after planning. The precision is part of the plan
    (`precision="bf16"` here); leave the Trainer's at "32-true".

    Raises InputError in `Trainer.fit` if the module lacks the submodule or trains parameters outside it, or if an
    option of the Trainer contradicts the plan.
    """

    def __init__(
        self,
        meta_args: Mapping[str, Any],
        *,
        module: str = "model",
        mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        save_distributed_checkpoint: bool = False,
        **options: Unpack[RequestOptions],
    ) -> None:
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint)
        for name, instead in (
            ("inputs", "every process passes its own part of the batch"),
            ("micro_batches", "give the Trainer accumulate_grad_batches"),
        ):
            if name in options:
                raise InputError(f"PlannedStrategy takes no {name}: {instead}")
        self._meta_args, self._module_path = meta_args, module
        self._options: dict[str, Any] = dict(options)
        self._mesh_shape, self._axis_names = mesh_shape, axis_names

    def setup_environment(self) -> None:
        super().setup_environment()
        shape = tuple(self._mesh_shape or (self.world_size,))
        if math.prod(shape) != self.world_size:
            text = "x".join(map(str, shape))
            raise InputError(f"a mesh of {text} has {math.prod(shape)} processes and there are {self.world_size}")
        names = tuple(self._axis_names) if self._axis_names is not None else None
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def planned(self) -> nn.Module:
        """The submodule that is planned."""
        assert self.lightning_module is not None
        try:
            return self.lightning_module.get_submodule(self._module_path)
        except AttributeError as error:
            owner = type(self.lightning_module).__name__
            raise InputError(
                f"{owner} has no submodule {self._module_path!r}: name the one to plan, module=..."
            ) from error

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if type(self.precision_plugin) is not Precision or self.precision_plugin.precision != "32-true":
            precision = self.precision_plugin.precision
            raise InputError(
                f"the Trainer has precision={precision!r}: pass it to PlannedStrategy, as part of the plan"
            )
        for callback in trainer.callbacks:
            if isinstance(callback, _AVERAGING):
                raise InputError(
                    f"{type(callback).__name__} copies the module before it is planned, so that its averages are "
                    "not sharded: average in a callback of your own, with a torch.optim.swa_utils.AveragedModel of the "
                    "planned submodule that on_train_start makes"
                )
        if not hasattr(self.planned, ATTRIBUTE):
            self._plan(trainer.accumulate_grad_batches)
        self._refuse_others()
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _plan(self, micro_batches: int) -> None:
        module = self.planned.train()
        on_meta = any(p.is_meta for p in module.parameters())
        autoparallelize(
            module, self._meta_args, self.device_mesh, inputs="local", micro_batches=micro_batches, **self._options
        )
        planned_of(module).returns_own_rows = True
        if on_meta:
            materialise(module)

    def _refuse_others(self) -> None:
        """InputError if parameters outside the planned submodule are trained: their gradients would not be reduced."""
        assert self.lightning_module is not None
        own = {id(p) for p in self.planned.parameters()}
        others = [n for n, p in self.lightning_module.named_parameters() if id(p) not in own and p.requires_grad]
        if others:
            raise InputError(
                f"{len(others)} trained parameters ('{others[0]}' is one) are outside of {self._module_path!r}, which "
                "is what is planned: move them into it, or name a submodule that holds all (module=...)"
            )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        no_sync: Any = self.planned.no_sync
        with no_sync():
            yield

    # -- checkpoints: Lightning's, with the state of the generator of random masks ----------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        random = planned_of(self.planned).random
        if random is not None:
            checkpoint[_RANDOM] = random.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint; optimizers only if training continues, as testing and validating need just weights."""
        assert self.lightning_module is not None
        strategy: Any = self
        optimizers = strategy.optimizers
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            strategy.optimizers = []
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        except KeyError as error:
            if error.args != ("optimizer_states",):
                raise
            raise InputError(
                f"{checkpoint_path} holds weights alone (save_weights_only), and training does not go on from those: "
                "load them into the module before fit, without ckpt_path"
            ) from error
        finally:
            strategy.optimizers = optimizers
        random, state = planned_of(self.planned).random, checkpoint.pop(_RANDOM, None)
        if random is not None and state is not None:
            random.load_state_dict(state)
        return checkpoint
