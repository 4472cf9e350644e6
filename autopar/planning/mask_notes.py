"""Notes of a plan about attention masks that are computed from an input.

Models of transformers look at an `attention_mask`, and use no mask where it is all ones. A trace cannot, as it does not
know the contents of the input. So the plan has a mask over all pairs of positions, which attention reads in every
layer; without a mask it takes a faster kernel.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import VAL, output_tensors

_MASK = 3  # position of the mask among the arguments


def mask_notes(graph: fx.Graph) -> tuple[str, ...]:
    """A note for each input that marks which tokens count and from which attention masks are computed."""
    readers: dict[fx.Node, list[fx.Node]] = {}  # by mask: the attention ops that read it
    for node in graph.nodes:
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            mask = node.kwargs.get("attn_mask", node.args[_MASK] if len(node.args) > _MASK else None)
            if isinstance(mask, fx.Node) and _is_for_all_heads(mask.meta[VAL]):
                readers.setdefault(mask, []).append(node)
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for mask in readers:
        mask_input = _mask_input(mask)
        if mask_input is not None:
            by_input.setdefault(mask_input, []).append(mask)
    return tuple(
        f"attention ({sum(len(readers[mask]) for mask in masks)} ops) reads a mask of "
        f"{'x'.join(map(str, masks[0].meta[VAL].shape))} made of the input {source.target}, whatever its contents. "
        f"If every token counts, leave {source.target} out: full or causal attention has a faster kernel without "
        f"a mask. A decoder does not need it either if all padding is at the end and its labels are ignored"
        for source, masks in by_input.items()
    )


def _mask_input(mask: fx.Node) -> fx.Node | None:
    """The only input that a mask is computed from, if it is [batch, tokens] and called a mask; else None."""
    inputs, waiting, visited = [], [mask], {mask}
    while waiting:
        node = waiting.pop()
        if isinstance(node.meta.get(VAL), (int, float)):
            continue  # a size: it does not depend on the tensor's contents
        if any(tensor.requires_grad for tensor in output_tensors(node)):
            return None
        if node.op == "placeholder":
            inputs.append(node)
        waiting += [source for source in node.all_input_nodes if source not in visited]
        visited.update(node.all_input_nodes)
    if len(inputs) != 1 or "mask" not in str(inputs[0].target) or inputs[0].meta[VAL].ndim != 2:
        return None
    return inputs[0]


def _is_for_all_heads(mask: torch.Tensor) -> bool:
    """Whether a mask is the same for each head; otherwise it is a bias, which remains if the input is left out."""
    return mask.ndim == 4 and mask.shape[1] == 1
