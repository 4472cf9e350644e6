"""`apply`: a model and a plan for it become a model that runs the plan."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import InputError, PlanMismatchError
from autopar.fingerprints.fingerprint import fingerprint
from autopar.plans import Plan
from autopar.runtime.calling.entered import let_submodules_be_called
from autopar.runtime.calling.states import deal_out_states
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.dtensors.advice import advise
from autopar.runtime.dtensors.anomalies import let_anomalies_be_found
from autopar.runtime.dtensors.assigned_data import assign_data
from autopar.runtime.dtensors.convolutions import mend_convolutions
from autopar.runtime.dtensors.counted_writes import count_writes_into_lists
from autopar.runtime.dtensors.lost_writes import refuse_lost_writes
from autopar.runtime.dtensors.mended_gradients import mend_gradients
from autopar.runtime.dtensors.mended_ops import mend_ops
from autopar.runtime.dtensors.mended_reductions import mend_reductions
from autopar.runtime.dtensors.optimizers import refuse_unfit
from autopar.runtime.dtensors.retried_ops import retry_ops
from autopar.runtime.dtensors.whole_draws import draw_whole
from autopar.runtime.dtensors.whole_inits import init_whole
from autopar.runtime.dtensors.whole_numbers import read_whole_numbers
from autopar.runtime.gradients.copied_gradients import let_gradients_be_copied
from autopar.runtime.gradients.dropped_gradients import drop_with_gradients
from autopar.runtime.gradients.early_steps import refuse_early_steps
from autopar.runtime.gradients.overflow import find_overflows_everywhere
from autopar.runtime.gradients.parameter_hooks import hooks_wait_for_gradients
from autopar.runtime.lowering.conversions import dtype_named
from autopar.runtime.lowering.lowering import Rank
from autopar.runtime.planned import Planned
from autopar.runtime.randomness import RandomState, agree_seed
from autopar.runtime.ranks.agreement import agree
from autopar.runtime.ranks.alike import group_of_all
from autopar.runtime.ranks.failures import count_steps, take_over_timeout
from autopar.runtime.ranks.leaving import leave_quietly
from autopar.runtime.ranks.standing import note_from_now_on
from autopar.runtime.stored.model_class import ATTRIBUTE, planned_class
from autopar.runtime.stored.parameters import distribute_state, listed, storage_of, tied_names, without_values
from autopar.runtime.stored.shared_memory import refuse_shared_memory
from autopar.runtime.stored.structure import Structure, refuse_backward_hooks
from autopar.runtime.traces import Replan, Traced
from autopar.runtime.weights.loaded_states import load_into_submodules, load_optimizer_states

_moved: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that DTensors have replaced in a planned model
_WRAPPERS = {
    **dict.fromkeys(("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"), "pass what it wraps"),
    "OptimizedModule": "pass the model itself, and compile what autoparallelize returns",
}


def apply(model: nn.Module, traced: Traced, plan: Plan, device_mesh: DeviceMesh, *, replan: Replan) -> nn.Module:
    """Make `model` run `plan` on `device_mesh`; called on every rank. Returns the same object.

    Its class becomes a subclass of the user's. Its parameters become DTensors with rank 0's values, stored as the plan
    says; those on the meta device stay there until `materialise` or `load_weights`. A call of another kind than the
    traced one (other shapes, other arguments, eval) asks `replan` for its graph and plan.

    Raises PlanMismatchError or InputError, on every rank, before anything is changed.
    """
    device = _device(device_mesh)
    check_world(device_mesh)
    take_over_timeout(device_mesh)
    group_of_all()  # may create a group, which is collective
    error: Exception | None = None
    try:
        _check(model, traced, plan, device_mesh)
        precision = dtype_named(plan.precision.get("parameter"))
        rank = Rank(LocalMesh.of(device_mesh), device, _stored_dtypes(model, precision))
        storage = storage_of(model, plan)
        planned = Planned(type(model), device_mesh, rank, storage, replan, plan.micro_batches)
        planned.built_dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        planned.add(traced, plan, model)
    except Exception as found:  # every rank must learn of it before any of them waits for a collective
        error = found
    digests = {
        "the plan": hashlib.sha256(plan.essence().encode()).hexdigest(),
        "which parameters and buffers are on the meta device": repr(without_values(model)),
    }
    agree(device, digests, error)
    planned.random = RandomState(agree_seed(rank.mesh.groups, device), device)
    _moved.update(dict.fromkeys(model.parameters()))
    planned.replaced = distribute_state(model, storage, precision, device_mesh, device)
    model.__class__ = planned_class(type(model), traced.loss_names)
    setattr(model, ATTRIBUTE, planned)
    let_submodules_be_called(model)
    load_into_submodules(model)
    planned.structure = Structure(model)
    deal_out_states(model, planned.programs.first, rank.mesh, device)
    _support_loops(device)
    return model


def _support_loops(device: torch.device) -> None:
    """Wrap what training loops call around planned models, each once a process: for DTensors torch lacks some of it, or
    does it wrong, and errors of a rank have to reach the others."""
    leave_quietly()
    note_from_now_on()
    count_steps()
    let_anomalies_be_found()
    refuse_unfit()
    refuse_early_steps()
    load_optimizer_states()
    assign_data()
    let_gradients_be_copied()
    drop_with_gradients()
    hooks_wait_for_gradients()
    advise()
    read_whole_numbers()
    mend_gradients()
    mend_ops()
    mend_convolutions()
    mend_reductions()
    init_whole()
    retry_ops()
    refuse_lost_writes()
    count_writes_into_lists()
    find_overflows_everywhere()
    if device.type == "cpu":
        draw_whole()


def check_world(device_mesh: DeviceMesh) -> None:
    """Raise InputError for a mesh that leaves ranks out: these would not be in its process groups."""
    if device_mesh.size() != dist.get_world_size():
        raise InputError(f"the mesh has {device_mesh.size()} ranks and there are {dist.get_world_size()}: use them all")


def check_unplanned(model: nn.Module) -> None:
    """Raise InputError for a model that is planned, wrapped or sharded already, or that cannot be planned as it is."""
    if hasattr(model, ATTRIBUTE):
        raise InputError("the model is already planned: build a new one to plan it again")
    kind = type(model).__name__
    if kind in _WRAPPERS and type(model).__module__.startswith("torch."):
        raise InputError(f"the model is wrapped in {kind}: {_WRAPPERS[kind]}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("the model is a scripted one, which cannot be traced: pass the module that was scripted")
    refuse_backward_hooks(model)
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if names:
        raise InputError(
            f"{listed(names)} {'is a DTensor' if len(names) == 1 else 'are DTensors'} already (fully_shard and "
            "parallelize_module make them, and so does planning another model with the same modules): pass the model "
            "as it was built, and models that share modules as one"
        )
    if moved := [name for name, parameter in model.named_parameters() if parameter in _moved]:
        raise InputError(
            f"{listed(moved)} {'is' if len(moved) == 1 else 'are'} also in a model that was planned before, which has "
            "a DTensor instead now, so they would no longer be tied: plan models that share parameters as one, a "
            "module that holds both and whose forward is the whole step"
        )
    refuse_shared_memory(model)


def _check(model: nn.Module, traced: Traced, plan: Plan, device_mesh: DeviceMesh) -> None:
    """Checks that need no other rank."""
    check_unplanned(model)
    if "forward" in vars(model):
        raise InputError(
            "`forward` is set on the model's instance, where it would hide the planned one: define it in the class"
        )
    if tuple(plan.mesh_shape) != tuple(device_mesh.shape):
        raise PlanMismatchError(f"the plan is for a mesh of {plan.mesh_shape}, this one is {tuple(device_mesh.shape)}")
    if plan.fingerprints.get("graph", "") != fingerprint(traced.graph):
        raise PlanMismatchError(
            "the plan is for another graph than the model's: plan again with this model and these examples"
        )
    names = {name for tied in tied_names(model) for name in tied}
    for parameter in plan.parameters:
        if parameter.name not in names:
            raise PlanMismatchError(f"the plan stores a parameter '{parameter.name}' that the model does not have")
        if tuple(parameter.shape) != tuple(model.get_parameter(parameter.name).shape):
            raise PlanMismatchError(
                f"parameter '{parameter.name}' has another shape than in the plan: {parameter.shape}"
            )
        if not parameter.storage.is_plain(plan.mesh_shape):
            raise PlanMismatchError(f"parameter '{parameter.name}' cannot be stored as {parameter.storage}")


def _device(device_mesh: DeviceMesh) -> torch.device:
    if device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_mesh.device_type)


def _stored_dtypes(model: nn.Module, precision: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype in which each parameter and buffer will lie in memory, under each of its names."""
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dtypes[name] = precision if precision is not None and parameter.is_floating_point() else parameter.dtype
    return dtypes
