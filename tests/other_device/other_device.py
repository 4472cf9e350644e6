"""A device other than the CPU for machines without one, to detect tensors in the wrong place as a GPU does.

It is torch's PrivateUse1, on the CPU's memory and kernels (`device.cpp`), with collectives by gloo (`collectives.cpp`).
An op on tensors of both devices fails, a collective of its backend only takes its own tensors, and backward runs in a
separate thread.

GPUs can be used the same way where they exist: several ranks may share one, since their collectives also run by gloo
on copies. (NCCL gives a GPU to one rank only, and some of gloo's own collectives read a GPU's memory as if it were
the CPU's: pytorch issue 152645.)
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sysconfig
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import autopar.cluster
from autopar.precision import Precision

NAME = "other"
BACKENDS = f"cpu:gloo,{NAME}:{NAME}"  # like "cpu:gloo,cuda:nccl"
SHARED = "shared"
ON_GPUS = f"cpu:gloo,cuda:{SHARED}"
_HERE = Path(__file__).parent
_BUILT = _HERE.parents[1] / "out" / f"other_device-{torch.__version__}"


def can_be_built() -> bool:
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return header.exists() and all(shutil.which(tool, path=_with_scripts()) is not None for tool in ("c++", "ninja"))


def _with_scripts() -> str:
    """PATH with this environment's programs, where torch looks for ninja."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


@functools.cache
def build(*, device: bool = True) -> Any:
    """The compiled extension, from another process's build if there is one. Without `device`: only collectives."""
    from torch.utils import cpp_extension

    os.environ["PATH"] = _with_scripts()
    name, files = ("other_device", ["device.cpp", "collectives.cpp"]) if device else (SHARED, ["collectives.cpp"])
    folder = _BUILT / name
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(_HERE / file) for file in files]
    return cpp_extension.load(name, sources, extra_cflags=["-O1", "-w"], build_directory=str(folder))


@functools.cache
def register() -> None:
    """Register `torch.device("other")` in this process. Plans for it are made as for CPUs."""
    torch.utils.rename_privateuse1_backend(NAME)
    extension = build()
    torch._register_device_module(NAME, _Module())
    torch.utils.generate_methods_for_privateuse1_backend()

    def backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return extension.collectives(dist.ProcessGroupGloo(store, rank, size, timeout), False)

    dist.Backend.register_backend(NAME, backend, devices=[NAME])
    preset = autopar.cluster._preset_of_device
    autopar.cluster._preset_of_device = lambda kind: "cpu" if kind == NAME else preset(kind)


def stand_in_for_the_cpu(name: str = NAME) -> None:
    """Make `name` the default device, and turn meshes of CPUs into meshes of it.

    "cuda" can be used too, where it exists, with the plans and the precision of a CPU.
    """
    import torch.distributed.device_mesh as meshes

    if name == NAME:
        register()
    else:
        share_the_gpus()
        precision: Callable[..., Precision] = Precision.of
        autopar.cluster._preset_of_device = lambda kind: "cpu"
        Precision.of = staticmethod(lambda value, kind="cpu": precision(value, "cpu"))  # type: ignore[method-assign]
        _DrawnOnTheCpu().__enter__()
    init: Callable[..., Any] = meshes.init_device_mesh
    meshes.init_device_mesh = lambda kind, *rest, **named: init(name if kind == "cpu" else kind, *rest, **named)
    torch.set_default_device(name)


class _DrawnOnTheCpu(TorchFunctionMode):
    """Draws on the CPU if a CPU generator is given, even though tensors are created on a GPU by default."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if func not in _DRAWING or generator is None or generator.device.type != "cpu" or "device" in kwargs:
            return func(*args, **(kwargs or {}))
        return func(*args, **kwargs, device="cpu").to(torch.get_default_device())


_DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm}


def join(device: str) -> str:
    """Make this process a rank on a device other than the CPU; returns the backends for its process group."""
    if device == NAME:
        register()
        return BACKENDS
    share_the_gpus()
    return ON_GPUS


def share_the_gpus() -> None:
    """Select this rank's GPU, which other ranks may share, and register a backend that allows this."""
    extension = build(device=False)

    def backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return extension.collectives(dist.ProcessGroupGloo(store, rank, size, timeout), True)

    dist.Backend.register_backend(SHARED, backend, devices=["cuda"])
    torch.cuda.init()
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


class _Module:
    """The interface of `torch.cuda` that torch needs of `torch.other`: one device that runs all work synchronously."""

    Stream = _Stream
    device = stream = staticmethod(contextlib.nullcontext)

    def current_stream(self, _: Any = None) -> _Stream:
        return _Stream()

    def synchronize(self, _: Any = None) -> None: ...

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, _: Any) -> None: ...

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _: int) -> None: ...  # it draws from the CPU's generator

    def get_rng_state(self, _: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, _: Any = 0) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
