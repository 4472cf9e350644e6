"""Arguments, keys and losses; a trace leaves the model unchanged, and keeps nothing of it alive."""

from __future__ import annotations

from typing import TypedDict

import pytest
import torch
import torch.nn.functional as F
from tiny_models import IDS, TEXT, llama, mlp
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from typing_extensions import Unpack

from autopar.calls.states import State
from autopar.errors import InputError
from autopar.tracing import TraceError, trace


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
    ("what", "error"),
    [(lambda x: x, None), (lambda x: x if x.sum() > 0 else -x, TraceError), (raise_it, ZeroDivisionError)],
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
    with pytest.raises(TraceError, match=r"test_calls\.py"):
        trace(Failing(lambda x: x if x.sum() > 0 else -x), dict(x=torch.randn(1, 2)))


def test_a_loss_is_traced_in_and_its_targets_are_inputs():
    model, x, y = mlp().eval(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    traced = trace(model, dict(input=x, target=y), loss_fn=nn.CrossEntropyLoss(), bias_addition_split=False)
    assert torch.equal(traced.gm(*traced.bind((x,), dict(target=y))), F.cross_entropy(model(x), y))
    with pytest.raises(InputError, match="target"):
        trace(model, dict(input=x), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(InputError, match=r"names 'target', but .* takes input, and loss_fn wanted behind the output"):
        trace(model, dict(input=x, target=y), loss_fn=lambda output, wanted: F.cross_entropy(output, wanted))


@pytest.mark.parametrize(
    ("examples", "fixed", "name"),
    [
        ({**TEXT, "input_idz": IDS}, {}, "input_idz"),
        (TEXT, {"use_cash": False}, "use_cash"),
        (TEXT, {"return_dikt": False}, "did you mean 'return_dict'"),
        ({}, {}, "input"),
    ],
)
def test_arguments_that_do_not_fit_are_named(examples, fixed, name):
    with pytest.raises(InputError, match=name):
        trace(llama() if examples else mlp(), examples, fixed)


@pytest.mark.parametrize("given", [{"return_dict": False}, {"output_attentions": True, "return_dict": False}])
def test_a_name_that_a_decorator_takes_fits_though_forward_does_not_declare_it(given):
    model = llama().eval()
    model.set_attn_implementation("eager")
    traced = trace(model, TEXT, given)
    found, expected = traced.gm(*traced.bind((), {**TEXT, **given})), model(**TEXT, **given)
    assert type(found) is tuple and len(found) == len(expected)
    assert torch.allclose(found[0], expected[0]) and torch.allclose(found[1], expected[1])


class Declared(TypedDict, total=False):
    scale: float


class Sum(nn.Module):
    def forward(self, x, **kwargs: Unpack[Declared]):
        return (x * kwargs.get("scale", 1.0) + kwargs.get("shift", 0.0)).sum()

    forward.__annotations__["kwargs"] = Unpack[Declared]  # the real object, as this file's annotations are strings


def test_a_name_that_nothing_declares_is_passed_on_with_a_warning():
    x = torch.ones(3)
    with pytest.warns(UserWarning, match=r"names 'shift', which Sum\.forward does not declare"):
        assert trace(Sum(), dict(x=x, shift=x), {"scale": 2.0}).gm(x, x) == 9
    with pytest.raises(InputError, match="'scales'"):
        trace(Sum(), dict(x=x, scales=x))


def test_another_call_is_an_input_error_and_another_key():
    model = llama()
    traced = trace(model, TEXT)
    assert traced.key((), TEXT) == traced.key((IDS,), dict(labels=IDS))
    for call in (
        dict(TEXT, input_ids=IDS[:1]),
        dict(input_ids=IDS),
        dict(TEXT, use_cache=False),
        dict(TEXT, labels=IDS.int()),
    ):
        assert traced.key((), call) != traced.key((), TEXT)
        with pytest.raises(InputError):
            traced.bind((), call)
    key = traced.key((), TEXT)
    assert traced.key((), TEXT) == key and (model.eval(), traced.key((), TEXT))[1] != key


def test_the_hooks_of_accelerate_are_bypassed_and_back_afterwards():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model, x = mlp().eval(), torch.randn(5, 4)
    expected = model(x)
    for module in (model[0], model):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    before = {k: dict(vars(m)) for k, m in model.named_modules()}
    traced = trace(model, dict(input=x), bias_addition_split=False)
    assert before == {k: dict(vars(m)) for k, m in model.named_modules()}
    assert torch.equal(traced.gm(x), expected) and torch.equal(model(x), expected)


def test_a_trace_keeps_no_parameter_alive():
    import weakref

    model = mlp()
    traced = trace(model, dict(input=torch.randn(5, 4)))
    old = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.zeros(8, 4))
    assert old() is None and traced.order.params[0] is model[0].weight


class Watching(nn.Module):
    """Registers a hook in its first call, as libraries that collect outputs do; each hook adds to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(2, 2), []

    def forward(self, x):
        if not hasattr(self, "is_watching"):
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
            self.is_watching = True
        return self.linear(x)


def test_hooks_of_a_forward_do_not_pile_up():
    model, x = Watching(), torch.randn(1, 2)
    graphs = [trace(model, dict(x=x)).graph for _ in range(3)]
    assert len({len(graph.nodes) for graph in graphs}) == 1
    assert not model.linear._forward_hooks and torch.equal(model(x), model.linear(x))


def test_a_mixture_that_returns_its_routes_is_traced_alike_each_time():
    config = MixtralConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=32, intermediate_size=32,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    )  # fmt: skip
    model, ids = MixtralForCausalLM(config), IDS % 32
    graphs = [trace(model, dict(input_ids=ids, labels=ids)).graph for _ in range(2)]
    first, second = ([(n.op, n.name, n.args and str(n.args)) for n in graph.nodes] for graph in graphs)
    assert first == second


def test_hooks_of_the_model_itself_are_not_in_the_graph_and_those_of_its_modules_are():
    model, x = mlp().eval(), torch.randn(5, 4)
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    inside = model(x)
    model.register_forward_hook(lambda module, args, output: output * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    with pytest.warns(UserWarning, match="forward hooks of 0 run now"):
        traced = trace(model, dict(input=x), bias_addition_split=False)
    assert torch.equal(traced.gm(x), inside)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


def test_pruned_weights_are_computed_in_the_graph():
    from torch.nn.utils import prune

    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    prune.random_unstructured(model, "weight", amount=0.5)
    traced = trace(model, dict(input=x))
    with torch.no_grad():
        model.weight_orig.mul_(2)
    assert torch.equal(traced.gm(x), model(x))


class Counting(nn.Module):
    """The result depends on the number of calls; `seen` is set but not read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(2, 2), 0, None

    def forward(self, x):
        self.calls += 1
        self.seen = x.shape
        return self.linear(x) * self.calls


def test_numbers_that_forward_sets_are_told():
    model = Counting()
    with pytest.warns(UserWarning, match=r"forward sets calls, which .* make it a buffer"):
        trace(model, dict(x=torch.randn(1, 2)))
    assert model.calls == 0


class Carrying(nn.Module):
    """Sets a state for the next call and a loss for the loop, both new attributes; caches a table and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state, self.mask, self.seen = nn.GRU(2, 2, batch_first=True), None, None, None
        self.outputs: list[torch.Tensor] = []
        self.register_buffer("rates", torch.rand(2))

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], x.shape[1]).tril()
            self.table = self.rates.cos()
        output, self.state = self.layer(x * self.table, self.state)
        self.seen, self.loss = output.shape, output.square().mean()
        self.outputs.append(output)
        return self.mask @ output


def test_what_forward_leaves_for_the_loop_or_the_next_call_is_set():
    model = Carrying()
    with pytest.warns(
        UserWarning, match=r"forward sets outputs \(changed in place, where .*\), which .* make it a buffer"
    ):
        traced = trace(model, dict(x=torch.randn(1, 3, 2)))
    assert model.state is None and not model.outputs and not hasattr(model, "loss")
    assert dict(traced.set_by_calls.names).keys() == {""} and {name for _, name in traced.set_by_calls.names} == {
        "state",
        "loss",
    }
    assert [*traced.states] == ["model.state"] and traced.set_outputs[2] == ("model.state", "model_state")
    assert [leaf.name for leaf in traced.inputs.leaves] == ["x"]  # the state is None, so it is no input


def test_a_list_of_weights_that_is_made_anew_is_no_state():
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(2, 2)

        def forward(self, x):
            self.layer.flatten_parameters()  # reads this list, before the layer makes it anew
            return self.layer(x)[0]

    traced = trace(Flattening(), dict(x=torch.randn(3, 1, 2)))
    assert not traced.states and not traced.set_by_calls.names


class Metric(nn.Module):
    """As those of torchmetrics: its hash depends on a tensor that forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def __hash__(self) -> int:
        return hash((type(self).__name__, id(self.total)))

    def forward(self, x):
        self.total = self.total + x.sum()
        return self.total


def test_modules_are_known_whatever_their_hash():
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = Metric()

        def forward(self, x):
            return self.metric(x) + self.metric(x * 2)

    traced = trace(Measured(), dict(x=torch.randn(3)))
    assert [traced.scope(node).module_path for node in traced.find("sum")] == ["metric", "metric"]


class Counted(nn.Module):
    """Counts in a tensor that exists before, or that the first call makes; it also caches a table."""

    def __init__(self, count: torch.Tensor | None) -> None:
        super().__init__()
        self.layer, self.count, self.table = nn.Linear(2, 2), count, None

    def forward(self, x):
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1])
        if self.count is None:
            self.count = torch.zeros(())
        self.count = self.count + 1
        return self.layer(x) * self.count + self.table


