"""A traced graph is the model: outputs and gradients bit for bit, the path that eager takes, nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.graph import VAL, fingerprint, output_tensors, resolve
from autopar.tracing import TraceError, known, trace

IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :2] = 0
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block that writes in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.last_norm, self.act = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last_norm(self.second(self.act(self.norm(self.first(x)))))
        out += x
        return self.act(out)


def gpt2(**options):
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=99, n_positions=32, bos_token_id=0,
                                            eos_token_id=0, **options))  # fmt: skip


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=99,
                                              num_attention_heads=2, num_key_value_heads=1))  # fmt: skip


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                            num_attention_heads=2, vocab_size=99))  # fmt: skip


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_labels=5,
                                                     num_attention_heads=2, image_size=32, patch_size=8))  # fmt: skip


def t5():
    return hf.T5ForConditionalGeneration(hf.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=99,
                                                     decoder_start_token_id=0))  # fmt: skip


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3))


def resnet():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), Block(4), Block(4),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))  # fmt: skip


TEXT = dict(input_ids=IDS, labels=IDS)
CASES = {
    "gpt2": (gpt2, TEXT),
    "gpt2 mask": (gpt2, {**TEXT, "attention_mask": MASK}),
    "llama": (llama, TEXT),
    "llama mask": (llama, {**TEXT, "attention_mask": MASK}),
    "bert": (bert, TEXT),
    "bert mask": (bert, {**TEXT, "attention_mask": MASK}),
    "vit": (vit, dict(pixel_values=PIXELS, labels=torch.tensor([1, 2]))),
    "t5": (t5, TEXT),
    "t5 mask": (t5, {**TEXT, "attention_mask": MASK}),
    "mlp": (mlp, dict(input=torch.randn(5, 4))),
    "resnet": (resnet, dict(input=PIXELS)),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tensors(value):
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def run(function, model, state):
    """Outputs, gradients and buffers of one run from the same random state and buffers."""
    model.load_state_dict(state)
    torch.manual_seed(1)
    out = tensors(function())
    scalar = sum(v.double().square().sum() for v in out if v.requires_grad)
    gradients = torch.autograd.grad(scalar, list(model.parameters()), allow_unused=True)
    return out, [g for g in gradients if g is not None], [b.clone() for b in model.buffers()]


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
    for a, b in zip(run(lambda: traced.gm(*traced.bind((), inputs)), model, state), run(lambda: model(**inputs), model, state)):
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
    """The torch functions an eager run makes, with the shapes of what they return."""

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


_SPELLED = {"div": "truediv", "__rsub__": "sub", "__rpow__": "pow", "__rdiv__": "truediv", "remainder": "mod", "__and__": "and",
            "bitwise_and": "and", "__or__": "or", "bitwise_or": "or", "__invert__": "invert", "__xor__": "xor"}  # fmt: skip


def spelled(name):
    return _SPELLED.get(name, name).strip("_")


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("resnet",) and "mask" not in n] + ["llama known", "t5 known"])
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
    # what the trace leaves out is computed from constants and asked by Python alone: no node uses it
    assert remaining(eager.found, found) is not None, (eager.found, found)
    assert len(found) <= len(eager.found)


def is_item(node):
    return getattr(node.target, "__name__", "") == "getitem" and not isinstance(node.args[0].meta[VAL], torch.Tensor)


def remaining(longer, shorter):
    """What is left of `longer` without `shorter`, which must be a subsequence of it; None if it is not."""
    left, position = [], 0
    for item in longer:
        if position < len(shorter) and item == shorter[position]:
            position += 1
        else:
            left.append(item)
    return left if position == len(shorter) else None


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_decoder_without_a_mask_is_causal_by_flag(make):
    graph = trace(make(), dict(input_ids=IDS)).graph
    calls = [n for n in graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    assert calls and all(n.kwargs["is_causal"] and n.kwargs["attn_mask"] is None for n in calls)


def test_a_known_mask_decides_the_branch_and_guards_it():
    model = llama()
    traced = trace(model, dict(input_ids=IDS, attention_mask=known(torch.ones_like(IDS))))
    assert all(n.kwargs["attn_mask"] is None for n in traced.graph.nodes if "scaled_dot" in str(n.target))
    traced.bind((), dict(input_ids=IDS, attention_mask=torch.ones_like(IDS)))
    with pytest.raises(InputError, match="masking_utils"):
        traced.bind((), dict(input_ids=IDS, attention_mask=MASK))


def test_an_unknown_mask_takes_the_librarys_data_free_path_only_where_it_is_needed():
    graph = trace(t5(), {**TEXT, "attention_mask": MASK}).graph
    assert any("attention_mask" in [i.name for i in n.all_input_nodes] for n in graph.nodes)
    assert torch.compiler.is_exporting() is False


class Failing(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.what = what

    def forward(self, x):
        self.count += 1
        return self.what(self.linear(x))


def raise_it(x):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("what", "error"), [(lambda x: x, None), (lambda x: x if x.sum() > 0 else -x, TraceError), (raise_it, ZeroDivisionError)]
)
def test_the_model_is_as_it_was_also_after_an_error(what, error):
    model = Failing(what)
    before = {k: (v, v.clone()) for k, v in (*model.named_parameters(), *model.named_buffers())}
    attributes = {k: sorted(vars(m)) for k, m in model.named_modules()}
    call, apply = nn.Module.__call__, torch.autograd.Function.apply
    if error is None:
        trace(model, dict(x=torch.randn(1, 2)))
    else:
        with pytest.raises(error):
            trace(model, dict(x=torch.randn(1, 2)))
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(after[k] is v and torch.equal(v, copied) for k, (v, copied) in before.items())
    assert attributes == {k: sorted(vars(m)) for k, m in model.named_modules()}
    assert nn.Module.__call__ is call and torch.autograd.Function.apply == apply


def test_the_place_of_a_branch_on_data_is_named():
    with pytest.raises(TraceError, match="test_models.py"):
        trace(Failing(lambda x: x if x.sum() > 0 else -x), dict(x=torch.randn(1, 2)))


class Twice(torch.autograd.Function):
    """Doubles forward; its backward is wrong on purpose, so that a replay that differentiates the inside is caught."""

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


def test_a_loss_is_traced_in_and_its_targets_are_inputs():
    model, x, y = mlp().eval(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    traced = trace(model, dict(input=x, target=y), loss_fn=nn.CrossEntropyLoss(), bias_addition_split=False)
    assert torch.equal(traced.gm(*traced.bind((x,), dict(target=y))), F.cross_entropy(model(x), y))
    with pytest.raises(InputError, match="target"):
        trace(model, dict(input=x), loss_fn=nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("examples", "fixed", "name"),
    [({**TEXT, "input_idz": IDS}, {}, "input_idz"), (TEXT, {"use_cash": False}, "use_cash"), ({}, {}, "input")],
)
def test_arguments_that_do_not_fit_are_named(examples, fixed, name):
    with pytest.raises(InputError, match=name):
        trace(llama() if examples else mlp(), examples, fixed)


def test_another_call_is_an_input_error_and_another_key():
    model = llama()
    traced = trace(model, TEXT)
    assert traced.key((), TEXT) == traced.key((IDS,), dict(labels=IDS))
    for call in (dict(TEXT, input_ids=IDS[:1]), dict(input_ids=IDS), dict(TEXT, use_cache=False), dict(TEXT, labels=IDS.int())):
        assert traced.key((), call) != traced.key((), TEXT)
        with pytest.raises(InputError):
            traced.bind((), call)
    key = traced.key((), TEXT)
    assert traced.key((), TEXT) == key and (model.eval(), traced.key((), TEXT))[1] != key


def test_a_model_without_memory_is_traced_at_full_size():
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2))
        graph = trace(model, dict(input_ids=torch.empty(1, 4096, dtype=torch.long)), parameter_dtype=torch.bfloat16).graph
    weights = [n for n in graph.nodes if n.op == "get_attr" and n.target.endswith("weight")]
    assert weights and all(n.meta[VAL].dtype == torch.bfloat16 for n in weights)
    assert not any("meta" in str(n.kwargs.get("device", "")) for n in graph.nodes)


def test_a_graph_traced_at_one_batch_size_runs_at_another():
    model = gpt2().eval()
    traced = trace(model, dict(input_ids=IDS), bias_addition_split=False)
    other = torch.randint(3, 90, (5, 11))
    assert torch.equal(traced.gm(other).logits, model(other).logits)
