"""Definitions of the terms of a report, with their units; the HTML report shows them beside the figures."""

from __future__ import annotations

STEP = {
    "compute": "Seconds of all ops of forward and backward on one device, without recomputed ones.",
    "recompute": "Seconds of forward ops, and their collectives, that backward runs a second time.",
    "communication": "Seconds of the collectives of forward and backward, without those of recomputed ops.",
    "optimizer": "Seconds of the optimizer step: reading and writing parameters, gradients and state.",
    "hidden": "Seconds of communication that overlap with compute; subtracted from the step.",
}
MEMORY = {
    "parameters": "Bytes of this device's shards of the parameters, as stored between steps.",
    "master weights": "Bytes of copies of the parameters in the optimizer's dtype, if they are stored in another.",
    "optimizer state": "Bytes that the optimizer keeps for each parameter (two numbers for AdamW).",
    "unread weights": "Bytes of parameters and buffers that the call does not read; replicated.",
    "inputs and outputs": "Bytes of the batch, of buffers, and of outputs that the training loop holds.",
    "gathered parameters": "Bytes of gathered or cast copies of parameters, kept until their gradient is computed.",
    "activations": "Bytes saved in forward for backward.",
    "gradients": "Bytes of gradients that are computed already and wait for the optimizer.",
    "unreduced gradients": "Bytes of gradients that are accumulated over micro-batches and not yet reduced.",
    "replayed block": "Bytes of activations that a recomputed block, or part of one, holds while its backward runs.",
    "communication buffers": "Bytes of parameters that are gathered for one block at a time, and of send buffers.",
    "workspace": "Bytes that are needed only while one op runs: gradients of activations, and temporaries.",
    "logits and loss": "Like workspace, for the ops that compute the loss from the model's outputs.",
    "optimizer transients": "Bytes of temporaries of the optimizer step.",
    "allocator": "Bytes that the device's allocator takes in addition to tensors: workspaces of libraries, rounding.",
}
COLLECTIVES = {
    "all_reduce": "Each device gets the sum of the tensors of all devices.",
    "all_gather": "Each device gets the whole tensor, put together from the shards of all.",
    "reduce_scatter": "Each device gets its shard of the sum of the tensors of all devices.",
    "all_to_all": "Each device sends a part to every other one: the tensor is then sharded on another dim.",
}
PHASES = {
    "forward": "while the loss is computed",
    "backward": "while gradients are computed",
    "replay": "in backward, for ops that are recomputed",
}
FIGURES = {
    "step": "Predicted seconds of one optimizer step: all micro-batches, forward and backward, and the optimizer.",
    "peak": "The most bytes that are allocated on one device at any moment of the step.",
    "budget": "The most bytes that a plan may allocate on one device.",
    "flops": "Model FLOPs of one step, forward and backward, over all devices; recomputed ops count once.",
    "rate": "Model FLOPs of one device, divided by the seconds of the step.",
    "gap": "How far the plan is at most above the proven bound: (objective - bound) / objective.",
    "objective": "The predicted seconds of a step, which the solver minimises.",
    "bound": "Proven by the solver: by this cost model, no plan whose equal blocks decide alike takes less.",
    "input bytes": "Bytes of the tensors that one device passes to collectives in a step.",
    "ratio": "Seconds of the step, divided by those of this plan.",
}
LAYOUTS = {
    "sharded": "Each device along the axis holds a part of a dim: S0 of dim 0; S1@4 of dim 1 in each of 4 parts.",
    "replicated": "Each device along the axis holds the whole tensor (R). R+: its gradient is a partial sum.",
    "partial": "Each device along the axis holds one term of a sum that is not yet reduced (P).",
}
