"""Models that have a name on the command line: an architecture of transformers with the config of a published size.

Configs hold only what differs from the architecture's default; their values are those of each model's config.json.
`parameters` counts a tied weight once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NamedModel:
    """One model of the zoo."""

    architecture: str
    parameters: int
    config: Mapping[str, int | bool] = field(default_factory=dict)


def _gpt2(layers: int, width: int, heads: int, parameters: int) -> NamedModel:
    return NamedModel("GPT2LMHeadModel", parameters, {"n_layer": layers, "n_embd": width, "n_head": heads})


def _llama(
    layers: int, width: int, inner: int, heads: int, pairs: int, words: int, length: int, parameters: int
) -> NamedModel:
    config = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": words,
        "max_position_embeddings": length,
    }
    return NamedModel("LlamaForCausalLM", parameters, config)


ZOO: dict[str, NamedModel] = {
    "gpt2": _gpt2(12, 768, 12, 124_439_808),
    "gpt2-medium": _gpt2(24, 1024, 16, 354_823_168),
    "gpt2-large": _gpt2(36, 1280, 20, 774_030_080),
    "gpt2-xl": _gpt2(48, 1600, 25, 1_557_611_200),
    "bert-base": NamedModel("BertForMaskedLM", 109_514_298),
    "bert-large": NamedModel(
        "BertForMaskedLM",
        335_174_458,
        {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    ),
    "t5-small": NamedModel("T5ForConditionalGeneration", 60_506_624),
    "t5-base": NamedModel(
        "T5ForConditionalGeneration",
        222_903_552,
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    ),
    "vit-base": NamedModel("ViTForImageClassification", 86_567_656, {"num_labels": 1000}),
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32, 32000, 4096, 6_738_415_616),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40, 32000, 4096, 13_015_864_320),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 8, 32000, 4096, 68_976_648_192),
    "llama-3-8b": _llama(32, 4096, 14336, 32, 8, 128256, 8192, 8_030_261_248),
    "llama-3-70b": _llama(80, 8192, 28672, 64, 8, 128256, 8192, 70_553_706_496),
    "mistral-7b": NamedModel("MistralForCausalLM", 7_241_732_096),
    "mixtral-8x7b": NamedModel("MixtralForCausalLM", 46_702_792_704),
    "qwen2.5-7b": NamedModel(
        "Qwen2ForCausalLM",
        7_615_616_512,
        {
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
}
"""The zoo, from small to large in each family: GPT-2, BERT, T5, ViT, Llama 2 and 3, Mistral, Mixtral, Qwen2.5."""
