"""What an optimizer keeps of a parameter: a master copy, and its state."""

from __future__ import annotations

import math

import torch

from autopar.layout import Layout
from autopar.precision import Precision

_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adafactor": 1, "lion": 1, "muon": 2}
OPTIMIZERS = tuple(_STATES)


def state_bytes(
    optimizer: str,
    precision: Precision,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    storage: Layout,
    mesh_shape: tuple[int, ...],
) -> dict[str, int]:
    """One rank's bytes, by part, for a parameter of this shape that is stored in `dtype`."""
    local, master = storage.local_shape(shape, mesh_shape), precision.master
    updated = master if master is not None and master != dtype else dtype
    found = {"master weights": math.prod(local) * updated.itemsize} if updated != dtype else {}
    return found | {"optimizer state": _elements(optimizer, local) * updated.itemsize}


def _elements(optimizer: str, shape: tuple[int, ...]) -> int:
    """Elements of an optimizer's state. Adafactor keeps, except for vectors, a mean over rows and one over columns
    (arXiv 1804.04235); Muon one momentum for matrices, and AdamW's state for other parameters, which AdamW updates."""
    if optimizer == "muon" and len(shape) == 2:
        return math.prod(shape)
    if optimizer != "adafactor" or len(shape) < 2:
        return _STATES[optimizer] * math.prod(shape)
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]
