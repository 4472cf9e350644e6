"""Recurrent layers with dropout between them: run one layer after the other, with masks from a counter.

torch's kernels (and cuDNN's) draw the masks between layers from their own generator, which knows no global index.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.local.context import LocalContext
from autopar.runtime.randomness import bits, keep


def recurrent_dropout(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """`torch._VF.lstm`, `gru`, `rnn_tanh` and `rnn_relu` in training, as `torch.nn` calls them.

    `(input, states, weights, has_biases, layers, dropout, training, bidirectional, batch_first)`.
    """
    assert key is not None
    value, states, weights, biases, layers, dropout, training, bidirectional, batch_first = args
    all_states = (states,) if isinstance(states, torch.Tensor) else tuple(states)
    directions = 2 if bidirectional else 1
    each, final = len(weights) // layers, []
    for layer in range(layers):
        own = tuple(state.narrow(0, layer * directions, directions) for state in all_states)
        states_of_layer = own[0] if isinstance(states, torch.Tensor) else own
        mine = weights[layer * each : (layer + 1) * each]
        value, *after = target(value, states_of_layer, mine, biases, 1, 0.0, training, bidirectional, batch_first)
        final.append(after)
        if layer < layers - 1:
            value = _dropped(value, dropout, layer, ctx, key)
    return value, *(torch.cat(parts) for parts in zip(*final, strict=True))


def _dropped(value: torch.Tensor, dropout: float, layer: int, ctx: LocalContext, key: torch.Tensor) -> torch.Tensor:
    """`value` with the mask of this layer; its features are whole, its other dims lie as in the first output."""
    if dropout == 1:
        return value * 0
    *outer, _ = ctx.shapes[0]
    indices = [torch.full((1,), layer, device=value.device, dtype=torch.int32)]
    indices += [ctx.positions(ctx.outputs[0], dim, length, value.device) for dim, length in enumerate(outer)]
    indices.append(torch.arange(value.shape[-1], device=value.device, dtype=torch.int32))
    kept = keep(bits(key, ctx.position, indices)[0], dropout)
    return torch.where(kept, value * (1 / (1 - dropout)), 0)
