"""Ops whose results on DTensors are wrong in torch (2.13 to 2.15), without an error, where loops use them on outputs.

torch runs `F.mse_loss(student(x), teacher(x))` of two planned models, and ops like it, on the local parts as they are.
The gradient of a mean is then divided by the number of this rank's elements: it is too large by a factor, the number of
parts. The mean is that of the parts' means, which is wrong if the parts differ in size, as those of odd parameters do,
or in the number of labels that are ignored (`F.cross_entropy` of outputs). Decomposed into ops on DTensors, they use
the global size. `fill_` of a partial tensor, which `F.cosine_embedding_loss` calls, writes the whole number into each
summand or factor.

And ops at which torch fails: `compared_ops`, and zeros written into a partial tensor, as in the gradient of a norm
(`(w.T @ w).norm()`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensors.compared_ops import ALLCLOSE, EQUAL, compared
from autopar.runtime.dtensors.joined_parts import neutral_number
from autopar.runtime.dtensors.lost_writes import refuse_lost_write
from autopar.runtime.dtensors.own_way import in_torchs_own_way

_aten = torch.ops.aten
_MEANS = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.huber_loss.default,
    _aten.binary_cross_entropy.default,
    _aten.binary_cross_entropy_with_logits.default,
    _aten.soft_margin_loss.default,
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss_backward.default,
    _aten.binary_cross_entropy_backward.default,
    _aten.soft_margin_loss_backward.default,
    *(_aten.nll_loss_forward.default, _aten.nll_loss_backward.default),
    *(_aten.nll_loss2d_forward.default, _aten.nll_loss2d_backward.default),
)


@functools.cache
def mend_ops() -> None:
    """From now on, these ops give on DTensors what they give on whole tensors. Once a process.

    The dispatcher is private: torch has no public way to say how an op runs on DTensors.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for op in _MEANS:
        handlers.setdefault(op, _decomposed)
    handlers.setdefault(_aten.fill_.Scalar, _filled)
    handlers.setdefault(_aten.masked_fill_.Scalar, _cleared)
    for op in (EQUAL, ALLCLOSE):
        handlers.setdefault(op, compared)


def _decomposed(op_call: OpOverload[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run the op's decomposition on DTensors, whose sizes are those of the whole tensor."""
    return decomposition_table[op_call](*args, **kwargs)


def _filled(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    tensor, value = args
    refuse_lost_write(op_call, tensor)
    neutral = neutral_number(tensor)
    op_call(tensor._local_tensor, value if neutral is None else neutral)
    return tensor


def _cleared(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    tensor, mask, value = args
    if value != 0 or mask.numel() != 1 or not any(placement.is_partial() for placement in tensor.placements):
        return in_torchs_own_way(op_call, args, kwargs)
    op_call(tensor._local_tensor, mask.full_tensor() if isinstance(mask, DTensor) else mask, value)
    return tensor
