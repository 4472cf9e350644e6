"""Reads torchtitan's TOML job files, up to release 0.2, as a mesh, a batch and a scheme for the planner.

    job = read_job("llama3_8b.toml", processes=64)
    mesh = init_device_mesh("cuda", job.mesh_shape, mesh_dim_names=job.axis_names)
    model = autoparallelize(job.build(), job.examples(), mesh, **job.options())

The degrees of `[parallelism]` give the mesh, and a scheme, which is a constraint of the plan: `fsdp` if there are only
shards, `hsdp`, `fsdp+tp` and so on. A table `[autopar]` may change this:

    [autopar]
    scheme = "free"            # the degrees are the mesh and nothing more; or any preset
    memory_budget = "70GiB"    # default: what the device has, of a GPU 95 %
    time_limit = 60.0
    constraints = []           # further pins

What to recompute is part of the plan: mode "none" of `[activation_checkpoint]` forbids recompute, any other leaves it
to the planner, which recomputes what the budget needs. Options of features that autopar lacks are refused if they turn
a feature on, and else ignored; unknown options are an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from autopar.errors import InputError
from autopar.integrations.torchtitan_tables import (
    CheckpointTable,
    JobTable,
    MetricsTable,
    ModelTable,
    OptimizerTable,
    OwnTable,
    ParallelismTable,
    RecomputeTable,
    SchedulerTable,
    TrainingTable,
    read_tables,
)
from autopar.planning.stages import RequestOptions
from autopar.zoo import ZOO


@dataclass(frozen=True)
class Job:
    """The tables of a file, and the mesh, batch and scheme that follow for the number of processes."""

    processes: int
    job: JobTable = field(default_factory=JobTable)
    model: ModelTable = field(default_factory=ModelTable)
    metrics: MetricsTable = field(default_factory=MetricsTable)
    optimizer: OptimizerTable = field(default_factory=OptimizerTable)
    lr_scheduler: SchedulerTable = field(default_factory=SchedulerTable)
    training: TrainingTable = field(default_factory=TrainingTable)
    parallelism: ParallelismTable = field(default_factory=ParallelismTable)
    activation_checkpoint: RecomputeTable = field(default_factory=RecomputeTable)
    checkpoint: CheckpointTable = field(default_factory=CheckpointTable)
    autopar: OwnTable = field(default_factory=OwnTable)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(size for size in self.degrees.values() if size > 1) or (1,)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """torchtitan's names of the axes that have more than one process."""
        return tuple(name for name, size in self.degrees.items() if size > 1) or ("dp_shard",)

    @property
    def micro_batches(self) -> int:
        """Backward passes of one optimizer step."""
        return self.batch // self.rows

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch, all processes together."""
        return self.training.local_batch_size * self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def batch(self) -> int:
        """Sequences of one optimizer step, all processes together."""
        batch_size = self.training.global_batch_size
        return self.rows if batch_size < 0 else batch_size

    @property
    def degrees(self) -> dict[str, int]:
        """How many processes each of torchtitan's axes has."""
        parallelism = self.parallelism
        replicas, shards, tensor = (
            parallelism.data_parallel_replicate_degree,
            parallelism.data_parallel_shard_degree,
            parallelism.tensor_parallel_degree,
        )
        if shards == -1:
            shards = self.processes // (replicas * tensor)
        return {"dp_replicate": replicas, "dp_shard": shards, "tp": tensor}

    def examples(self) -> dict[str, torch.Tensor]:
        """Examples of one micro-batch, data-free."""
        ids = torch.empty(self.rows, self.training.seq_len, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    def options(self) -> RequestOptions:
        """The arguments of `autopar.plan` that the file decides."""
        own, keeps_activations = self.autopar, self.activation_checkpoint.mode == "none"
        scheme = {"free": (), "degrees": self._scheme()}.get(own.scheme, (own.scheme,))
        return {
            "constraints": [*scheme, *(["recompute:* = never"] if keeps_activations else []), *own.constraints],
            "memory_budget": own.memory_budget,
            "micro_batches": self.micro_batches,
            "optimizer": "adamw",
            "precision": _PRECISIONS[self.training.mixed_precision_param],
            "time_limit": own.time_limit,
        }

    def _scheme(self) -> tuple[str, ...]:
        presets = {
            (): (),
            ("dp_replicate",): ("ddp",),
            ("dp_shard",): ("fsdp",),
            ("tp",): ("tp",),
            ("dp_replicate", "dp_shard"): ("hsdp",),
            ("dp_replicate", "tp"): ("tp",),
            ("dp_shard", "tp"): ("fsdp+tp",),
        }
        split_axes = tuple(name for name, size in self.degrees.items() if size > 1)
        if split_axes not in presets:
            raise InputError('no preset has three axes: write scheme = "free" under [autopar], or a degree of 1')
        return presets[split_axes]

    def build(self) -> nn.Module:
        """The model of `[model]`: a Llama 3 of transformers with torchtitan's sizes, on the current default device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        flavors: dict[str, Mapping[str, int | bool]] = {
            "debugmodel": _DEBUG,
            "8B": ZOO["llama-3-8b"].config,
            "70B": ZOO["llama-3-70b"].config,
        }
        if self.model.name != "llama3" or self.model.flavor not in flavors:
            raise InputError(
                f"[model] is {self.model.name} {self.model.flavor}: this reader builds llama3 as {', '.join(flavors)}; "
                "build any other yourself and pass it to autoparallelize with job.options()"
            )
        config = {"rope_theta": 500000.0, "use_cache": False, **flavors[self.model.flavor]}
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**config))
        return model


_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_DEBUG = {  # sizes of torchtitan's "debugmodel"
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
}


def read_job(path: str | Path, processes: int) -> Job:
    """Read a torchtitan file for a job of this many processes.

    Raises InputError, which names file, table and option, for a file that cannot be read, and for unknown, unsupported
    or contradicting options.
    """
    job = Job(processes, **read_tables(Path(path)))
    try:
        _check(job)
    except InputError as error:
        raise InputError(f"{path}: {error.message}") from error
    return job


def _check(job: Job) -> None:
    for name, value, allowed in (
        ("[training] mixed_precision_param", job.training.mixed_precision_param, _PRECISIONS),
        (
            "[activation_checkpoint] mode",
            job.activation_checkpoint.mode,
            ("none", "selective", "full", "memory_budget"),
        ),
        ("[optimizer] name", job.optimizer.name, ("AdamW", "Adam")),
        ("[lr_scheduler] decay_type", job.lr_scheduler.decay_type, ("linear", "sqrt", "cosine")),
    ):
        if value not in allowed:
            raise InputError(f"{name} = {value!r}: it must be {' or '.join(map(repr, allowed))}")
    sizes = list(job.degrees.values())
    if min(sizes) < 1 or math.prod(sizes) != job.processes:
        text = ", ".join(f"{name} {size}" for name, size in job.degrees.items())
        raise InputError(f"[parallelism] comes to {text}, which is not the {job.processes} processes that there are")
    if job.training.local_batch_size < 1 or job.batch < 1 or job.batch % job.rows:
        raise InputError(
            f"[training] global_batch_size = {job.batch} is no multiple of the {job.rows} sequences that "
            "local_batch_size and the data-parallel degrees come to"
        )
