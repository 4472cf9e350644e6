"""Small versions of transformers architectures with real weights and inputs: those of the zoo that a CPU can run.

Widths, depths and vocabularies are reduced under the names that configs use; all else is the default config's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto

SMALL: dict[str, int] = {
    "vocab_size": 99, "vocab_size_per_layer_input": 99, "src_vocab_size": 99, "tgt_vocab_size": 99,
    "entity_vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "emb_dim": 32,
    "embedding_size": 32, "entity_emb_size": 32, "word_embed_proj_dim": 32, "feature_size": 16, "d_embed": 32,
    "embedding_dim": 32, "hidden_dim": 64,
    "intermediate_size": 64, "dense_intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "d_inner": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_hidden_size": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "global_head_dim": 8, "d_kv": 8, "d_head": 8,
    "rotary_dim": 4, "kv_channels": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_k": 2, "moe_topk": 2, "first_k_dense_replace": 1,
    "max_position_embeddings": 64, "n_positions": 64, "image_size": 64, "patch_size": 8, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_labels": 5,
}  # fmt: skip

LISTS = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}


def small_config(kind: Any) -> Any:
    """A small config of this class, including nested configs."""
    default = kind()
    values: dict[str, Any] = {}
    for name, value in SMALL.items():
        if isinstance(getattr(kind, name, None), property):
            continue
        now = vars(default).get(name)
        if type(now) is int and not name.endswith("token_id"):
            values[name] = min(now, value)
        elif name.endswith("token_id") and hasattr(default, name):
            values[name] = value
    for name in getattr(kind, "sub_configs", {}):
        if getattr(default, name, None) is not None:
            values[name] = small_config(type(getattr(default, name))).to_dict()
    if default.is_encoder_decoder:
        values["decoder_start_token_id"] = 1
    if "kv_lora_rank" in values:  # every head has its own keys
        values["num_key_value_heads"] = values["num_attention_heads"]
    return kind(**values)


def small(name: str) -> nn.Module:
    """The small model of a transformers class on the CPU, with the library's initial weights."""
    torch.manual_seed(0)
    architecture = getattr(hf, name)
    config = small_config(architecture.config_class)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model: nn.Module = architecture(config)
    return model


def inputs_of(model: nn.Module, batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Real inputs of a training step, with labels if the model takes any."""
    generator = torch.Generator().manual_seed(batch)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        config: Any = model.config
        size, channels = getattr(config, "image_size", None) or 64, getattr(config, "num_channels", None) or 3
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        made = {main: torch.randn(batch, channels, height, width, generator=generator)}
        if "labels" in parameters:
            made["labels"] = torch.arange(batch) % 2
        return made
    if main != "input_ids":
        raise ValueError(f"no inputs are made for {main}")
    ids = torch.randint(3, 90, (batch, length), generator=generator)
    per_sequence = type(model).__name__.endswith("SequenceClassification")
    made = {"input_ids": ids}
    if "labels" in parameters:
        made["labels"] = torch.arange(batch) % 2 if per_sequence else ids.clone()
    return made


def padded(ids: torch.Tensor) -> torch.Tensor:
    """A left-padded attention mask whose first sequence is two tokens shorter."""
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return mask
