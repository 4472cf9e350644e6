"""Models whose forward, in each call, continues from state that the previous call left in attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Cell(nn.Module):
    """A recurrent cell that continues from its last result, or from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.h: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.h is None:
            self.h = x.new_zeros(x.shape[0], 8)
        now = torch.tanh(self.inner(x.mean(1)) + self.outer(self.h))
        self.h = now.detach()
        return now

    def forget(self) -> None:
        self.h = None


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.ModuleList([Cell(), Cell()]), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.head(cell(x)).square().mean() for cell in self.cells)


class Lstm(nn.Module):
    """The state is a pair of tensors whose batch is dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.state = nn.LSTM(8, 4, num_layers=2, batch_first=True), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, (h, c) = self.rnn(x, self.state)
        self.state = h.detach(), c.detach()
        return result.square().mean()

    def forget(self) -> None:
        self.state = None


class Memories(nn.Module):
    """Keeps a window of earlier activations for each layer, as Transformer-XL does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.mems: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mems = []
        for i, layer in enumerate(self.layers):
            seen = torch.cat([self.mems[i], x], 1) if self.mems else x
            mems.append(seen[:, -10:].detach())
            scores = (layer(x) @ seen.transpose(1, 2)).softmax(-1)
            x = x + scores @ seen
        self.mems = mems
        return x.square().mean()

    def forget(self) -> None:
        self.mems = []


class Averaging(nn.Module):
    """A running mean and a count, updated in training and only read in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean, self.count = nn.Linear(8, 8), torch.zeros(8, dtype=torch.float64), None
        self.calls = torch.zeros((), dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.training:
            if self.count is None:
                self.count = torch.zeros((), dtype=torch.float64)
            self.count = self.count + 1
            self.calls += 1
            self.mean = self.mean + (y.detach().mean((0, 1)) - self.mean) / self.count
        return (y - self.mean).square().mean() * (1 + self.calls)

    def forget(self) -> None:
        self.mean, self.count = torch.zeros(8, dtype=torch.float64), None
        self.calls = torch.zeros((), dtype=torch.float64)


class Registered(nn.Module):
    """The state is a registered buffer, which is None before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("h", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.mean(1)) + (0 if self.h is None else 0.5 * self.h)
        self.h = y.detach()
        return y.square().mean()

    def forget(self) -> None:
        self.h = None


class Scratch(nn.Module):
    """Writes in place into parts of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.past = nn.Linear(8, 8), torch.zeros(8, 3, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.mean(1))
        self.past[:, 0] = self.past[:, 1]
        self.past[:, 1] = y.detach()
        return (y - self.past.mean(1)).square().mean()

    def forget(self) -> None:
        self.past = torch.zeros(*self.past.shape, dtype=torch.float64)


class Checkpointed(Stacked):
    """The cells run in checkpointed regions; their recomputation in backward must not set the state again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [checkpoint(cell, x, use_reentrant=False) for cell in self.cells]
        return sum(self.head(one).square().mean() for one in made)


class Undetached(Cell):
    """The state is not detached, so backward goes through earlier calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.new_zeros(x.shape[0], 8) if self.h is None else self.h
        self.h = torch.tanh(self.inner(x.mean(1)) + self.outer(before))
        return self.h.square().mean()


class Late(Undetached):
    """The first call sets a state that it does not read; later calls read it, with its gradient."""

    def forward(self, x: torch.Tensor, begins: bool = False) -> torch.Tensor:
        before = x.new_zeros(x.shape[0], 8) if begins else self.h
        self.h = torch.tanh(self.inner(x.mean(1)) + self.outer(before))
        return self.h.square().mean()


class Delayed(nn.Module):
    """The state is the input of the previous call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = getattr(self, "before", None)
        self.before = x
        return self.layer(x if before is None else x - before).square().mean()

    def forget(self) -> None:
        del self.before


class Named(nn.Module):
    """States in a dict with a number, in a cell called twice in a forward, and in a tensor that is read only once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell, self.past = nn.Linear(8, 8), Cell(), dict[str, Any]()
        self.first: torch.Tensor | None = torch.ones(8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cell(x) + self.cell(2 * x)
        if self.first is not None:
            y, self.first = y + self.first, None
        if self.past:
            y = y + self.past["y"] * self.past["calls"]
        self.past = {"y": self.layer(y).detach(), "calls": min(self.past.get("calls", 0) + 1, 2)}
        return self.layer(y).square().mean()

    def forget(self) -> None:
        self.past, self.first = {}, torch.ones(8, dtype=torch.float64)


class Grown(nn.Module):
    """The state is a buffer that has no elements before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mem", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.mean(1))
        self.mem = y.detach() if self.mem.numel() == 0 else 0.5 * self.mem + y.detach()
        return (y + self.mem).square().mean()

    def forget(self) -> None:
        self.mem = torch.zeros(0)


class Turned(nn.Module):
    """Reads a state with its batch on one dim and sets it with the batch on another.

    Further states are means of pairs of rows and a mean of all rows, which the first call sets but does not read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turned, self.pairs = nn.Linear(8, 8), torch.zeros(8, 8, dtype=torch.float64), None
        self.mean: torch.Tensor | None = None

    def forget(self) -> None:
        self.turned, self.pairs, self.mean = torch.zeros(*self.turned.shape, dtype=torch.float64), None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.mean(1)) + self.turned
        if self.pairs is not None and self.mean is not None:
            y = y + self.pairs.repeat_interleave(2, 0) * self.mean
        self.turned, self.pairs = y.detach().t().contiguous(), y.detach().view(-1, 2, 8).mean(1)
        self.mean = y.detach().mean(0)
        return y.square().mean()


class Scaled(nn.Module):
    """A loss that carries a running average in a buffer and a count in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones((), dtype=torch.float64))
        self.count: torch.Tensor | None = None

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        loss = output.square().mean()
        self.average = 0.5 * self.average + 0.5 * loss.detach()
        self.count = torch.ones((), dtype=torch.float64) if self.count is None else self.count + 1
        self.last = loss.detach()
        return loss / self.average * self.count


class Deciding(nn.Module):
    """The control flow depends on the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(8, 8), torch.zeros((), dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return (self.layer(x) * (2 if self.count > 2 else 1)).square().mean()


class Appending(nn.Module):
    """Mutates a list that is its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.past = nn.Linear(8, 8), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.past.append(y.detach())
        return y.square().mean()


MODELS: dict[str, type[nn.Module]] = {
    one.__name__: one
    for one in (Stacked, Lstm, Memories, Averaging, Registered, Scratch, Delayed, Named, Grown, Turned)
}
