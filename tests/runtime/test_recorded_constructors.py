"""A constructor recorded without data and then replayed gives the values and generator state of a direct run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from autopar import InputError
from autopar.runtime.weights.recording import Tape, View, recording
from autopar.runtime.weights.replaying import Replay, slice_for

Build = Callable[[], nn.Module]


class Odd(nn.Module):
    """Uses every way of filling tensors that we have seen in constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.legacy = nn.Parameter(torch.Tensor(5).uniform_())
        self.cut = nn.Parameter(torch.zeros(3, 400))
        nn.init.trunc_normal_(self.cut, std=0.02)
        self.tail = nn.Parameter(torch.empty(50, 50))
        nn.init.trunc_normal_(self.tail, a=2.0, b=3.0)
        self.arrays = nn.Parameter(torch.from_numpy(np.random.RandomState(0).rand(3, 3)))
        self.turned = nn.Parameter(torch.empty(4, 3).t())
        nn.init.normal_(self.turned)
        self.orthogonal = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.orthogonal)
        self.sparse = nn.Parameter(torch.empty(6, 5))
        nn.init.sparse_(self.sparse, 0.3)
        self.layer = nn.Linear(4, 4)
        self.layer.weight.data.mul_(2)
        self.recurrent = nn.LSTM(4, 5, 2, bidirectional=True)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.scale = nn.Parameter(torch.ones(4) * self.rates[2])
        self.listed = nn.Parameter(torch.tensor(torch.arange(7.0).tolist()))
        self.table = nn.Embedding(7, 3, padding_idx=1)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.spectral_norm = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
        self.half = nn.Linear(3, 4).bfloat16()
        self.register_buffer("places", torch.ones(4, 4).triu().nonzero())
        self.register_buffer("numbers", torch.from_numpy(torch.arange(4).numpy() * 2))


def of(name: str, **config: Any) -> Build:
    architecture = getattr(transformers, name)
    return lambda: architecture(architecture.config_class(**config))


def _replayed(
    build: Build, only: Callable[[str], bool] = lambda _: True, device: str = "cpu"
) -> tuple[dict[str, torch.Tensor], Any]:
    with recording() as recorded:
        model = build()
    views = {name: recorded.view(t) for name, t in _tensors(model).items() if only(name)}
    steps = slice_for(recorded.tape, {view.storage for view in views.values()})
    found: dict[str, torch.Tensor] = {}

    def place(number: int, replay: Replay) -> None:
        found.update({n: replay.tensor(v).clone() for n, v in views.items() if v.storage == number})

    Replay(recorded.tape, {view.storage for view in views.values()}, torch.device(device)).run(steps, place)
    return found, steps


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


BUILDS: dict[str, Build] = {
    "odd": Odd,
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),  # its layers are deep copies
    "llama": of("LlamaForCausalLM", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
    "gpt2": of("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4),
    "t5": of("T5ForConditionalGeneration", d_model=32, d_ff=64, num_layers=2, num_heads=4),
    "vit": of("ViTForImageClassification", hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "swin": of("SwinForImageClassification", embed_dim=24, depths=[2, 2], num_heads=[2, 2]),
    "wav2vec2": of("Wav2Vec2ForCTC", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64),
    "mamba": of("MambaForCausalLM", hidden_size=32, num_hidden_layers=2),
    "mixtral": of("MixtralForCausalLM", hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", BUILDS)
def test_values_are_those_of_the_constructor(name: str) -> None:
    torch.manual_seed(5)
    right = _tensors(BUILDS[name]())
    after = torch.get_rng_state()
    torch.manual_seed(5)
    found, steps = _replayed(BUILDS[name])
    assert found.keys() == right.keys()
    assert not steps.unfilled
    for tensor_name, tensor in right.items():
        assert found[tensor_name].dtype == tensor.dtype, tensor_name
        assert torch.equal(found[tensor_name], tensor), tensor_name
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("elements", [15, 4096, 4096 + 5, 3 * 4096 + 16])
def test_numbers_that_nothing_reads_are_drawn_in_pieces(
    elements: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's first values, which the model overwrites, are never all in memory; the second ones are right."""
    monkeypatch.setattr("autopar.runtime.weights.replaying.PIECE_ELEMENTS", 1024)

    def build() -> nn.Module:
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.empty(elements, dtype=dtype).uniform_(-1, 1))
        nn.init.normal_(holder.weight, std=2.0)
        nn.init.normal_(holder.weight, std=3.0)
        return holder

    torch.manual_seed(5)
    right, after = build().weight, torch.get_rng_state()
    torch.manual_seed(5)
    found, _ = _replayed(build)
    assert torch.equal(found["weight"], right)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["transformer", "llama", "gpt2", "vit"])
def test_values_on_a_gpu_are_those_of_a_constructor_there(name: str) -> None:
    with torch.device("cuda"):
        torch.manual_seed(5)
        right = _tensors(BUILDS[name]())
    torch.manual_seed(5)
    found, _ = _replayed(BUILDS[name], device="cuda")
    for tensor_name, tensor in right.items():
        assert torch.equal(found[tensor_name], tensor), tensor_name


def test_recording_draws_nothing() -> None:
    before = torch.get_rng_state()
    with recording():
        Odd()
    assert torch.equal(torch.get_rng_state(), before)
    assert nn.init.trunc_normal_(torch.empty(4)).abs().max() > 0  # torch's own function is restored


def test_what_draws_nothing_runs_alone() -> None:
    """Rotary frequencies of a large model can be computed without its weights."""
    build = of("LlamaForCausalLM", num_hidden_layers=2)  # 0.7 billion parameters
    found, steps = _replayed(build, only=lambda name: "inv_freq" in name)
    assert not steps.draws
    assert torch.equal(found["model.rotary_emb.inv_freq"], 1 / 10000 ** (torch.arange(0, 128, 2) / 128))


def test_only_what_is_needed_is_in_memory() -> None:
    """A storage lives from the op that fills it to the last op that needs it, whatever the constructor does between."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(10))
            for layer in self.layers:
                nn.init.normal_(layer.weight)

    with recording() as recorded:
        model = Twice()
    wanted = {recorded.view(p).storage for p in model.parameters()}
    held = []
    replay = Replay(recorded.tape, wanted, torch.device("cpu"))
    replay.run(slice_for(recorded.tape, wanted), lambda _, run: held.append(len(run._storages)))
    assert held == [1] * 10


def test_values_are_not_read_where_they_are_random() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        if layer.weight.sum() > 0:
            layer.weight.data.neg_()
        return layer

    with recording(), pytest.raises(InputError, match=r"reads the value of a random number.*test_recorded"):
        build()


def test_tensors_that_nothing_fills_are_told() -> None:
    with recording() as recorded:
        made, filled = torch.empty(3), torch.empty(3).fill_(2)
    views: list[View] = [recorded.view(made), recorded.view(filled)]
    assert slice_for(recorded.tape, {v.storage for v in views}).unfilled == {views[0].storage}


def test_equal_constructors_have_equal_digests() -> None:
    def tape(scale: float) -> Tape:
        with recording() as recorded:
            nn.init.normal_(nn.Linear(3, 3).weight, std=scale)
        return recorded.tape

    assert tape(1.0).digest() == tape(1.0).digest() != tape(2.0).digest()
