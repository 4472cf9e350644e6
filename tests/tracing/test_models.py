"""A traced graph equals the model: bit-identical outputs and gradients, on the path that eager takes."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from tiny_models import CASES, IDS, MASK, TEXT, gpt2, run, tensors
from torch.overrides import TorchFunctionMode

from autopar.fingerprints.fingerprint import fingerprint
from autopar.graph import VAL, output_tensors, resolve
from autopar.tracing import known, trace


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("functional", [True, False])
def test_replay_equals_the_model_bit_for_bit(name, training, functional):
    make, inputs = CASES[name]
    model = make().train(training)
    traced = trace(model, inputs, bias_addition_split=False, remove_inplace=functional)
    state = copy.deepcopy(model.state_dict())
    replayed = run(lambda: traced.gm(*traced.bind((), inputs)), model, state)
    eager = run(lambda: model(**inputs), model, state)
    for a, b in zip(replayed, eager, strict=True):
        assert len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", CASES)
def test_with_the_bias_split_it_equals_the_model_to_rounding(name):
    make, inputs = CASES[name]
    model = make().double().eval()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    traced = trace(model, inputs)
    state = copy.deepcopy(model.state_dict())
    replayed = run(lambda: traced.gm(*traced.bind((), inputs)), model, state)
    for a, b in zip(replayed, run(lambda: model(**inputs), model, state), strict=True):
        assert all(torch.allclose(x, y, rtol=1e-6, atol=1e-9) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_node_has_its_facts_and_the_trace_is_deterministic(name):
    make, inputs = CASES[name]
    model = make()
    first, second = (trace(model, inputs).graph for _ in range(2))
    assert fingerprint(first) == fingerprint(second)
    assert isinstance(first.output_node().args[0], tuple)
    for node in first.nodes:
        assert VAL in node.meta
        assert all(v.device.type == "meta" and v.grad_fn is None for v in output_tensors(node))
        if node.op == "call_function" and output_tensors(node):
            assert resolve(node)


class Calls(TorchFunctionMode):
    """Records the torch functions of an eager run, with the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = tensors((args, kwargs))
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__")
        made = [v for v in tensors(result) if writes or not any(v is b for b in before)]
        if made and name != "__get__":
            self.found.append((spelled(name), tuple((tuple(v.shape), v.dtype) for v in made)))
        return result


_SPELLED = {
    "div": "truediv", "__rsub__": "sub", "__rpow__": "pow", "__rdiv__": "truediv", "remainder": "mod", "__and__": "and",
    "bitwise_and": "and", "__or__": "or", "bitwise_or": "or", "__invert__": "invert", "__xor__": "xor",
}  # fmt: skip


def spelled(name):
    return _SPELLED.get(name, name).strip("_")


@pytest.mark.parametrize(
    "name", [n for n in CASES if n not in ("resnet",) and "mask" not in n] + ["llama known", "t5 known"]
)
def test_the_trace_takes_the_path_that_eager_takes(name):
    if name.endswith("known"):
        make = CASES[name.split()[0]][0]
        inputs = {**TEXT, "attention_mask": MASK}
        examples = {**TEXT, "attention_mask": known(MASK)}
    else:
        make, inputs = CASES[name]
        examples = inputs
    model = make()
    graph = trace(model, examples, bias_addition_split=False, remove_inplace=False).graph
    found = [
        (spelled(getattr(n.target, "__name__", n.target)), tuple((tuple(v.shape), v.dtype) for v in output_tensors(n)))
        for n in graph.nodes
        if n.op.startswith("call") and output_tensors(n) and not is_item(n)
    ]
    with Calls() as eager:
        model(**inputs)
    # the trace leaves out what is computed from constants and read by Python only, since no node uses it
    assert remaining(eager.found, found) is not None, (eager.found, found)
    assert len(found) <= len(eager.found)


def is_item(node):
    return getattr(node.target, "__name__", "") == "getitem" and not isinstance(node.args[0].meta[VAL], torch.Tensor)


def remaining(longer, shorter):
    """The items of `longer` without `shorter`; None if `shorter` is not a subsequence of it."""
    left, position = [], 0
    for item in longer:
        if position < len(shorter) and item == shorter[position]:
            position += 1
        else:
            left.append(item)
    return left if position == len(shorter) else None


def test_a_model_without_memory_is_traced_at_full_size():
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2))
        graph = trace(
            model, dict(input_ids=torch.empty(1, 4096, dtype=torch.long)), parameter_dtype=torch.bfloat16
        ).graph
    weights = [n for n in graph.nodes if n.op == "get_attr" and n.target.endswith("weight")]
    assert weights and all(n.meta[VAL].dtype == torch.bfloat16 for n in weights)
    assert not any("meta" in str(n.kwargs.get("device", "")) for n in graph.nodes)


def test_a_graph_traced_at_one_batch_size_runs_at_another():
    model = gpt2().eval()
    traced = trace(model, dict(input_ids=IDS), bias_addition_split=False)
    other = torch.randint(3, 90, (5, 11))
    assert torch.equal(traced.gm(other).logits, model(other).logits)
