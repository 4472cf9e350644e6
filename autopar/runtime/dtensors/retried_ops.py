"""Ops that torch (2.11 to 2.15) refuses on DTensors, done another way, as optimizers and loops use them.

- In place, on a number whose parts are not combined yet: `norm.clamp_(min=1e-6)`, `squares.mean().sqrt_()`. The parts
  are combined first.
- `norm * factor`, after `norm * 2.0`: torch takes the tensor for the number, and fails. And a whole count added to
  parts of one, or written into them: torch gives each of two parts 3 / 2, as float32 or rounded. Combined parts avoid
  both.
- On lists, where torch has a rule for single tensors only: `torch._foreach_copy_`.
- With `out=`, where torch has no rule for it.
- Without a rule, or where the rule fails (`torch.cdist`, `torch.renorm`, `weight[weight > 0]`), or in place where it
  would change the layout (`weight[weight.abs() < 0.1] = 0.0`), which torch refuses, or loses the write: each rank
  gathers the whole, and computes on it.
- A view that needs elements of several ranks (`weight.flatten()` of rows shared unevenly) is taken of a gathered copy,
  as torch does for slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import InputError
from autopar.runtime.dtensors.joined_parts import has_parts_of_norm, is_partial, joined, neutral_number, whole
from autopar.runtime.dtensors.lost_writes import refuse_lost_write

_aten = torch.ops.aten
_SINGLE: dict[str, OpOverload[..., Any]] = {  # by the name of the op on lists
    "aten::_foreach_copy": _aten.copy.default,
    "aten::_foreach_copy_": _aten.copy_.default,
    "aten::_foreach_maximum": _aten.clamp_min.default,
    "aten::_foreach_maximum_": _aten.clamp_min_.default,
    "aten::_foreach_minimum": _aten.clamp_max.default,
    "aten::_foreach_minimum_": _aten.clamp_max_.default,
    "aten::_foreach_addcdiv": _aten.addcdiv.default,
    "aten::_foreach_addcmul": _aten.addcmul.default,
}
_Call = Callable[[], Any]


@functools.cache
def retry_ops() -> None:
    """From now on, do so; once a process.

    The dispatcher is private. It calls this method if it knows no layouts for a call yet, and returns at once what the
    method returns in place of layouts.
    """
    kind: Any = type(DTensor._op_dispatcher)
    kind._propagate_op_sharding_dispatch_slow_path = _retried(kind._propagate_op_sharding_dispatch_slow_path)
    kind._dispatch_fast_path_python_tail = _retried_at_end(kind._dispatch_fast_path_python_tail)


def _retried(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def propagate(
        dispatcher: Any, op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *others: Any
    ) -> Any:
        try:
            found = own(dispatcher, op_call, args, kwargs, *others)
        except RuntimeError as error:
            again = _another_way(op_call, args, kwargs, is_ruled=not isinstance(error, NotImplementedError))
            if again is None:
                raise
        else:
            is_moved = getattr(found, "needs_redistribute", False)
            is_mixed_up = is_moved and (
                _has_number_as_tensor(op_call, args)
                or _has_parts_of_count(args)
                or _writes_parts_in_list(op_call, args)
            )
            again = _on_joined(op_call, args, kwargs) if is_mixed_up else None
            if _writes_where_mask(op_call, args):
                again = _another_way(op_call, args, kwargs, is_ruled=False)
            elif again is None and is_moved and _moves_what_it_writes(found, op_call, args):
                again = _another_way(op_call, args, kwargs, is_ruled=True)
            if again is None:
                return found
        return again()

    return propagate


def _retried_at_end(own: Callable[..., Any]) -> Callable[..., Any]:
    """torch 2.11 refuses an op in place that would change the layout only once it has run on a copy."""

    @functools.wraps(own)
    def tail(
        dispatcher: Any, op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *others: Any
    ) -> Any:
        try:
            return own(dispatcher, op_call, args, kwargs, *others)
        except RuntimeError as error:
            is_refused = "in-place operations that require placement changes" in str(error)
            again = _another_way(op_call, args, kwargs, is_ruled=True) if is_refused else None
            if again is None:
                raise
        return again()

    return tail


def _another_way(
    op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_ruled: bool
) -> _Call | None:
    """A call that gives the op's result without torch's rule for it; None: there is none."""
    name = op_call._schema.name
    if isinstance(kwargs.get("out"), DTensor):
        return functools.partial(_into_out, op_call, args, kwargs)
    if is_ruled and (on_joined := _on_joined(op_call, args, kwargs)) is not None:
        return on_joined
    if not is_ruled and name in _SINGLE:
        return functools.partial(_one_by_one, op_call, args, kwargs)
    if op_call.namespace != "aten" or {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & {*op_call.tags}:
        return None
    if is_ruled and op_call.is_view and not all(placement.is_replicate() for placement in args[0].placements):
        return functools.partial(_viewed, op_call, args, kwargs)
    written = sum(argument.alias_info is not None for argument in op_call._schema.arguments)
    if not written:
        return functools.partial(_on_wholes, op_call, args, kwargs)
    if name.endswith("_") and written == 1 and isinstance(args[0], DTensor) and not is_partial(args[0]):
        return functools.partial(_into_part, op_call, args, kwargs)
    return None


def _has_number_as_tensor(op_call: OpOverload[..., Any], args: tuple[Any, ...]) -> bool:
    """torch would find the layouts of this call again for one with a tensor in place of the number."""
    pairs = zip(op_call._schema.arguments, args, strict=False)
    return any(isinstance(value, (int, float)) and str(argument.type) == "Tensor" for argument, value in pairs)


def _writes_where_mask(op_call: OpOverload[..., Any], args: tuple[Any, ...]) -> bool:
    """torch takes a mask for an index into one dim, and fails on the ranks whose shards have other shapes than it."""
    if op_call not in (_aten.index_put.default, _aten.index_put_.default):
        return False
    return any(isinstance(index, DTensor) and index.dtype == torch.bool and index.ndim > 1 for index in args[1])


def _moves_what_it_writes(found: Any, op_call: OpOverload[..., Any], args: tuple[Any, ...]) -> bool:
    """torch would write into a copy in another layout, and lose it (`parameter.view(-1).index_copy_`)."""
    if not op_call._schema.name.endswith("_") or not isinstance(args[0], DTensor):
        return False
    is_moved: bool = found.redistribute_schema.args_schema[0].placements != args[0].placements
    return is_moved


def _has_parts_of_count(args: tuple[Any, ...]) -> bool:
    """torch would divide whole integers by the number of parts, to add them to parts."""
    return any(is_partial(value) and not value.is_floating_point() for value in tree_leaves(args))


def _writes_parts_in_list(op_call: OpOverload[..., Any], args: tuple[Any, ...]) -> bool:
    """torch 2.11 would write into combined copies of these, and lose it."""
    is_in_place = op_call._schema.name.endswith("_")
    return is_in_place and isinstance(args[0], (list, tuple)) and any(is_partial(value) for value in args[0])


def _on_joined(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """The op on combined parts; not for `out=...` and ops that are views."""
    if not any(is_partial(value) for value in tree_leaves((args, kwargs))):
        return None
    is_in_place = op_call._schema.name.endswith("_")
    if any(argument.alias_info is not None for argument in op_call._schema.arguments[is_in_place:]):
        return None
    written = [tensor for tensor in tree_leaves(args[0]) if is_partial(tensor)] if is_in_place else []

    def call() -> Any:
        wholes, targets = tree_map(joined, args), [joined(tensor) for tensor in written]
        if written:
            target_of = {id(tensor): target for tensor, target in zip(written, targets, strict=True)}
            wholes = (tree_map(lambda value: target_of.get(id(value), value), args[0]), *wholes[1:])
        found = op_call(*wholes, **tree_map(joined, kwargs))
        for tensor, target in zip(written, targets, strict=True):
            _store(op_call, tensor, target)
        return (args[0] if found is not None else None) if is_in_place else found

    return call


def _store(op_call: OpOverload[..., Any], tensor: DTensor, combined: DTensor) -> None:
    """Write the combined value into a tensor of parts: in place of them, or as parts if others see its memory."""
    if not tensor._is_view() and _holders(tensor._local_tensor) == _holders(torch.empty(1)):
        tensor._local_tensor, tensor._spec = combined._local_tensor, combined._spec
        return
    refuse_lost_write(op_call, tensor)
    value, neutral = combined._local_tensor, neutral_number(tensor)
    if has_parts_of_norm(tensor) and (value < 0).any():
        raise InputError(
            f"{op_call._schema.name.removeprefix('aten::')} writes a negative number into a view of a norm, whose "
            "parts on the ranks cannot hold it: write it without the underscore (norm = -norm)"
        )
    tensor._local_tensor.copy_(value) if neutral is None else tensor._local_tensor.fill_(neutral)


def _holders(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _one_by_one(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op on lists as ops on single tensors; a last argument of numbers has one for each."""
    single, count = _SINGLE[op_call._schema.name], len(args[0])
    if single in (_aten.copy.default, _aten.copy_.default):
        args = args[:2]  # without `non_blocking`
    rows = []
    for value in args:
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        rows.append(value if isinstance(value, (list, tuple)) else [value] * count)
    is_scaled = single in (_aten.addcdiv.default, _aten.addcmul.default)
    results = []
    for row in zip(*rows, strict=True):
        tensors, number = (row[:3], {"value": row[3]} if len(row) > 3 else dict(kwargs)) if is_scaled else (row, {})
        results.append(single(*tensors, **number))
    return None if op_call._schema.name.endswith("_") else results


def _into_out(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """`torch.nan_to_num(gradient, out=gradient)`: the result is copied into `out`, whose layout stays."""
    others = dict(kwargs)
    out: DTensor = others.pop("out")
    out.copy_(op_call._overloadpacket(*args, **others))
    return out


def _on_wholes(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mesh = next(value.device_mesh for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor))
    with torch.no_grad():
        result = op_call(*tree_map(whole, args), **tree_map(whole, kwargs))

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return tree_map(wrapped, result)


def _viewed(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a gathered copy: writes into it are refused (`lost_writes`)."""
    with torch.no_grad():
        gathered = args[0].detach().redistribute(placements=[Replicate()] * args[0].device_mesh.ndim)
        return op_call(gathered, *args[1:], **kwargs)


def _into_part(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """An op in place on the whole of a tensor, of which each rank writes its part."""
    tensor: DTensor = args[0]
    refuse_lost_write(op_call, tensor)
    with torch.no_grad():
        written = tensor.full_tensor().clone()
        op_call(written, *tree_map(whole, args[1:]), **tree_map(whole, kwargs))
        replicated = DTensor.from_local(written, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
        tensor._local_tensor.copy_(replicated.redistribute(placements=tensor.placements)._local_tensor)
    return tensor
