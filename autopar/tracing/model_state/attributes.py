"""The model's tensors while it is traced: parameters and buffers are replaced by named, data-free ones.

They are swapped in the modules' own dictionaries, and in lists and dicts that also hold them, and restored afterwards,
also after an error. Tied tensors stay one object with one name, the first. A tensor that a module holds unregistered,
or that a closure captures, becomes a constant of the trace.
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
_FEW = 16  # elements of an integer buffer, up to which its contents are known


@dataclass(frozen=True)
class Attribute:
    """A tensor of the model: its name in the graph, its data-free stand-in, the original, and its contents if known.

    `is_kept`: it is no registered tensor, and existed before the trace.
    """

    name: str
    data_free: torch.Tensor
    original: torch.Tensor
    known: torch.Tensor | None = None
    is_kept: bool = False

    @property
    def lacks_value(self) -> bool:
        """Whether its contents would be known if it were not on the meta device; batch norms count calls from 0."""
        if not self.original.is_meta or not _is_few_integers(self.original):
            return False
        return not self.name.startswith("_constant_") and not self.name.endswith("num_batches_tracked")


class Attributes:
    """Finds the attribute that a tensor is or stands for, and swaps the model's tensors for data-free ones."""

    def __init__(self, model: nn.Module, parameter_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.parameter_dtype = parameter_dtype
        self.constants: dict[str, Any] = {}  # also modules: bodies of control flow, leaves outside the model's tree
        self._by_id: dict[int, Attribute] = {}
        self._alive: list[torch.Tensor] = []

    def find(self, tensor: torch.Tensor) -> Attribute | None:
        """The attribute of this tensor; None for a tensor that was created, unseen, during the trace."""
        attribute = self._by_id.get(id(tensor))
        if attribute is not None:
            return attribute
        if not _is_new(tensor):
            return self._constant(tensor, is_kept=True)
        if not is_array(tensor):
            return None
        with torch._C.DisableTorchFunction():
            return self._constant(tensor, tensor.clone())  # a copy: the array's owner may write into it

    def is_written(self, value: Any) -> bool:
        """Whether a value is an unregistered tensor from before the trace that forward has written into."""
        attribute = self._by_id.get(id(value))
        return (
            attribute is not None
            and attribute.is_kept
            and attribute.original is value
            and attribute.data_free._version > 0
        )

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a real tensor that was created during the trace from numbers."""
        return self._constant(tensor).data_free

    def _constant(
        self, tensor: torch.Tensor, content: torch.Tensor | None = None, *, is_kept: bool = False
    ) -> Attribute:
        """Register a tensor as a constant of the trace; `content`: the tensor to keep, by default the tensor itself."""
        content = tensor if content is None else content
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = content
        is_part = hasattr(tensor, "full_tensor")  # a DTensor, as calls of the plan set: reading it would communicate
        contents = content if tensor.device.type != "meta" and not tensor.requires_grad and not is_part else None
        attribute = self._by_id[id(tensor)] = Attribute(name, _data_free(tensor, None), content, contents, is_kept)
        self._by_id[id(attribute.data_free)] = attribute
        self._alive.append(tensor)
        return attribute

    def is_unseen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is not the model's, and was created during the trace."""
        return id(tensor) not in self._by_id and _is_new(tensor)

    def data_free(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a constant."""
        attribute = self.find(tensor)
        assert attribute is not None
        return attribute.data_free

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The model's own tensor behind a stand-in."""
        attribute = self._by_id.get(id(tensor))
        return tensor if attribute is None else attribute.original

    def real_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with data of the tensor behind a stand-in; with random values if the model has none."""
        original = self.original(tensor).detach()
        if original.device.type == "meta":
            return torch.rand(tensor.shape).to(tensor.dtype)
        return original.to("cpu", tensor.dtype, copy=True)

    def release(self) -> None:
        """Drop all references to the model's tensors: a trace must not keep alive what the runtime replaces."""
        self._by_id.clear()
        self._alive.clear()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """While inside, parameters and buffers are data-free; afterwards the model is as before.

        Attributes, hooks and submodules that a forward sets are undone too, or a repeated trace would start from what
        the previous one left.
        """
        saved: list[tuple[Any, dict[str, Any]]] = []
        _check_scripted(self.model)
        holders = Held(self.model)
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
                        contents = _number(tensor) if kind == "_buffers" else None
                        self._by_id[id(stand_in)] = Attribute(full, stand_in, tensor, contents)
                    tensors[name] = stand_ins[id(tensor)]
        holders.update()
        all_are_old()  # see _is_new
        try:
            with collection_paused():
                yield
        finally:
            for tensors, before in saved:
                tensors.clear()
                tensors.update(before)
            holders.update()


def _check_scripted(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UntraceableError(
                "a module of TorchScript (made by torch.jit.script, trace or load) holds its tensors where no plan can "
                "lay them out: use the module that it was made of, and torch.compile of the planned model",
                where=path,
            )


def _number(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a buffer of a few integers, which usually describes how a layer is built; else None.

    Other buffers change from step to step: a trace that had read them would be invalid at the next one.
    """
    return None if tensor.is_meta or not _is_few_integers(tensor) else tensor.detach().cpu().clone()


def _is_few_integers(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _FEW and not tensor.is_floating_point() and not tensor.is_complex()


def _data_free(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    free = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(free, requires_grad=tensor.requires_grad)
    return free.requires_grad_() if tensor.requires_grad else free


def _is_new(tensor: torch.Tensor) -> bool:
    """Whether a tensor was created since the trace began: collection is off, so only these are in generation 0."""
    return any(tracked is tensor for tracked in gc.get_objects(generation=0))
