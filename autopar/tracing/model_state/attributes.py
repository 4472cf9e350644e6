"""The model's tensors while it is traced: parameters and buffers are data-free, and named.

They are swapped inside the modules' own dictionaries, and where lists and dicts of modules hold them besides, and put
back afterwards, also after an error. Tied tensors keep one identity and get one name, the first. A tensor that hangs on
a module without being registered, or that a closure holds, becomes a constant of the trace.
"""

from __future__ import annotations

import collections
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import UntraceableError
from autopar.python.collecting import all_are_old, collection_paused
from autopar.python.held import Held
from autopar.tracing.contents.arrays import is_array

_DICTS = (dict, collections.OrderedDict)
_FEW = 16  # elements of a buffer whose contents are known


@dataclass(frozen=True)
class Attribute:
    """A tensor of the model: its name in the graph, its data-free stand-in, the original, and what is known of it.

    `is_kept`: it is no buffer, and was there before the trace.
    """

    name: str
    data_free: torch.Tensor
    original: torch.Tensor
    known: torch.Tensor | None = None
    is_kept: bool = False


class Attributes:
    """Finds the attribute behind a tensor, and swaps the model's tensors for data-free ones."""

    def __init__(self, model: nn.Module, parameter_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.parameter_dtype = parameter_dtype
        self.constants: dict[str, Any] = {}  # also modules: bodies, leaves outside the model's tree
        self._by_id: dict[int, Attribute] = {}
        self._alive: list[torch.Tensor] = []

    def find(self, tensor: torch.Tensor) -> Attribute | None:
        """The attribute this tensor is; None for a tensor that was made, unseen, during the trace."""
        found = self._by_id.get(id(tensor))
        if found is not None:
            return found
        if not _is_new(tensor):
            return self._constant(tensor, is_kept=True)
        if not is_array(tensor):
            return None
        with torch._C.DisableTorchFunction():
            return self._constant(tensor, tensor.clone())  # whoever has the array may write into it

    def is_written(self, value: Any) -> bool:
        """Whether a value is a tensor that was there before the trace, no buffer, and that forward has written into."""
        found = self._by_id.get(id(value))
        return found is not None and found.is_kept and found.original is value and found.data_free._version > 0

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a real tensor that was made during the trace, of numbers that no tensor held."""
        return self._constant(tensor).data_free

    def _constant(
        self, tensor: torch.Tensor, content: torch.Tensor | None = None, *, is_kept: bool = False
    ) -> Attribute:
        content = tensor if content is None else content
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = content
        is_part = hasattr(tensor, "full_tensor")  # a DTensor, as calls set for the loop: ops of it move data
        known = content if tensor.device.type != "meta" and not tensor.requires_grad and not is_part else None
        found = self._by_id[id(tensor)] = Attribute(name, _data_free(tensor, None), content, known, is_kept)
        self._by_id[id(found.data_free)] = found
        self._alive.append(tensor)
        return found

    def is_unseen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is none of the model's, and was made during the trace."""
        return id(tensor) not in self._by_id and _is_new(tensor)

    def data_free(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a constant."""
        found = self.find(tensor)
        assert found is not None
        return found.data_free

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The model's own tensor behind a stand-in."""
        found = self._by_id.get(id(tensor))
        return tensor if found is None else found.original

    def real_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor with the values behind a stand-in, or random ones where the model has none."""
        original = self.original(tensor).detach()
        if original.device.type == "meta":
            return torch.rand(tensor.shape).to(tensor.dtype)
        return original.to("cpu", tensor.dtype, copy=True)

    def release(self) -> None:
        """Forget the model's own tensors: a trace must not keep alive what the runtime replaces."""
        self._by_id.clear()
        self._alive.clear()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Parameters and buffers are data-free inside; the model is as it was afterwards.

        A forward may also set attributes, register hooks and hang other modules in: that is undone too, or a repeated
        trace would start from what the one before it left.
        """
        saved: list[tuple[Any, dict[str, Any]]] = []
        _check_scripted(self.model)
        held = Held(self.model)
        stand_ins: dict[int, torch.Tensor] = {}
        for path, module in list(self.model.named_modules()):
            own = vars(module)
            saved += [(own, dict(own)), (module._modules, dict(module._modules))]
            saved += [(hooks, dict(hooks)) for name, hooks in own.items() if "hooks" in name and type(hooks) in _DICTS]
            for kind in ("_parameters", "_buffers"):
                tensors: Any = getattr(module, kind)
                saved.append((tensors, dict(tensors)))
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in stand_ins:
                        cast = kind == "_parameters" and tensor.is_floating_point()
                        dtype = self.parameter_dtype if cast else None
                        stand_in = stand_ins[id(tensor)] = _data_free(tensor, dtype)
                        full = f"{path}.{name}" if path else name
                        known = _number(tensor) if kind == "_buffers" else None
                        self._by_id[id(stand_in)] = Attribute(full, stand_in, tensor, known)
                    tensors[name] = stand_ins[id(tensor)]
        held.update()
        all_are_old()  # see _is_new
        try:
            with collection_paused():
                yield
        finally:
            for tensors, before in saved:
                tensors.clear()
                tensors.update(before)
            held.update()


def _check_scripted(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UntraceableError(
                "a module of TorchScript (made by torch.jit.script, trace or load) holds its tensors where no plan can "
                "lay them out: use the module that it was made of, and torch.compile of the planned model",
                where=path,
            )


def _number(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a buffer that holds a few integers, as those do that say how a layer is built; else None.

    Others change from step to step: a trace that had read them would be out of date at the next.
    """
    if tensor.device.type == "meta" or tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > _FEW:
        return None
    return tensor.detach().cpu().clone()


def _data_free(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    free = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(free, requires_grad=tensor.requires_grad)
    return free.requires_grad_() if tensor.requires_grad else free


def _is_new(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made since the trace began: with collection off, those alone are in generation 0."""
    return any(found is tensor for found in gc.get_objects(generation=0))
