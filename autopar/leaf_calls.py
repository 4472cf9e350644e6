"""A leaf: a module that the trace did not enter, as a function of its parameters and buffers.

Its path is part of the fingerprints of graphs: moving the file would invalidate saved plans of models with leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from autopar.python.one_process import one_process
from autopar.python.replaced import replaced


class LeafCall:
    """Runs `module` with other tensors in place of its parameters and buffers; the target of a node in the graph.

    `names`: the names of these tensors in the module. If forward rebinds a buffer to a new tensor, the new values are
    copied into the given tensor. `path`: the module's name in the model. `unshown`: arguments that cannot stand in a
    graph (functions, enum members), by the strings that replace them there. Calls are equal only if identical, as
    graphs need; leaves that cost the same have equal `kind`s.

    >>> call = LeafCall(nn.Linear(2, 1, bias=False), "head", ["weight"])
    >>> call([torch.tensor([[1.0, 2.0]])], (torch.tensor([3.0, 4.0]),), {})
    tensor([11.])
    """

    noun = "module"
    reason = ""  # why it is a leaf, if the trace does not record that for its module
    rule: str | None = None  # the sharding rule that `planning.leaf_splits` found for it; if None,
    whole = ""  # why every rank must run all of it

    def __init__(
        self, module: nn.Module, path: str, names: Sequence[str], unshown: Mapping[str, Any] | None = None
    ) -> None:
        self.module, self.path, self.names, self.unshown = module, path, tuple(names), dict(unshown or {})
        self.__name__ = self.__qualname__ = f"leaf_{type(module).__name__}"

    def __call__(self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.unshown:
            args, kwargs = pytree.tree_map_only(str, lambda text: self.unshown.get(text, text), (args, dict(kwargs)))
        return self._called(dict(zip(self.names, tensors, strict=True)), args, kwargs)

    def _called(self, tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the module with these tensors; buffers that it rebinds (`self.mean = 0.9 * self.mean`) are written."""
        bound = dict(tensors)
        with one_process(), _checkpoints_off():
            result = functional_call(self.module, bound, args, dict(kwargs))
        for name, tensor in tensors.items():
            new = bound[name]
            if new is not tensor and (new.shape, new.dtype) == (tensor.shape, tensor.dtype):
                with torch.no_grad():
                    tensor.copy_(new)
        return result

    @property
    def kind(self) -> Hashable:
        """Everything that determines the cost of a call apart from the shapes of its arguments."""
        others = tuple(map(id, self.unshown.values()))
        return (type(self.module), _description(self.module), self.module.training, self.names, others)


def _checkpoints_off() -> AbstractContextManager[None]:
    """Make `torch.utils.checkpoint` a plain call inside the context: its replay in backward would read the module's own
    tensors instead of the call's. The plan decides what is recomputed."""
    if torch.compiler.is_compiling():
        return nullcontext()
    assert isinstance(checkpoint, FunctionType)
    return replaced(checkpoint, _run)


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{name: value for name, value in kwargs.items() if name not in _OPTIONS})


_OPTIONS = {p.name for p in signature(checkpoint).parameters.values() if p.kind is p.KEYWORD_ONLY}
_OPTIONS |= {"use_reentrant", "preserve_rng_state"}  # of checkpoint itself, not passed to the function


def _description(module: nn.Module) -> str:
    """The module's `repr`; a text of this module alone if that fails, as where it prints contents of meta tensors.

    >>> _description(nn.Linear(2, 1))
    'Linear(in_features=2, out_features=1, bias=True)'
    """
    try:
        return repr(module)
    except RuntimeError:
        return f"{type(module).__name__} {id(module)}"
