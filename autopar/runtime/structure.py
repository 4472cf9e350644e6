"""The modules and parameters of a planned model: that none was replaced since it was planned."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.layout import Layout
from autopar.runtime.parameters import placements


class Structure:
    """The modules of a model as they are now. Looking whether one was replaced is quick: it is done at every call."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = tuple(model.modules())
        self._names = {id(module): name for name, module in model.named_modules()}
        self._children = [(m, m._modules, dict(m._modules)) for m in self.modules if m._modules]

    def check(self) -> None:
        """Raise InputError if a module is not there any more; others may have come, the graph does not know them."""
        for module, now, before in self._children:
            if now != before:
                for name, child in before.items():
                    if child is not None and now.get(name) is not child:
                        path = ".".join(filter(None, [self._names[id(module)], name]))
                        raise InputError(
                            f"the module '{path}' was replaced or removed after the model was planned, and calls would "
                            "go on with the old one: change the model first, then autoparallelize it"
                        )


def check_parameters(
    state: list[torch.Tensor], names: Sequence[str], storage: Mapping[str, Layout], before: list[torch.Tensor]
) -> None:
    """Raise InputError if a parameter was replaced by one that is no DTensor, or that lies otherwise than planned.

    Ranks would train copies that differ, or take some shard for another. `before`: what was checked last; it becomes
    `state`, and where it is that nothing is looked at again.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and len(before) == len(state) and all(map(operator.is_, state, before)):
        return
    for tensor, name in zip(state, names, strict=True):
        if isinstance(tensor, DTensor) and name in storage and tensor.placements != placements(storage[name]):
            raise InputError(
                f"the parameter '{name}' was replaced after the model was planned, by one that lies as "
                f"{list(tensor.placements)}, not as planned ({storage[name]}): tie weights before autoparallelize"
            )
        plain = isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor)
        if plain and not name.startswith("_constant_"):  # those hang on the model without being registered
            raise InputError(
                f"the parameter '{name}' was replaced after the model was planned, by one that is no DTensor: write "
                "values into the one that there was, with copy_ or load_state_dict"
            )
    if not compiling:
        before[:] = state
