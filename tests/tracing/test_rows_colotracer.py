"""The tracer's rows C: ColoTracer; one acceptance case a row."""

from prelude import *


def test_c01() -> None:
    """rank test (`x.dim()`, `x.ndim`) picks the Python branch from the sample's meta shape"""
    m = mk(lambda self, x: x.sum(-1) if x.dim() == 2 else x.mean())
    t = mt.trace(m, dict(x=R(4, 3)))
    assert names(t) == ["sum"]
    assert names(mt.trace(m, dict(x=R(4)))) == ["mean"]


def test_c02() -> None:
    """extent test (`x.size(i)`, `x.shape[i]`) picks the branch; the other branch leaves no node"""
    m = mk(lambda self, x: x * 2 if x.size(1) > 3 else x - 2)
    assert "mul" in names(mt.trace(m, dict(x=R(1, 4))))
    assert "sub" in names(mt.trace(m, dict(x=R(1, 3))))


def test_c03() -> None:
    """Python loop bounded by a tensor extent is unrolled"""

    def f(self, x):
        for _ in range(x.shape[0]):
            x = x + 1
        return x

    assert names(mt.trace(mk(f), dict(x=R(3, 2)))).count("add") == 3


def test_c04() -> None:
    """`len(x)` and iteration/unpacking of a traced tensor work"""

    def f(self, x):
        a, b = x
        return a * b + len(x)

    m = mk(f)
    t = mt.trace(m, dict(x=R(2, 5)))
    assert same(t, m, R(2, 5))


