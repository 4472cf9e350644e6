"""A torchtitan file is converted to a mesh, a preset, a budget and examples; unsupported options are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autopar
from autopar import Cluster, InputError
from autopar.integrations.torchtitan import Job, read_job

# The tables of torchtitan's own llama3_8b.toml, including options that only concern execution.
PUBLISHED = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
print_args = false
[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
[metrics]
log_freq = 10
enable_tensorboard = true
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
context_parallel_degree = 1
[checkpoint]
enable = false
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
filter_fqns = ["output"]
"""


def _job(folder: Path, text: str, processes: int = 64) -> Job:
    (folder / "job.toml").write_text(text)
    return read_job(folder / "job.toml", processes)


def test_a_published_file(tmp_path: Path) -> None:
    job = _job(tmp_path, PUBLISHED)
    assert (job.mesh_shape, job.axis_names) == ((8, 8), ("dp_shard", "tp"))
    assert (job.batch, job.rows, job.micro_batches) == (8, 8, 1)
    assert job.examples()["input_ids"].shape == (8, 8192)
    assert job.options()["constraints"] == ["fsdp+tp"]
    assert job.options()["precision"] == "bf16"
    assert (job.optimizer.beta2, job.training.max_norm) == (0.95, 1.0)
    with torch.device("meta"):
        assert sum(p.numel() for p in job.build().parameters()) == 8_030_261_248


@pytest.mark.parametrize(
    ("replicas", "shards", "tensor", "constraints", "shape"),
    [
        (8, 1, 1, ["ddp"], (8,)),
        (1, -1, 1, ["fsdp"], (8,)),
        (1, 1, 8, ["tp"], (8,)),
        (2, -1, 1, ["hsdp"], (2, 4)),
        (2, 1, 4, ["tp"], (2, 4)),
        (1, 2, 4, ["fsdp+tp"], (2, 4)),
    ],
)
def test_degrees_are_a_mesh_and_a_scheme(
    replicas: int, shards: int, tensor: int, constraints: list[str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    text = f"[parallelism]\ndata_parallel_replicate_degree = {replicas}\ndata_parallel_shard_degree = {shards}\n"
    text += f"tensor_parallel_degree = {tensor}\n"
    job = _job(tmp_path, text, 8)
    assert (job.options()["constraints"], job.mesh_shape) == (constraints, shape)
    free = _job(tmp_path, text + '[autopar]\nscheme = "free"\nconstraints = ["output:* = R"]\n', 8)
    assert (free.options()["constraints"], free.mesh_shape) == (["output:* = R"], shape)


def test_the_options_are_those_of_plan(tmp_path: Path) -> None:
    own = '[autopar]\nmemory_budget = "1GiB"\ntime_limit = 30\n'
    text = "[training]\nlocal_batch_size = 1\nglobal_batch_size = 8\nseq_len = 64\n"
    job = _job(tmp_path, text + "[activation_checkpoint]\nmode = 'none'\n" + own, 4)
    with torch.device("meta"):
        model = job.build()
    made = autopar.plan(model, job.examples(), Cluster.preset("h100", job.mesh_shape, job.axis_names), **job.options())
    assert made.micro_batches == 2
    assert made.memory_budget_bytes == 2**30
    assert made.constraints == ("fsdp", "recompute:* = never")
    assert all(p.storage.placements[0].is_sharded for p in made.parameters)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[model]\nflavour = 'x'\n[speed]\nwarp = 9\n",
            r"unknown: \[model\] flavour \(is it flavor\?\), \[speed\] warp",
        ),
        ("steps = 3", "unknown: steps"),
        ("[training]\nsteps = '3'", r"\[training\] steps = '3': int is wanted"),
        ("[training]\nsteps = true", r"\[training\] steps = True: int is wanted"),
        ("[autopar]\nconstraints = 'fsdp'", r"\[autopar\] constraints = 'fsdp': a list of texts"),
        ("[parallelism]\npipeline_parallel_degree = 2", r"\[parallelism\] pipeline_parallel_degree = 2 has no meaning"),
        ("[model]\nconverters = ['float8']", r"\[model\] converters = \['float8'\] has no meaning .* or write \[\]"),
        ("[experimental]\ncustom_import = 'mine'", r"\[experimental\] custom_import = 'mine' has no meaning"),
        ("[parallelism]\ntensor_parallel_degree = 3", "comes to dp_replicate 1, dp_shard 2, tp 3, which is not the 8"),
        ("[training]\nglobal_batch_size = 9", "global_batch_size = 9 is no multiple of the 64 sequences"),
        ("[training]\nmixed_precision_param = 'fp8'", "mixed_precision_param = 'fp8': it must be 'bfloat16' or"),
        ("[optimizer]\nname = 'Lion'", r"\[optimizer\] name = 'Lion': it must be 'AdamW' or 'Adam'"),
        ("[training\n", "cannot be read as TOML"),
    ],
)
def test_what_cannot_be_is_told(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told) as error:
        _job(tmp_path, text, 8)
    assert str(tmp_path / "job.toml") in str(error.value)
    assert "\n" not in str(error.value)


def test_what_shows_later_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read as TOML"):
        read_job(tmp_path / "none.toml", 8)
    three = (
        "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2\ntensor_parallel_degree = 2"
    )
    with pytest.raises(InputError, match="no preset has three axes"):
        _job(tmp_path, three, 8).options()
    with pytest.raises(InputError, match="this reader builds llama3 as debugmodel, 8B, 70B"):
        _job(tmp_path, "[model]\nname = 'deepseek_v3'", 8).build()
