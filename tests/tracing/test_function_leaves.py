"""Functions as leaves: if the root itself reads data, the smallest function that can be one node becomes a leaf."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from autopar import Cluster, UntraceableError, plan
from autopar.leaf_calls import LeafCall
from autopar.planning.leaf_requests import LeafWarning
from autopar.tracing import TraceError, trace
from autopar.tracing.leaves.functions import function_around
from autopar.tracing.leaves.tensors import show_leaf_tensors

TWO = Cluster.preset("cpu", shape=(2,))
EXAMPLES = dict(x=torch.randn(6, 4), targets=[dict(boxes=torch.rand(3, 2)), dict(boxes=torch.rand(5, 2))])


class Picking(nn.Module):
    """Like a detector: the root's own methods select rows by data, one of them with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.scale, self.spare = nn.Parameter(torch.tensor(2.0)), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, targets):
        features = self.backbone(x).relu()
        for target in targets:
            if (target["boxes"] < 0).any():
                raise ValueError(f"negative: {target['boxes'].tolist()}")
        return self.loss(features, self.head(features), targets, weight=0.5)

    def loss(self, features, found, targets, weight):
        losses = [self.one(found, target["boxes"]) for target in targets]
        return {"boxes": sum(losses) * weight, "size": features.square().mean()}

    def one(self, found, boxes):
        rows, columns = torch.where((found[:, None] - boxes).norm(dim=-1) < 1.5)
        if len(rows) == 0:
            return found.sum() * 0 + boxes.sum() * 0
        return (found[rows] - boxes[columns]).square().sum() * self.scale + boxes.sum() * 0


def leaves(graph):
    return [node for node in graph.nodes if isinstance(node.target, LeafCall)]


def outcome(call, model, examples):
    model.zero_grad()
    losses = call(**examples)
    (losses["boxes"] + losses["size"]).backward()
    return [losses["boxes"], losses["size"], *(p.grad for p in model.parameters())]


def test_the_smallest_function_is_one_node_and_its_graph_is_the_model():
    torch.manual_seed(0)
    model = Picking()
    traced = trace(model, EXAMPLES, unsupported="leaf", bias_addition_split=False)
    found = leaves(traced.graph)
    assert [node.target.path for node in found] == ["one", "one"]
    assert [[str(n.target) for n in node.args[0]] for node in found] == [["scale"], ["scale"]]
    assert traced.find("linear") and traced.find("relu")
    for seed in range(3):
        torch.manual_seed(seed)
        other = dict(x=2 * torch.randn(6, 4), targets=[dict(boxes=torch.rand(3, 2)), dict(boxes=torch.rand(5, 2))])
        mine = outcome(lambda **given: traced.gm(*traced.bind((), given)), model, other)
        theirs = outcome(model, model, other)
        for ours, expected in zip(mine, theirs, strict=True):
            assert (ours is None and expected is None) or torch.equal(ours, expected)
    assert mine[-1] is None, "what no one reads has no gradient"


def test_a_function_leaf_reads_the_tensors_of_its_node():
    """The node gets other parameters than the model's, as under a plan that shards them."""
    model = Picking()
    traced = trace(model, EXAMPLES, unsupported="leaf", bias_addition_split=False)
    node = leaves(traced.graph)[0]
    found, boxes = torch.randn(6, 2), torch.rand(3, 2)
    values = iter((found, boxes))
    flat = [next(values) if isinstance(value, torch.fx.Node) else value for value in node.args[1]]
    scale = torch.tensor(3.0, requires_grad=True)
    other = copy.deepcopy(model)
    other.scale.data.fill_(3.0)
    mine = node.target([scale], flat, {})
    assert torch.equal(mine, other.one(found, boxes))
    mine.backward()
    assert scale.grad is not None and model.scale.grad is None


def test_the_model_is_as_it_was():
    model = Picking()
    code = {name: getattr(Picking, name).__code__ for name in ("forward", "loss", "one")}
    trace(model, EXAMPLES, unsupported="leaf")
    assert code == {name: getattr(Picking, name).__code__ for name in code}
    assert set(vars(model)["_modules"]) == {"backbone", "head", "spare"}


class Counting(Picking):
    """The inner function returns a number read from data, so that its caller is the leaf."""

    def one(self, found, boxes):
        return int((found.sum() > 0).sum())

    def loss(self, features, found, targets, weight):
        count = self.one(found, targets[0]["boxes"])
        return {"boxes": found[:count].sum() * self.scale, "size": features.mean()}


class Writing(Picking):
    """The inner function writes into its argument."""

    def one(self, found, boxes):
        if boxes.sum() > 0:
            found.mul_(2)
        return found

    def loss(self, features, found, targets, weight):
        return {"boxes": self.one(found * 1, targets[0]["boxes"]).sum(), "size": features.mean()}


class Hiding(Picking):
    """The inner function reads a tensor that is not among its arguments."""

    def one(self, found, boxes):
        return self.kept[0] + found if boxes.sum() > 0 else found

    def loss(self, features, found, targets, weight):
        self.kept = [found * 2]
        return {"boxes": self.one(found, targets[0]["boxes"]).sum(), "size": features.mean()}


@pytest.mark.parametrize("kind", [Counting, Writing, Hiding])
def test_where_a_function_cannot_be_a_node_its_caller_is(kind):
    torch.manual_seed(0)
    model = kind()
    traced = trace(model, EXAMPLES, unsupported="leaf", bias_addition_split=False)
    assert [node.target.path for node in leaves(traced.graph)] == ["loss"]
    mine = outcome(lambda **given: traced.gm(*traced.bind((), given)), model, EXAMPLES)
    for ours, expected in zip(mine, outcome(model, model, EXAMPLES), strict=True):
        assert (ours is None and expected is None) or torch.equal(ours, expected)


