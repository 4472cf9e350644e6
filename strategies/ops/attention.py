"""Fused attention: batch, heads (grouped or not) and the query's sequence "q" can be split; keys and the head dim
never."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, argument, tensors


def attention(node: fx.Node) -> str:
    """`scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)`.

    Where the shapes suit the fused kernels, causal attention split on "q" balances the work among the ranks
    (`autopar.runtime.local.causal`). Elsewhere it needs a mask by global position, and does not save the masked half.
    """
    query, key, val, *mask = tensors(node)
    lead = [f"b{k}" for k in range(query.dim() - 3)] + (["h"] if query.dim() > 2 else [])
    groups = query.shape[-3] // key.shape[-3] if argument(node, "enable_gqa", 7, False) else 1
    heads = lead if groups == 1 else [*lead[:-1], f"(h g={groups})"]
    random = argument(node, "dropout_p", 4, 0.0) > 0
    value_dim = "v!" if val.shape[-1] != query.shape[-1] else "e!"
    operands = [[*heads, "q", "e!"], [*lead, "k!", "e!"], [*lead, "k!", value_dim]]
    if mask:
        operands.append([*heads, "q", "k!"][-mask[0].dim() :])
    text = f"{', '.join(map(' '.join, operands))} -> {' '.join((*heads, 'q', value_dim))}"
    if random:
        return f"{text} | @sdpa_dropout always"
    if not argument(node, "is_causal", 5, False):
        return text
    fused = query.dim() == 4 and query.shape[-1] == val.shape[-1] and query.shape[-2] == key.shape[-2]
    return f"{text} | q @{'sdpa_causal plain' if fused else 'sdpa_causal_mask plain double'}"


RULES: dict[str, str | Writer] = {
    "scaled_dot_product_attention": attention,
}
