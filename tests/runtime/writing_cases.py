"""Forwards that write in place, around autograd, on real ranks: values and gradients equal one process. The loops are
those of `loop_cases`."""

from __future__ import annotations

import torch
from loop_cases import Net, in_presets, plainly
from writing_operators import centre, scale


class Clipped(Net):
    """Clips hidden values outside of autograd, so that gradients are not clipped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            hidden.clamp_(min=0.1)
            hidden[:, 1:4].view(-1, 3).mul_(0.5)
        hidden.data = hidden.data.round(decimals=2)
        return (self.down(hidden) ** 2).mean()


class Ended(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.up(x))
        gate.detach_()
        return (self.down(gate * self.up(x)) ** 2).mean()


class Into(Net):
    """Writes results into preallocated tensors (`out=`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            room = torch.empty(hidden.shape, dtype=hidden.dtype)
            torch.add(hidden, 1.0, out=room)
            torch.mul(room, 0.1, out=room)
        return (self.down(hidden * room) ** 2).mean()


class Ringed(Net):
    """The latest means in a ring buffer: writes at the step, a buffer, and reads the entry before it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("ring", torch.ones(2, 32))
        self.step: torch.Tensor
        self.ring: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        before = self.ring[self.step % 2]
        self.step += 1
        self.ring[self.step % 2] = hidden.detach().mean(0)
        hidden[:, self.step] = hidden[:, 0] * before.mean()
        return (self.down(hidden - self.ring.mean(0)) ** 2).mean()


class ByCalls(Net):
    """Writes by custom operators, list functions and initialisers, whose results are read only where they wrote."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        other = hidden.detach() * 2
        scale(other, self.up.bias.detach())
        torch.ops.autopar_writing.add_(other, hidden.detach()[0])
        means = centre(other)
        torch._foreach_mul_([other, means], [0.5, 3.0])
        filled = torch.nn.init.constant_(torch.empty_like(other), 0.5)
        torch.nn.functional.threshold_(other, 0.1, 0.2)
        torch.nn.functional.leaky_relu_(hidden, 0.3)
        return (self.down(hidden * other + filled + means[:, None]) ** 2).mean()


CASES = {
    2: in_presets(
        written_by_calls=plainly(ByCalls),
        clipped_around_autograd=plainly(Clipped),
        history_ended_in_place=plainly(Ended),
        written_into_room=plainly(Into),
        written_at_a_step=plainly(Ringed),
    )
}
