"""Which dtype each kind of tensor has in a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from autopar.errors import InputError


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training step; `None` leaves the model's own.

    `parameter`: the tensors that the optimizer updates. `compute`: parameters and floating inputs are cast to it before
    use, as shards, before any all-gather. `reduction`: gradients of parameters while they are summed over ranks
    (default: compute). `master`: an additional copy that the optimizer keeps. bf16 compute with fp32 parameters *is*
    training with fp32 master weights: 4 bytes of parameter, 4 of gradient and 8 of AdamW state for each.
    """

    parameter: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduction: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            dtype = getattr(self, f.name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
            ):
                raise InputError(
                    f"precision has {dtype} for {f.name}: it must be a floating dtype, such as torch.bfloat16"
                )

    @staticmethod
    def of(value: Precision | str | torch.dtype | None, device_kind: str = "cpu") -> Precision:
        """From a name ("bf16", "fp16", "fp32", "fp64", "pure-bf16"), a dtype, or None: the default of the device.

        >>> Precision.of("bf16").compute, Precision.of(None, "cuda").parameter, Precision.of(None, "cpu").compute
        (torch.bfloat16, torch.float32, None)
        """
        if isinstance(value, Precision):
            return value
        if value is None:
            return _NAMED["bf16"] if device_kind == "cuda" else Precision()
        if isinstance(value, torch.dtype):
            return Precision(value, value, value)
        if isinstance(value, str) and value in _NAMED:
            return _NAMED[value]
        raise InputError(f"precision {value!r} is unknown: use one of {', '.join(_NAMED)} or autopar.Precision(...)")

    def to_dict(self) -> dict[str, str | None]:
        """As plain names, for JSON.

        >>> Precision.from_dict(Precision.of("bf16").to_dict()) == Precision.of("bf16")
        True
        """
        return {
            f.name: None if (v := getattr(self, f.name)) is None else str(v).removeprefix("torch.")
            for f in fields(self)
        }

    @staticmethod
    def from_dict(names: Mapping[str, str | None]) -> Precision:
        """What `to_dict` wrote."""
        return Precision(**{key: None if name is None else getattr(torch, name) for key, name in names.items()})


_NAMED = {
    "bf16": Precision(torch.float32, torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16, torch.float16),
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "fp64": Precision(torch.float64, torch.float64, torch.float64),
    "pure-bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
}
