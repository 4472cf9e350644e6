"""Functions without a data-free kernel in torch: the trace's meta results look like the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import Made
from torch import nn
from torch.distributions import Beta, Dirichlet

from autopar.graph import VAL
from autopar.tracing import TraceError, trace
from autopar.tracing.errors import UnsetError


def looks(make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The graph's result, after checking that the traced meta tensor has its shape, dtype and `requires_grad`."""
    traced = trace(Made(make), {"x": x})
    found: Any = traced.gm(x)
    [node] = traced.graph.output_node().all_input_nodes
    free = node.meta[VAL]
    assert (free.shape, free.dtype, free.requires_grad) == (found.shape, found.dtype, found.requires_grad)
    return found


SPECTRA: list[dict[str, Any]] = [
    {},
    {"hop_length": 3},
    {"center": False, "window": torch.ones(16)},
    {"length": 50},
    {"length": 70, "hop_length": 8},
    {"onesided": False, "return_complex": True},
]


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("options", SPECTRA, ids=lambda options: ", ".join(options) or "default")
def test_signals_of_spectra(options: dict[str, Any], batch: tuple[int, ...]) -> None:
    frames = 16 if options.get("onesided") is False else 9
    x = torch.randn(*batch, frames, 12, dtype=torch.complex64, requires_grad=True)
    window = options.get("window", torch.hann_window(16))
    found = looks(lambda x: torch.istft(x, 16, **{**options, "window": window}), x)
    torch.testing.assert_close(found, torch.istft(x, 16, **{**options, "window": window}))


def test_a_signal_of_which_only_the_window_is_learned() -> None:
    window = torch.hann_window(16).requires_grad_()
    x = torch.randn(3, 9, 12, dtype=torch.complex64)
    assert looks(lambda x: torch.istft(x, 16, window=window), x).requires_grad


QUANTISED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numbers": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "tensors": lambda x: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), -128, 127
    ),
    "channels": lambda x: torch.fake_quantize_per_channel_affine(x, torch.full((4,), 0.1), torch.zeros(4), 0, 0, 255),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_numbers_that_are_quantised(kind: str) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    torch.testing.assert_close(looks(QUANTISED[kind], x), QUANTISED[kind](x))


@pytest.mark.parametrize("drawn", [lambda x: Dirichlet(x.exp()).rsample(), lambda x: Beta(x.exp(), x.exp()).rsample()])
def test_numbers_that_a_function_of_torch_draws(drawn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    found = looks(drawn, x)
    assert bool(((found >= 0) & (found <= 1)).all())


class Strided(nn.Module):
    """The layers of EnCodec keep a stride as a buffer, and read it in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=None)  # reads its count, which is 0 at first
        self.register_buffer("step", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x[..., :: int(self.step)])


def test_a_buffer_on_meta_that_decides_a_size_is_named() -> None:
    """As a leaf, the layer would run with a wrong stride, and its output would have a wrong shape."""
    with torch.device("meta"):
        model = nn.Sequential(Strided())
    with pytest.raises(UnsetError, match=r"buffer '0.step'.* before planning: model.get_submodule\('0'\).step = "):
        trace(model, {"input": torch.ones(4, 1, 9)}, unsupported="leaf")
    model.get_submodule("0").step = torch.tensor(2)
    traced = trace(model, {"input": torch.ones(4, 1, 9)}, unsupported="leaf")
    [node] = traced.graph.output_node().all_input_nodes
    assert node.meta[VAL].shape == (4, 1, 5)


def test_a_mask_that_the_model_keeps_is_told_as_such() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)
            self.register_buffer("kept", torch.arange(32) % 4 == 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[:, self.kept])

    with pytest.raises(TraceError, match=r"depends on the buffer 'kept', .* its indices"):
        trace(Masked(), {"x": torch.randn(4, 32)})
