"""The models of the equality runs: small configs without dropout, most of them of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH, SEQUENCE, VOCABULARY = 8, 16, 96


@dataclass(frozen=True)
class Case:
    """How to build a model (with the same weights in every process), and how to make the batch of a step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    loss_fn: Callable[..., torch.Tensor] | None = None
    concrete: Mapping[str, Any] = field(default_factory=dict)


def _random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def _tokens(step: int, length: int = SEQUENCE) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=_random(step))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_head=4, n_embd=32, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


class MLP(nn.Module):
    """A stack of layers without residuals, some with a bias."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return self.act(out)


class ResNet(nn.Module):
    """A residual convolutional net with batch norm; its loss is outside of the model."""

    def __init__(self, channels: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.blocks = nn.Sequential(*(_Residual(channels) for _ in range(blocks)))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def _mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def _classify(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def _causal(step: int) -> dict[str, torch.Tensor]:
    ids = _tokens(step)
    return {"input_ids": ids, "labels": ids}


def _masked(step: int) -> dict[str, torch.Tensor]:
    """A padded batch: rows of different lengths, and labels ignored unevenly."""
    ids = _tokens(step)
    length = torch.arange(SEQUENCE - BATCH, SEQUENCE).unsqueeze(1) + 1
    mask = (torch.arange(SEQUENCE) < length).long()
    labels = torch.where((mask == 1) & (torch.rand(ids.shape, generator=_random(step)) < 0.4), ids, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _padded_causal(step: int) -> dict[str, torch.Tensor]:
    batch = _masked(step)
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
    return batch


def _images(step: int) -> dict[str, torch.Tensor]:
    generator = _random(step)
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 8, (BATCH,), generator=generator),
    }


def _translation(step: int) -> dict[str, torch.Tensor]:
    batch = _masked(step)
    return {**batch, "labels": torch.where(_tokens(step + 500, 12) < 20, -100, _tokens(step + 500, 12))}


def _vectors(step: int) -> dict[str, torch.Tensor]:
    generator = _random(step)
    x = torch.randn(BATCH, 4 * SEQUENCE, 32, generator=generator)
    return {"x": x, "target": torch.randn(BATCH, 4 * SEQUENCE, 8, generator=generator)}


def _pictures(step: int) -> dict[str, torch.Tensor]:
    generator = _random(step)
    return {
        "x": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "target": torch.randint(0, 8, (BATCH,), generator=generator),
    }


CASES: dict[str, Case] = {
    "gpt2": Case(_gpt2, _causal),
    "llama": Case(_llama, _padded_causal),
    "bert": Case(_bert, _masked),
    "vit": Case(_vit, _images),
    "t5": Case(_t5, _translation),
    "mlp": Case(MLP, _vectors, _mean_square),
    "resnet": Case(ResNet, _pictures, _classify),
}


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """The model, with the same weights in every process."""
    torch.manual_seed(7)
    return CASES[name].build().to(dtype).train()


def batch(name: str, step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The batch of a step, with floating tensors in `dtype`."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in CASES[name].batch(step).items()}


def reference_loss(name: str, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss as a user computes it on one device."""
    case = CASES[name]
    if case.loss_fn is None:
        return model(**inputs).loss
    inputs = dict(inputs)
    target = inputs.pop("target")
    return case.loss_fn(model(**inputs), target)
