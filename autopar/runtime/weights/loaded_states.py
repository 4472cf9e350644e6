"""States for `load_state_dict`: plain tensors are sharded like the parameters, shards of another rank are refused."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves

from autopar.errors import InputError
from autopar.runtime.ranks.agreement import agree
from autopar.runtime.stored.parameters import dealt_out


def check_own_shards(pairs: Iterable[tuple[Any, torch.Tensor]]) -> None:
    """Raise InputError, on every rank, where a value that is loaded into a parameter is a shard of another rank.

    `torch.save` writes a DTensor as the shards of the rank that saves, and every rank that loads the file gets these.
    Their mesh was read from the file: it is another object, and knows the rank that saved. If no value has such a mesh,
    the ranks do not communicate.
    """
    read = [(v, p) for v, p in pairs if isinstance(v, DTensor) and isinstance(p, DTensor)]
    read = [(v, p) for v, p in read if v.device_mesh is not p.device_mesh and any(x.is_shard() for x in v.placements)]
    if not read:
        return
    wrong = [v.device_mesh for v, p in read if v.device_mesh.get_coordinate() != p.device_mesh.get_coordinate()]
    error = None
    if wrong:
        error = InputError(
            f"load_state_dict is given the shards of rank {wrong[0]._rank}: a file that one rank has written with "
            "torch.save holds its shards alone. Save on every rank with autopar.save_checkpoint, or whole weights with "
            "autopar.export_full_state"
        )
    agree(read[0][1].device, {}, error)


def deal_out_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Turn plain tensors that `load_state_dict` is about to read into a module into DTensors like its parameters."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    check_own_shards((state_dict.get(prefix + name), parameter) for name, parameter in parameters.items())
    for name, parameter in parameters.items():
        if (value := state_dict.get(prefix + name)) is not None:
            state_dict[prefix + name] = _dealt(value, parameter)


def load_into_submodules(model: nn.Module) -> None:
    """From now on `load_state_dict` of a submodule takes plain tensors, as that of a planned model does."""
    for module in model.modules():
        if module is not model:
            module.register_load_state_dict_pre_hook(deal_out_state)


@functools.cache
def load_optimizer_states() -> None:
    """From now on `optimizer.load_state_dict` takes plain state for DTensors, such as one saved by a single process."""
    original = Optimizer.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        original(self, _fitted(self, state_dict))

    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _fitted(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(keys) != len(parameters) or not any(isinstance(p, DTensor) for p in parameters):
        return state_dict  # torch reports what does not fit
    by_key = dict(zip(keys, parameters, strict=True))
    states: Mapping[Any, Any] = state_dict["state"]
    entries = {key: state for key, state in states.items() if key in by_key and isinstance(state, Mapping)}
    if isinstance(optimizer, LBFGS) and any(map(_is_plain, tree_leaves(entries))):
        raise InputError(
            "the state of LBFGS is made of vectors over all parameters, and those of one process are not "
            "sharded like a planned model's: start LBFGS again from the weights"
        )
    check_own_shards((value, by_key[key]) for key, state in entries.items() for value in state.values())
    fitted = {
        key: {name: value if name == "step" else _dealt(value, by_key[key]) for name, value in state.items()}
        for key, state in entries.items()
    }
    return {**state_dict, "state": {**states, **fitted}}


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not isinstance(value, DTensor)


def _dealt(value: Any, parameter: torch.Tensor) -> Any:
    return dealt_out(value, parameter) if isinstance(value, torch.Tensor) else value
