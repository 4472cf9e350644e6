"""Fused attention: batch, heads (grouped or not) and "q" split; keys and the head's dim never."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, argument, by_name, output_shapes, tensors


def attention(node: fx.Node) -> str:
    """`scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)`.

    Causal attention on a part of the "q" needs a mask by global position and loses the causal kernel's saving.
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
    return f"{text} | q @sdpa_causal double" if argument(node, "is_causal", 5, False) else text


_MULTI_HEAD = """query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn
 dropout_p out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight
 q_proj_weight k_proj_weight v_proj_weight"""


def multi_head(node: fx.Node) -> str | None:
    """`multi_head_attention_forward`, all projections in one op, (length, batch, width): splits on the batch.

    With dropout it draws its own mask, which no rank could share.
    """
    random = argument(node, "training", 13, True) and argument(node, "dropout_p", 10, 0.0) > 0
    if random or tensors(node)[0].dim() != 3:
        return None
    mask = argument(node, "attn_mask", 16)
    heads = argument(node, "num_heads", 4)
    weights = dict.fromkeys(
        ("in_proj_weight", "out_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), "_ _"
    )
    vectors = dict.fromkeys(("in_proj_bias", "out_proj_bias"), "_")
    operands = {
        **dict.fromkeys(("query", "key", "value"), "_ b _"),
        **weights,
        **vectors,
        **dict.fromkeys(("bias_k", "bias_v"), "_ _ _"),
        "key_padding_mask": "b _",
        "attn_mask": f"(b h={heads}!) _ _" if mask is not None and mask.dim() == 3 else "_ _",
    }
    outputs = ["_ b _", "b _ _ _" if output_shapes(node)[-1:] and len(output_shapes(node)[-1]) == 4 else "b _ _"]
    return by_name(_MULTI_HEAD, ", ".join(outputs[: len(output_shapes(node))]), **operands)(node)


RULES: dict[str, str | Writer] = {
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head,
}
