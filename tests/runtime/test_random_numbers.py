"""Ops that draw random numbers draw the same under any plan, on any mesh, on every rank and in a replay."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_plans import random_plan
from simulated_mesh import SimulatedMesh
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from autopar.layout import Layout, take_shard
from autopar.plans import Plan, Segment
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.lowering.lowering import Rank, lower
from autopar.runtime.randomness import bits
from autopar.tracing import Traced, trace

INPUTS = {"x": torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


@torch.library.custom_op("autopar_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(like)


@noise.register_fake
def _(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like)


@torch.library.custom_op("autopar_tests::stir", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,))
def stir(x: torch.Tensor) -> None:
    x.mul_(torch.rand_like(x) + 0.5)


@stir.register_fake
def _(x: torch.Tensor) -> None:
    return None


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.rand_like(x) > 0.1).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask


class Drawing(nn.Module):
    """Dropout of whole layers for single samples, several kinds of noise, and a random permutation of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16).double(), nn.Linear(16, 12).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = h * (torch.rand(h.shape[0], 1, dtype=h.dtype) + 0.5).floor()
        h = h * h.new_empty((h.shape[0], 1)).bernoulli_(0.7).div_(0.7)
        h = h + torch.randn_like(h) * torch.rand_like(h)
        h = h + torch.empty_like(h).uniform_(-0.1, 0.1) + torch.randn(16, dtype=h.dtype)
        h = h + nn.init.uniform_(torch.empty_like(h), -0.1, 0.1) + nn.init.normal_(h.detach().clone(), std=0.1)
        h = h + nn.init.kaiming_uniform_(torch.empty_like(h)) + torch.normal(0.0, 0.1, (8, 16), dtype=h.dtype)
        stir(stirred := torch.ones_like(h.detach()))
        h = h * stirred
        h = nn.functional.dropout(h, 0.2) * torch.bernoulli(torch.sigmoid(h.detach()))
        h = h + torch.distributions.Gamma(torch.full_like(h[0].detach(), 2.0), 1.0).rsample() + noise(h.detach())
        h = torch.native_dropout(h, 0.1, True)[0] + torch.feature_dropout(h[..., None], 0.1, True)[..., 0]
        h = h * h.new(h.shape).uniform_(0.9, 1.1) + torch.ops.aten.dropout(h, 0.1, True)
        h = torch.vmap(lambda row: nn.functional.dropout(row, 0.1) * torch.rand(16), randomness="different")(h)
        h = h + nn.functional.dropout(h.mean(), 0.3) * torch.rand(()) + torch.randn_like(h.sum().detach())
        h = h + nn.functional.fractional_max_pool2d(h[None], 2, output_size=(3, 5), return_indices=True)[0].mean()
        h = Masked.apply(h) + torch.distributions.Dirichlet(torch.ones_like(h.detach())).sample()
        y = self.second(h)[torch.randperm(8)] + torch.empty_like(x).exponential_()
        y = y + nn.functional.gumbel_softmax(y, tau=0.7, hard=True) * nn.functional.gumbel_softmax(y, dim=0)
        return (y * torch.randint(0, 3, (8, 1))).square().mean()


def outcome(model: nn.Module, traced: Traced, plan: Plan) -> list[torch.Tensor]:
    """The loss and the gradients, whole; they must be equal on all ranks."""
    shape = plan.mesh_shape
    storage: dict[str, Layout] = {p.name: p.storage for p in plan.parameters}

    def one(mesh: LocalMesh) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lowered = lower(traced.graph, plan, Rank(mesh, torch.device("cpu"), {}))
        state = {
            name: take_shard(traced.attribute(name).detach(), storage[name], shape, mesh.coordinate).clone()
            for name in lowered.state
        }
        leaves = [part.requires_grad_() for part in state.values()]
        assert lowered.takes_key
        loss = lowered.module(INPUTS["x"], *leaves, None, torch.tensor(7))[0]
        loss.backward()
        return loss.detach(), {name: part.grad for name, part in zip(state, leaves, strict=True)}  # type: ignore[misc]

    ranks = SimulatedMesh(shape).run(one)
    loss, gradients = ranks[(0,) * len(shape)]
    found = [loss]
    for name, parameter in model.named_parameters():
        whole = torch.zeros_like(parameter)
        for coordinate, (other, parts) in ranks.items():
            assert torch.equal(other, loss)
            positions = torch.arange(whole.numel()).view(whole.shape)
            held = take_shard(positions, storage[name], shape, coordinate)
            whole.view(-1)[held.flatten()] = parts[name].flatten()
        found.append(whole.detach())
    assert gradients.keys() == storage.keys()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_draws_the_same_numbers(seed: int) -> None:
    model = Drawing()
    traced = trace(model, INPUTS)
    alone = outcome(model, traced, replace(random_plan(traced.graph, model, (1, 1), random.Random(0)), recompute=()))
    torch.manual_seed(seed)  # the state of the default generator must not matter
    plan = random_plan(traced.graph, model, (2, 2), random.Random(seed))
    for mine, whole in zip(outcome(model, traced, plan), alone, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-12)


def test_a_replay_draws_the_same_numbers() -> None:
    model = Drawing()
    traced = trace(model, INPUTS)
    kept = replace(random_plan(traced.graph, model, (2, 2), random.Random(3)), recompute=())
    inner = [i for i, n in enumerate(traced.graph.nodes) if n.op not in ("placeholder", "get_attr", "output")]
    replayed = replace(kept, recompute=(Segment(inner[0], inner[-2], ""),))
    for mine, whole in zip(outcome(model, traced, replayed), outcome(model, traced, kept), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)


