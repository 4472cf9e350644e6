"""The tracer's rows R: RobustTracer, GraphCollection and recursive_trace; one acceptance case a row."""

from prelude import *


def test_r01() -> None:
    """tensors given as concrete arguments become inputs (placeholders), they are not baked in"""
    m = mk(lambda self, x: self.l(x), l=nn.Linear(2, 2))
    g = mt.RobustTracer().trace(m, {"x": R(1, 2)})
    assert [n.op for n in g.nodes] == ["placeholder", "call_module", "output"]


def test_r02() -> None:
    """non-tensor concrete arguments stay Python values and select the branch"""
    m = mk(lambda self, x, f: x + 1 if f else x * 2)
    g = mt.RobustTracer().trace(m, {"x": R(2), "f": True})
    assert "add" in gnames(g) and "mul" not in gnames(g)


def test_r03() -> None:
    """defaults that are not tensors are filled in automatically"""
    m = mk(lambda self, x, up=False: self.c(x + 1) if up else self.c(x), c=nn.Linear(2, 2))
    g = mt.RobustTracer().trace(m, {"x": R(1, 2)})
    assert gnames(g) == ["c"]


def test_r04() -> None:
    """a parameter whose default *is* a tensor remains an input"""

    def f(self, x, w=torch.ones(2)):
        return x * w

    g = mt.RobustTracer().trace(mk(f), {"x": R(2)})
    assert len([n for n in g.nodes if n.op == "placeholder"]) == 2


def test_r05() -> None:
    """a module using an untraceable operation becomes one `call_module` node; tracing completes"""
    bad = mk(lambda self, x: torch.tensor(x.tolist()))
    m = nn.Sequential(nn.Linear(2, 2), bad, nn.ReLU())
    g = mt.RobustTracer().trace(m, {"input": R(1, 2)})
    assert gnames(g) == ["0", "1", "2"]


def test_r06() -> None:
    """only the smallest enclosing module becomes opaque, its ancestors stay traced"""
    bad = mk(lambda self, x: x if x.sum() > 0 else -x)
    mid = nn.Sequential(nn.Linear(2, 2), bad)
    m = nn.Sequential(mid, nn.ReLU())
    t = mt.RobustTracer()
    g = t.trace(m, {"input": R(1, 2)})
    assert gnames(g) == ["0.0", "0.1", "1"] and not t.is_failed(mid)


def test_r07() -> None:
    """nothing recorded during the abandoned attempt remains in the final graph"""
    bad = mk(lambda self, x: (x * 3).exp() if (x + 7).sum() > 0 else x)
    m = nn.Sequential(bad)
    g = mt.RobustTracer().trace(m, {"input": R(2)})
    assert len(g.nodes) == 3


def test_r08() -> None:
    """several independent failing modules are all isolated in one call"""
    bads = [mk(lambda self, x: x if x.max() > 0 else x + 1) for _ in range(3)]
    m = nn.Sequential(bads[0], nn.ReLU(), bads[1], bads[2])
    t = mt.RobustTracer()
    g = t.trace(m, {"input": R(2)})
    assert gnames(g) == ["0", "1", "2", "3"] and all(map(t.is_failed, bads))


def test_r09() -> None:
    """if the failing code is in the parent itself, the parent becomes opaque and its children disappear from that graph"""
    par = mk(lambda self, x: self.l(x) if x.sum() > 0 else x, l=nn.Linear(2, 2))
    m = nn.Sequential(par)
    t = mt.RobustTracer()
    g = t.trace(m, {"input": R(1, 2)})
    assert gnames(g) == ["0"] and not t.is_failed(par.l)


def test_r10() -> None:
    """failures are reported as "ExceptionType: message" """
    bad = mk(lambda self, x: x if x.sum() > 0 else -x)
    t = mt.RobustTracer()
    t.trace(nn.Sequential(bad), {"input": R(2)})
    assert t.is_failed(bad) and re.match(r"\w+: .+", t.failure_msg(bad))


def test_r11() -> None:
    """modules without failure report `None`"""
    m = nn.Sequential(nn.ReLU())
    t = mt.RobustTracer()
    t.trace(m, {"input": R(2)})
    assert t.failure_msg(m) is None and t.failure_msg(m[0]) is None and not t.is_failed(m[0])


