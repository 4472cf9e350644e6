"""Tensors for the cases of rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DRAWS = torch.Generator().manual_seed(0)  # the same in every run


def x(*shape: int) -> Tensor:
    """A tensor that needs a gradient."""
    return torch.randn(*shape, dtype=torch.float64, generator=DRAWS, requires_grad=True)


def const(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=DRAWS)


def single(*shape: int) -> Tensor:
    """A float32 tensor, for kernels without float64."""
    return torch.randn(*shape, generator=DRAWS, requires_grad=True)


def positive(*shape: int) -> Tensor:
    return (torch.rand(*shape, dtype=torch.float64, generator=DRAWS) + 0.5).requires_grad_()


def tied(*shape: int) -> Tensor:
    """Like the result of a ReLU: many zeros, distributed unevenly over rows, and few other values."""
    return torch.randint(-3, 2, shape, generator=DRAWS).double().relu().requires_grad_()


def ids(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, generator=DRAWS)


def mask(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=DRAWS) > 0.4


def labels(limit: int, *shape: int) -> Tensor:
    """Labels, some of which are ignored, distributed unevenly over the batch."""
    found = torch.randint(0, limit, shape, generator=DRAWS)
    found.view(-1)[:3] = -100
    return found


def weights(rows: int, width: int, hidden: int, *, layers: int = 1, directions: int = 1) -> list[Tensor]:
    """Weights of a recurrent layer; `rows`: the number of hidden units times the number of gates."""
    return [
        tensor
        for layer in range(layers)
        for _ in range(directions)
        for tensor in (x(rows, width if layer == 0 else hidden * directions), x(rows, hidden), x(rows), x(rows))
    ]


def lstm(*, layers: int, batch_first: bool, bidirectional: bool = False, dropout: float = 0.0) -> tuple[Any, ...]:
    directions = 1 + bidirectional
    states = (x(layers * directions, 6, 2), x(layers * directions, 6, 2))
    own = weights(8, 4, 2, layers=layers, directions=directions)
    given = x(6, 3, 4) if batch_first else x(3, 6, 4)
    return (torch._VF.lstm, given, states, own, True, layers, dropout, True, bidirectional, batch_first)


def name_of(case: tuple[Any, ...]) -> str:
    """The text of a case."""

    def text(part: Any) -> str:
        if isinstance(part, Tensor):
            return "x".join(map(str, part.shape))
        if isinstance(part, (list, tuple)):
            return "(" + ",".join(map(text, part)) + ")"
        if isinstance(part, dict):
            return "{" + ",".join(f"{key}={text(value)}" for key, value in part.items()) + "}"
        return getattr(part, "__name__", str(part))

    return " ".join(map(text, case))
