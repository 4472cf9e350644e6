"""Data, fully sharded, tensor and sequence parallelism, written by hand with torch's own API.

Each function takes a model, the path of its list of blocks and a mesh of one axis, and returns the model to be trained.
Tensor and sequence parallelism are for Llama alone: they rely on its layers' names.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def ddp(model: nn.Module, blocks: str, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Module, blocks: str, mesh: DeviceMesh) -> nn.Module:
    for block in model.get_submodule(blocks):  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, blocks: str, mesh: DeviceMesh) -> nn.Module:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for block in model.get_submodule(blocks):  # type: ignore[attr-defined]
        plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
        parallelize_module(block, mesh, plan)
    return model


def sequence_parallel(model: nn.Module, blocks: str, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism in which activations outside the blocks' products are sharded by sequence positions."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    parts, whole = Shard(1), Replicate()
    for block in model.get_submodule(blocks):  # type: ignore[attr-defined]
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel(output_layouts=parts) for name in rows}
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": parts}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=parts, desired_input_layouts=whole)
        parallelize_module(block, mesh, plan)
    ends: dict[str, ParallelStyle] = {  # embeddings stay whole: rotary embeddings take their length from them
        f"{blocks}.0": PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(parts,), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=parts, output_layouts=whole),
    }
    return parallelize_module(model, mesh, ends)


BY_HAND = {"ddp": ddp, "fsdp": fsdp, "tp": tensor_parallel, "sp": sequence_parallel}
