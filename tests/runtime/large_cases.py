"""Models built on the meta device and initialised on real ranks, against one process with the same seed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import LiveStorages

Build = Callable[[], nn.Module]


class Odd(nn.Module):
    """Has its own parameters and buffers, which only its constructor initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 34)
        self.first.weight.data.mul_(2)
        self.second = nn.Parameter(torch.zeros(34, 17))
        nn.init.trunc_normal_(self.second, std=0.02)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(17, 4))
        self.register_buffer("triangle", torch.ones(4, 4).triu(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.head(torch.tanh(self.first(x)) @ self.second) @ self.triangle) ** 2).mean()


class Layers(nn.Module):
    """Consists of layers that can all reset their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) ** 3).mean()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def ids(rows: int = 4, length: int = 8) -> dict[str, torch.Tensor]:
    words = torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(7))
    return {"input_ids": words, "labels": words}


def rows(count: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 16, generator=torch.Generator().manual_seed(count))}


MODELS: dict[str, tuple[Build, dict[str, torch.Tensor]]] = {
    "odd": (Odd, rows()),
    "layers": (Layers, rows()),
    "llama": (llama, ids()),
    "t5": (t5, ids()),
}


def on_meta(name: str, preset: str = "fsdp", **options: Any) -> nn.Module:
    build, inputs = MODELS[name]
    with torch.device("meta"):
        model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(model, inputs, mesh, constraints=preset, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    both = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for named in both for name, tensor in named}


def differing(model: nn.Module, alone: nn.Module) -> list[str]:
    """Names of tensors that are not bit-identical in both models."""
    mine, right = tensors(model), tensors(alone)
    assert list(mine) == list(right)
    return [n for n in right if whole(mine[n]).dtype != right[n].dtype or not torch.equal(whole(mine[n]), right[n])]


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model(**inputs)
    return found if isinstance(found, torch.Tensor) else found.loss  # type: ignore[no-any-return]


def as_one_process(name: str, preset: str) -> dict[str, Any]:
    """Values, generator and loss after materialising, against a model that was built on the CPU."""
    build, inputs = MODELS[name]
    model = on_meta(name, preset)
    was_on_meta = all(tensor.is_meta for tensor in tensors(model).values())
    torch.manual_seed(11)
    autopar.materialise(model, build if name == "odd" else None)
    left = torch.rand(1).item()
    torch.manual_seed(11)
    alone = build()
    right = torch.rand(1).item()
    differ = differing(model, alone)
    loss, expected = loss_of(model, inputs), loss_of(alone, inputs)
    loss.backward()
    parameters = list(model.parameters())
    held = sum(p.to_local().untyped_storage().nbytes() for p in parameters)  # type: ignore[operator]
    return {
        "was_on_meta": was_on_meta,
        "differing": differ,
        "generators_differ": left != right,
        "loss_error": abs(loss.item() - expected.item()),
        "share": held / sum(p.numel() * p.element_size() for p in parameters),
        "tied_apart": len(parameters) != len(list(alone.parameters())),
    }


def seeds_of_rank_zero() -> dict[str, Any]:
    """Ranks with different seeds all use rank 0's for initialisation, and then have their own again."""
    model = on_meta("llama")
    torch.manual_seed(11 + dist.get_rank())
    before = torch.get_rng_state()
    autopar.materialise(model)
    kept = torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    return {"differing": differing(model, llama()), "kept": kept}


def in_another_dtype() -> dict[str, Any]:
    """Parameters are stored in the plan's dtype: the constructor's values, cast."""
    model = on_meta("llama", precision="bf16")
    torch.manual_seed(11)
    autopar.materialise(model)
    torch.manual_seed(11)
    alone = llama()
    stored = {str(p.dtype) for p in model.parameters()}
    return {"stored": sorted(stored), "differing": differing(model, alone.to(next(model.parameters()).dtype))}


def filled_by_a_checkpoint() -> dict[str, Any]:
    """A model from the meta device resumes from a checkpoint, without drawing initial values."""
    saved, model = on_meta("odd", "fsdp"), on_meta("odd", "tp")
    autopar.materialise(saved, Odd)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        path = autopar.save_checkpoint(saved, None, folder[0], step=3).result()
        early = refusal(lambda: autopar.load_checkpoint(model, None, path))
        before = torch.get_rng_state()
        autopar.materialise(model, Odd, draw=False)
        drawn = not torch.equal(torch.get_rng_state(), before)
        step = autopar.load_checkpoint(model, None, path)
        dist.barrier()
    differ = [n for n, t in tensors(model).items() if not torch.equal(whole(t), whole(tensors(saved)[n]))]
    return {"early": early, "drawn": drawn, "step": step, "differing": differ}


def never_whole() -> dict[str, Any]:
    """Peak bytes of live tensors as a fraction of the model's; all layers have equal size."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(64))
            for layer in self.layers:
                nn.init.trunc_normal_(layer.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    with torch.device("meta"):
        model: nn.Module = Deep()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    autopar.autoparallelize(model, {"x": torch.zeros(4, 256)}, mesh, constraints="fsdp")
    with LiveStorages([]) as live:
        autopar.materialise(model, Deep)
    return {"share": live.peak_bytes / sum(p.numel() * p.element_size() for p in model.parameters())}


def refusal(run: Callable[[], Any]) -> str:
    try:
        run()
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_without_values() -> str:
    return refusal(lambda: on_meta("llama")(**ids()))


def nothing_fills_it() -> str:
    return refusal(lambda: autopar.materialise(on_meta("odd")))


def another_build() -> str:
    return refusal(lambda: autopar.materialise(on_meta("odd"), Layers))


def one_rank_fails() -> str:
    def build() -> nn.Module:
        if dist.get_rank() == 1:
            raise ValueError("no such file")
        return Odd()

    model = on_meta("odd")
    try:
        autopar.materialise(model, build)
    except (autopar.AutoparError, ValueError) as error:
        return str(error)
    return "no error"


def ranks_build_differently() -> str:
    def build() -> nn.Module:
        model = Odd()
        nn.init.normal_(model.second, std=1.0 + dist.get_rank())
        return model

    return refusal(lambda: autopar.materialise(on_meta("odd"), build))


def old_optimizer() -> str:
    model = on_meta("layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autopar.materialise(model)
    found = refusal(lambda: model(**rows()))
    assert optimizer.param_groups
    return found


def one_rank_has_values() -> str:
    with torch.device("meta"):
        model: nn.Module = Layers()
    if dist.get_rank() == 0:
        model = Layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return refusal(lambda: autopar.autoparallelize(model, rows(), mesh))


PRESETS = ("ddp", "fsdp", "tp")
REFUSED = (
    run_without_values,
    nothing_fills_it,
    another_build,
    one_rank_fails,
    ranks_build_differently,
    old_optimizer,
    one_rank_has_values,
)
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{name}-{preset}": partial(as_one_process, name, preset) for name in MODELS for preset in PRESETS}
    | {
        case.__name__: case
        for case in (seeds_of_rank_zero, in_another_dtype, filled_by_a_checkpoint, never_whole, *REFUSED)
    }
}
