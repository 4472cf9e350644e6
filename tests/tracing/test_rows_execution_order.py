"""The tracer's rows F: the execution-order recorder; one acceptance case a row."""

from prelude import *


def test_f01() -> None:
    """the root module is the first entry of the module order"""
    m = MLP(4)
    t = mt.trace(m, dict(x=R(2, 4)))
    assert t.order.modules[0] is m


def test_f02() -> None:
    """nested modules are recorded in pre-order (parent at entry, then its children)"""
    m = mk(lambda self, x: self.o(self.b(x)), b=MLP(4), o=nn.Linear(4, 1))
    t = mt.trace(m, dict(x=R(2, 4)))
    assert t.order.modules == [m, m.b, m.b.f1, m.b.act, m.b.f2, m.o]


def test_f03() -> None:
    """calling a module twice gives two entries"""
    m = mk(lambda self, x: self.l(self.l(x)), l=nn.Linear(2, 2))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert t.order.modules == [m, m.l, m.l]


def test_f04() -> None:
    """modules without parameters take part in the module order"""
    m = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Tanh())
    t = mt.trace(m, dict(input=R(1, 2)))
    assert t.order.modules == [m, m[0], m[1], m[2]]


def test_f05() -> None:
    """modules and parameters that are never executed do not appear"""
    m = mk(lambda self, x: self.a(x), a=nn.Linear(2, 2), dead=nn.Linear(2, 2), w=nn.Parameter(R(1)))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert m.dead not in t.order.modules and not any(p is m.w for p in t.order.params)


def test_f06() -> None:
    """parameters are ordered by first use, not by registration"""
    m = mk(lambda self, x: x * self.b + self.a, a=nn.Parameter(R(2)), b=nn.Parameter(R(2)))
    t = mt.trace(m, dict(x=R(2)))
    assert ids(t.order.params) == ids([m.b, m.a])


def test_f07() -> None:
    """each parameter appears once even if used repeatedly"""
    m = mk(lambda self, x: (x @ self.w) @ self.w, w=nn.Parameter(R(2, 2)))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert len(t.order.params) == 1


def test_f08() -> None:
    """direct use of a parameter in an op gives a usage group owned by the module whose forward runs"""
    m = mk(lambda self, x: torch.addmm(self.b, x, self.w), b=nn.Parameter(R(3)), w=nn.Parameter(R(2, 3)))
    t = mt.trace(m, dict(x=R(1, 2)))
    (u,) = t.order.usage[m]
    assert u.module is m and [n for n, _ in u.named_params] == ["b", "w"]


def test_f09() -> None:
    """parameters used through a method call or an operator count as well"""
    m = mk(lambda self, x: self.w.mul(x), w=nn.Parameter(R(2)))
    t = mt.trace(m, dict(x=R(2)))
    assert ids(t.order.params) == ids([m.w])


def test_f10() -> None:
    """a leaf-module call uses all of that module's parameters"""
    m = mk(lambda self, x: self.l(x), l=nn.Linear(2, 3))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert [n for n, _ in t.order.usage[m.l][0].named_params] == ["weight", "bias"]


def test_f11() -> None:
    """a parent lists each called child with *all* the child's parameters under child-relative names"""
    m = mk(lambda self, x: self.b(x), b=MLP(4))
    t = mt.trace(m, dict(x=R(1, 4)))
    u = t.order.usage[m][0]
    assert u.module is m.b and [n for n, _ in u.named_params] == ["f1.weight", "f1.bias", "f2.weight", "f2.bias"]


def test_f12() -> None:
    """a tied parameter reachable under two names is one parameter"""
    e = nn.Embedding(5, 3)
    h = nn.Linear(3, 5, bias=False)
    h.weight = e.weight
    m = mk(lambda self, i: self.h(self.e(i)), e=e, h=h)
    t = mt.trace(m, dict(i=torch.tensor([1])))
    assert len(t.order.params) == 1 and t.order.modules == [m, e, h]


def test_f13() -> None:
    """parameters passed by keyword are usages (the reference implementation misses these)"""
    m = mk(lambda self, x: F.linear(x, weight=self.w, bias=self.b), w=nn.Parameter(R(2, 2)), b=nn.Parameter(R(2)))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert ids(t.order.params) == ids([m.w, m.b])


def test_f14() -> None:
    """parameters inside list/tuple arguments are usages (also missed by the reference)"""
    m = mk(lambda self, x: torch.cat([self.cls, x]), cls=nn.Parameter(R(1, 2)))
    t = mt.trace(m, dict(x=R(3, 2)))
    assert ids(t.order.params) == ids([m.cls])


