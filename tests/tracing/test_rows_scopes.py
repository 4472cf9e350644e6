"""The tracer's rows D: the scope and Hugging Face tracers; one acceptance case a row."""

from prelude import *


def test_d01() -> None:
    """a Scope stores module path and module type"""
    s = mt.Scope("enc.0", nn.Linear)
    assert (s.module_path, s.module_type) == ("enc.0", nn.Linear)


def test_d02() -> None:
    """the scope context manager switches on entry and restores on exit, including on exceptions"""
    s = mt.Scope("", None)
    with mt.ScopeContextManager(s, nn.ReLU(), "act"):
        assert s.module_type is nn.ReLU and "act" in s.module_path
    assert (s.module_path, s.module_type) == ("", None)


def test_d03() -> None:
    """a node created inside a submodule (also a `call_method`) carries that submodule's scope"""
    sub = mk(lambda self, x: x.transpose(0, 1))
    m = mk(lambda self, x: self.s(x) + 1, s=sub)
    t = mt.trace(m, dict(x=R(2, 3)))
    assert t.scope(t.find_one("transpose")) == mt.Scope("s", type(sub))


def test_d04() -> None:
    """nodes of the root's own forward have the root scope (empty path, type None)"""
    m = mk(lambda self, x: self.a(x) * 2, a=nn.ReLU())
    t = mt.trace(m, dict(x=R(2)))
    assert t.scope(t.find_one("mul")) == mt.Scope("", None)


def test_d05() -> None:
    """nested calls: the innermost module wins and its full qualified path is known"""
    m = nn.Sequential(nn.Sequential(mk(lambda self, x: x.sin())))
    t = mt.trace(m, dict(input=R(2)))
    assert t.scope(t.find_one("sin")).module_path == "0.0" and t.scope_stack(t.find_one("sin")) == ["", "0", "0.0"]


def test_d06() -> None:
    """a leaf's `call_module` node is attributed to the leaf itself"""
    m = mk(lambda self, x: self.l(x), l=nn.Linear(2, 2))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert t.scope(t.find_one("l")) == mt.Scope("l", nn.Linear)


def test_d07() -> None:
    """every node (placeholder, get_attr, output included) has an entry in the name-to-scope map"""
    m = mk(lambda self, x: x * self.w, w=nn.Parameter(R(2)))
    t = mt.trace(m, dict(x=R(2)))
    assert set(t.scopes) == {n.name for n in t.graph.nodes}


def test_d08() -> None:
    """siblings do not inherit each other's scope; repeated calls of a module share one path"""
    m = mk(lambda self, x: self.b(self.a(x)) - self.a(x), a=mk(lambda self, x: x.sin()), b=mk(lambda self, x: x.cos()))
    t = mt.trace(m, dict(x=R(2)))
    assert (
        [t.scope(n).module_path for n in t.find("sin")] == ["a", "a"]
        and t.scope(t.find_one("cos")).module_path == "b"
        and t.scope(t.find_one("sub")).module_path == ""
    )


def test_d09() -> None:
    """flat tracing: with the quantisation leaf policy even torch.nn layers are expanded to functions and parameters"""
    t = mt.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), dict(input=R(1, 2)), leaf_policy="flat")
    assert not [n for n in t.graph.nodes if n.op == "call_module"] and "linear" in names(t)


def test_d10() -> None:
    """flat tracing keeps only the declared marker types as leaves (isinstance match)"""

    class Cast(nn.Module):
        forward = lambda self, x: x

    class Cast8(Cast):
        pass

    t = mt.trace(nn.Sequential(Cast8(), nn.ReLU()), dict(input=R(1)), leaf_policy="flat", leaf_types=(Cast,))
    assert t.find_one("0").op == "call_module" and "1" not in names(t)


def test_d11() -> None:
    """layer policy: torch.nn modules are leaves, `nn.Sequential` is not"""
    t = mt.trace(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.GELU()), dict(input=R(1, 2)), leaf_policy="layers")
    assert names(t) == ["0.0", "1"]


def test_d12() -> None:
    """layer policy: transformers activations and Conv1D are leaves"""
    from transformers.activations import ACT2FN
    from transformers.pytorch_utils import Conv1D

    t = mt.trace(nn.Sequential(Conv1D(3, 2), ACT2FN["gelu_new"]), dict(input=R(1, 2)), leaf_policy="layers")
    assert names(t) == ["0", "1"]


