"""The modules of a planned model: which they are, and that none was replaced since it was planned."""

from __future__ import annotations

from torch import nn

from autopar.errors import InputError


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
