"""`generate` on planned models and real ranks, with a growing cache and with one of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import autopar
from autopar.runtime.stored.model_class import ATTRIBUTE

NEW_TOKENS = 5
IDS = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(0))


def built() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double()


def llama() -> LlamaForCausalLM:
    """Its forward declares the contents of `**kwargs`, and a decorator removes `return_dict` from them."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0)).double()


def adapted() -> LlamaForCausalLM:
    """With adapters of peft inserted into the model itself."""
    model = llama()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.double()


def wrapped() -> nn.Module:
    """With adapters of peft around the model, whose `generate` then calls it."""
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), adapters).double()


def t5() -> T5ForConditionalGeneration:
    """Its `generate` calls the encoder separately."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 96}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)).double()


def planned(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(model, {"input_ids": IDS, "labels": IDS}, mesh, constraints="tp", **options).eval()


def generated(model: Any, cache: str, **settings: Any) -> list[list[int]]:
    settings |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    return model.generate(input_ids=IDS[:2, :6], **settings).tolist()


def twice(build: Callable[[], nn.Module], cache: str, **settings: Any) -> dict[str, Any]:
    """The tokens of two runs, those of one process, and the number of the model's graphs after each run."""
    model, alone = planned(build()), build().eval()
    programs = getattr(model, ATTRIBUTE).programs
    found: dict[str, Any] = {"alone": generated(alone, cache, **settings), "tokens": [], "graphs": []}
    for _ in range(2):
        found["tokens"].append(generated(model, cache, **settings))
        found["graphs"].append(len(programs))
    return found


def with_local_inputs() -> str:
    try:
        generated(planned(built(), inputs="local"), "dynamic")
    except autopar.InputError as refused:
        return str(refused)
    return "no error"


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "dynamic": lambda: twice(built, "dynamic"),
        "static": lambda: twice(built, "static"),
        "llama": lambda: twice(llama, "dynamic"),
        "adapters": lambda: twice(adapted, "dynamic"),
        "wrapped": lambda: twice(wrapped, "dynamic"),
        "t5": lambda: twice(t5, "dynamic"),
        "llama_beams": lambda: twice(llama, "dynamic", num_beams=2),
        "local": with_local_inputs,
    }
}