def test_c05() -> None:
    """size algebra (`x.shape[:-1] + (k,)`, products, floor-division) can be fed back into view/reshape"""

    def f(self, x):
        return x.view(x.shape[:-1] + (2, x.shape[-1] // 2)).sum(-1)

    m = mk(f)
    t = mt.trace(m, dict(x=R(3, 4)))
    assert t.val(t.find_one("sum")).shape == (3, 2) and same(t, m, R(3, 4))


def test_c06() -> None:
    """a size-derived value converts with int()/float() and can index a list"""

    def f(self, x):
        return x * [1.0, 2.0, 4.0][x.shape[0]] / float(x.size(1))

    m = mk(f)
    assert same(mt.trace(m, dict(x=R(2, 5))), m, R(2, 5))


def test_c07() -> None:
    """dtype/device tests are ordinary Python booleans while tracing"""
    m = mk(lambda self, x: x.float() if x.dtype == torch.int64 else x)
    assert names(mt.trace(m, dict(x=torch.arange(3)))) == ["float"]
    assert names(mt.trace(m, dict(x=R(3)))) == []


def test_c08() -> None:
    """`torch.finfo(x.dtype)` / `torch.iinfo` usable on a traced tensor's dtype"""
    m = mk(lambda self, x: x.masked_fill(x < 0, torch.finfo(x.dtype).min))
    t = mt.trace(m, dict(x=R(4)))
    assert same(t, m, R(4))


def test_c09() -> None:
    """`torch.arange` sized by a traced extent becomes a node that depends on the input"""
    m = mk(lambda self, x: x + torch.arange(x.size(0)))
    t = mt.trace(m, dict(x=R(4)))
    assert t.find_one("arange").all_input_nodes and same(t, m, R(4))


def test_c10() -> None:
    """`torch.zeros` / `torch.ones` sized by traced extents (varargs and tuple form)"""
    m = mk(lambda self, x: x + torch.zeros(x.size(0), 3) + torch.ones((x.size(0), 3)))
    t = mt.trace(m, dict(x=R(2, 3)))
    assert t.val(t.find_one("zeros")).shape == (2, 3) and t.find_one("ones").all_input_nodes


def test_c11() -> None:
    """`torch.full` and `torch.full_like`"""
    m = mk(lambda self, x: torch.full((x.size(0),), 2.5) * torch.full_like(x, 3.0))
    t = mt.trace(m, dict(x=R(4)))
    assert t.val(t.find_one("full")).shape == (4,)
    assert same(t, m, R(4))


def test_c12() -> None:
    """`torch.eye` and `torch.empty`"""
    m = mk(lambda self, x: x @ torch.eye(x.size(1)) + torch.empty(x.shape[0], x.size(1)).fill_(1.0))
    t = mt.trace(m, dict(x=R(3, 2)))
    assert t.find_one("eye").all_input_nodes
    assert same(t, m, R(3, 2))


def test_c13() -> None:
    """`torch.tensor` built from traced numbers stays an in-graph value"""
    m = mk(lambda self, x: x / torch.tensor(x.size(-1) ** 0.5))
    t = mt.trace(m, dict(x=R(2, 9)))
    assert "tensor" in names(t)
    assert same(t, m, R(2, 9))


def test_c14() -> None:
    """factory calls with only literal sizes neither fail nor depend on the input"""
    m = mk(lambda self, x: x + torch.ones(3, device="cpu"))
    t = mt.trace(m, dict(x=R(2, 3)))
    assert same(t, m, R(2, 3))
    assert all(not n.all_input_nodes for n in t.find("ones"))


def test_c15() -> None:
    """every patched torch entry is the original object again after tracing, also after an exception"""
    before = [getattr(torch, n) for n in "arange zeros ones full full_like eye empty tensor finfo".split()]
    mt.trace(mk(lambda self, x: x + torch.zeros(x.size(0))), dict(x=R(2)))
    assert before == [getattr(torch, n) for n in "arange zeros ones full full_like eye empty tensor finfo".split()]


def test_c16() -> None:
    """every value node carries the meta value (shape, dtype) of its result"""
    m = mk(lambda self, x: self.l(x).relu().long(), l=nn.Linear(3, 5))
    t = mt.trace(m, dict(x=R(2, 3)))
    assert all(t.val(n) is not None for n in t.graph.nodes if n.op != "output")
    assert t.val(t.find_one("long")).dtype == torch.int64 and t.val(t.find_one("long")).shape == (2, 5)


def test_c17() -> None:
    """multi-output operations keep a tuple of metas; element access is its own node"""
    m = mk(lambda self, x: (lambda a, b: a - b)(*x.chunk(2, 1)))
    t = mt.trace(m, dict(x=R(2, 6)))
    assert [v.shape for v in t.val(t.find_one("chunk"))] == [(2, 3), (2, 3)] and same(t, m, R(2, 6))


def test_c18() -> None:
    """a parameter access is a `get_attr` node (one per parameter) whose meta is still marked a Parameter"""
    m = mk(lambda self, x: x * self.w + self.w, w=nn.Parameter(R(3)))
    t = mt.trace(m, dict(x=R(2, 3)))
    assert t.find_one("w").op == "get_attr" and isinstance(t.val(t.find_one("w")), nn.Parameter)


def test_c19() -> None:
    """registered buffers are `get_attr` nodes too, never copied constants"""
    m = mk(lambda self, x: x + self.b)
    m.register_buffer("b", R(3))
    t = mt.trace(m, dict(x=R(2, 3)))
    assert t.find_one("b").op == "get_attr" and t.gm.b is m.b


def test_c20() -> None:
    """sample (meta) argument whose name is not in `forward`'s signature is rejected before tracing"""
    m = mk(lambda self, x: x)
    with raises((KeyError, ValueError), match="z"):
        mt.trace(m, dict(x=R(2), z=R(2)))


def test_c21() -> None:
    """concrete argument with an unknown name is rejected"""
    m = mk(lambda self, x, k=1: x * k)
    with raises((KeyError, ValueError), match="kk"):
        mt.trace(m, dict(x=R(2)), concrete_args=dict(kk=3))


def test_c22() -> None:
    """samples may be real or meta tensors; a *concrete* tensor must carry data"""
    m = mk(lambda self, x, y: x + y)
    assert names(mt.trace(m, dict(x=meta(2), y=R(2)))) == ["add"]
    with raises((AssertionError, ValueError), match="y"):
        mt.trace(m, dict(x=R(2)), concrete_args=dict(y=meta(2)))


def test_c23() -> None:
    """arguments with defaults that get no sample are fixed to their default and leave no placeholder"""
    m = mk(lambda self, x, scale=3, bias=None: x * scale if bias is None else x * scale + bias)
    t = mt.trace(m, dict(x=R(2)))
    assert phs(t) == ["x"]
    assert names(t) == ["mul"] and torch.equal(t.gm(torch.ones(2)), torch.full((2,), 3.0))


def test_c24() -> None:
    """concrete arguments choose branches, vanish from the graph, and leave no run-time assertion nodes"""
    m = mk(lambda self, x, train: F.dropout(x, 0.5) if train else x + 0)
    t = mt.trace(m, dict(x=R(2)), concrete_args=dict(train=False))
    assert phs(t) == ["x"] and names(t) == ["add"]


def test_c25() -> None:
    """dictionaries passed by the caller are not modified"""
    c, s = {}, dict(x=R(2))
    mt.trace(mk(lambda self, x, k=2: x * k), s, concrete_args=c)
    assert c == {} and set(s) == {"x"} and s["x"].device.type == "cpu"


def test_c26() -> None:
    """without samples the tracer degrades to data-free symbolic tracing"""
    m = mk(lambda self, x, y: torch.relu(x) @ y)
    t = mt.trace(m)
    assert phs(t) == ["x", "y"] and names(t) == ["relu", "matmul"]


def test_c27() -> None:
    """placeholders keep no default value; return annotations do not break code generation"""

    def f(self, x: "torch.Tensor" = None) -> "tuple[torch.Tensor, int]":
        return x + 1, 2

    t = mt.trace(mk(f), dict(x=R(2)))
    assert next(iter(t.graph.nodes)).args == () and t.gm(torch.zeros(2))[1] == 2


def test_c28() -> None:
    """checkpointed calls are numbered 0,1,2... in call order on every node they contain"""
    m = mk(lambda self, x: checkpoint(self.b, checkpoint(self.a, x)), a=MLP(4), b=MLP(4))
    t = mt.trace(m, dict(x=R(2, 4)))
    assert {t.region(n) for n in t.under("a")} == {(0,)} and {t.region(n) for n in t.under("b")} == {(1,)}


def test_c29() -> None:
    """nodes outside checkpoints are untagged; switching the feature off tags nothing"""
    m = mk(lambda self, x: self.b(checkpoint(self.a, x)), a=MLP(4), b=MLP(4))
    assert all(t.region(n) == () for t in [mt.trace(m, dict(x=R(2, 4)))] for n in t.under("b"))
    t = mt.trace(m, dict(x=R(2, 4)), trace_act_ckpt=False)
    assert all(t.region(n) == () for n in t.graph.nodes)


def test_c30() -> None:
    """nested checkpoints give a path of region ids; nodes after the inner call are back in the outer one"""
    inner = lambda x: torch.cos(x)
    outer = lambda x: torch.exp(checkpoint(inner, torch.sin(x)))
    t = mt.trace(mk(lambda self, x: checkpoint(outer, x)), dict(x=R(2)))
    a, b, c = (t.region(t.find_one(n)) for n in ("sin", "cos", "exp"))
    assert a == c and len(b) == 2 and b[0] == a[0]


def test_c31() -> None:
    """reentrant and non-reentrant checkpoint, and `from ... import checkpoint` aliases, are all seen"""
    for re in (True, False):
        t = mt.trace(mk(lambda self, x: checkpoint(torch.sin, x, use_reentrant=re)), dict(x=R(2).requires_grad_()))
        assert t.region(t.find_one("sin")) == (0,)


def test_c32() -> None:
    """checkpoint machinery is restored when the body raises"""
    import torch.utils.checkpoint as cp

    def boom(x):
        raise ZeroDivisionError

    with raises(ZeroDivisionError):
        mt.trace(mk(lambda self, x: checkpoint(boom, x)), dict(x=R(2)))
    y = R(2).requires_grad_()
    checkpoint(torch.sin, y, use_reentrant=True).sum().backward()
    assert y.grad is not None


def test_c33() -> None:
    """the traced graph of a checkpointed model computes the same values and gradients"""
    m = mk(lambda self, x: checkpoint(self.a, x, use_reentrant=False).sum(), a=MLP(4))
    t = mt.trace(m, dict(x=R(2, 4)))
    x = R(2, 4)
    g1 = torch.autograd.grad(m(x), list(m.parameters()))
    g2 = torch.autograd.grad(t.gm(x), list(t.gm.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(g1, g2))


def test_c34() -> None:
    """regions can be re-emitted: the produced module wraps each region in a real checkpoint call"""
    m = mk(lambda self, x: checkpoint(self.a, x).relu(), a=MLP(4))
    t = mt.trace(m, dict(x=R(2, 4)))
    g = mt.passes.emit_checkpoints(t)
    with count_calls(torch.utils.checkpoint, "checkpoint") as c:
        assert same(g, m, R(2, 4))
    assert c.n == 1


def test_c35() -> None:
    """a user module type can be declared a leaf together with a rule that computes its meta output"""

    class Fused(nn.Module):
        def forward(self, x):
            raise RuntimeError("needs GPU")

    with mt.leaf_rule(Fused, lambda mod, x: x.new_empty(x.shape[0], 7)):
        t = mt.trace(mk(lambda self, x: self.f(x) + 1, f=Fused()), dict(x=R(2, 3)))
    assert t.find_one("f").op == "call_module" and t.val(t.find_one("add")).shape == (2, 7)


def test_c36() -> None:
    """a torch.nn type can be forced to be traced into (non-leaf)"""
    t = mt.trace(mk(lambda self, x: self.l(x), l=nn.Linear(2, 2)), dict(x=R(1, 2)), non_leaf_types=(nn.Linear,))
    assert "linear" in names(t) and {"l.weight", "l.bias"} <= set(names(t))


def test_c37() -> None:
    """a function can be given a replacement used only while tracing (decomposition or meta rule)"""

    def slow(x):
        return torch.from_numpy(x.numpy() * 2)

    with mt.override(slow, lambda x: x * 2):
        t = mt.trace(mk(lambda self, x: slow(x) + 1), dict(x=R(2)))
    assert names(t) == ["mul", "add"]


def test_c38() -> None:
    """bias split: Linear becomes weight-only linear followed by an addition"""
    m = mk(lambda self, x: self.l(x), l=nn.Linear(3, 6))
    t = mt.trace(m, dict(x=R(2, 3)), bias_addition_split=True)
    assert [n for n in names(t) if "." not in n] == ["linear", "add"] and same(t, m, R(2, 3))


def test_c39() -> None:
    """bias split: convolution bias is reshaped to broadcast over the spatial axes"""
    m = mk(lambda self, x: self.c(x), c=nn.Conv2d(3, 6, 2, stride=2, groups=3))
    t = mt.trace(m, dict(x=R(2, 3, 8, 8)), bias_addition_split=True)
    assert "add" in names(t) and same(t, m, R(2, 3, 8, 8))


def test_c40() -> None:
    """bias split: addmm/addbmm with alpha and beta"""
    m = mk(
        lambda self, x: torch.addmm(self.b, x, self.w, alpha=2, beta=3), b=nn.Parameter(R(4)), w=nn.Parameter(R(3, 4))
    )
    t = mt.trace(m, dict(x=R(2, 3)), bias_addition_split=True)
    assert "addmm" not in names(t) and same(t, m, R(2, 3))


def test_integers_of_a_split_product():
    """they take the whole part of alpha and beta"""
    ids = torch.arange(18).view(2, 3, 3)
    m = mk(lambda self, x: torch.baddbmm(x, x, x, alpha=1.5, beta=2.5))
    assert same(mt.trace(m, dict(x=ids), bias_addition_split=True), m, ids)


def test_c41() -> None:
    """bias split leaves bias-free layers and default traces alone"""
    m = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert "add" not in names(mt.trace(m, dict(input=R(1, 2)), bias_addition_split=True))
    assert names(mt.trace(nn.Sequential(nn.Linear(2, 2)), dict(input=R(1, 2)))) == ["0"]


def test_c42() -> None:
    """failure to compute a meta value is reported with the operation kind and target"""

    class NoMeta(nn.Module):
        def forward(self, x):
            return torch.ops.demo.nometa(x)

    with raises(RuntimeError, match="nometa"):
        mt.trace(NoMeta(), dict(x=R(2)))


def test_c43() -> None:
    """a branch on tensor *data* is an error (or leaf fallback), never a silent guess"""
    with raises(mt.TraceError):
        mt.trace(mk(lambda self, x: x if x.sum() > 0 else -x), dict(x=R(3)))


def test_c44() -> None:
    """operators and reflected operators are recorded with the right operand order"""
    m = mk(lambda self, x: 2 - x / 3 + 2**x - (-x) % 5)
    assert same(mt.trace(m, dict(x=R(3))), m, R(3))


def test_c45() -> None:
    """item assignment is recorded and later reads see it"""

    def f(self, x):
        y = x * 1
        y[:, 0] = 5
        return y.sum(1)

    m = mk(f)
    t = mt.trace(m, dict(x=R(2, 3)))
    assert "setitem" in names(t) and same(t, m, R(2, 3))


def test_c46() -> None:
    """`isinstance(x, torch.Tensor)`, `torch.is_tensor`, `x is None`, f-strings behave as in eager mode"""

    def f(self, x, y=None):
        assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and f"{x.shape}"
        return x if y is None else x + y

    assert names(mt.trace(mk(f), dict(x=R(2), y=R(2)))) == ["add"]


def test_c47() -> None:
    """reading attributes leaves no dead nodes in the graph"""
    m = mk(lambda self, x: (x.shape, x.device, x.dtype, x.requires_grad, x + 1)[-1])
    assert names(mt.trace(m, dict(x=R(2)))) == ["add"]


def test_c48() -> None:
    """one tracer object can trace several models; results are independent"""
    T1 = mt.MetaTracer()
    a = T1.trace(mk(lambda self, x: x.sin()), dict(x=R(2)))
    b = T1.trace(mk(lambda self, y: y.cos()), dict(y=R(2)))
    assert names(a) == ["sin"] and names(b) == ["cos"]


def test_c49() -> None:
    """the model is untouched: parameter objects, devices, hooks, training flag, attributes"""
    m = MLP(4)
    p = dict(m.named_parameters())
    d = {k: sorted(v.__dict__) for k, v in m.named_modules()}
    mt.trace(m, dict(x=R(2, 4)))
    assert all(p[k] is v for k, v in m.named_parameters()) and d == {
        k: sorted(v.__dict__) for k, v in m.named_modules()
    }


def test_c50() -> None:
    """device arguments survive: no "meta" device constant is baked into the graph"""
    m = mk(lambda self, x: x + torch.zeros(2, device=x.device) + x.new_zeros(2))
    t = mt.trace(m, dict(x=meta(2)))
    assert "meta" not in t.gm.code
    assert mt.trace(nn.LSTM(3, 4), dict(input=R(5, 2, 3))).gm.code.count("meta") == 0


def test_c51() -> None:
    """a model whose parameters live on the meta device (no memory) can be traced"""
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(10000, 10000), nn.ReLU())
    t = mt.trace(m, dict(input=R(2, 10000)))
    assert t.val(t.find_one("1")).shape == (2, 10000)
