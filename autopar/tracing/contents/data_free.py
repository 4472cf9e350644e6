"""Functions without a data-free kernel in torch, although the shape of their result follows from their arguments.

Each substitute runs the original on tensors with data. On data-free tensors it makes a tensor that looks like the
result, from ops that gradients pass through. For operators called inside a `torch.autograd.Function`, a meta kernel is
registered with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from autopar.tracing.targets import methods

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
Function = Callable[..., Tensor]


def _ctc_loss(*args: Any, **kwargs: Any) -> Tensor:
    """The loss's shape follows from that of the log-probabilities and the reduction."""
    probabilities = args[0] if args else kwargs["log_probs"]
    if probabilities.device.type != "meta":
        return torch.nn.functional.ctc_loss(*args, **kwargs)
    reduction = args[5] if len(args) > 5 else kwargs.get("reduction", "mean")
    is_batch = reduction == "none" and probabilities.ndim == 3
    return probabilities.sum((0, 2)) if is_batch else probabilities.sum()


def _istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """The original reads data to check that windows cover the signal. The number of frames gives the length."""
    if input.device.type != "meta":
        options = (hop_length, win_length, window, center, normalized, onesided, length, return_complex)
        return torch.istft(input, n_fft, *options)
    if length is None:
        hop = n_fft // 4 if hop_length is None else hop_length
        length = n_fft + hop * (input.shape[-1] - 1) - (2 * (n_fft // 2) if center else 0)
    values = input if return_complex else torch.view_as_real(input).sum(-1)
    signal = values.sum((-2, -1)).unsqueeze(-1).expand(*input.shape[:-2], length).contiguous()
    return signal if window is None else signal + window.sum().to(signal.dtype)  # the window may be learned


def _like_its_first(function: Function) -> Function:
    """A substitute for a function whose result looks like its first argument."""

    def substitute(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.clone() if input.is_meta else function(input, *args, **kwargs)

    return substitute


# Called by `torch.distributions.Dirichlet` and `Beta`, and by `Gamma`; torch 2.11 has none of these meta kernels.
_LIKE_THEIR_FIRST = ("_sample_dirichlet", "_dirichlet_grad", "_standard_gamma", "_standard_gamma_grad")
_kernels = torch.library.Library("aten", "IMPL")  # kernels stay registered while this object lives
for _name in _LIKE_THEIR_FIRST:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _kernels.impl(_name, lambda first, *others: torch.empty_like(first), "Meta")

STANDS_FOR: dict[Function, Function] = {
    _ctc_loss: torch.nn.functional.ctc_loss,
    _istft: torch.istft,
    **{_like_its_first(f): f for f in (torch.fake_quantize_per_tensor_affine, torch.fake_quantize_per_channel_affine)},
}
"""By substitute: the function that appears in the graph."""


def _recorded(function: Function, recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    return recorder.record(function, *args, **kwargs)


DATA_FREE = {original: partial(_recorded, function) for function, original in STANDS_FOR.items()}
DATA_FREE |= dict.fromkeys(methods("istft"), partial(_recorded, _istft))
"""Handlers of the original functions."""
