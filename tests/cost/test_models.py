"""FLOPs and saved bytes of models of other libraries, against FlopCounterMode and real runs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from recorded import counted_flops, counted_saved_bytes
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.cost import annotate, saved_bytes, total_flops
from autopar.graph import COST
from autopar.tracing import trace

IDS = torch.arange(32).view(2, 16)
SLOW = "llama, padded", "bert, padded", "t5, padded"  # gpt2 padded is quick
TOKENS = {"input_ids": IDS, "labels": IDS}
PADDED = {**TOKENS, "attention_mask": torch.tensor([[1] * 16, [1] * 10 + [0] * 6])}


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=101, n_positions=64, bos_token_id=1, eos_token_id=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str = "sdpa") -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=101, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=101,
        max_position_embeddings=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=101, dropout_rate=0.1,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


class WithLoss(nn.Module):
    """A model together with a loss that is computed outside of it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), labels)


def resnet() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return WithLoss(
        nn.Sequential(*stem, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    )


def mlp() -> nn.Module:
    return WithLoss(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 5)))


def decoder(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A small causal language model of transformers, by the name of its family."""
    config = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes,
    }  # fmt: skip
    return lambda: getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))


def swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    return transformers.SwinForImageClassification(config)


PIXELS = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
IMAGES = {"x": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 3])}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "gpt2": (gpt2, TOKENS),
    "gpt2 with dropout": (lambda: gpt2(0.1), TOKENS),
    "gpt2, padded": (gpt2, PADDED),
    "llama": (llama, TOKENS),
    "llama, padded": (llama, PADDED),
    "llama, eager attention": (lambda: llama("eager"), TOKENS),
    "bert": (bert, TOKENS),
    "bert, padded": (bert, PADDED),
    "vit": (vit, PIXELS),
    "t5": (t5, TOKENS),
    "t5, padded": (t5, PADDED),
    "resnet": (resnet, IMAGES),
    "qwen3": (decoder("Qwen3", head_dim=8), TOKENS),
    "gemma2": (decoder("Gemma2", head_dim=8), TOKENS),
    "falcon, one key for all heads": (decoder("Falcon"), TOKENS),
    "mamba": (decoder("Mamba", state_size=4), TOKENS),
    "swin": (swin, PIXELS),
    "mlp": (mlp, {"x": torch.randn(6, 8), "labels": torch.tensor([0, 1, 2, 3, 4, 0])}),
}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    value = model(**batch)
    return value if isinstance(value, torch.Tensor) else value.loss


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in CASES])
def test_flops_and_saved_bytes_are_those_of_the_model_run_whole(name: str) -> None:
    make, batch = CASES[name]
    torch.manual_seed(0)
    model = make().train()
    traced = trace(model, meta_args=batch)
    annotate(traced.graph, "cpu", traced.root)
    assert not [node.name for node in traced.graph.nodes if node.meta[COST].estimated]

    owned = [*model.parameters(), *model.buffers(), *batch.values()]
    assert saved_bytes(traced.graph) == counted_saved_bytes(lambda: loss_of(model, batch), owned)

    if "attention_mask" in batch:  # libraries read a mask's data, so meta tensors cannot run whole: the same ops on cpu
        with sdpa_kernel(SDPBackend.MATH):
            expected = counted_flops(lambda: loss_of(model, batch))
    else:
        meta = copy.deepcopy(model).to("meta")
        expected = counted_flops(lambda: loss_of(meta, {key: value.to("meta") for key, value in batch.items()}))
    assert total_flops(traced.graph) == expected


def test_the_gpu_keeps_less_than_the_cpu_where_its_masks_are_bytes() -> None:
    traced = trace(gpt2(0.1).train(), meta_args=TOKENS)
    annotate(traced.graph, "cuda", traced.root)
    on_cuda = saved_bytes(traced.graph)
    annotate(traced.graph, "cpu", traced.root)
    assert on_cuda < saved_bytes(traced.graph)


def test_thirty_two_layers_cost_few_measurements() -> None:
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256,
        )  # fmt: skip
        model, ids = transformers.LlamaForCausalLM(config), torch.zeros(1, 2048, dtype=torch.long)
    traced = trace(model.train(), meta_args={"input_ids": ids, "labels": ids}, parameter_dtype=torch.bfloat16)
    annotate(traced.graph, "cuda", traced.root)
    measured = {id(n.meta[COST]) for n in traced.graph.nodes if n.meta[COST].work}
    assert len(measured) < 80
