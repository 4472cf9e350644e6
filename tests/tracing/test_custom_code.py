"""Custom operators, compiled functions and autograd functions are one node, with the gradients of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as flexing
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autopar.graph import target_name
from autopar.tracing import TraceError, trace

# Dynamo itself reads `.grad` of compiled functions' arguments, in the run after the trace.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@torch.library.custom_op("autopar_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scaled.register_fake
def _(x, factor):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.factor = inputs[1]


# The backward is wrong by a factor of 100 on purpose, to detect a replay that differentiates the inside.
scaled.register_autograd(lambda ctx, grad: (grad * ctx.factor * 100, None), setup_context=_keep)


@torch.library.custom_op("autopar_tests::raise_by_one", mutates_args=("x",))
def raise_by_one(x: torch.Tensor) -> None:
    x.add_(1)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


below_apply = vars(torch._C._FunctionBase)["apply"].__get__(None, Tripled)  # not a Python method


class Filled(torch.autograd.Function):
    """Creates a tensor without a device argument, as the softmax of DeBERTa does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x > 0)
        return x.masked_fill(x <= 0, torch.tensor(torch.finfo(x.dtype).eps))

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


class Handed(torch.autograd.Function):
    """Returns its argument, a product, and a mask of the positive elements."""

    @staticmethod
    def forward(ctx, x):
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x, x * 3, positive

    @staticmethod
    def backward(ctx, first, second, third):
        return first * 10 + second * 100


class SetUp(torch.autograd.Function):
    """Saves for backward in `setup_context`."""

    @staticmethod
    def forward(x, factor=2.0):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


@torch.compile(backend="eager")
def fused(x, y):
    return F.gelu(x) * y + x


@torch.compile(backend="eager")
def written(x):
    return x.add_(1)


class Using(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(4, 4), what
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        return self.what(self.linear(x), x, self.other).relu()


def same_with_gradients(model, traced, x):
    mine, theirs = traced.gm(x), model(x)
    assert torch.allclose(mine, theirs)
    for p, q in zip(
        *(torch.autograd.grad(y.sum(), list(model.linear.parameters())) for y in (mine, theirs)), strict=True
    ):
        assert torch.allclose(p, q)


def written_copy(h):
    copy = h * 1
    raise_by_one(copy)
    return copy


@pytest.mark.parametrize(
    ("what", "name", "count"),
    [
        (lambda h, x, other: scaled(h, 2.0), "scaled", 1),
        (lambda h, x, other: torch.ops.autopar_tests.scaled(h, 2.0), "scaled", 1),
        (lambda h, x, other: torch.ops.autopar_tests.scaled.default(h, 2.0), "scaled", 1),
        (lambda h, x, other: h * written_copy(x), "raise_by_one", 1),
        (lambda h, x, other: Filled.apply(h), "Filled", 1),
        (lambda h, x, other: below_apply(h), "Tripled", 1),
        (lambda h, x, other: below_apply(h) * Tripled.apply(x), "Tripled", 2),
        (lambda h, x, other: Handed.apply(h)[0] * Handed.apply(x)[1], "Handed", 2),
        (lambda h, x, other: SetUp.apply(h), "SetUp", 1),
        (lambda h, x, other: fused(h, y=x), "fused", 1),
        (lambda h, x, other: fused(fused(h, x), x), "fused", 2),
    ],
)
def test_it_is_one_node_with_the_gradients_of_eager(what, name, count):
    torch.manual_seed(0)
    model, x = Using(what), torch.randn(3, 4)
    traced = trace(model, dict(x=x))
    own = [n for n in traced.graph.nodes if n.op == "call_function" and name in target_name(n)]
    assert len(own) == count
    assert not [n for n in traced.graph.nodes if getattr(n.target, "__name__", "") == "gelu"]
    same_with_gradients(model, traced, x)


@pytest.mark.parametrize(
    "what",
    [
        lambda h, x, other: torch.compile(lambda y: other(y) * 2, backend="eager")(h),
        lambda h, x, other: torch.compile(other, backend="eager")(h),
        lambda h, x, other: written(h * 1),
        lambda h, x, other: torch.compile(lambda y: y.square().mean(), backend="eager")(h),  # a loss
    ],
)
def test_a_compiled_function_that_touches_more_is_looked_into(what):
    torch.manual_seed(0)
    model, x = Using(what), torch.randn(3, 4)
    traced = trace(model, dict(x=x))
    assert not [n for n in traced.graph.nodes if "Compiled" in type(n.target).__name__]
    same_with_gradients(model, traced, x)


def test_a_compiled_function_compiles_again_after_the_trace():
    compiled = []

    def backend(graph, examples):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x, y: x.sin() * y, backend=backend)
    x = torch.randn(3)
    traced = trace(lambda x: function(x, x), dict(x=x))
    assert not compiled
    assert torch.equal(traced.gm(x), x.sin() * x) and len(compiled) == 1
    assert torch.equal(function(x, x), x.sin() * x)


