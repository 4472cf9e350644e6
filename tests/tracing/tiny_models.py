"""Small models that the tests trace, their inputs, and comparison of runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn
from torch.utils import _pytree as pytree

IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :2] = 0
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Made(nn.Module):
    """Returns `make` of its input."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.make(x)


class Block(nn.Module):
    """A residual block with an in-place op."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.last_norm, self.act = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last_norm(self.second(self.act(self.norm(self.first(x)))))
        out += x
        return self.act(out)


def gpt2(**options):
    sizes = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=99, n_positions=32)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=99))


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES, vocab_size=99))


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=5))


def t5():
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=99)
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3))


def resnet():
    stem = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*stem, Block(4), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


TEXT = dict(input_ids=IDS, labels=IDS)
CASES = {
    "gpt2": (gpt2, TEXT),
    "gpt2 mask": (gpt2, {**TEXT, "attention_mask": MASK}),
    "llama": (llama, TEXT),
    "llama mask": (llama, {**TEXT, "attention_mask": MASK}),
    "bert": (bert, TEXT),
    "bert mask": (bert, {**TEXT, "attention_mask": MASK}),
    "vit": (vit, dict(pixel_values=PIXELS, labels=torch.tensor([1, 2]))),
    "t5": (t5, TEXT),
    "t5 mask": (t5, {**TEXT, "attention_mask": MASK}),
    "mlp": (mlp, dict(input=torch.randn(5, 4))),
    "resnet": (resnet, dict(input=PIXELS)),
}


def tensors(value):
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def run(function, model, state):
    """Outputs, gradients and buffers of one run, from given buffers and a fixed random state."""
    model.load_state_dict(state)
    torch.manual_seed(1)
    out = tensors(function())
    scalar = sum(v.double().square().sum() for v in out if v.requires_grad)
    gradients = torch.autograd.grad(scalar, list(model.parameters()), allow_unused=True)
    return out, [g for g in gradients if g is not None], [b.clone() for b in model.buffers()]


# Assertions to trace are in this module, since pytest rewrites those of test modules.


def asserts_a_tensor(x):
    assert (x > -100).all(), "too small"
    return x * 2


def asserts_a_number(x):
    assert torch.all(x > -100).item()
    assert x.sum().item() < 1000, f"too large: {x.shape}"
    return x * 2


def asserts_the_opposite(x):
    assert not (x > 100).any()
    return x * 2


def branches_then_asserts(x):
    if x.sum() > 0:
        assert x is None
    return x * 2


def acts_then_asserts(x):
    if x.sum() > 0:
        x = x + 1
        assert x.ndim == 1
    return x


def asserts_a_branch(x):
    assert x.shape if (x > 0).any() else x is None
    return x
