"""accelerate's own `save_state`, `load_state`, `save_model` and `get_state_dict` for planned models.

accelerate lets rank 0 write the state dicts of model and optimizer; for a planned model these hold only the shards of
one rank. Here each tensor is gathered first, one at a time, and kept on the CPU of rank 0, so that the files are those
of a single process. Use `autopar.save_checkpoint` for models that do not fit there.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate.accelerator
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.runtime.checkpoints.together import Together
from autopar.runtime.ranks.meeting import meet
from autopar.runtime.stored.model_class import ATTRIBUTE

_RANDOM = "planned_random.bin"  # file in a checkpoint's folder: the state of the generator of random masks


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with whole tensors on the CPU of rank 0, empty on other ranks; every rank must call it.

    Devices hold one whole tensor at a time. Tied tensors stay tied.
    """
    whole: dict[int, torch.Tensor] = {}
    state: OrderedDict[str, torch.Tensor] = OrderedDict()  # accelerate looks for tied tensors only in this type
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in whole:
            whole[id(tensor)] = _whole(tensor)
        state[name] = whole[id(tensor)]
    return state if _writes() else OrderedDict()


@functools.cache
def let_accelerate_keep_states() -> None:
    """Patch accelerate, once per process, to save and load planned models as whole tensors."""
    module: Any = accelerate.accelerator
    for owner, name, wrapper in (
        (Accelerator, "get_state_dict", _getting),
        (Accelerator, "save_state", _saving),
        (Accelerator, "load_state", _loading),
        (module, "save_accelerator_state", _writing),
        (module, "load_accelerator_state", _reading),
    ):
        setattr(owner, name, wrapper(getattr(owner, name)))


def _getting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def get_state_dict(accelerator: Accelerator, model: nn.Module, unwrap: bool = True) -> Any:
        if not hasattr(model, ATTRIBUTE):
            return plain(accelerator, model, unwrap=unwrap)
        meet("accelerate's saving")
        return whole_state(model)

    return get_state_dict


def _saving(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save_state(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        if not any(hasattr(model, ATTRIBUTE) for model in accelerator._models):
            return plain(accelerator, *args, **kwargs)

        def work() -> Any:
            folder = plain(accelerator, *args, **kwargs)
            states = [random.state_dict() for random in _randoms(accelerator._models)]
            if states and accelerator.is_main_process:
                torch.save(states, Path(folder, _RANDOM))
            return folder

        return Together("accelerate's save_state").all_do("accelerate saved a state", work)

    return save_state


def _writing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save_accelerator_state(
        output_dir: Any, model_states: list[Any], optimizers: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        # gather everything before rank 0 writes: if writing fails, no other rank is left waiting in a gather
        return plain(
            output_dir, model_states, [_WholeOptimizer(optimizer) for optimizer in optimizers], *args, **kwargs
        )

    return save_accelerator_state


def _reading(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def load_accelerator_state(input_dir: Any, models: list[Any], *args: Any, **kwargs: Any) -> Any:
        takers = [_WholeModel(model) if hasattr(model, ATTRIBUTE) else model for model in models]
        return plain(input_dir, takers, *args, **kwargs)

    return load_accelerator_state


def _loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def load_state(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        folders: list[str] = []  # the folder that accelerate loads from, which it may choose itself
        handle = accelerator.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
        try:
            result = plain(accelerator, *args, **kwargs)
        finally:
            handle.remove()
        path, randoms = Path(folders[0], _RANDOM), _randoms(accelerator._models)
        states = torch.load(path, weights_only=True) if randoms and path.exists() else []
        if states and len(states) != len(randoms):
            raise InputError(
                f"{folders[0]} has the counters of random masks of {len(states)} planned models, and the accelerator "
                f"has {len(randoms)}: prepare the same models"
            )
        for random, state in zip(randoms, states, strict=False):
            random.load_state_dict(state)
        return result

    return load_state


class _WholeOptimizer:
    """The interface that accelerate needs to save an optimizer; gathers its state, so every rank must make one."""

    def __init__(self, optimizer: Any) -> None:
        self._state: dict[str, Any] = pytree.tree_map_only(DTensor, _whole, optimizer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The state with whole tensors on rank 0, and empty ones elsewhere."""
        return self._state


class _WholeModel:
    """The interface through which accelerate and safetensors load a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Empty: it is asked only for tied tensors, which `load_state_dict` handles itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, **options: Any) -> Any:
        """Load `state`; a file has one of the names of tied tensors, so the others are filled in from that."""
        tied: dict[int, list[str]] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            tied.setdefault(id(tensor), []).append(name)
        complete = dict(state)
        for names in tied.values():
            present = next((name for name in names if name in complete), None)
            if present is not None:
                complete |= {name: complete[present] for name in names if name not in complete}
        return self.model.load_state_dict(complete, strict=strict, **options)


def _randoms(models: list[Any]) -> list[Any]:
    planned = [getattr(model, ATTRIBUTE) for model in models if hasattr(model, ATTRIBUTE)]
    return [planned_model.random for planned_model in planned if planned_model.random is not None]


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor: the whole tensor on the CPU of rank 0, an empty one on other ranks."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if _writes() else torch.empty(0)
