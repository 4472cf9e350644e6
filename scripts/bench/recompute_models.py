"""Stacks of published blocks for `scripts/bench/recompute.py`, and the measured cost of a step of such a stack."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from autopar.cluster import Cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import LiveStorages

BLOCKS, WIDTH, HEADS, ROWS, LENGTH = 6, 128, 4, 4, 256
aten = torch.ops.aten
_DEVICE = Cluster.preset("cpu", (1,)).device


class GPT2(nn.Module):
    """Blocks of GPT-2 after a linear layer; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(n_embd=WIDTH, n_head=HEADS, resid_pdrop=0.0, attn_pdrop=0.0)
        config._attn_implementation = "sdpa"
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(GPT2Block(config, layer_idx=i) for i in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Llama(nn.Module):
    """Blocks of Llama after a linear layer; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS
        )
        config._attn_implementation = "sdpa"
        self.into = nn.Linear(WIDTH, WIDTH)
        cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(LENGTH)[None])
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.blocks = nn.ModuleList(LlamaDecoderLayer(config, layer_idx=i) for i in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x, position_embeddings=(self.cos, self.sin))
        return x.square().mean()


MODELS: dict[str, type[nn.Module]] = {"gpt2": GPT2, "llama": Llama}


def example() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


# -- prices of ops, the same for all systems --------------------------------------------------------------------------


def op_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs as torch counts them; the CPU's fused attention, which torch does not count, as that of other devices."""
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return sdpa_flop_count(*(tuple(t.shape) for t in args[:3]))
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return sdpa_backward_flop_count(*(tuple(t.shape) for t in args[:4]))
    formula = flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=out) if formula is not None else 0


def op_seconds(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Seconds of an ATen op by autopar's CPU preset: compute plus memory traffic; views are free."""
    if func.is_view or func is aten.detach.default:
        return 0.0
    tensors = [t for t in pytree.tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
    moved = sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)
    return op_flops(func, args, kwargs, out) / _DEVICE.flops_per_s["float32"] + moved / _DEVICE.bytes_per_s


class StepMeter(LiveStorages):
    """Measures peak live bytes, as `scripts/bench/predict.py` does, and adds up the prices of all ops that run."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__(tensors)
        self.seconds, self.flops = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.seconds += op_seconds(func, args, kwargs or {}, out)
        self.flops += op_flops(func, args, kwargs or {}, out)
        return out


class Measured:
    """The cost of one way to run a step: peak bytes, prices of its ops, and CPU seconds of the steps of `time`."""

    def __init__(self, model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = example()

        def step() -> None:
            run(x).backward()
            for parameter in model.parameters():
                parameter.grad = None

        step()  # a warm-up: compilers compile, caches fill
        with StepMeter([*model.parameters(), *model.buffers(), x]) as meter:
            step()
        self.peak_bytes, self.seconds, self.flops = meter.peak_bytes, meter.seconds, meter.flops
        self.step = step
        self.cpu_seconds: list[float] = []

    def time(self) -> None:
        """Run one more step, and record its CPU time."""
        start = time.process_time()
        self.step()
        self.cpu_seconds.append(time.process_time() - start)