def test_r12() -> None:
    """`is_unvisited` is true until a module was called during tracing"""
    m = mk(lambda self, x: self.a(x), a=nn.ReLU(), b=nn.ReLU())
    t = mt.RobustTracer()
    assert t.is_unvisited(m) and t.is_unvisited(m.a)
    t.trace(m, {"x": R(2)})
    assert not t.is_unvisited(m) and not t.is_unvisited(m.a) and t.is_unvisited(m.b)


def test_r13() -> None:
    """if the root's own forward cannot be traced, no exception escapes; the root is marked failed"""
    m = mk(lambda self, x: self.l(x) if x.sum() > 0 else x, l=nn.Linear(2, 2))
    t = mt.RobustTracer()
    g = t.trace(m, {"x": R(1, 2)})
    assert t.is_failed(m) and isinstance(g, fx.Graph) and "l" not in gnames(g)


def test_r14() -> None:
    """unexpected exceptions (not tracing limits) are also contained and attributed"""

    def f(self, x):
        raise ValueError("boom")

    m = nn.Sequential(mk(f))
    t = mt.RobustTracer()
    t.trace(m, {"input": R(2)})
    assert "boom" in (t.failure_msg(m) or t.failure_msg(m[0]))


def test_r15() -> None:
    """`register_leaf` makes exactly that type opaque (subclasses are not matched)"""

    class A(nn.Module):
        def forward(self, x):
            return x + 1

    class B(A):
        pass

    with leaf_type(A):
        g = mt.RobustTracer().trace(nn.Sequential(A(), B()), {"input": R(2)})
    assert gnames(g) == ["0", "add"]


def test_r16() -> None:
    """`unregister_leaf` restores normal tracing; unregistering an unknown type is an error"""

    class A(nn.Module):
        def forward(self, x):
            return x + 1

    mt.RobustTracer.register_leaf(A)
    mt.RobustTracer.unregister_leaf(A)
    assert gnames(mt.RobustTracer().trace(nn.Sequential(A()), {"input": R(2)})) == ["add"]
    with raises(KeyError):
        mt.RobustTracer.unregister_leaf(A)


def test_r17() -> None:
    """`is_registered_leaf` accepts a type or an instance"""

    class A(nn.Module):
        pass

    with leaf_type(A):
        assert mt.RobustTracer.is_registered_leaf(A) and mt.RobustTracer.is_registered_leaf(A())
    assert not mt.RobustTracer.is_registered_leaf(A)


def test_r18() -> None:
    """a root that is itself a leaf is not traced into: inputs, one call, output"""
    g = mt.RobustTracer().trace(nn.Linear(2, 3), {"input": R(1, 2)})
    assert [n.op for n in g.nodes] == ["placeholder", "call_module", "output"]


def test_r19() -> None:
    """roots that cannot be called (containers) are reported failed instead of crashing"""
    ml = nn.ModuleList([nn.Linear(2, 2)])
    t = mt.RobustTracer()
    t.trace(ml)
    assert t.is_failed(ml)


def test_r20() -> None:
    """`is_leaf_module`: torch.nn layers yes, `nn.Sequential` and user modules no, failed and registered ones yes"""
    t = mt.RobustTracer()
    assert (
        t.is_leaf_module(nn.Linear(1, 1), "l")
        and not t.is_leaf_module(nn.Sequential(), "s")
        and not t.is_leaf_module(MLP(2), "m")
    )


def test_r21() -> None:
    """`recursive_trace` returns graphs for the root and for the children of every failed module"""
    par = mk(lambda self, x: self.l(x) if x.sum() > 0 else self.k(x), l=nn.Linear(2, 2), k=MLP(2))
    m = nn.Sequential(par, nn.ReLU())
    gc = mt.recursive_trace(m, {"input": R(1, 2)})
    assert set(gc) == {m, par.l, par.k} and gc.is_failed(par)


def test_r22() -> None:
    """recursion continues when a child of a failed module fails as well"""
    inner = mk(lambda self, x: self.z(x) if x.sum() > 0 else x, z=nn.Linear(2, 2))
    outer = mk(lambda self, x: self.i(x) if x.max() > 0 else x, i=inner)
    m = nn.Sequential(outer)
    gc = mt.recursive_trace(m, {"input": R(1, 2)})
    assert {m, inner, inner.z} <= set(gc) and gc.is_failed(inner)