def test_f15() -> None:
    """concrete arguments decide which modules are in the order"""
    m = mk(lambda self, x, full: self.b(self.a(x)) if full else self.a(x), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    assert mt.trace(m, dict(x=R(1, 2)), concrete_args=dict(full=False)).order.modules == [m, m.a]
    assert mt.trace(m, dict(x=R(1, 2)), concrete_args=dict(full=True)).order.modules == [m, m.a, m.b]


def test_f16() -> None:
    """a tracing configuration is a plain record: tracer (fresh default per instance) and concrete args (None)"""
    a, b = mt.TracingConfig(), mt.TracingConfig()
    assert a.tracer is not b.tracer and a.concrete_args is None


def test_f17() -> None:
    """recording can be attached to a stock `torch.fx.Tracer` and is detached afterwards, also on error"""
    tr = torch.fx.Tracer()
    m = MLP(2)
    with mt.record_execution(tr, m) as info:
        tr.trace(m)
    assert info.modules[0] is m and "call_module" not in vars(tr)


def test_f18() -> None:
    """after a child returns, direct parameter use is credited to the parent again"""
    m = mk(lambda self, x: self.c(x) * self.w, c=MLP(2), w=nn.Parameter(R(2)))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert [u.module for u in t.order.usage[m]] == [m.c, m] and all(u.module is not m for u in t.order.usage[m.c])


def test_f19() -> None:
    """every visited module has a usage entry; parameter-free ones map to an empty list and are absent from the parent's list"""
    m = mk(lambda self, x: self.r(self.l(x)), r=nn.ReLU(), l=nn.Linear(2, 2))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert t.order.usage[m.r] == [] and [u.module for u in t.order.usage[m]] == [m.l]


def test_f20() -> None:
    """merely reading a parameter attribute (shape, None test) is not a use"""
    m = mk(lambda self, x: x if self.w is not None and self.w.shape[0] == 2 else -x, w=nn.Parameter(R(2)))
    t = mt.trace(m, dict(x=R(2)))
    assert t.order.params == []


def test_f21() -> None:
    """buffers are not parameters"""
    m = mk(lambda self, x: x * self.k + self.w, w=nn.Parameter(R(2)))
    m.register_buffer("k", R(2))
    t = mt.trace(m, dict(x=R(2)))
    assert ids(t.order.params) == ids([m.w])


def test_f22() -> None:
    """`visited` equals the set of ordered parameters"""
    m = MLP(3)
    o = mt.trace(m, dict(x=R(1, 3))).order
    assert pset(o.visited) == pset(o.params) and len(o.params) == len(o.visited)


def test_f23() -> None:
    """containers that are only indexed or iterated are not "called" """
    m = mk(lambda self, x: [x := l(x) for l in self.ls][-1], ls=nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert t.order.modules == [m, m.ls[0], m.ls[1]]


def test_f24() -> None:
    """parameters used together in one op form one group; two ops form two groups in order"""
    m = mk(lambda self, x: (x * self.a) + self.b, a=nn.Parameter(R(2)), b=nn.Parameter(R(2)))
    t = mt.trace(m, dict(x=R(2)))
    assert [[n for n, _ in u.named_params] for u in t.order.usage[m]] == [["a"], ["b"]]


def test_f25() -> None:
    """frozen parameters are recorded like trainable ones"""
    m = MLP(2).requires_grad_(False)
    assert len(mt.trace(m, dict(x=R(1, 2))).order.params) == 4


def test_f26() -> None:
    """checkpointed submodules are recorded once per call, in order (no recomputation entries)"""
    m = mk(lambda self, x: self.o(checkpoint(self.b, x)), b=MLP(2), o=nn.Linear(2, 1))
    t = mt.trace(m, dict(x=R(1, 2)))
    assert t.order.modules == [m, m.b, m.b.f1, m.b.act, m.b.f2, m.o]


def test_f27() -> None:
    """the order reflects execution, so a residual/reversed architecture is listed as run"""
    m = mk(
        lambda self, x: [x := x + l(x) for l in reversed(self.ls)][-1],
        ls=nn.ModuleList(nn.Linear(2, 2) for _ in range(3)),
    )
    t = mt.trace(m, dict(x=R(1, 2)))
    assert t.order.modules[1:] == [m.ls[2], m.ls[1], m.ls[0]]


def test_f28() -> None:
    """order survives a submodule that had to be kept opaque: its parameters count at the call position"""
    bad = mk(lambda self, x: self.l(x) if x.sum() > 0 else x, l=nn.Linear(2, 2))
    m = nn.Sequential(nn.Linear(2, 2), bad, nn.Linear(2, 2))
    t = mt.trace(m, dict(input=R(1, 2)), unsupported="leaf")
    assert ids(t.order.params) == ids([*m[0].parameters(), *bad.parameters(), *m[2].parameters()])
