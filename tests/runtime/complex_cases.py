"""Models with complex tensors on ranks: these can be communicated, and backward reads the same values as forward. The
loops are those of `loop_cases`."""

from __future__ import annotations

import torch
from loop_cases import ROWS, Net, in_presets, plainly
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Filtered(nn.Module):
    """A filter over the frequencies of the rows, stored as pairs of real numbers, as in GFNet."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(ROWS.shape[-1], 32), nn.Linear(32, 32)
        self.filter = nn.Parameter(torch.randn(17, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        found = torch.fft.rfft(x) * torch.view_as_complex(self.filter)
        return self.down(torch.fft.irfft(found, n=32) + x).pow(2).mean()


class Conjugated(nn.Module):
    """Complex parameters, of which one is read conjugated and by its real and imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(ROWS.shape[-1], 16)
        self.mixing = nn.Parameter(torch.randn(16, 8, dtype=torch.complex128) / 8)
        self.bias = nn.Parameter(torch.randn(8, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.up(x).to(self.mixing.dtype) @ self.mixing.conj() + self.bias
        parts = torch.complex(mixed.real @ self.mixing.real.T, mixed.imag @ self.mixing.imag.T)
        return (mixed @ self.mixing.mH).abs().pow(2).mean() + parts.abs().mean()


class Spectral(nn.Module):
    """An FFT over the batch, so that a sharded batch is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS.shape[-1], 8))
        self.filter = nn.Parameter(torch.randn(ROWS.shape[0] // 2 + 1, 8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.fft.rfft(x @ self.weight, dim=0) * torch.view_as_complex(self.filter)
        return torch.fft.irfft(found, n=x.shape[0], dim=0).pow(2).mean()


class Doubled(nn.Module):
    """Takes complex rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(ROWS.shape[-1], 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.real).square().mean() + self.up(x.imag).mean()


def conjugate_inputs() -> float:
    """Inputs that are lazy views: with the conjugate bit, and their imaginary parts, with the negative bit."""
    pairs = torch.complex(ROWS, ROWS + 1)
    models: list[nn.Module] = []
    for kind, x in ((Doubled, pairs), (Net, ROWS)):
        for plan in (True, False):
            torch.manual_seed(3)
            model = kind().double()
            mesh = init_device_mesh("cpu", (2,))
            models.append(autopar.autoparallelize(model, {"x": x}, mesh, constraints="ddp") if plan else model)
    with torch.no_grad():
        found = [abs(models[0](x).item() - models[1](x).item()) for x in (pairs.conj(), pairs)]
        return max(*found, *(abs(models[2](x).item() - models[3](x).item()) for x in (pairs.conj().imag, ROWS)))


CASES = {
    2: in_presets(
        filter_of_pairs=plainly(Filtered),
        complex_parameters=plainly(Conjugated),
        filter_of_rows=plainly(Spectral),
    )
    | {"conjugate_inputs": conjugate_inputs}
}
