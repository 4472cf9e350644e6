"""The costs of all nodes, each measured alone, add up to those of the model measured as a whole."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import counted_flops, counted_saved_bytes, graph_of, graph_of_call
from torch import nn

from autopar.cost import NodeCost, annotate, saved_bytes, total_flops
from autopar.graph import COST, GRAD_MODE
from autopar.tracing import trace


class Attention(nn.Module):
    """Causal attention with one fused qkv, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = 2, 16, 32
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Norm(nn.BatchNorm2d):
    """Batch norm without its check of the number of dims, which symbolic tracing cannot evaluate."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        running, affine = (self.running_mean, self.running_var), (self.weight, self.bias)
        return F.batch_norm(input, *running, *affine, self.training, 0.1, self.eps)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), Norm(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), Norm(8)
        self.norm2.eval()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)) + x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 4))


class Classified(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x).flatten(0, -2), labels)


CASES: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "mlp": (Classified(mlp()), ((6, 8), torch.zeros(6, dtype=torch.long))),
    "blocks": (Classified(nn.Sequential(Block(), Block())), ((2, 16, 32), torch.zeros(32, dtype=torch.long))),
    "convolutions": (Classified(Convolutions()), ((4, 3, 8, 8), torch.zeros(4, dtype=torch.long))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sum_over_nodes_is_the_whole_model(name: str) -> None:
    model, inputs = CASES[name]
    real = [torch.randn(i) if isinstance(i, tuple) else i for i in inputs]
    meta = copy.deepcopy(model).to("meta")
    graph = graph_of(meta, *inputs)
    annotate(graph, "cpu")
    assert total_flops(graph) == counted_flops(lambda: meta(*[t.to("meta") for t in real]))
    assert saved_bytes(graph) == counted_saved_bytes(lambda: model(*real), [*model.state_dict().values(), *real])
    assert not any(node.meta[COST].estimated for node in graph.nodes)


def test_frozen_inputs_cost_no_backward() -> None:
    model = mlp()
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(False)
    meta = copy.deepcopy(model).to("meta")
    graph = graph_of(meta, (6, 8))
    annotate(graph, "cpu")
    x = torch.randn(6, 8)
    assert total_flops(graph) == counted_flops(lambda: meta(x.to("meta")).sum())
    assert saved_bytes(graph) == counted_saved_bytes(lambda: model(x), [*model.parameters(), x])


def meta_tensor(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def cost_of(target: Any, *args: Any, device_kind: str = "cpu", **kwargs: Any) -> NodeCost:
    node = graph_of_call(target, *args, **kwargs)
    annotate(node.graph, device_kind)
    cost = node.meta[COST]
    assert isinstance(cost, NodeCost)
    return cost


def test_saved_tensors_are_told_apart() -> None:
    x, w = meta_tensor(4, 8), meta_tensor(8, 8)
    assert cost_of(torch.matmul, x, w).saved_inputs == (0, 1)
    softmax = cost_of(torch.softmax, x, -1)
    assert (softmax.saved_inputs, softmax.saved_outputs, softmax.saved_internal_bytes) == ((), (0,), 0)
    norm = cost_of(F.layer_norm, x, (8,), w[0].detach())
    assert norm.saved_internal_bytes == 2 * 4 * 4


def test_without_gradients_nothing_is_kept() -> None:
    cost = cost_of(F.gelu, meta_tensor(4, 8, grad=False))
    assert (cost.saved_inputs, cost.moved_bytes_backward, cost.flops_backward) == ((), 0, 0)
    node = graph_of_call(F.gelu, meta_tensor(4, 8))
    node.meta[GRAD_MODE] = False
    annotate(node.graph)
    assert node.meta[COST].saved_inputs == ()


@pytest.mark.parametrize("view", [torch.t, torch.flatten, torch.detach, lambda t: t[1:], lambda t: t.expand(3, 4, 8)])
def test_views_are_free_and_alias(view: Any) -> None:
    cost = cost_of(view, meta_tensor(4, 8))
    assert cost.alias_of == (0,)
    assert cost.moved_bytes_forward == 0
    assert cost.work is None or cost.work.kernels_forward == 0


def test_copies_move_bytes_and_alias_nothing() -> None:
    cost = cost_of(torch.Tensor.contiguous, meta_tensor(4, 8).t())
    assert cost.alias_of == (None,)
    assert cost.moved_bytes_forward == 2 * 4 * 8 * 4


def test_parts_of_a_split_alias_the_whole() -> None:
    node = graph_of_call(torch.split, meta_tensor(4, 8), 2)
    annotate(node.graph)
    assert node.meta[COST].alias_of == (0, 0)
    picked = [n.meta[COST].alias_of for n in node.graph.nodes if n.op == "call_function" and n is not node]
    assert picked == [(0,), (1,)]


def test_an_embedding_reads_its_rows_only() -> None:
    cost = cost_of(F.embedding, torch.zeros(3, dtype=torch.long, device="meta"), meta_tensor(1000, 8))
    assert cost.moved_bytes_forward == 3 * 8 + 2 * 3 * 8 * 4
    assert cost.moved_bytes_backward >= 1000 * 8 * 4


def test_in_place_ops_on_tensors_that_train() -> None:
    node = graph_of_call(torch.clone, meta_tensor(4, 8))
    relu = node.graph.call_method("relu_", (node,))
    relu.meta["val"] = node.meta["val"]
    annotate(node.graph)
    cost = relu.meta[COST]
    assert not cost.estimated
    assert cost.alias_of == (0,)


class LeafThatReads(nn.Module):
    """A leaf that reads values, so that it cannot run on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if float(x.sum().item()) > 0 else x


