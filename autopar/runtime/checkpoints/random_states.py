"""The states of all generators that a training step may draw from, of one rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.runtime.stored.model_class import ATTRIBUTE


def random_states(model: nn.Module) -> dict[str, Any]:
    """The states of torch (CPU and this rank's GPU), NumPy's and Python's global generators, and the plan's counter."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (the global one is the user's)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    counter = _counter_of(model)
    if counter is not None:
        states["plan"] = counter.state_dict()
    return states


def set_random_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Restore `states`; the plan's counter is left alone if the model or `states` have none."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    counter = _counter_of(model)
    if counter is not None and "plan" in states:
        counter.load_state_dict(states["plan"])


def _counter_of(model: nn.Module) -> Any:
    """The `RandomState` of a planned model."""
    planned = getattr(model, ATTRIBUTE, None)
    return planned.random if planned is not None else None
