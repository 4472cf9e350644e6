"""The tables of a torchtitan file: options that are read, features that must be off, and options that are ignored.

Names and defaults are those of torchtitan 0.2 (`torchtitan/config/job_config.py`), with the old names of two options.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from autopar.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = TypeVar("Table")


@dataclass(frozen=True)
class JobTable:
    dump_folder: str = "./outputs"
    description: str = ""


@dataclass(frozen=True)
class ModelTable:
    name: str = "llama3"
    flavor: str = "debugmodel"


@dataclass(frozen=True)
class MetricsTable:
    log_freq: int = 10
    enable_tensorboard: bool = False
    save_tb_folder: str = "tb"


@dataclass(frozen=True)
class OptimizerTable:
    name: str = "AdamW"
    lr: float = 8e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class SchedulerTable:
    warmup_steps: int = 200
    decay_ratio: float | None = None
    decay_type: str = "linear"
    min_lr_factor: float = 0.0


@dataclass(frozen=True)
class TrainingTable:
    dataset: str = "c4_test"
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    max_norm: float = 1.0
    steps: int = 10000
    mixed_precision_param: str = "bfloat16"
    seed: int | None = None


@dataclass(frozen=True)
class ParallelismTable:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1


@dataclass(frozen=True)
class RecomputeTable:
    mode: str = "selective"


@dataclass(frozen=True)
class CheckpointTable:
    enable: bool = False
    folder: str = "checkpoint"
    interval: int = 500


@dataclass(frozen=True)
class OwnTable:
    scheme: str = "degrees"
    memory_budget: str | None = None
    time_limit: float = 60.0
    constraints: tuple[str, ...] = ()


TABLES: dict[str, type] = {
    "job": JobTable,
    "model": ModelTable,
    "metrics": MetricsTable,
    "optimizer": OptimizerTable,
    "lr_scheduler": SchedulerTable,
    "training": TrainingTable,
    "parallelism": ParallelismTable,
    "activation_checkpoint": RecomputeTable,
    "checkpoint": CheckpointTable,
    "autopar": OwnTable,
}
_RENAMED = {"training.batch_size": "local_batch_size", "checkpoint.enable_checkpoint": "enable"}  # old names
_OFF: dict[str, tuple[object, ...]] = {  # features that autopar lacks, with the values that turn them off
    "profiling.enable_profiling": (False,),
    "profiling.enable_memory_snapshot": (False,),
    "metrics.enable_wandb": (False,),
    "metrics.save_for_all_ranks": (False,),
    "model.converters": ([], ""),
    "optimizer.early_step_in_backward": (False,),
    "training.compile": (False,),
    "training.enable_cpu_offload": (False,),
    "training.dtype": ("float32",),
    "training.deterministic": (False,),
    "parallelism.pipeline_parallel_degree": (1,),
    "parallelism.context_parallel_degree": (1,),
    "parallelism.expert_parallel_degree": (1,),
    "parallelism.expert_tensor_parallel_degree": (1,),
    "parallelism.enable_compiled_autograd": (False,),
    "checkpoint.initial_load_path": ("",),
    "checkpoint.initial_load_in_hf": (False,),
    "checkpoint.last_save_in_hf": (False,),
    "checkpoint.load_step": (-1,),
    "checkpoint.create_seed_checkpoint": (False,),
    "compile.enable": (False,),
    "validation.enable": (False,),
    "validation.enabled": (False,),
    "fault_tolerance.enable": (False,),
    "memory_estimation.enabled": (False,),
    "experimental.*": ("",),
}
_HOW = (  # ignored: details of features that are off here, or of what the plan decides
    "job.print_args",
    "job.use_for_integration_test",
    "profiling.*",
    "metrics.disable_color_printing",
    "model.tokenizer_path",
    "model.hf_assets_path",
    "model.print_after_conversion",
    "optimizer.implementation",
    "training.mixed_precision_reduce",
    "training.dataset_path",
    "training.gc_*",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.enable_async_tensor_parallel",
    "parallelism.disable_loss_parallel",
    "parallelism.pipeline_parallel_*",
    "parallelism.module_fqns_per_model_part",
    "parallelism.context_parallel_rotate_method",
    "checkpoint.*",
    "activation_checkpoint.*",
    "compile.*",
    "float8.*",
    "mx.*",
    "quantize.*",
    "comm.*",
    "validation.*",
    "fault_tolerance.*",
    "memory_estimation.*",
)


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of the file; options and tables that it lacks have torchtitan's defaults.

    Raises InputError for a file that is not TOML, for unknown options (naming all of them), for values of another type,
    and for options that turn on a feature that autopar lacks.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as TOML: {error}") from error
    loose = [name for name, table in tables.items() if not isinstance(table, dict)]
    unknown = [*loose, *(text for name, table in tables.items() if name not in loose for text in _unknown(name, table))]
    if unknown:
        raise InputError(f"{path}: unknown: {', '.join(unknown)}: remove it, torchtitan 0.2 does not have it either")
    for name, table in tables.items():
        for key, value in table.items():
            _check_off(path, f"{name}.{key}", value)
    return {name: _table(path, name, kind, tables.get(name, {})) for name, kind in TABLES.items()}


def _unknown(name: str, table: Mapping[str, Any]) -> list[str]:
    """The table's unknown options, each with the known one that is probably meant."""
    own = [field.name for field in fields(TABLES[name])] if name in TABLES else []
    unknown = []
    for key in table:
        path = f"{name}.{key}"
        is_known = key in own or path in _RENAMED or any(fnmatchcase(path, pattern) for pattern in (*_OFF, *_HOW))
        if not is_known:
            near = difflib.get_close_matches(key, own, 1)
            unknown.append(f"[{name}] {key}" + (f" (is it {near[0]}?)" if near else ""))
    return unknown


def _check_off(path: Path, name: str, value: object) -> None:
    for pattern, off in _OFF.items():
        if fnmatchcase(name, pattern) and value not in off:
            table, _, key = name.partition(".")
            raise InputError(
                f"{path}: [{table}] {key} = {value!r} has no meaning for autopar: remove it, or write {off[0]!r}"
            )


def _table(path: Path, name: str, kind: type[Table], table: Mapping[str, Any]) -> Table:
    types = get_type_hints(kind)
    options = {_RENAMED.get(f"{name}.{key}", key): value for key, value in table.items()}
    values = {key: _typed(path, f"[{name}] {key}", types[key], value) for key, value in options.items() if key in types}
    return kind(**values)


def _typed(path: Path, name: str, annotation: Any, value: Any) -> Any:
    kinds = getattr(annotation, "__args__", None) or (annotation,)
    if getattr(annotation, "__origin__", None) is tuple:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise InputError(f"{path}: {name} = {value!r}: a list of texts is wanted")
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        words = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise InputError(f"{path}: {name} = {value!r}: {words} is wanted")
    return value
