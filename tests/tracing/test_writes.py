"""In-place writes become functional ops, with the same values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import run
from torch import nn

from autopar.errors import UntraceableError
from autopar.tracing import trace


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Writing(nn.Module):
    def __init__(self, write) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6))
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(4, 6))
        self.write = write

    def forward(self, x):
        return self.write(self, x * self.w)


def written_views(m, y):
    y[1:3].t()[0] += 5
    y.view(2, 12)[:, ::2].mul_(2)
    z = y.detach().clone()  # autograd forbids in-place writes into one of several views
    z.chunk(2, dim=1)[1].copy_(z[:, :3] * 2)
    z.unbind(0)[2].exp_()
    return y, z


def read_between(m, y):
    a, before = y[0], y.sum()
    y.add_(1)
    between = a * 2
    a.zero_()
    return before, between, y, a


def one_of_several(m, y):
    top, index = y.topk(2, dim=1)
    top /= top.sum(1, keepdim=True)
    return top, index, y


def into_a_buffer(m, y):
    m.seen += y.detach().sum(0)
    m.seen[2:4] = 7
    return y * m.seen


def with_out(m, y):
    made = torch.empty_like(y).detach()
    torch.mul(y.detach(), 2, out=made)
    made.masked_fill_(made > 0, -1)
    return y + made


def by_masks_and_indices(m, y):
    y = y.clone()
    y[y > 0] = 2.0
    y[[0, 2], 1:3] = 0.5
    y[..., -1:] = y[..., :1].clone()
    y.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 6))
    return y.clamp_(max=1).t()


def by_functions(m, y):
    other, several = y.detach() * 2, [y.detach() + 1, y.detach()[:2] - 1]
    torch.nn.functional.threshold_(other, 0.1, 0.2)
    torch.nn.functional.leaky_relu_(y, 0.3)
    torch._foreach_mul_(several, [2.0, 3.0])
    torch._foreach_add_(several, 1.0)
    filled = torch.nn.init.constant_(torch.empty_like(y), 0.5)
    torch.nn.init.xavier_uniform_(other[:2]).fill_(3)
    return y * filled, other, *several


def type_is_kept(m, y):
    n = (y > 0).long()
    n += 2
    n.mul_(torch.tensor(3))
    n[0] = y[0] * 10
    return n, y


def by_operators(m, y):
    inside = y > 0
    inside &= y < 1
    outside = ~inside
    outside |= y > 2
    n = y.detach().long()
    n <<= 1
    n ^= 3
    n //= 2
    y **= 2
    return torch.where(inside, y, 0.0), outside, n


def without_gradient(m, y):
    z, half, last = y * 2, y[:, :3] * 1.5, y * 3
    with torch.no_grad():
        z.clamp_(min=0.1)  # new values, with the old history
        z[1:3].mul_(z[1:3].abs()).add_(1)
        half[:, 1] = 0
        half.copy_(half.round())
        before = z.sum()
        z += 1
    last.data = last.data.round()
    ended = y * 4
    ended.detach_()
    z = z + ended
    return z, z * m.w, half.sum(), before, (last * y).sum()


def at_a_step(m, y):
    m.step += 1
    m.queue[m.step % 4] = y.detach().mean(0)
    m.queue[m.step].mul_(2)
    return y * m.queue.mean(0)


def at_a_step_that_goes_on(m, y):
    row = m.queue[m.step]
    m.queue[m.step, 1:3] = 7
    m.step.copy_((m.step + 1) % 4)
    row.add_(y.detach().sum(0))  # of the step before
    m.queue[m.step] = y.detach()[0]
    return y * m.queue, row * y


def at_steps_beside_other_indices(m, y):
    z = y.clone()
    m.step += 1
    z[:, m.step] = y[:, 0] * m.w[:, 1]
    z[None, m.step, ..., 2:4] = 3.0
    z[m.step.int(), torch.tensor([0, 5])] += 1
    z[1, m.step] = m.w[0, 0]
    z[m.step] = y[:1] * 2
    z[torch.tensor(3)] -= 1
    return z * z, z[m.step], z[..., m.step]


def by_names(m, y):
    z = y.detach().clone()
    z[0].copy_(other=y[1] * 2)
    z[1].fill_(value=3)
    z[2].fill_(value=m.w.detach().sum())
    z[3].masked_fill_(mask=y[3] > 0, value=2.0).add_(other=y[0], alpha=2)
    return z, y


def compared(m, y):
    a, b, c = y.clone(), y.clone(), y * 2
    c.eq_(m.w).logical_and_(a.gt_(0.1))
    return a + y, b.logical_not_() * y, c


@pytest.mark.parametrize(
    "write",
    [
        compared,
        by_names,
        at_a_step,
        at_a_step_that_goes_on,
        at_steps_beside_other_indices,
        by_operators,
        without_gradient,
        written_views,
        read_between,
        one_of_several,
        into_a_buffer,
        with_out,
        by_functions,
        by_masks_and_indices,
        type_is_kept,
    ],
)
def test_writes_in_place_become_pure_with_the_same_values_and_gradients(write):
    model, x = Writing(write), torch.randn(4, 6)
    traced = trace(model, dict(x=x))
    writers = [n for n in traced.graph.nodes if n.op == "call_method" and n.target.endswith("_") and n.users]
    assert not [n for n in writers if not str(n.target).startswith("__")]
    assert not [n for n in traced.graph.nodes if str(n.target).startswith("__i")]
    state = copy.deepcopy(model.state_dict())
    for step in (0, 1):
        state["step"].fill_(step)
        for a, b in zip(run(lambda: traced.gm(x), model, state), run(lambda: model(x), model, state), strict=True):
            assert len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("functional", [True, False])
def test_writes_inside_vmap_are_seen(functional):
    class Marked(nn.Module):
        def forward(self, x):
            def row(places):
                made = places.new_zeros(4)
                made[places] = 1
                return made[:3]

            return x.sum() + torch.vmap(row)(torch.tensor([[0, 2], [1, 3]]) + 0)

    x = torch.randn(2)
    traced = trace(Marked(), dict(x=x), remove_inplace=functional)
    assert torch.equal(traced.gm(x), Marked()(x))


def test_writes_through_views_that_are_operators_are_seen():
    """Under vmap a view is an operator: the Jacobian starts as zeros, whose diagonal is set to ones."""

    class Contracting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.vmap(torch.func.jacrev(lambda row: self.linear(row).tanh()))(x).square().sum()

    model, x = Contracting(), torch.randn(3, 4)
    traced = trace(model, dict(x=x), remove_inplace=True)
    found = [torch.autograd.grad(f(x), list(model.parameters())) for f in (traced.gm, model)]
    assert torch.equal(traced.gm(x), model(x))
    assert all(map(torch.equal, *found))


def test_data_of_another_shape_are_refused():
    def narrowed(m, y):
        y.data = y.data[:2]
        return y

    with pytest.raises(UntraceableError, match=r"set in forward to a tensor of shape \(2, 6\).*test_writes.py"):
        trace(Writing(narrowed), dict(x=torch.randn(4, 6)))


@pytest.mark.parametrize("variance", ["each", "one", "row"])
def test_a_variance_is_looked_into(variance):
    class Gaussian(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x, y):
            mean, of_each = self.layer(x).chunk(2, dim=1)
            var = {"each": of_each.exp(), "one": 0.5, "row": of_each.exp().mean(1)}[variance]
            return nn.functional.gaussian_nll_loss(mean, y, var, full=True, eps=0.9)

    model, x, y = Gaussian(), torch.randn(4, 6), torch.randn(4, 4)
    traced = trace(model, dict(x=x, y=y))
    state = copy.deepcopy(model.state_dict())
    for a, b in zip(run(lambda: traced.gm(x, y), model, state), run(lambda: model(x, y), model, state), strict=True):
        assert len(a) == len(b) and all(map(torch.equal, a, b))
