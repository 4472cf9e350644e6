"""A trace that reuses results of equal calls makes the same graph as one that runs every call."""

from __future__ import annotations

import pytest
import torch
from small_zoo import inputs_of, small
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import VAL
from autopar.tracing import trace
from autopar.tracing.running import Runs

NAMES = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM",
    "BertForMaskedLM", "ModernBertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification",
    "ConvNextForImageClassification",
)  # fmt: skip


def facts(graph):
    """All information in a graph's nodes; for tensors their metadata and known values."""

    def shown(value):
        if isinstance(value, torch.Tensor):
            known = None if value.is_meta else value.tolist()
            return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad, value.storage_offset(), known)
        return value

    position = {node: i for i, node in enumerate(graph.nodes)}

    def told(value):
        return f"%{position[value]}" if isinstance(value, fx.Node) else shown(value)

    return [
        (
            node.name,
            node.target if isinstance(node.target, str) else type(node.target),
            fx.node.map_aggregate((node.args, node.kwargs), told),
            {name: pytree.tree_map(told, value) for name, value in node.meta.items()},
        )
        for node in graph.nodes
    ]


def shares(graph):
    """For each node the first nodes whose values share its storages."""
    first: dict[int, int] = {}
    found = []
    for i, node in enumerate(graph.nodes):
        tensors = [v for v in pytree.tree_leaves(node.meta[VAL]) if isinstance(v, torch.Tensor)]
        found.append([first.setdefault(t.untyped_storage()._cdata, i) for t in tensors])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_remembered_calls_are_written_down_as_calls_made_anew(name, monkeypatch):
    model = small(name).train()
    inputs = inputs_of(model)
    hits = 0
    again = Runs.repeated_result

    def counted(runs, *call):
        nonlocal hits
        made = again(runs, *call)
        hits += made is not None
        return made

    graphs = []
    for how in (counted, lambda runs, *call: None):
        monkeypatch.setattr(Runs, "repeated_result", how)
        graphs.append(trace(model, inputs).graph)
        monkeypatch.setattr(Runs, "run", lambda runs, func, args, kwargs: func(*args, **kwargs))
    remembered, anew = graphs
    assert hits > len(remembered.nodes) / 5, "hardly any call was remembered"
    assert facts(remembered) == facts(anew)
    assert shares(remembered) == shares(anew)


@pytest.mark.parametrize("write", [torch.Tensor.add_, torch.Tensor.zero_, lambda x, y: x.__setitem__(0, y[0])])
def test_writes_between_equal_calls_are_nodes(write):
    """Equal calls on a tensor that is known in the first call, and then overwritten from the inputs."""

    class Model(torch.nn.Module):
        def forward(self, x):
            steps = torch.arange(4.0)
            before = steps.exp()
            write(steps, x) if write is not torch.Tensor.zero_ else write(steps)
            return before + steps.exp() + x.exp() + x.exp()

    traced = trace(Model(), {"x": torch.rand(4)})
    x = torch.rand(4)
    assert torch.equal(traced.gm(x), Model()(x))