def test_at_worst_the_whole_forward_is_one_node():
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) if x.sum() > 0 else self.other(x)

    model = Asking()
    traced = trace(model, dict(x=torch.randn(2, 4)), unsupported="leaf")
    (node,) = leaves(traced.graph)
    assert node.target.path == "forward"
    assert {str(n.target) for n in node.args[0]} == {name for name, _ in model.named_parameters()}
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        assert torch.equal(traced.gm(x), model(x))
    with pytest.raises(TraceError, match="contents"):
        trace(model, dict(x=torch.randn(2, 4)))


def test_the_root_that_tells_numbers_is_refused():
    class Telling(nn.Module):
        def forward(self, x):
            return x, bool(x.sum() > 0)

    with pytest.raises(TraceError, match="returns numbers that depend on data"):
        trace(Telling(), dict(x=torch.randn(2, 4)), unsupported="leaf")


class Loss(Picking):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, x, targets):
        return super().forward(x, targets)["boxes"]


def test_a_plan_takes_a_function_leaf_and_tells_it():
    with pytest.warns(LeafWarning, match=r"one and 1 more \(function\) cannot be traced.*<bool eq>"):
        made = plan(Loss(4096), EXAMPLES, TWO)
    assert made.predicted.peak_bytes > 0


def test_too_much_in_a_function_leaf_is_an_error_that_names_it():
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(x).mean() if x.sum() > 0 else x.mean()

    with pytest.raises(UntraceableError, match="function 'forward' would run whole on every rank") as error:
        plan(Asking(), dict(x=torch.randn(8, 64)), TWO)
    assert "constraints='leaf:forward'" in str(error.value)
    made = plan(Asking(), dict(x=torch.randn(8, 64)), TWO, constraints="leaf:forward")  # a warning would be an error
    assert made.constraints == ("leaf:forward",)
    assert sum("forward" in node.target for node in made.nodes) == 1


def test_leaf_tensors_are_shown_beside_function_leaves():
    traced = trace(Loss(8), EXAMPLES, unsupported="leaf")
    show_leaf_tensors(traced)
    traced.graph.lint()
    assert not [n for n in traced.graph.nodes if n.op == "call_module"]


def test_functions_that_are_defined_anew_in_a_sweep_are_told_apart():
    def planned() -> None:
        def picked(output, y):
            there = y >= 0
            return nn.functional.cross_entropy(output[there], y[there]) if there.any() else output.sum() * 0

        class Scores(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 5)

            def forward(self, x):
                return self.layer(x)

        inputs = dict(x=torch.randn(8, 64), y=torch.arange(8) % 5)
        made = plan(Scores(), inputs, TWO, loss_fn=picked)
        assert [node for node in made.nodes if "picked" in node.target]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeafWarning)
        planned()
        planned()


RUNS: list[type] = []


class Bare(nn.Module):
    """Its forward returns an object that no graph can hold."""

    def forward(self, x):
        RUNS.append(type(self))
        return {int(i): row for i, row in enumerate(x) if row.sum() > 0}, object()


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x):
        RUNS.append(type(self))
        return {int(i): row for i, row in enumerate(x) if row.sum() > 0}, object()


def test_a_decorated_forward_is_tried_no_more_often_than_a_bare_one():
    RUNS.clear()
    for kind in (Bare, Decorated):
        with pytest.raises(TraceError, match="forward returns what no graph can hold"):
            trace(kind(), dict(x=torch.randn(3, 2)), unsupported="leaf")
    assert RUNS.count(Decorated) == RUNS.count(Bare)


def test_a_comprehension_is_no_leaf_but_the_function_around_it():
    def asking(rows):
        return {i: 1 // row for i, row in enumerate(rows)}

    with pytest.raises(ZeroDivisionError) as caught:
        asking([0])
    assert function_around(caught.value, {}, ()) is asking


@pytest.mark.parametrize("as_module", [False, True])
def test_what_a_leaf_returns_can_be_written_into(as_module):
    class Compared(nn.Module):
        def forward(self, a, b):
            return (a - b).abs() if torch.equal(a, b) else (a - b) ** 2

    class Kernel(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.compared = nn.Linear(64, 64), Compared()

        def compare(self, a, b):
            return (a - b).abs() if torch.equal(a, b) else (a - b) ** 2

        def forward(self, x):
            z = self.layer(x)
            return (self.compared if as_module else self.compare)(z, z * 2).div_(-2).exp_().sum()

    model, x = Kernel(), torch.randn(8, 64)
    with pytest.warns(LeafWarning, match="will run whole"):
        assert plan(model, dict(x=x), TWO).nodes
    traced = trace(model, dict(x=x), unsupported="leaf")
    found = [(f(x), *torch.autograd.grad(f(x), list(model.layer.parameters()))) for f in (traced.gm, model)]
    assert all(map(torch.allclose, *found))


class Matcher(nn.Module):
    """As in detection: an assignment by costs, computed by a library that takes no tensors."""

    def forward(self, costs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(np.argsort(np.asarray(costs.detach().cpu()), axis=1)[:, 0], dtype=torch.int64)


def test_a_matcher_that_forward_makes_and_that_reads_an_array_is_a_leaf() -> None:
    def matched(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[torch.arange(6), Matcher()(x.cos())].sum()

    x = torch.randn(6, 4)
    traced = trace(matched, {"x": x}, unsupported="leaf")
    assert traced.find("sin")
    torch.testing.assert_close(traced.gm(x), matched(x))