@pytest.mark.parametrize("count", [None, torch.tensor(2.0)])
def test_a_count_is_a_state_and_a_table_is_none(count):
    model = Counted(count)
    traced = trace(model, dict(x=torch.randn(1, 2)))
    assert [*traced.states] == ["model.count"] and traced.set_by_calls.names == (("", "count"),)
    assert model.count is count and (count is None or count == 2)
    given = [torch.randn(1, 2), *([] if count is None else [torch.tensor(5.0)])]
    values = traced.bind(given[:1], {"model.count": given[1]} if given[1:] else {})
    assert torch.equal(traced.gm(*values), model.layer(given[0]) * (1 if count is None else 6) + torch.arange(2))


class Going(nn.Module):
    """Continues from its own result, caches a table, and stores its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state, self.table = nn.Linear(2, 2), None, None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(x.shape[1])
        self.made = self.layer(x) + self.table
        self.state = self.made if self.state is None else self.made + self.state
        return self.state


def test_of_installed_modules_states_alone_are_set(monkeypatch):
    assert trace(Going(), dict(x=torch.randn(1, 2))).set_by_calls.names == (("", "made"), ("", "state"))
    monkeypatch.setattr("autopar.tracing.model_state.left_behind._is_installed", lambda kind: True)
    assert trace(Going(), dict(x=torch.randn(1, 2))).set_by_calls.names == (("", "state"),)


def test_a_state_that_a_call_does_not_read_is_no_input_of_it():
    model = Going()
    model.state = torch.ones(1, 2)
    assert [leaf.name for leaf in trace(model, dict(x=torch.randn(1, 2))).inputs.leaves] == ["x", "model_state"]

    class Beginning(Going):
        def forward(self, x):
            self.state = None
            return super().forward(x)

    model = Beginning()
    given = {State("", "state"): torch.ones(1, 2)}
    traced = trace(model, dict(x=torch.randn(1, 2)), states=given)
    assert [leaf.name for leaf in traced.inputs.leaves] == ["x"] and not traced.states
    assert ("", "state") in traced.set_by_calls.names


def test_a_trace_leaves_what_forward_writes_into_as_it_was():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.count = nn.Linear(2, 2), torch.zeros(())

        def forward(self, x):
            self.count += 1
            return self.layer(x) * self.count

    model = Writing()
    traced = trace(model, dict(x=torch.randn(1, 2)))
    assert model.count == 0 and [*traced.states] == ["model.count"]


class Notes:
    def __init__(self):
        self.loss, self.all, self.table = None, [], {}


NOTED = []


@pytest.mark.parametrize(
    "keep",
    [
        lambda model, given, value: given.append(value),
        lambda model, given, value: NOTED.append(value),
        lambda model, given, value: setattr(model.notes, "loss", value),
        lambda model, given, value: model.notes.all.append(value),
        lambda model, given, value: setattr(type(model), "last", value),
    ],
    ids=["argument", "global", "object", "list_of_an_object", "class"],
)
def test_what_forward_leaves_beside_its_modules_is_told(keep):
    class Keeping(nn.Module):
        last = None

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.notes = nn.Linear(2, 2), Notes()

        def forward(self, x, given):
            self.notes.table.setdefault(x.shape[1], torch.arange(x.shape[1]))  # each call stores the same value
            y = self.layer(x)
            keep(self, given, y.square().mean())
            return y

    model, given = Keeping(), []
    with pytest.warns(
        UserWarning, match=r"forward stores what it computes at \S*test_calls.py:\d+ in an object"
    ) as told:
        trace(model, dict(x=torch.randn(1, 2), given=given))
    assert len(told) == 1
    assert not (given or NOTED or model.notes.loss or model.notes.all or model.last)


def test_an_argument_that_comes_back_among_several_results_stays_itself():
    class Density(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.randn(4, 2))

        def forward(self, x, scale):  # distributions broadcast arguments, but equal shapes need no op
            own, given = (torch.distributions.Normal(of, scale).log_prob(x + 1) for of in (self.mean, x))
            return own + given

    model, inputs = Density(), dict(x=torch.randn(4, 2), scale=torch.rand(4, 2) + 1)
    traced = trace(model, inputs)  # without a warning that forward stores inputs or parameters
    assert not any("broadcast" in str(node.target) for node in traced.graph.nodes)
    assert torch.equal(traced.gm(*inputs.values()), model(**inputs))


class Opaque:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("kind", [Opaque, lambda x: type("Items", (dict,), {})(x=x)])
def test_tensors_in_other_objects_are_refused(kind):
    class Taking(nn.Module):
        def forward(self, batch):
            return batch.x

    class Returning(nn.Module):
        def forward(self, x):
            return kind(x + 1)

    with pytest.raises(InputError, match=r"argument 'batch' has tensors inside a (Opaque|Items)"):
        trace(Taking(), dict(batch=kind(torch.ones(2))))
    with pytest.raises(InputError, match=r"what forward returns has tensors inside a (Opaque|Items)"):
        trace(Returning(), dict(x=torch.ones(2)))


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        x = x + torch.randn(x.shape, generator=self.generator)
        return torch.empty_like(x).uniform_(generator=self.generator) * torch.rand_like(x, generator=None)


def test_generators_are_left_out_of_the_graph_with_a_warning():
    with pytest.warns(UserWarning, match="a torch.Generator, which a planned model does not use") as told:
        traced = trace(Generating(), dict(x=torch.randn(2, 3)))
    assert len(told) == 2
    assert not any(isinstance(a, torch.Generator) for n in traced.graph.nodes for a in (*n.args, *n.kwargs.values()))


@pytest.mark.parametrize(
    ("classes", "mend"),
    [
        (lambda y: -1, "give their number, num_classes=N"),
        (lambda y: max(y.max() + 1, 4), "give 'y' a known example"),
        (lambda y: y.max().item() + 1, "one_hot.. depends on data: give a plain number"),
    ],
)
def test_classes_that_nobody_counts_are_asked_for(classes, mend):
    class Marked(nn.Module):
        def forward(self, y):
            return F.one_hot(y, classes(y)).float()

    with pytest.raises(TraceError, match=mend):
        trace(Marked(), dict(y=torch.arange(4)))


def test_a_known_tensor_may_count_classes():
    class Marked(nn.Module):
        def forward(self, y):
            return F.one_hot(y, torch.tensor(3) + 1).float()

    assert trace(Marked(), dict(y=torch.arange(4))).gm(torch.arange(4)).shape == (4, 4)


@pytest.mark.parametrize("distance", [lambda a, b: (a - b).square().sum(-1), nn.PairwiseDistance()])
def test_distances_that_a_loss_is_given_are_traced(distance):
    class Triplets(nn.Module):
        def forward(self, x):
            return F.triplet_margin_with_distance_loss(x, x.flip(0), x + 1, distance_function=distance)

    x = torch.randn(4, 3)
    assert torch.equal(trace(Triplets(), dict(x=x)).gm(x), Triplets()(x))
