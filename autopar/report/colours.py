"""One colour for each kind of bytes and part of a step, the same in every picture; a label always stands beside it."""

COLOURS = {
    "parameters": "#4e79a7",
    "master weights": "#86a8d0",
    "optimizer state": "#b07aa1",
    "unread weights": "#8c8c5a",
    "inputs and outputs": "#9c9c9c",
    "gathered parameters": "#76b7b2",
    "activations": "#59a14f",
    "gradients": "#e15759",
    "unreduced gradients": "#ff9d9a",
    "replayed block": "#edc948",
    "communication buffers": "#9c755f",
    "workspace": "#f28e2b",
    "logits and loss": "#ffbe7d",
    "optimizer transients": "#d4a6c8",
    "allocator": "#bab0ac",
    "compute": "#4e79a7",
    "recompute": "#edc948",
    "communication": "#e15759",
    "optimizer": "#b07aa1",
}
