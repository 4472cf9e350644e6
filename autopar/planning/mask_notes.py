"""A hint on masks of attention that an input makes, for the notes of a plan.

Models of transformers look at an `attention_mask`, and go without a mask where it is all ones. A trace cannot: what the
input will hold is not known. So the plan has a mask of all pairs of positions, which attention reads in every layer,
and without which it takes a faster kernel.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import VAL, output_tensors

_MASK = 3  # where the mask stands among the arguments


def mask_notes(graph: fx.Graph) -> tuple[str, ...]:
    """A note for each input that tells which tokens count and of which masks of attention are made."""
    readers: dict[fx.Node, list[fx.Node]] = {}  # mask: what reads it
    for node in graph.nodes:
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            mask = node.kwargs.get("attn_mask", node.args[_MASK] if len(node.args) > _MASK else None)
            if isinstance(mask, fx.Node) and _is_for_all_heads(mask.meta[VAL]):
                readers.setdefault(mask, []).append(node)
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for mask in readers:
        asked = _mask_input(mask)
        if asked is not None:
            by_input.setdefault(asked, []).append(mask)
    return tuple(
        f"attention ({sum(len(readers[mask]) for mask in masks)} ops) reads a mask of "
        f"{'x'.join(map(str, masks[0].meta[VAL].shape))} made of the input {source.target}, whatever its contents. "
        f"If every token counts, leave {source.target} out: full or causal attention has a faster kernel without "
        f"a mask. A decoder does not need it either if all padding is at the end and its labels are ignored"
        for source, masks in by_input.items()
    )


def _mask_input(mask: fx.Node) -> fx.Node | None:
    """The one input [batch, tokens], named a mask, whose content makes this one; None with anything else in it."""
    inputs, waiting, seen = [], [mask], {mask}
    while waiting:
        node = waiting.pop()
        if isinstance(node.meta.get(VAL), (int, float)):
            continue  # a size: nothing of the tensor that has it
        if any(tensor.requires_grad for tensor in output_tensors(node)):
            return None
        if node.op == "placeholder":
            inputs.append(node)
        waiting += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    if len(inputs) != 1 or "mask" not in str(inputs[0].target) or inputs[0].meta[VAL].ndim != 2:
        return None
    return inputs[0]


def _is_for_all_heads(mask: torch.Tensor) -> bool:
    """Whether it says the same of each head; else it is a bias, which stays without the input."""
    return mask.ndim == 4 and mask.shape[1] == 1
