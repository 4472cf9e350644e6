"""Advice added to errors that torch raises when a script treats a planned model as a plain one."""

from __future__ import annotations

import functools
import sys
from types import TracebackType

_ADVICE = {  # by a part of the error's text; the first that matches counts
    "aten._fused_": (
        "this optimizer has no fused kernel for DTensors, as parameters of a planned model are (Adam and AdamW have): "
        "leave fused=True out"
    ),
    "aten._foreach_norm": (
        "a list holds parameters of a planned model, which are DTensors, and others, which are not: take a norm of "
        "each kind (torch.nn.utils.get_total_norm, .full_tensor() of the first) and the root of the sum of their "
        "squares, and give that to torch.nn.utils.clip_grads_with_norm_ for each kind"
    ),
    "aten._foreach_": (
        "a list holds parameters, which are DTensors in a planned model, and buffers, which are not: make two calls, "
        "or write in place (torch._foreach_mul_ in place of torch._foreach_mul)"
    ),
    "got mixed torch.Tensor and DTensor": (
        "parameters and gradients of a planned model are DTensors, and so is what it returns sharded. "
        "Where the loss is computed outside of the model, give it as loss_fn=... to autoparallelize, or "
        'keep what the model returns whole by constraints="output:* = R" (one R for each mesh axis); with '
        'inputs="local", autopar.own_rows(model, output) has the rows of this rank. '
        "tensor.full_tensor() is plain; load_state_dict and parameter.data = ... take plain tensors, and "
        "distribute_tensor(plain, parameter.device_mesh, parameter.placements) goes with a parameter. An optimizer "
        "that makes plain tensors of its own (Alice, SM3, SPlus) is stepped under "
        "torch.distributed.tensor.experimental.implicit_replication(), on every rank. A method of the "
        'model that reads parameters itself is planned after autopar.register_forward_method(model, "name")'
    ),
    "Operator c10d.": (
        "torch.distributed was called on a DTensor, as DistributedDataParallel around a planned model does. Its "
        "gradients are summed over the ranks already, and its parameters agree: leave it out"
    ),
    "does not have a sharding strategy registered": (
        "torch cannot do this to DTensors, as parameters and gradients of a planned model are: read "
        "tensor.full_tensor(), write with mul_, copy_ or parameter.data = ..."
    ),
    "'Tensor' object has no attribute 'placements'": (
        "backward was given a plain gradient of an output that lies sharded: give it as distribute_tensor(gradient, "
        "output.device_mesh, output.placements) of torch.distributed.tensor, or keep outputs whole by "
        'constraints="output:* = R" (one R for each mesh axis)'
    ),
    "its data is not allocated yet": (
        "torch made a plain tensor of DTensors, as parameters and gradients of a planned model and their norms are: "
        "torch.tensor([norm, ...]), which Lightning's grad_norm does. Give it numbers (norm.item(), on every rank); "
        "torch.nn.utils.get_total_norm takes DTensors"
    ),
    "Expected !nested_tensorlist[0].empty()": (
        "clip_grad_value_ found no gradient. A plan with micro_batches=N moves gradients in every N-th backward (with "
        "accelerate, where sync_gradients is true): clip after it"
    ),
    "to match target batch_size": (
        'a model planned with inputs="local" returned more rows than the process has passed, as its outputs lie '
        "otherwise (on classes, say): autopar.own_rows(model, output) has those of this rank"
    ),
    "No inf checks were recorded for this optimizer": (
        "a GradScaler found no gradient of the optimizer's parameters. A plan with micro_batches=N moves gradients in "
        "every N-th backward: step the scaler after it"
    ),
}


@functools.cache
def advise() -> None:
    """From now on, print advice with such an error when it ends the process; once a process.

    torch raises these errors in C++, where they cannot be intercepted.
    """
    before = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (text := advice_for(error)) and text not in getattr(error, "__notes__", ()):
            error.add_note(text)
        before(kind, error, trace)

    sys.excepthook = shown


def advice_for(error: BaseException) -> str:
    """The advice for an error; "" if there is none."""
    if not isinstance(error, (RuntimeError, NotImplementedError, AttributeError, AssertionError, ValueError)):
        return ""
    return next((f"autopar: {advice}" for words, advice in _ADVICE.items() if words in str(error)), "")
