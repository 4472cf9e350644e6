"""What the words of a report mean, each with its unit: told where the figure stands."""

from __future__ import annotations

STEP = {
    "compute": "Seconds of all ops, forward and backward, on one device, without what is recomputed.",
    "recompute": "Seconds that backward spends on running forward ops (and their collectives) a second time.",
    "communication": "Seconds in collectives of forward and backward, those of recomputed ops apart.",
    "optimizer": "Seconds of the optimizer's step: reading and writing parameters, gradients and state.",
    "hidden": "Seconds of communication that run while something else does; taken off the step.",
}
MEMORY = {
    "parameters": "Bytes of this device's part of the parameters, as they are stored between steps.",
    "master weights": "Bytes of the copies in the optimizer's dtype, where parameters are stored in another.",
    "optimizer state": "Bytes that the optimizer keeps for each parameter (two numbers for AdamW).",
    "unread weights": "Bytes of parameters and buffers that the call does not read: whole on every device.",
    "inputs and outputs": "Bytes of the batch, of buffers, and of outputs that the caller holds meanwhile.",
    "gathered parameters": "Bytes of parameters gathered from other devices, or cast, that live until their gradient.",
    "activations": "Bytes kept from forward for backward.",
    "gradients": "Bytes of gradients that are there at this moment and wait for the optimizer.",
    "unreduced gradients": "Bytes of gradients added up over micro-batches before they are moved.",
    "replayed block": "Bytes that a block, or part of one, keeps once it is recomputed, while its own backward runs.",
    "communication buffers": "Bytes of parameters gathered for one stretch alone, and of buffers that are sent.",
    "workspace": "Bytes that live only while one op runs: gradients of activations, and temporaries.",
    "logits and loss": "As workspace, where the op is one of those that make the loss of the model's results.",
    "optimizer transients": "Bytes of temporaries of the optimizer's step.",
    "allocator": "Bytes that the device's allocator counts beside tensors: libraries' workspaces, rounding.",
}
COLLECTIVES = {
    "all_reduce": "Every device hands in a tensor and gets the sum of all.",
    "all_gather": "Every device hands in its part and gets the whole tensor.",
    "reduce_scatter": "Every device hands in a whole tensor and gets its part of the sum.",
    "all_to_all": "Every device hands every other one a part: a tensor changes the dim it is sharded on.",
}
PHASES = {
    "forward": "while the loss is computed",
    "backward": "while gradients are computed",
    "replay": "again, in backward, for ops that are recomputed",
}
FIGURES = {
    "step": "Predicted seconds of one optimizer step: all micro-batches, forward and backward, and the optimizer.",
    "peak": "The most bytes that one device has allocated at any moment of the step.",
    "budget": "The bytes that one device may have allocated at its peak.",
    "flops": "Model FLOPs of one step, forward and backward, all devices together; what is recomputed counts once.",
    "rate": "Model FLOPs that one device does in a second of the step, waiting included.",
    "gap": "How much slower than the proven bound the plan is at most: (objective - bound) / objective.",
    "objective": "The seconds of a step that the solver minimised.",
    "bound": "At these prices, no plan whose equal blocks decide alike takes fewer seconds: proven by the solver.",
    "input bytes": "Bytes that one device hands in to collectives in a step.",
    "ratio": "Seconds of its step, as a multiple of this plan's.",
}
LAYOUTS = {
    "sharded": "Each device along the axis holds one part of the dim: S0 of dim 0, S1@4 of dim 1 in each of 4 parts.",
    "replicated": "Each device along the axis holds the whole tensor (R); R+: and its gradient is a partial sum.",
    "partial": "Each device along the axis holds a term of a sum that is yet to be added up (P).",
}