def written_unseen(h):
    with torch._C.DisableTorchFunction():
        Written.apply(h)
    return h * 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda h, x, o: Written.apply(h), "Written returns an argument that it wrote into"),
        (lambda h, x, o: written_unseen(h), "WrittenBackward is the backward of a tensor whose node does not know it"),
    ],
)
def test_a_custom_function_that_writes_is_an_error(what, words):
    with pytest.raises(TraceError, match=rf"{words}.*test_custom_code"):
        trace(Using(what), dict(x=torch.randn(3, 4)))


def test_whether_a_custom_function_has_a_gradient_is_that_of_eager():
    def forward(x, w):
        with torch.no_grad():
            without = Handed.apply(x * w)[1]
        return Handed.apply(x)[1], Handed.apply(x * w)[1], Handed.apply(x * w)[2], without

    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    traced = trace(forward, dict(x=x, w=w))
    mine, theirs, (outputs,) = traced.gm(x, w), forward(x, w), traced.graph.output_node().args
    assert [t.requires_grad for t in mine] == [t.requires_grad for t in theirs] == [False, True, False, False]
    assert [node.meta["val"].requires_grad for node in outputs] == [False, True, False, False]


def causal(batch, head, query, key):
    return query >= key


class Flexible(nn.Module):
    """Attention with a learned bias by distance and a block mask; `hidden`: the bias is read from the module."""

    def __init__(self, attention, hidden=False) -> None:
        super().__init__()
        self.qkv, self.slope = nn.Linear(16, 48), nn.Parameter(torch.rand(2))
        self.attention, self.hidden = attention, hidden

    def forward(self, x):
        query, key, value = self.qkv(x).view(2, 32, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(causal, None, None, 32, 32, device=x.device, BLOCK_SIZE=16)
        slope = self.slope

        def bias(score, batch, head, i, j):
            return score - slope[head] * (i - j)

        def hiding(score, batch, head, i, j):
            return score - self.slope[head] * (i - j)

        return (
            self.attention(query, key, value, score_mod=hiding if self.hidden else bias, block_mask=mask)
            .transpose(1, 2)
            .reshape(2, 32, 16)
        )


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Lets flex_attention use its CPU backward, which exists but is dense and slow, so the library refuses it."""
    monkeypatch.setattr(flexing, "_validate_device", lambda *tensors: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize(
    "attention", [flex_attention, torch.compile(flex_attention, backend="eager")], ids=["plain", "compiled"]
)
def test_flex_attention_is_one_node_with_the_gradients_of_eager(attention):
    torch.manual_seed(0)
    model, x = Flexible(attention), torch.randn(2, 32, 16)
    traced = trace(model, dict(x=x))
    (node,) = traced.find("flex_attention")
    assert "slope" in {str(n.target) for n in node.all_input_nodes}
    assert tuple(node.meta["val"].shape) == (2, 2, 32, 8)
    mine, theirs = traced.gm(x), model(x)
    assert torch.equal(mine, theirs)
    for p, q in zip(
        *(torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (mine, theirs)), strict=True
    ):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)


def test_the_block_mask_of_flex_attention_is_that_of_eager():
    def masks(x):
        made = create_block_mask(causal, None, None, 32, 32, device=x.device, BLOCK_SIZE=16)
        return [v for v in vars(made).values() if isinstance(v, torch.Tensor)]

    x = torch.randn(2, 32, 16)
    mine, theirs = trace(masks, dict(x=x)).gm(x), masks(x)
    assert len(theirs) > 4
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.usefixtures("flex_on_cpu")
def test_a_function_of_flex_attention_that_hides_a_module_is_an_error():
    with pytest.raises(TraceError, match="closes over a module"):
        trace(Flexible(flex_attention, hidden=True), dict(x=torch.randn(2, 32, 16)))


@torch.library.custom_op("autopar_tests::columns", mutates_args=())
def columns(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [x[:, i].double() for i in range(count)]


@torch.library.custom_op("autopar_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0.5]


@columns.register_fake
def _(x, count):
    return list(x.to("cpu")[:, :count].double().unbind(1))


@positive.register_fake
def _(x):
    return x[x > 0.5]


def test_an_operator_whose_fake_kernel_reads_data_is_tried_out():
    x = torch.randn(3, 4)
    traced = trace(lambda x: columns(x * 2, 2)[1], dict(x=x))
    (output,) = traced.graph.output_node().args[0]
    assert output.meta["val"].shape == (3,) and output.meta["val"].dtype == torch.float64
    assert torch.equal(traced.gm(x), (x * 2)[:, 1].double())


def test_an_operator_whose_result_has_no_fixed_shape_is_refused():
    with pytest.raises(TraceError, match="positive"):
        trace(lambda x: positive(x * 2), dict(x=torch.randn(300)))