def test_r23() -> None:
    """concrete arguments apply to the root only, never to recursed submodules"""
    kid = mk(lambda self, x, f=False: x + 1 if f else x * 2)
    m = mk(lambda self, x, f=False: self.k(x) if x.sum() > 0 else x, k=kid)
    gc = mt.recursive_trace(m, {"x": R(2), "f": True})
    assert gnames(gc[kid])[-1] == "mul"


def test_r24() -> None:
    """a module shared by two failed parents gets one graph"""
    s = nn.Linear(2, 2)
    P = lambda: mk(lambda self, x: self.s(x) if x.sum() > 0 else x, s=s)
    m = nn.Sequential(P(), P())
    gc = mt.recursive_trace(m, {"input": R(1, 2)})
    assert list(gc).count(s) == 1


def test_r25() -> None:
    """the collection iterates over traced modules, is indexable, and raises KeyError otherwise"""
    m = nn.Sequential(nn.ReLU())
    gc = mt.recursive_trace(m, {"input": R(1)})
    assert list(gc) == [m] and isinstance(gc[m], fx.Graph)
    with raises(KeyError):
        gc[m[0]]


def test_r26() -> None:
    """running a collection again forgets the previous model"""
    a, b = nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())
    gc = mt.GraphCollection()
    gc.recursive_trace(a, {"input": R(1)})
    gc.recursive_trace(b, {"input": R(1)})
    assert list(gc) == [b] and gc.is_unvisited(a)


def test_r27() -> None:
    """a failing instance called several times is opaque at every call"""
    bad = mk(lambda self, x: x if x.sum() > 0 else -x)
    m = mk(lambda self, x: self.b(self.b(x) + 1), b=bad)
    assert gnames(mt.RobustTracer().trace(m, {"x": R(2)})) == ["b", "add", "b"]


def test_r28() -> None:
    """outputs of an opaque module are usable downstream (tuple, dict, attribute access)"""
    bad = mk(lambda self, x: (x if x.sum() > 0 else -x, x.size(0)))
    m = mk(lambda self, x: (lambda a, n: a.view(n, -1))(*self.b(x)), b=bad)
    t = mt.trace(m, dict(x=R(2, 3)), unsupported="leaf")
    assert same(t, m, R(2, 3).abs())


def test_r29() -> None:
    """a partially opaque graph is executable and equals the model, and meta values exist after the opaque node"""
    bad = mk(lambda self, x: x.sort()[0] if x.sum() > 0 else x)
    m = nn.Sequential(nn.Linear(2, 4), bad, nn.Linear(4, 1))
    t = mt.trace(m, dict(input=R(3, 2)), unsupported="leaf")
    assert same(t, m, R(3, 2)) and t.val(t.find_one("2")).shape == (3, 1)


def test_r30() -> None:
    """the model is unchanged after failures (forward methods, buffers, random state of parameters)"""
    bad = mk(lambda self, x: [self.n.add_(1), x if x.sum() > 0 else -x][1])
    bad.register_buffer("n", torch.zeros(1))
    m = nn.Sequential(bad)
    mt.RobustTracer().trace(m, {"input": R(2)})
    assert bad.n.item() == 0 and "forward" not in vars(bad)


def test_r31() -> None:
    """two tracer objects do not share failure state, but share the class-level leaf registry"""
    bad = mk(lambda self, x: x if x.sum() > 0 else -x)
    t1, t2 = mt.RobustTracer(), mt.RobustTracer()
    t1.trace(nn.Sequential(bad), {"input": R(2)})
    assert t1.is_failed(bad) and not t2.is_failed(bad)


def test_r32() -> None:
    """code that merely needs concrete sizes, iteration or isinstance does not cause an opaque module"""
    m = nn.Sequential(mk(lambda self, x: sum(r for r in x) * len(x) if isinstance(x, torch.Tensor) else x))
    t = mt.RobustTracer()
    t.trace(m, {"input": R(3, 2)})
    assert not t.is_failed(m[0])