class Recurrent(nn.Module):
    """Each kind of recurrent layer of `torch.nn`, with dropout between layers."""

    def __init__(self) -> None:
        super().__init__()
        options = {"num_layers": 3, "dropout": 0.4, "batch_first": True}
        self.lstm = nn.LSTM(3, 4, bidirectional=True, proj_size=2, **options).double()
        self.gru, self.rnn = nn.GRU(4, 4, **options).double(), nn.RNN(4, 4, **options).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (hidden, cell) = self.lstm(x.view(8, 4, 3))
        y, last = self.gru(y)
        y, final = self.rnn(y)
        return y.square().mean() + (hidden.mean() * cell.mean() + last.mean() * final.mean())


@pytest.mark.parametrize("seed", range(6))
def test_dropout_between_recurrent_layers_is_that_of_one_process(seed: int) -> None:
    model = Recurrent()
    traced = trace(model, INPUTS)
    alone = outcome(model, traced, replace(random_plan(traced.graph, model, (1, 1), random.Random(0)), recompute=()))
    torch.manual_seed(seed)
    plan = random_plan(traced.graph, model, (2, 2) if seed % 2 else (4,), random.Random(seed))
    for mine, whole in zip(outcome(model, traced, plan), alone, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_one_by_one_are_the_module(kind: type[nn.RNNBase]) -> None:
    """With a dropout rate of almost 0 the layers run one by one, and give the module's results."""

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(3, 4, num_layers=3, bidirectional=True, dropout=1e-9).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, states = self.layers(x.view(4, 8, 3))
            return y.square().sum() + sum(s.cos().sum() for s in (states if isinstance(states, tuple) else [states]))

    model = Sequences()
    traced = trace(model, INPUTS)
    plan = replace(random_plan(traced.graph, model, (1, 1), random.Random(0)), recompute=())
    assert "recurrent_dropout" in {node.local for node in plan.nodes}
    loss, *gradients = outcome(model, traced, plan)
    whole = model(INPUTS["x"])
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-7, atol=0)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # the compiler's own
def test_numbers_drawn_within_a_compiled_reduction_are_those_of_eager_mode() -> None:
    """When the index was multiplied first, the loop of Inductor's C++ code did not end: see `bits`."""
    key, x = torch.tensor(7), torch.zeros(4, 32)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        indices = [torch.arange(length, dtype=torch.int32) for length in x.shape]
        return torch.softmax(x + bits(key, 5, indices).to(torch.float64) * 2.0**-32, -1)

    torch.testing.assert_close(torch.compile(noisy)(x), noisy(x))


@pytest.mark.parametrize("shape", [(2048, 4096), (64, 64, 256)])
def test_numbers_repeat_as_often_as_by_chance(shape: tuple[int, ...]) -> None:
    drawn = bits(torch.tensor(7), 5, [torch.arange(length, dtype=torch.int32) for length in shape])
    count = drawn.numel()
    by_chance = count * (count - 1) / 2**33
    assert count - drawn.unique().numel() < 1.5 * by_chance


def test_numbers_are_spread_as_the_op_says() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            uniform, low = torch.rand_like(x), torch.rand(x.shape, dtype=torch.bfloat16)
            chance = torch.empty_like(x).bernoulli_(0.25)
            waits = torch.empty_like(x).exponential_(2.0)
            shifted = torch.empty_like(x).normal_(3.0, std=0.5)
            return uniform, low, torch.randn_like(x), shifted, chance, waits, uniform + low

    x = torch.zeros(200, 500, dtype=torch.float32)
    model = Noise()
    traced = trace(model, {"x": x})
    plan = replace(random_plan(traced.graph, model, (1,), random.Random(0)), recompute=())
    lowered = lower(traced.graph, plan, Rank(LocalMesh((1,), (0,), ("0:",)), torch.device("cpu"), {}))
    uniform, low, normal, shifted, chance, waits, _ = lowered.module(x, None, torch.tensor(7))
    for numbers, mean, deviation in (
        (uniform, 0.5, 12**-0.5), (low.float(), 0.498, 12**-0.5), (normal, 0.0, 1.0), (shifted, 3.0, 0.5),
        (chance, 0.25, 0.1875**0.5), (waits, 0.5, 0.5),
    ):  # fmt: skip
        assert abs(numbers.mean().item() - mean) < 0.01 and abs(numbers.std().item() - deviation) < 0.01
    assert waits.min() > 0, "whose logarithm may be taken"
    assert uniform.min() >= 0 and uniform.max() < 1 and low.max() < 1
    assert abs(torch.corrcoef(torch.stack([uniform.flatten(), normal.flatten()]))[0, 1]) < 0.02
    assert set(chance.unique().tolist()) == {0.0, 1.0}


def test_complex_numbers_have_both_parts() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            normal, uniform = torch.randn_like(x), torch.rand_like(x)
            return normal, torch.empty_like(x).normal_(3.0, std=0.5), uniform, normal + uniform

    x = torch.zeros(200, 500, dtype=torch.complex64)
    model = Noise()
    traced = trace(model, {"x": x})
    plan = replace(random_plan(traced.graph, model, (1,), random.Random(0)), recompute=())
    lowered = lower(traced.graph, plan, Rank(LocalMesh((1,), (0,), ("0:",)), torch.device("cpu"), {}))
    found = lowered.module(x, None, torch.tensor(7))
    torch.manual_seed(0)
    for numbers, own in zip(found, model(x), strict=True):
        assert numbers.dtype == own.dtype
        for part, expected in ((numbers.real, own.real), (numbers.imag, own.imag)):
            assert abs(part.mean() - expected.mean()) < 0.01 and abs(part.std() - expected.std()) < 0.01
        assert abs(torch.corrcoef(torch.stack([numbers.real.flatten(), numbers.imag.flatten()]))[0, 1]) < 0.02
