"""`torch.cov` and `torch.corrcoef`, decomposed into the ops that they consist of.

torch checks that the divisor, which depends on the number of observations, is positive by reading a tensor, which is
impossible without data; here the divisor is a traced size. The checks of weights (not negative, sum not zero) are
assumed to pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autopar.tracing.targets import methods

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
COVARIANCES = methods("cov", "corrcoef")


def covariances(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The call's result, computed by recorded ops; calls that torch refuses are left to torch."""
    arguments = {"input": args[0], **kwargs} if args else kwargs
    own = arguments["input"]
    if own.ndim > 2 or own.dtype == torch.bool or not _weights_fit(own, **kwargs):
        return recorder.record(func, *args, **kwargs)
    function = correlation if func.__name__ == "corrcoef" else covariance
    with recorder:
        return function(**arguments)


def _weights_fit(own: Tensor, fweights: Tensor | None = None, aweights: Tensor | None = None, **others: Any) -> bool:
    """Whether weights have the shapes and dtypes that torch accepts."""
    observations = own.shape[-1] if own.ndim else 1
    for weights, is_count in ((fweights, True), (aweights, False)):
        if weights is None:
            continue
        is_number = not weights.is_complex() and weights.dtype != torch.bool
        if not is_number or weights.is_floating_point() is is_count:
            return False
        if weights.ndim > 1 or weights.numel() != observations:
            return False
    return True


def covariance(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """`torch.cov`, step by step as torch computes it.

    >>> covariance(torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    weights = aweights if fweights is None else fweights if aweights is None else fweights * aweights
    if weights is None:
        total: Any = rows.shape[1]
        divisor: Any = torch.sym_max(total - correction, 0)
    else:
        total = divisor = weights.sum()
        if correction:
            spread = 1 if aweights is None else (weights * aweights).sum() / total
            divisor = total - correction * spread
        divisor = divisor.clamp(min=0)
    mean = (rows if weights is None else rows * weights).sum(1) / total
    rows = rows - mean.unsqueeze(1)
    others = (rows if weights is None else rows * weights).t()
    result = torch.mm(rows, others.conj() if rows.is_complex() else others) / divisor
    return result.reshape(()) if rows.shape[0] == 1 else result


def correlation(input: Tensor) -> Tensor:
    """`torch.corrcoef`, likewise.

    >>> correlation(torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    result = covariance(input)
    if not result.ndim:
        return result / result
    variance = torch.einsum("ii->i", result)
    deviation = (variance.real if variance.is_complex() else variance).sqrt()
    result = result / deviation.unsqueeze(1) / deviation
    if result.is_complex():
        return torch.complex(result.real.clamp(-1, 1), result.imag.clamp(-1, 1))
    return result.clamp(-1, 1)
