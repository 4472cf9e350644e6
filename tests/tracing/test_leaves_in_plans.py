"""Leaves in plans: their contents count, too large a share of them is an error, and users can request them."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from autopar import Cluster, InputError, Plan, UntraceableError, plan
from autopar.cost import annotate
from autopar.graph import COST, TRIAL_FLOPS, output_tensors
from autopar.leaf_calls import LeafCall
from autopar.planning.leaf_requests import LeafWarning
from autopar.tracing import trace
from autopar.tracing.leaves.tensors import show_leaf_tensors

TWO = Cluster.preset("cpu", shape=(2,))


class Branching(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.shared(self.linear(x)) if x.sum() > 0 else x


class Net(nn.Module):
    """Two untraceable layers, whose size makes them about `share` of all FLOPs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, hidden), nn.Linear(hidden, 8)) for _ in range(2))
        self.gates = nn.ModuleList(Branching(8) for _ in range(2))
        self.gates[1].shared = self.gates[0].shared

    def forward(self, x):
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = gate(layer(x))
        return self.gates[0].shared(x).square().mean()


def leaves(graph):
    return [node for node in graph.nodes if isinstance(node.target, LeafCall)]


def test_what_a_leaf_reads_is_in_the_graph_once():
    traced = trace(Net(64), dict(x=torch.randn(4, 8)), unsupported="leaf")
    shown = show_leaf_tensors(traced)
    traced.graph.lint()
    assert shown == leaves(traced.graph) and not [n for n in traced.graph.nodes if n.op == "call_module"]
    read = [str(n.target) for n in traced.graph.nodes if n.op == "get_attr"]
    assert len(read) == len(set(read)) and sum("shared" in name for name in read) == 2
    assert {"gates.0.linear.weight", "gates.1.linear.bias"} <= set(read)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_graph_takes_the_way_that_data_decides(sign):
    model, x = Net(64), sign * torch.rand(4, 8)
    traced = trace(model, dict(x=x), unsupported="leaf", bias_addition_split=False)
    show_leaf_tensors(traced)
    assert torch.equal(traced.gm(x), model(x))


def test_costs_of_leaves_are_estimates_and_no_less_than_a_trial_run():
    traced = trace(Net(64), dict(x=torch.randn(4, 8)), unsupported="leaf")
    show_leaf_tensors(traced)
    annotate(traced.graph, "cpu", traced.root)
    for leaf in leaves(traced.graph):
        cost = leaf.meta[COST]
        assert cost.estimated and cost.flops_backward == 2 * cost.flops_forward
        products = 2 * 2 * 4 * 8 * 8  # two linear layers on four rows; biases count like products
        assert products <= cost.flops_forward <= products * 9 / 8
        assert leaf.meta.get(TRIAL_FLOPS, 0) <= cost.flops_forward
        assert [t.shape for t in output_tensors(leaf)] == [(4, 8)]
    assert not any(n.meta[COST].estimated for n in traced.graph.nodes if n not in leaves(traced.graph))


def test_a_small_leaf_is_told_and_planned():
    with pytest.warns(LeafWarning, match=r"gates\.0 and 1 more \(Branching\) cannot be traced"):
        made = plan(Net(512), dict(x=torch.randn(4, 8)), TWO)
    stored = {parameter.name for parameter in made.parameters}
    assert {"gates.0.linear.weight", "gates.0.shared.weight", "gates.1.linear.weight"} <= stored


def test_a_leaf_with_too_much_of_the_model_is_an_error_that_names_it_and_alone_tells_why(recwarn):
    with pytest.raises(UntraceableError) as error:
        plan(Net(16), dict(x=torch.randn(4, 8)), TWO)
    assert not [w for w in recwarn if w.category is LeafWarning]
    text = str(error.value)
    for part in ("2 modules 'gates.*'", "Branching", "bool()", "constraints='leaf:gates.*'", "[at gates.0"):
        assert part in text


def test_who_asks_for_leaves_gets_them_and_the_plan_says_so(recwarn):
    made = plan(Net(16), dict(x=torch.randn(4, 8)), TWO, constraints=("leaf:gates.*", "fsdp"))
    assert not [w for w in recwarn if w.category is LeafWarning]
    assert Plan.from_json(made.to_json()).constraints == ("leaf:gates.*", "fsdp")
    traceable = plan(Net(16), dict(x=torch.randn(4, 8)), TWO, constraints=["leaf:layers.0", "leaf:gates.*"])
    assert len(traceable.nodes) < len(made.nodes)


def test_a_request_that_matches_nothing_is_refused():
    with pytest.raises(InputError, match=r"no module is called 'gate'.*: did you mean 'gates'\?"):
        plan(Net(16), dict(x=torch.randn(4, 8)), TWO, constraints="leaf:gate")


def test_eager_experts_are_no_leaves_unless_asked_for(recwarn):
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = hf.MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4, vocab_size=11, use_cache=False)
    config._experts_implementation = "eager"
    ids = torch.randint(0, 11, (2, 8))
    examples = dict(input_ids=ids, labels=ids)
    whole = plan(hf.MixtralForCausalLM(config), examples, TWO)
    assert not [w for w in recwarn if w.category is LeafWarning]
    assert sum(node.target.endswith(".experts") for node in whole.nodes) == 2
    made = plan(hf.MixtralForCausalLM(config), examples, TWO, constraints="leaf:model.layers.*.mlp.experts")
    assert {"model.layers.1.mlp.experts.gate_up_proj"} <= {parameter.name for parameter in made.parameters}


def test_what_a_librarys_config_raises_is_told_at_the_line_of_the_model():
    config = hf.T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, vocab_size=32)  # without a start token
    ids = torch.randint(1, 32, (2, 6))
    with pytest.raises(UntraceableError, match=r"decoder_start_token_id.*modeling_t5\.py:\d+"):
        plan(hf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, TWO)
