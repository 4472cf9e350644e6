"""A module that the trace left whole, as a function of its own tensors.

Fingerprints of graphs hold the path of this file: moved, it would have all plans of models with leaves made again.
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
    """Runs `module` with other tensors in place of its parameters and buffers; stands in a graph as a function.

    `names`: those tensors, by their names in the module; a buffer that it binds to another tensor is written. `path`:
    the module's name in the model. `unshown`: arguments that a graph cannot show (functions, members of an enum), by
    the texts that stand for them there. Equality is identity, as graphs need it; leaves that cost the same share their
    `kind`. `title`: what it is, for people.

    >>> call = LeafCall(nn.Linear(2, 1, bias=False), "head", ["weight"])
    >>> call([torch.tensor([[1.0, 2.0]])], (torch.tensor([3.0, 4.0]),), {})
    tensor([11.])
    """

    noun = "module"
    reason = ""  # why it is one, where that is not told of its module
    rule: str | None = None  # how it may be split (see `leaf_splits`), or
    whole = ""  # why it runs whole

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
        """The call with these tensors, by name; what it binds anew (`self.mean = 0.9 * self.mean`) is written."""
        bound = dict(tensors)
        with one_process(), _checkpoints_off():
            result = functional_call(self.module, bound, args, dict(kwargs))
        for name, given in tensors.items():
            new = bound[name]
            if new is not given and (new.shape, new.dtype) == (given.shape, given.dtype):
                with torch.no_grad():
                    given.copy_(new)
        return result

    @property
    def kind(self) -> Hashable:
        """What its costs depend on, beside the shapes of its arguments."""
        others = tuple(map(id, self.unshown.values()))
        return (type(self.module), _told(self.module), self.module.training, self.names, others)


def _checkpoints_off() -> AbstractContextManager[None]:
    """Inside, checkpointed functions just run: their replay in backward would find the module's own tensors, which are
    not those of the call. The plan says what is recomputed."""
    if torch.compiler.is_compiling():
        return nullcontext()
    assert isinstance(checkpoint, FunctionType)
    return replaced(checkpoint, _run)


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{name: value for name, value in kwargs.items() if name not in _OPTIONS})


_OPTIONS = {p.name for p in signature(checkpoint).parameters.values() if p.kind is p.KEYWORD_ONLY}
_OPTIONS |= {"use_reentrant", "preserve_rng_state"}


def _told(module: nn.Module) -> str:
    """A module's options as text; one whose text tells contents of tensors, which may have none, is like no other.

    >>> _told(nn.Linear(2, 1))
    'Linear(in_features=2, out_features=1, bias=True)'
    """
    try:
        return repr(module)
    except RuntimeError:
        return f"{type(module).__name__} {id(module)}"
