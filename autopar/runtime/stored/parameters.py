"""Parameters and buffers of the user's model, replaced in place by what the plan stores."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from autopar.errors import InputError
from autopar.layout import Layout
from autopar.plans import Plan
from autopar.python.held import Held
from autopar.runtime.communication.transit import Transit
from autopar.runtime.gradients.own_gradients import added_up, unshared
from autopar.runtime.gradients.parameter_hooks import comes_without_gradient, wait_for_gradients
from autopar.runtime.gradients.passes import fills_gradients
from autopar.runtime.gradients.second_derivatives import are_differentiated

_FIRST = torch.iinfo(torch.int64).max  # autograd runs ready nodes by sequence number, the largest first


def placements(layout: Layout) -> tuple[DTensorPlacement, ...]:
    """A plain layout as DTensor placements.

    >>> placements(Layout.parse("S1, R"))
    (Shard(dim=1), Replicate())
    """
    return tuple(Shard(p.dim) if p.is_sharded else Replicate() for p in layout.placements)


def storage_of(model: nn.Module, plan: Plan) -> dict[str, Layout]:
    """How each parameter is stored, under each of its names: whole if the planned call does not read it.

    Later calls may read it (a stage added later, a head trained last); they are planned around this storage.
    """
    planned = {p.name: p.storage for p in plan.parameters}
    whole = Layout.replicated(len(plan.mesh_shape))
    stored = {}
    for names in tied_names(model):
        layout = next((planned[name] for name in names if name in planned), whole)
        stored.update(dict.fromkeys(names, layout))
    return stored


def distribute_state(
    model: nn.Module,
    storage: Mapping[str, Layout],
    dtype: torch.dtype | None,
    device_mesh: DeviceMesh,
    device: torch.device,
) -> list[weakref.ref[nn.Parameter]]:
    """Replace every parameter by a DTensor stored as `storage` says.

    Values are rank 0's, also for buffers; tensors on the meta device stay there until they are materialised. Tied
    parameters stay one object. `dtype`: for the storage of floating parameters; None: unchanged. Returns weak
    references to the replaced parameters.
    """
    replaced: list[weakref.ref[nn.Parameter]] = []
    with torch.no_grad(), Held(model).replaced():
        for buffer in model.buffers():
            if buffer.is_meta:
                continue
            buffer.data = buffer.data.to(device).contiguous()  # a broadcast cannot write overlapping elements
            if buffer.numel():
                dist.broadcast(buffer.data, src=0)
        for names in tied_names(model):
            old = model.get_parameter(names[0])
            layout = storage[names[0]]
            target = torch.device("meta") if old.is_meta else device
            value = old.detach().to(target, dtype if old.is_floating_point() else None)
            source = None if old.is_meta else 0  # meta tensors are not sent
            new = nn.Parameter(
                distribute_tensor(value, device_mesh, placements(layout), src_data_rank=source),
                requires_grad=old.requires_grad,
            )
            _take_over(old, new)
            replaced.append(weakref.ref(old))
            replace_parameter(model, names, new)
            del old, value  # one whole parameter at a time
    return replaced


def _take_over(old: torch.Tensor, new: torch.Tensor) -> None:
    """Carry over attributes that the user has set (flags for optimizers, such as `_no_weight_decay`), and hooks."""
    for name, value in vars(old).items():
        setattr(new, name, value)
    new._backward_hooks = old._backward_hooks  # the same dictionaries, so that hook handles work
    new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    wait_for_gradients(new)


def dealt_out(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A plain tensor of a parameter's shape as a DTensor in the parameter's layout, with rank 0's values.

    Any other `value` is returned as it is; the code that copies it reports whether it fits.
    """
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or parameter.is_meta:
        return value
    if value.shape != parameter.shape or value.is_meta:
        return value
    # a replicated tensor is overwritten with rank 0's values: not the caller's own tensor
    is_written = any(placement.is_replicate() for placement in parameter.placements)
    on_device = value.detach().to(parameter.device, copy=is_written)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=0)


class _Local(torch.autograd.Function):
    """The local part of a parameter; its gradient becomes a DTensor in the parameter's layout.

    Like `DTensor.to_local`, but without working out the gradient's layout anew for each parameter in each step: hence
    the private `_spec`. Gradients that ops give directly and reduced ones from the transit are added up.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, transit: Transit, place: int, name: str) -> torch.Tensor:
        ctx.given = tensor._spec, transit, place, name
        ctx.set_materialize_grads(False)
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None]:
        spec, transit, place, name = ctx.given
        is_again = gradient is not None and are_differentiated()
        parts = transit.reductions.arrived(place, name, fills=fills_gradients(ctx))
        if gradient is not None and is_again:
            for part in parts:
                gradient = gradient + part
        else:
            parts[:0] = [] if gradient is None else [unshared(gradient)]
            gradient = added_up(parts)
        if gradient is None:
            comes_without_gradient(transit.reductions.parameter(place))
            return None, None, None, None
        if gradient.dtype != spec.tensor_meta.dtype:
            gradient = gradient.to(spec.tensor_meta.dtype)
        if is_again:
            return _with_history(gradient, spec), None, None, None
        # not `DTensor(...)`, whose `__init__` does nothing, slowly
        return DTensor.__new__(DTensor, gradient, spec, requires_grad=False), None, None, None


def _with_history(local: torch.Tensor, spec: Any) -> DTensor:
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)


# Without an active functorch transform, `_Local.apply` inspects all arguments and then calls this; the inspection takes
# longer than the call, for each parameter in each step. Under a transform, parameters are not DTensors.
_local = super(torch.autograd.Function, _Local).apply


def local_of(tensor: torch.Tensor, transit: Transit | None, place: int, name: str) -> torch.Tensor:
    """This rank's part of a parameter or buffer; `transit` brings its gradients (None in compiled graphs)."""
    if not isinstance(tensor, DTensor):
        return tensor
    if transit is None or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.to_local()
    local: torch.Tensor = _local(tensor, transit, place, name)
    if not transit.reductions.brings(place):
        # ops give its whole gradient: added to `.grad` at once, it does not stay beside that of earlier micro-batches
        assert local.grad_fn is not None
        local.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
    return local


