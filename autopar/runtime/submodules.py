"""The submodules of a planned model, which are not to be called on their own: their parameters are shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError


def refuse_calls(model: nn.Module) -> None:
    """From now on a submodule that is called on plain tensors while its parameters are DTensors raises InputError.

    Leaves run with local tensors in their places, and traces with data-free ones: both pass.
    """
    for name, module in model.named_modules():
        if module is not model:
            module.register_forward_pre_hook(partial(_check, name), with_kwargs=True)


def _check(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if all(isinstance(tensor, DTensor) for tensor in given):
        return
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return  # the next question is one that the compiler cannot follow
    if not DTensor._op_dispatcher._allow_implicit_replication:
        raise InputError(
            f"the submodule '{name}' of a planned model was called on its own, and the plan is one of the whole model: "
            "call the model. To run the submodule all the same, on every rank with the same whole inputs, call it "
            "inside `torch.distributed.tensor.experimental.implicit_replication()`; it then returns a DTensor"
        )
