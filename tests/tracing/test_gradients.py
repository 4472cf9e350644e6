"""The graph has what changes gradients or dtypes implicitly: autograd functions, no_grad, autocast, checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import TEXT, llama, run
from torch import nn

from autopar.errors import UntraceableError
from autopar.graph import VAL
from autopar.tracing import trace


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Twice(torch.autograd.Function):
    """Doubles in forward; its backward is wrong on purpose, to detect a replay that differentiates its inside."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor, x + factor

    @staticmethod
    def backward(ctx, first, second):
        return first * 100, None


twice = Twice.apply  # bound early, as user code does


def test_an_autograd_function_is_one_node_and_keeps_its_backward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            a, b = twice(self.w * x, 2)
            return a + b

    model, x = M(), torch.randn(3)
    traced = trace(model, dict(x=x))
    assert [n.target.__name__ for n in traced.graph.nodes if n.op == "call_function"].count("Twice") == 1
    a, b = (torch.autograd.grad(f(x).sum(), model.w)[0] for f in (model, traced.gm))
    assert torch.equal(a, b)


def test_under_no_grad_nothing_is_detached_and_the_key_is_another():
    model = llama().eval()
    with torch.no_grad():
        traced = trace(model, TEXT)
        # a trace assumes that all inputs are different tensors
        apart = {name: value.clone() for name, value in TEXT.items()}
        inside = traced.key((), apart)
    assert inside == traced.own_key != traced.key((), apart)
    assert not [n for n in traced.graph.nodes if n.target == "detach"]
    assert not traced.graph.output_node().args[0][0].meta[VAL].requires_grad


def test_a_part_without_gradient_is_cut_off_in_the_graph():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            with torch.no_grad():
                scale = (self.w * x).sum()
            return self.w * scale

    model, x = Part(), torch.randn(3)
    traced = trace(model, dict(x=x))
    assert all(map(torch.equal, *[torch.autograd.grad(f(x).sum(), model.w) for f in (traced.gm, model)]))


class Mixed(nn.Module):
    """Autocast around a part of it, with ops of all kinds: lower precision, float32, promotion."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.second(torch.tanh(self.first(x)))
            z = self.conv(y.t().unsqueeze(0))
            y = torch.softmax(y, -1) + y @ y.t() @ y
            with torch.autocast("cpu", enabled=False):
                y = y.float() @ self.first.weight
            return y, z, F.mse_loss(y, x)


@pytest.mark.parametrize("split", [True, False])
def test_autocast_becomes_casts_that_one_can_see(split):
    model, x = Mixed(), torch.randn(4, 6)
    traced = trace(model, dict(x=x), bias_addition_split=split)
    state = model.state_dict()
    replayed, eager = run(lambda: traced.gm(x), model, state), run(lambda: model(x), model, state)
    assert [v.dtype for v in replayed[0]] == [v.dtype for v in eager[0]]
    if split:  # the bias is added after rounding the product to bfloat16
        assert all(torch.allclose(p, q, rtol=5e-2, atol=5e-2) for p, q in zip(replayed[0], eager[0], strict=True))
    else:
        assert all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(replayed, eager, strict=True))
    for node in traced.graph.nodes:
        assert "autocast" not in str(node.target)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_of_transformers_are_regions(reentrant):
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    traced = trace(model, {**TEXT}, dict(use_cache=False))
    for layer in range(2):
        assert {n.meta["region"] for n in traced.under(f"model.layers.{layer}")} == {(layer,)}
    assert traced.graph.output_node().meta["region"] == ()


class Pushed(nn.Module):
    """Moves an input along a gradient, as in Langevin dynamics; no gradient flows through that gradient."""

    def __init__(self, by_weight: bool) -> None:
        super().__init__()
        self.energy, self.head, self.by_weight = nn.Linear(3, 3), nn.Linear(3, 3), by_weight

    def forward(self, x):
        z = x.detach().requires_grad_()
        energy = self.energy(z).tanh().sum()
        (push,) = torch.autograd.grad(energy, self.energy.weight if self.by_weight else z)
        return self.head(x + push.sum(0)).square().sum()


def test_gradients_in_forward_by_parameters_are_taken_in_a_leaf():
    model, x = Pushed(by_weight=True), torch.randn(5, 3)
    with pytest.raises(
        UntraceableError, match=r"with respect to a parameter, a buffer or a constant: let the module.*\.py:\d+"
    ):
        trace(model, dict(x=x))
    traced = trace(model, dict(x=x), unsupported="leaf")
    found = [(f(x), *torch.autograd.grad(f(x), list(model.head.parameters()))) for f in (traced.gm, model)]
    assert all(map(torch.equal, *found))


def test_gradients_in_forward_by_what_it_has_made_are_in_the_graph():
    model, x = Pushed(by_weight=False), torch.randn(5, 3)
    traced = trace(model, dict(x=x))
    assert not traced.failures
    found = [(f(x), *torch.autograd.grad(f(x), list(model.head.parameters()))) for f in (traced.gm, model)]
    assert all(map(torch.equal, *found))


class Force(nn.Module):
    """Forces from energies, with layers that are called twice on equal shapes."""

    def __init__(self, create_graph: bool = True, **options: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)
        self.options = {"create_graph": create_graph, **options}

    def forward(self, x, beside):
        x.requires_grad_()
        energy = self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x))))).sum()
        found = torch.autograd.grad(energy, (x, beside), **self.options)
        return sum(one.square().sum() for one in found if one is not None) + energy


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("unused", ["allow_unused", "materialize_grads"])
def test_gradients_of_gradients_are_those_of_eager(create_graph, unused):
    model, x = Force(create_graph, retain_graph=True, **{unused: True}), torch.randn(5, 3)
    traced = trace(model, dict(x=x, beside=torch.randn(2, requires_grad=True)))
    calls = [f(x.clone(), torch.randn(2, requires_grad=True)) for f in (traced.gm, model)]
    assert torch.equal(*calls)
    assert all(map(torch.equal, *(torch.autograd.grad(loss, list(model.parameters())) for loss in calls)))


@pytest.mark.parametrize(
    ("options", "told"),
    [({}, "appears to not have been used in the graph"), ({"is_grads_batched": True}, "call it for each row")],
)
def test_gradients_in_forward_that_are_refused(options, told):
    with pytest.raises((UntraceableError, RuntimeError), match=told):
        trace(Force(**options), dict(x=torch.randn(5, 3), beside=torch.randn(2, requires_grad=True)))


def test_backward_in_forward_is_refused():
    class Filling(nn.Module):
        def forward(self, x):
            x.square().sum().backward()
            return x.grad

    with pytest.raises(
        UntraceableError, match=r"backward\(\) inside forward adds to .grad, which a planned forward leaves"
    ):
        trace(Filling(), dict(x=torch.randn(3, requires_grad=True)), unsupported="leaf")


def test_gradients_of_gradients_that_torch_func_writes_are_those_of_eager():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x):
            def slope(x):
                return torch.func.grad(lambda x: self.net(x).sum())(x).sum()

            return torch.vmap(torch.func.grad(slope))(x).square().mean()

    model, x = Residual(), torch.randn(5, 1)
    losses = [f(x) for f in (model, trace(model, dict(x=x)).gm)]
    one, other = (torch.autograd.grad(loss, next(model.parameters()))[0] for loss in losses)
    assert torch.allclose(*losses) and torch.allclose(one, other)


DERIVATIVES = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "grad_and_value": lambda f, x: sum(torch.func.grad_and_value(lambda y: f(y).sum())(x)),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(5, 2))[0],
    "jvp": lambda f, x: torch.stack(torch.func.jvp(f, (x,), (x.cos(),))),
    "jacrev": lambda f, x: torch.func.jacrev(lambda y: f(y).sum(0))(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda y: f(y).sum(0))(x[:2]),
    "hessian": lambda f, x: torch.vmap(torch.func.hessian(lambda y: f(y).sum()))(x),
    "hessian times vector": lambda f, x: torch.func.jvp(torch.func.grad(lambda y: f(y).sum()), (x,), (x,))[1],
}


class Sines(nn.Module):
    """Some ops have no tangent in forward mode: torch creates zeros there, which modes do not see."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        return torch.sin(3 * self.norm(x @ self.first.weight.t() + self.first.bias)) @ self.second.weight.t()