def holder_of(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module keeps the parameter or buffer of this name: a dictionary and a key in it."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if attribute in module._parameters else module._buffers), attribute


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter: more than one where it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def without_values(model: nn.Module) -> list[str]:
    """Names of parameters and buffers on the meta device, each tensor once."""
    return [name for tensors in (model.named_parameters(), model.named_buffers()) for name, t in tensors if t.is_meta]


def check_ready(model: nn.Module, replaced: list[weakref.ref[nn.Parameter]]) -> None:
    """Raise InputError if the model has no values yet, or an optimizer holds parameters that were replaced."""
    check_values(model)
    check_no_old_holders(replaced)


def check_values(model: nn.Module) -> None:
    """Raise InputError if the model is still on the meta device."""
    if missing := without_values(model):
        are = "is" if len(missing) == 1 else "are"
        ways = "with autopar.materialise(model), or with autopar.load_weights(model, folder)"
        if set(missing).isdisjoint(model.state_dict()):  # buffers that no file has
            ways = "with autopar.materialise(model), which leaves what is loaded as it is"
        raise InputError(f"{listed(missing)} {are} on the meta device: give the model its values {ways}")


def listed(names: list[str], most: int = 4) -> str:
    """Names for a message.

    >>> listed(["a", "b", "c"], most=2), listed(["a"])
    ("'a', 'b' and 1 more", "'a'")
    """
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def check_no_old_holders(replaced: list[weakref.ref[nn.Parameter]]) -> None:
    """Raise InputError if an optimizer, or a module outside of the model, still holds parameters that were replaced.

    An optimizer is recognised by a list of them under the key "params" of a dict, as in `param_groups`, a module by its
    `_parameters`; any other holder (a variable, a copy of the weights) is ignored.
    """
    alive = [p for p in (ref() for ref in replaced) if p is not None]
    if not alive:
        return
    holders = [holder for holder in gc.get_referrers(*alive) if holder is not alive]
    for module in gc.get_objects() if any(isinstance(holder, dict) for holder in holders) else ():
        if issubclass(type(module), nn.Module) and any(module._parameters is holder for holder in holders):
            raise InputError(
                f"a {type(module).__name__} outside of the model holds a parameter that autoparallelize has replaced, "
                "which it shared with the model, and would train a copy of its own: let it share the new one "
                "(`head.weight = body.embedding.weight` after autoparallelize), or plan a module that holds both"
            )
    lists = [holder for holder in holders if isinstance(holder, list)]
    groups = [group for group in (gc.get_referrers(*lists) if lists else ()) if isinstance(group, dict)]
    if any(group.get("params") is holder for group in groups for holder in lists):
        raise InputError(
            f"an optimizer still holds {len(alive)} parameters that autoparallelize has replaced, and would update "
            "tensors that the model no longer uses: build the optimizer after autoparallelize (after materialise or "
            "load_weights for a model from the meta device)"
        )


@contextmanager
def plain_parameters(model: nn.Module, device: str = "meta") -> Iterator[None]:
    """For the duration, the model's parameters are data-free tensors of global shapes, so that it can be traced."""
    groups = [(names, _registered(model, names[0])) for names in tied_names(model)]
    holders = Held(model)
    try:
        for names, parameter in groups:
            plain = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            replace_parameter(model, names, nn.Parameter(plain, requires_grad=parameter.requires_grad))
        holders.update()
        yield
    finally:
        for names, parameter in groups:
            replace_parameter(model, names, parameter)
        holders.update()


def _registered(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter of this name; raises InputError if a plain tensor is in its place."""
    holder, attribute = holder_of(model, name)
    if not isinstance(holder[attribute], nn.Parameter):
        raise InputError(
            f"a plain tensor stands in for the parameter '{name}', as torch.func.functional_call has it, in a kind of "
            "call that was not planned yet: make one such call of the model itself first, give functional_call tensors "
            "that require gradients where the parameters do, or call a model without a plan"
        )
    return holder[attribute]


def replace_parameter(model: nn.Module, names: list[str], new: nn.Parameter) -> None:
    """Put `new` in a parameter's place, under all of its names."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, new)  # not `_parameters[...]`: RNNs keep a second list
