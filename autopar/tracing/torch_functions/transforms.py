"""`torch.vmap` and `torch.func` inside a model: a body is recorded below the transform, where tensors are plain ones.

Above it, the recorder would see tensors without their batch dim, or wrapped for a derivative, which no graph could
replay. So while a transformed function runs, a dispatch mode records what reaches the dispatcher.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch._functorch.apis  # where `torch.vmap` looks up what it calls
import torch._functorch.eager_transforms  # and torch.func
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.graph import VAL
from autopar.tracing.contents.asking import ask
from autopar.tracing.patching import attributes_set
from autopar.tracing.picked.picked_rows import picked_rows_in
from autopar.tracing.recorder import Recorder
from autopar.tracing.targets import FACTORIES
from autopar.tracing.values import META

_DERIVATIVES = {"grad_impl": "grad", "grad_and_value_impl": "grad_and_value", "_jvp_with_argnums": "jvp"}
_OF_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray}


class _Below(TorchDispatchMode):
    """Records the ops of a transformed function that reach the dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == META:  # vmap creates tensors on the device of its operands
            kwargs = {**kwargs, "device": self.recorder.device}
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._node_for_zeros, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default and self.recorder.known.can_tell(args):
            return ask(self.recorder, torch.Tensor.item, args, kwargs)
        result = self.recorder.record(func, *args, **kwargs)
        if torch.is_grad_enabled() and func is not torch.ops.aten.detach.default and self._requires_grad(args, kwargs):
            self._require_grad(result)
        return result

    def function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch function; one that makes a tensor of numbers (`torch.tensor`) is recorded itself, as no operator
        that reaches the dispatcher says what the numbers are."""
        if func not in FACTORIES:
            return func(*args, **kwargs)
        if func in _OF_NUMBERS and not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves((args, kwargs))):
            with temporarily_clear_interpreter_stack(), _disable_current_modes():
                return self.recorder.record(func, *args, **kwargs)
        return func(*args, **{**kwargs, "device": META})

    def _node_for_zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        """A node for zero tensors that forward-mode AD creates for missing tangents without passing any mode."""
        if not tensor._is_zerotensor() or id(tensor) in self.recorder.nodes:
            return tensor
        options = {"dtype": tensor.dtype, "device": self.recorder.device}
        zeros: torch.Tensor = self.recorder.record(torch.ops.aten.zeros.default, list(tensor.shape), **options)
        return zeros

    def _requires_grad(self, *arguments: Any) -> bool:
        return any(self._value(t).requires_grad for t in self._tensors(arguments))

    def _require_grad(self, result: Any) -> None:
        """Mark results as requiring a gradient: below autograd they do not say so, and a plan must know it."""
        for tensor in self._tensors(result):
            if tensor.is_floating_point() or tensor.is_complex():
                self._value(tensor).requires_grad_()

    def _tensors(self, value: Any) -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and id(t) in self.recorder.nodes]

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The data-free value in the annotation of the tensor's node."""
        value: torch.Tensor = self.recorder.nodes[id(tensor)].meta[VAL]
        return value


@contextlib.contextmanager
def transformed_bodies(recorder: Recorder) -> Iterator[None]:
    """While inside, functions transformed by `torch.vmap` or `torch.func` are recorded as ops on plain tensors."""
    apis: Any = torch._functorch.apis
    eager: Any = torch._functorch.eager_transforms
    weak_recorder = weakref.ref(recorder)  # torch keeps lists of its functions, which may keep these replacements alive

    def below(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = weak_recorder()
            if recorder is None or not recorder.is_recording() or recorder.below is not None:
                return original(*args, **kwargs)
            for rows in picked_rows_in((args, kwargs)):
                raise rows.unknown(f"torch.func.{name}")
            with _Below(recorder) as mode, recorder.below_functions(mode.function):  # one mode for nested transforms
                return original(*args, **kwargs)

        return call

    def vjp(*args: Any, **kwargs: Any) -> Any:
        value, pull, *aux = below("vjp", differentiated)(*args, **kwargs)
        return value, below("vjp", pull), *aux

    differentiated = eager._vjp_with_argnums
    replaced = {own: below(name, getattr(eager, own)) for own, name in _DERIVATIVES.items()}
    replaced["_vjp_with_argnums"] = vjp
    with attributes_set(apis, vmap_impl=below("vmap", apis.vmap_impl)), attributes_set(eager, **replaced):
        yield
