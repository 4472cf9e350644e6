"""States of a planned model: attributes that forward carries from call to call, passed as arguments and set again.

Every rank has a state whole, or with `inputs="local"` its rows of a state that has rows, along whichever dim they lie.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.calls.states import State, placeholder_name, states_in
from autopar.errors import InputError
from autopar.layout import Layout, R, shard, take_shard
from autopar.runtime.calling.calls import LayoutOnMesh, replaced
from autopar.runtime.calling.outputs import returned, rows_of_rank, rows_or_whole
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.programs import Program, Programs, made_by_calls


def with_states(states: Mapping[str, State], model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, with the states added under their argument names.

    Raises InputError for a state on the meta device.
    """
    if not states:
        return kwargs
    values = {argument: state.read(model) for argument, state in states.items()}
    for argument, value in values.items():
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value)):
            raise InputError(
                f"the state '{argument}', which forward carries from call to call, is on the meta device and has no "
                "values: before the first call, set it to a tensor on the model's device, or to None"
            )
    return {**kwargs, **values}


def put_states(
    results: list[Any], outputs: Sequence[Any], program: Program, programs: Programs, device_mesh: DeviceMesh
) -> None:
    """Put the states that a call has made into its `results`, at their places; `outputs`: local tensors."""
    states = {p: name for p, (argument, name) in program.traced.set_outputs.items() if argument in programs.states}
    if not states:
        return
    layouts = [program.lowered.outputs[place] for place in states]
    is_local = program.plan.inputs == "local"
    values = returned([outputs[place] for place in states], layouts, device_mesh, whole=not is_local)
    if is_local:
        shapes = [at[1] for at in layouts if at is not None]
        rows = programs.rows_of_states
        dims = [_dim_of(name, shape, rows, device_mesh) for name, shape in zip(states.values(), shapes, strict=True)]
        values = rows_or_whole(values, layouts, device_mesh, dims)
    if not torch.compiler.is_compiling():
        made_by_calls.update(dict.fromkeys(values))
    for place, value in zip(states, values, strict=True):
        results[place] = value


def looks_of_set(programs: Programs, model: nn.Module) -> dict[str, Any]:
    """Data-free values of attributes that calls set and that no call has read yet, to be passed to a trace.

    They turn out to be states if the traced call reads them.
    """
    set_by_calls = {argument: None for state in programs.traces for argument, _ in state.set_outputs.values()}
    states = states_in({argument: None for argument in set_by_calls if argument not in programs.states}, {})
    paths = {path for path, _ in model.named_modules()}
    values = {state.argument: state.read(model) for state in states if state.path in paths}  # not those of the loss
    return {name: pytree.tree_map_only(torch.Tensor, _look, value) for name, value in values.items()}


def _look(tensor: torch.Tensor) -> torch.Tensor:
    look = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return look.requires_grad_(tensor.requires_grad)


def take_over(model: nn.Module, program: Program, known_states: Collection[str], device_mesh: DeviceMesh) -> None:
    """Bring states that `program` is the first to read (those not in `known_states`) into the layouts that calls get.

    So far calls have set them as values that only the loop reads: of the whole batch, on every rank.
    """
    is_local = program.plan.inputs == "local"

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        layout_on_mesh = program.inputs.get(name)
        if is_local and layout_on_mesh is not None and not layout_on_mesh[0].is_replicated:
            return rows_of_rank(tensor, device_mesh, next(p.dim for p in layout_on_mesh[0].placements if p.is_sharded))
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    for argument, state in program.traced.states.items():
        if argument not in known_states:
            state.put(model, replaced(argument, state.read(model), part))


def _dim_of(name: str, shape: Sequence[int], rows: Mapping[str, int], device_mesh: DeviceMesh) -> int:
    """The dim along which a state is dealt out; -1 if it is not."""
    dim = rows.get(name, -1)
    dim = dim if dim < len(shape) else -1
    if dim >= 0 and shape[dim] % device_mesh.size():
        raise InputError(
            f"with inputs=\"local\" each rank has its own rows of the state '{name}', which forward carries from call "
            f"to call, and {device_mesh.size()} ranks cannot share {shape[dim]} on dim {dim} evenly: pass it as an "
            'argument and return it, or plan with inputs="global"'
        )
    return dim


def layouts_of_states(rows: Mapping[str, int], mesh: LocalMesh) -> dict[str, LayoutOnMesh]:
    """The layouts of states whose rows lie along these dims, by their names as inputs."""
    outer = [math.prod(mesh.shape[:axis]) for axis in range(len(mesh.shape))]
    return {
        name: (Layout(tuple(R if dim < 0 else shard(dim, outer_size) for outer_size in outer)), mesh.shape)
        for name, dim in rows.items()
    }


def check_rows_of_states(programs: Programs, tensors: Mapping[str, torch.Tensor], error: Exception) -> None:
    """Raise InputError, caused by the `error` of a call, if a state has another number of rows than this rank passes.

    `tensors`: those of the call, by name.
    """
    dims = programs.rows_of_states
    rows = next((len(tensor) for name, tensor in tensors.items() if name not in dims and tensor.ndim), 0)
    argument_of = {placeholder_name(argument): argument for argument in programs.states}
    for name, dim in dims.items():
        state = tensors.get(name)
        if state is not None and 0 <= dim < state.ndim and state.shape[dim] != rows:
            raise InputError(
                f"with inputs=\"local\" each rank has its own rows of the state '{argument_of.get(name, name)}', which "
                f"forward carries from call to call: it has {state.shape[dim]} on dim {dim}, but this rank passes "
                f"{rows} rows. Set it to this rank's rows, or to None"
            ) from error


def deal_out_states(model: nn.Module, program: Program, mesh: LocalMesh, device: torch.device) -> None:
    """Put the states of the example calls on the device, with rank 0's values: every rank the whole, or its rows.

    States that the caller sets later must lie as calls leave them.
    """

    def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else _rows_of_first_rank(tensor, program.inputs.get(name), mesh, device)

    for argument, state in program.traced.states.items():
        state.put(model, replaced(argument, state.read(model), own))


def _rows_of_first_rank(
    tensor: torch.Tensor, layout_on_mesh: LayoutOnMesh | None, mesh: LocalMesh, device: torch.device
) -> torch.Tensor:
    needs_grad = tensor.requires_grad
    if tensor.layout == torch.strided and tensor.numel():
        tensor = tensor.detach().to(device).contiguous().clone()  # a broadcast cannot write elements that share memory
        dist.broadcast(tensor, src=0)
        if layout_on_mesh is not None and not layout_on_mesh[0].is_replicated:
            tensor = take_shard(tensor, layout_on_mesh[0], mesh.shape, mesh.coordinate).clone()
    return tensor.requires_grad_() if needs_grad else tensor