def test_d13() -> None:
    """further module types can be registered as leaves by dotted name (norms, rotary embeddings)"""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    t = mt.trace(
        nn.Sequential(LlamaRMSNorm(4)),
        dict(input=R(1, 4)),
        leaf_types=("transformers.models.llama.modeling_llama.LlamaRMSNorm",),
    )
    assert names(t) == ["0"]


def test_d14() -> None:
    """a module may veto being a leaf through a compound flag"""

    class Q(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.is_compound = c

        def forward(self, x):
            return x * 2

    t = mt.trace(
        nn.Sequential(Q(False), Q(True)),
        dict(input=R(1)),
        module_leaves=lambda mod, name: isinstance(mod, Q) and not mod.is_compound,
    )
    assert names(t) == ["0", "mul"]


def test_d15() -> None:
    """chosen functions are recorded as one opaque node instead of being traced through"""

    def rope(q, k, c):
        return q * c, k * c

    rope_ref = rope
    t = mt.trace(mk(lambda self, x: sum(rope(x, x, x.cos()))), dict(x=R(2)), autowrap_functions=(rope,))
    assert "rope" in names(t) and names(t).count("mul") == 0


def test_d16() -> None:
    """`math` functions of traced sizes do not abort the trace"""
    m = mk(lambda self, x: x / math.sqrt(x.size(-1)))
    assert same(mt.trace(m, dict(x=R(2, 9))), m, R(2, 9))


def test_d17() -> None:
    """`symbolic_trace` returns a GraphModule *and* the tracer used"""
    gm, tr = mt.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert isinstance(gm, fx.GraphModule) and isinstance(tr, fx.Tracer) and tr.root is not None


def test_d18() -> None:
    """plain functions can be traced; the module class takes the root's name"""

    def double(x):
        return x * 2

    gm, _ = mt.symbolic_trace(double)
    assert gm(3) == 6 and type(gm).__name__ == "double"


def test_d19() -> None:
    """concrete_args specialises a control-flow flag; later values of it cannot change the graph"""

    def f(a, b):
        return a if b else a * 2

    gm, _ = mt.symbolic_trace(f, concrete_args={"b": False})
    assert gm(3, False) == 6


def test_d20() -> None:
    """nested inputs can be declared with placeholder leaves (pytree flattening)"""
    f = lambda x: sum(x.values())
    f.__name__ = "f"
    gm, _ = mt.symbolic_trace(f, concrete_args={"x": {"a": fx.PH, "b": fx.PH}})
    assert gm({"a": 1, "b": 2}) == 3


def test_d21() -> None:
    """tracing a transformers model returns a runnable graph and the tracer, inputs limited to the chosen names"""
    m = tiny_llama()
    gm, tr = mt.hf_symbolic_trace(m, input_names=["input_ids"], dummy_inputs=dict(input_ids=IDS))
    assert [n.name for n in gm.graph.nodes if n.op == "placeholder"] == ["input_ids"] and tr is not None


def test_d22() -> None:
    """without input names the model's own `dummy_inputs` keys are used"""
    m = tiny_llama()
    gm, _ = mt.hf_symbolic_trace(m)
    assert {n.name for n in gm.graph.nodes if n.op == "placeholder"} == set(m.dummy_inputs)


def test_d23() -> None:
    """every other forward parameter is fixed to its default; an unknown input name is a ValueError"""
    m = mk(lambda self, a, b=None, c=2: a * c if b is None else b)
    gm, _ = mt.hf_symbolic_trace(m, ["a"], dummy_inputs=dict(a=R(2)))
    assert gnames(gm.graph) == ["mul"]
    with raises(ValueError, match="nope"):
        mt.hf_symbolic_trace(m, ["nope"], dummy_inputs={})


def test_d24() -> None:
    """user concrete arguments win over defaults and merge with them"""
    m = mk(lambda self, a, k=1, j=1: a * k + j)
    gm, _ = mt.hf_symbolic_trace(m, ["a"], {"k": 5}, dummy_inputs=dict(a=R(1)))
    assert gm(torch.ones(1)).item() == 6


def test_d25() -> None:
    """`dummy_inputs=None` is accepted (the reference crashes on it); required parameters without sample default to None"""
    m = mk(lambda self, a, b: a if b is None else a + b)
    gm, _ = mt.hf_symbolic_trace(m, ["a"], dummy_inputs=None)
    assert gnames(gm.graph) == []


def test_d26() -> None:
    """models without `config` are accepted and not left with a new attribute"""
    m = MLP(2)
    gm, _ = mt.hf_symbolic_trace(m, ["x"], dummy_inputs=dict(x=R(1, 2)))
    assert not hasattr(m, "config")


def test_d27() -> None:
    """a wrapped forward in the accelerate style is bypassed during tracing"""
    m = MLP(2)
    m._old_forward = m.forward
    m.forward = lambda x: (_ for _ in ()).throw(RuntimeError("hooked"))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert names(t) == ["f1", "act", "f2"]


def test_d28() -> None:
    """the wrapped forward is back afterwards, for the root and all submodules, with nothing else left behind"""
    m = MLP(2)
    w = lambda x: x
    m._old_forward = m.forward
    m.forward = w
    before = set(vars(m))
    with mt.disable_hooked_forward(m):
        assert m.forward is not w
    assert m.forward is w and set(vars(m)) == before


def test_d29() -> None:
    """restoration also happens when the body raises"""
    m = MLP(2)
    w = lambda x: x
    m._old_forward = m.forward
    m.forward = w
    with raises(KeyError):
        with mt.disable_hooked_forward(m):
            raise KeyError
    assert m.forward is w


def test_d30() -> None:
    """models without wrapped forwards are untouched"""
    m = MLP(2)
    before = {k: dict(vars(v)) for k, v in m.named_modules()}
    with mt.disable_hooked_forward(m):
        pass
    assert before == {k: dict(vars(v)) for k, v in m.named_modules()}


def test_d31() -> None:
    """labels produce a loss value in the graph output"""
    m = tiny_llama()
    gm, _ = mt.hf_symbolic_trace(
        m, ["input_ids", "labels"], dict(use_cache=False), dummy_inputs=dict(input_ids=IDS, labels=IDS)
    )
    assert torch.allclose(gm(input_ids=IDS, labels=IDS)["loss"], m(input_ids=IDS, labels=IDS).loss, atol=1e-5)


def test_d32() -> None:
    """attention-mask preparation (data-dependent shortcuts in the library) does not stop the trace"""
    m = tiny_gpt2()
    d = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    t = mt.trace(m, d, concrete_args=dict(use_cache=False))
    assert torch.allclose(t.gm(**d)["logits"], m(**d).logits, atol=1e-5)


def test_d33() -> None:
    """a user tracer class can be supplied and is the one returned"""

    class My(mt.HFTracer):
        pass

    _, tr = mt.hf_symbolic_trace(tiny_bert(), ["input_ids"], tracer_cls=My, dummy_inputs=dict(input_ids=IDS))
    assert type(tr) is My


def test_d34() -> None:
    """a key/value cache in the output is returned as tensors (or as the cache class), never as dead text in generated code"""
    m = tiny_llama()
    t = mt.trace(m, dict(input_ids=IDS), concrete_args=dict(use_cache=True))
    out = t.gm(IDS)
    assert len([v for v in leaves(out) if isinstance(v, torch.Tensor)]) == 1 + 2 * m.config.num_hidden_layers


def test_d35() -> None:
    """boolean keyword inputs are concrete while tensors next to them are traced"""
    m = mk(lambda self, x, flip=False: x.flip(0) if flip else x)
    gm, _ = mt.hf_symbolic_trace(m, ["x"], dict(flip=True), dummy_inputs=dict(x=R(2)))
    assert gnames(gm.graph) == ["flip"]


def test_d36() -> None:
    """scope information exists for HF graphs and can be used to group nodes by layer"""
    m = tiny_llama()
    t = mt.trace(m, dict(input_ids=IDS), concrete_args=dict(use_cache=False))
    paths = {t.scope(n).module_path for n in t.graph.nodes}
    assert {f"model.layers.{i}.self_attn" for i in range(m.config.num_hidden_layers)} <= paths