@pytest.mark.filterwarnings("ignore:.torch.jit.script.")  # torch's own warning
@pytest.mark.parametrize("net", [lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), Sines])
@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives_that_torch_func_takes_in_forward_are_those_of_eager(kind, net):
    class Differentiated(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return DERIVATIVES[kind](self.net, x).square().mean()

    model, x = Differentiated(), torch.randn(5, 3)
    losses = [f(x) for f in (model, trace(model, dict(x=x)).gm)]
    one, other = (torch.autograd.grad(loss, next(model.parameters()))[0] for loss in losses)
    assert torch.allclose(*losses) and torch.allclose(one, other) and one.any()


def test_forward_mode_by_hand_is_refused_with_what_to_write():
    class Dual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            with torch.autograd.forward_ad.dual_level():
                found = self.linear(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
                return torch.autograd.forward_ad.unpack_dual(found).tangent.sum()

    with pytest.raises(UntraceableError, match=r"torch\.func\.jvp.*test_gradients.py:\d+"):
        trace(Dual(), dict(x=torch.randn(5, 3)), unsupported="leaf")


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.vmap(lambda row: row * torch.tensor([1.0, 2.0, 3.0]))(x),
        lambda x: torch.vmap(lambda row: row[torch.as_tensor([0, 2])])(x),
        lambda x: torch.func.grad(lambda y: (y * torch.tensor([1.0, 2.0, 3.0])).sum())(x),
        lambda x: torch.vmap(lambda row: row * int(torch.tensor([4, 5]).cumsum(0)[1]))(x),
        lambda x: torch.vmap(lambda row: row.roll(torch.arange(3)[1].item()))(x),
    ],
)
def test_numbers_as_tensors_and_known_ones_as_numbers_inside_a_function_that_torch_func_takes(forward):
    class Inside(nn.Module):
        def forward(self, x):
            return forward(x)

    traced = trace(Inside(), dict(x=torch.randn(5, 3))).gm
    x = torch.randn(5, 3)
    assert torch.equal(traced(x), forward(x))