def test_an_op_that_needs_data_is_estimated() -> None:
    graph, root = leaf_graph(LeafThatReads())
    annotate(graph, "cpu", root)
    cost = next(n for n in graph.nodes if n.op == "call_module").meta[COST]
    assert cost.estimated
    assert cost.flops_forward >= 2 * 4 * 8 * 8
    assert cost.flops_backward >= 2 * cost.flops_forward


def leaf_graph(leaf: nn.Module) -> tuple[torch.fx.Graph, nn.Module]:
    """The graph of one call of a leaf module on a tensor that needs a gradient, and a root that holds it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = meta_tensor(4, 8)
    call = graph.call_module("leaf", (x,))
    call.meta["val"] = meta_tensor(4, 8)
    graph.output(call)
    root = nn.Module()
    root.leaf = leaf
    return graph, root


def test_a_size_may_be_a_known_tensor() -> None:
    """A view that takes sizes from a tensor of known value, as in Longformer; it saves nothing for backward."""

    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).view(torch.div(x.shape[0], 4, rounding_mode="trunc"), 4, -1)

    graph = trace(Cut(), {"x": torch.empty(8, 4, device="meta", requires_grad=True)}).graph
    annotate(graph)
    cost = next(node for node in graph.nodes if node.target == "view").meta[COST]
    assert not cost.estimated
    assert (cost.alias_of, cost.saved_inputs, cost.saved_outputs) == ((0,), (), ())


def test_a_leaf_module_owns_its_parameters() -> None:
    graph, root = leaf_graph(nn.Linear(8, 8))
    annotate(graph, "cpu", root)
    cost = next(n for n in graph.nodes if n.op == "call_module").meta[COST]
    assert (cost.flops_forward, cost.flops_backward) == (2 * 4 * 8 * 8, 2 * 2 * 4 * 8 * 8)
    assert (cost.saved_inputs, cost.saved_internal_bytes, cost.estimated) == ((0,), 0, False)


class Doubled(torch.autograd.Function):
    """An opaque autograd function that saves one additional tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.exp())
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def test_opaque_functions_keep_what_they_save() -> None:
    cost = cost_of(Doubled.apply, meta_tensor(4, 8))
    assert (cost.saved_inputs, cost.saved_outputs, cost.saved_internal_bytes) == ((0,), (), 4 * 8 * 4)


def test_identical_nodes_are_measured_once() -> None:
    graph = graph_of(nn.Sequential(*[Block() for _ in range(24)]), (2, 16, 32))
    annotate(graph)
    costs = {id(n.meta[COST]) for n in graph.nodes if n.op.startswith("call") and n.meta[COST].work}
    assert len(costs) < 40


def test_equal_constants_of_other_types_are_other_nodes() -> None:
    x = meta_tensor(4, 8, dtype=torch.int64, grad=False)
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = x
    for constant in (2, 2.0):
        graph.call_function(torch.mul, (source, constant)).meta["val"] = x * constant
    annotate(graph)
    whole, floating = [n.meta[COST] for n in graph.nodes if n.op == "call_function"]
    assert floating.moved_bytes_forward < whole.moved_bytes_forward  # float32 against int64
