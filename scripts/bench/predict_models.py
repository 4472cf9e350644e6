"""Models and batches of `scripts/bench/predict.py`, by name: decoders, encoders, vision and convolution.

Configs are those of the published models without dropout; "-small" models are narrower and shallower. Weights and
tokens are random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


def _gpt2(layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def _decoder(
    kind: str, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, **other: bool
) -> nn.Module:
    """A decoder; `kind`: "Llama" or "Qwen2"."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=hidden,
        vocab_size=vocabulary,
        use_cache=False,
        **other,
    )
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, vocab_size=50265, max_position_embeddings=514
    )
    return RobertaForMaskedLM(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=1000)
    return ViTForImageClassification(config)


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=1000))


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def _text(vocabulary: int) -> Callable[[int, int], Batch]:
    def batch(rows: int, sequence: int) -> Batch:
        ids = torch.randint(3, vocabulary, (rows, sequence))
        return {"input_ids": ids, "labels": ids}

    return batch


def _images(rows: int, side: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(1000, (rows,))}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "gpt2": (_gpt2, _text(50257)),
    "gpt2-small": (lambda: _gpt2(6, 384, 6, 8000), _text(8000)),
    "llama-160m": (lambda: _decoder("Llama", 12, 768, 12, 4, 2048, 32000), _text(32000)),
    "llama-small": (lambda: _decoder("Llama", 8, 512, 8, 4, 1408, 8000), _text(8000)),
    "qwen2-small": (lambda: _decoder("Qwen2", 8, 512, 8, 2, 1408, 32000, tie_word_embeddings=True), _text(32000)),
    "bert": (_bert, _text(30522)),
    "roberta": (_roberta, _text(50265)),
    "vit": (_vit, _images),
    "convnext": (_convnext, _images),
    "resnet50": (_resnet, _images),
}


def build(name: str) -> nn.Module:
    """The model, in training mode, on the default device."""
    model = MODELS[name][0]()
    for attribute, value in {"loss_type": "ForCausalLM"}.items():
        if name.startswith("gpt2"):  # else transformers warns that it guesses
            setattr(model, attribute, value)
    return model.train()


def batch(name: str, rows: int, length: int) -> Batch:
    """A global batch of `rows` examples of `length` tokens, or of `length` x `length` pixels."""
    return MODELS[name][1](rows, length)


def optimizer_for(name: str, parameters: Any) -> torch.optim.Optimizer:
    """The torch optimizer for a plan's `optimizer` name."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=1e-4)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if name == "sgd-momentum" else 0.0)
