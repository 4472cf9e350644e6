"""Which gradient sums are new tensors and which are added in place: compared with autograd on real data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import fx, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from autopar.cost import annotate
from autopar.cost.memory.formulas import StepMemory
from autopar.graph import COST
from autopar.precision import Precision
from autopar.runtime.live_storages import LiveStorages
from autopar.tracing import trace

WIDTH, WORDS = 8, 32

# Functions that read a tensor twice or more, each in a different way.
BRANCHES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "products": lambda x: x * 2 + x * 3,
    "three": lambda x: x * 2 + x * 3 + x.exp(),
    "residual": lambda x: x + torch.tanh(x),
    "itself": lambda x: x + x,
    "residual, read again": lambda x: (x + torch.tanh(x)) * x,
    "views": lambda x: x.flatten(0, 1).sum(0) + x.flatten(0, 1).exp().sum(0),
    "a view and a product": lambda x: x.flatten(0, 1).sum() + (x * 2).sum(),
    "linear on three dims": lambda x: F.linear(x, torch.ones(WIDTH, WIDTH)) + F.linear(x, torch.ones(WIDTH, WIDTH)),
    "linear on two dims": lambda x: F.linear(x[0], torch.ones(WIDTH, WIDTH)) + F.linear(x[0], torch.ones(WIDTH, WIDTH)),
    "norms": lambda x: F.layer_norm(x, (WIDTH,)) + F.layer_norm(x, (WIDTH,)).exp(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "transposed": lambda x: x.transpose(0, 1).exp() + x.transpose(0, 1).sin(),
    "pieces": lambda x: x[:, :2].sum() + x[:, 2:].exp().sum() + x.sum(),
    "gelu by hand": lambda x: x * 0.5 * (1 + torch.tanh(x + 0.04 * x.pow(3))),
}


class Branches(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.of = nn.Parameter(torch.ones(WIDTH)), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x * self.weight).sum()


def _language(kind: str, head: str = "ForCausalLM", **sizes: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **sizes)
    config.use_cache = config.tie_word_embeddings = False
    model: nn.Module = getattr(transformers, f"{kind}{head}")(config)
    return model


NETS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _language(
        "GPT2", "LMHeadModel", n_layer=2, n_embd=16, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": lambda: _language(
        "Llama", num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2
    ),
    "bert": lambda: _language(
        "Bert", "ForMaskedLM", num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
}  # fmt: skip


def _foreseen(model: nn.Module, graph: fx.Graph) -> int:
    """Predicted number of sums that are new tensors: gradients made of an input beyond one for each occurrence."""
    annotate(graph, root=model)
    parameters = dict(model.named_parameters())
    memory = StepMemory(graph, parameters, (1,), Precision(), "sgd", 1, "cpu")
    found = 0
    for node in graph.nodes:
        for point in memory.lifetimes.points(node):
            if point.backward:
                handed = node.meta[COST].gradient_alias_of
                counts = Counter(point.made)
                found += sum(many - (place >= len(handed) or handed[place] is None) for place, many in counts.items())
    return found


def _sums(loss: torch.Tensor) -> int:
    """Number of sums that autograd makes as new tensors; others it adds in place. No backward of these nets adds."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        loss.backward()
    return sum(event.name == "aten::add" for event in profiled.events())


def _loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Callable[[], torch.Tensor], fx.Graph]:
    traced = trace(model, {name: one.to("meta") for name, one in inputs.items()})
    module = fx.GraphModule(model, traced.graph)
    return lambda: module(*traced.bind((), inputs))[0], traced.graph


def _branches(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Branches(BRANCHES[name]), {"x": torch.ones(3, 4, WIDTH)}


def _net(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.arange(16).reshape(2, 8)
    return NETS[name](), {"input_ids": ids, "labels": ids}


CASES = [(_branches, name) for name in BRANCHES] + [(_net, name) for name in NETS]


# for an op that reads a tensor twice, its own backward is measured
OF_SEVERAL = [case for case in CASES if case[1] != "itself"]


@pytest.mark.parametrize(("build", "name"), OF_SEVERAL, ids=[name for _, name in OF_SEVERAL])
def test_sums_are_those_that_autograd_makes(build: Callable[[str], Any], name: str) -> None:
    model, inputs = build(name)
    loss, graph = _loss(model, inputs)
    loss().backward()  # so that gradients of parameters read twice are added to existing ones
    assert _foreseen(model, graph) == _sums(loss())


@pytest.mark.parametrize(("build", "name"), CASES, ids=[name for _, name in CASES])
def test_who_follows_storages_leaves_additions_in_place(build: Callable[[str], Any], name: str) -> None:
    """If `LiveStorages` watches backward, autograd adds in place as without it, and gradients are bit-identical."""
    model, inputs = build(name)
    loss, _ = _loss(model, inputs)
    sums = _sums(loss())
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    total = loss()
    live = LiveStorages(model.parameters())
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled, live:
        total.backward()
    names = Counter(event.name for event in profiled.events())
    in_place = names["aten::add_"]  # each is nested in an aten::add that autograd called, and every other one too
    assert (names["aten::add"] - in_place) / 2 == sums
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
