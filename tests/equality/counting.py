"""Counts the collectives that really ran, as seen by the dispatcher."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts calls and this rank's input bytes by `(kind, axis)`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.axis = {mesh.get_group(axis).group_name: axis for axis in range(mesh.ndim)}
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name.startswith("_c10d_functional::"):
            kind = _KINDS.get(name.removeprefix("_c10d_functional::").split(".")[0])
            if kind is not None:
                key = kind, next(self.axis[a] for a in reversed(args) if isinstance(a, str) and a in self.axis)
                self.calls[key] += 1
                self.bytes[key] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))

    def table(self) -> dict[str, list[int]]:
        """`{"all_reduce@0": [calls, bytes]}`"""
        return {f"{kind}@{axis}": [n, self.bytes[kind, axis]] for (kind, axis), n in sorted(self.calls.items())}
