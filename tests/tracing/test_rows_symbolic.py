"""The tracer's rows Y: the dynamic-shape tracer family; one acceptance case a row."""

from prelude import *


def test_y01() -> None:
    """a module or a bare function can be the root; the tracer exposes the root actually used"""
    f = lambda x, y: x * y + 1
    T1 = mt.MetaTracer()
    t = T1.trace(f, dict(x=R(2), y=R(2)))
    assert names(t) == ["mul", "add"] and isinstance(T1.root, nn.Module)


def test_y02() -> None:
    """example inputs stay inputs; their placeholders carry the example and a data-free meta value"""
    x = R(3, 4)
    t = mt.trace(mk(lambda self, x, y: x + y), dict(x=x, y=R(3, 4)))
    p = next(iter(t.graph.nodes))
    assert p.meta["example_value"] is x and p.meta["val"].shape == (3, 4) and len(phs(t)) == 2


def test_y03() -> None:
    """declaring a dimension dynamic makes that extent symbolic in the placeholder's meta"""
    t = mt.trace(mk(lambda self, x: x * 2), dict(x=R(3, 4)), dynamic_shapes=dict(x={0: "batch"}))
    d = next(iter(t.graph.nodes)).meta["val"].shape
    assert mt.is_symbolic(d[0]) and d[1] == 4


def test_y04() -> None:
    """with static dims `x.shape` consists of plain Python ints"""
    seen = []
    mt.trace(mk(lambda self, x: (seen.append(x.shape), x)[1]), dict(x=R(3, 4)))
    assert tuple(seen[0]) == (3, 4) and all(isinstance(d, int) for d in seen[0])


def test_y05() -> None:
    """with a dynamic dim the shape still supports len, iteration, indexing and slicing; static entries stay ints"""
    seen = []
    mt.trace(mk(lambda self, x: (seen.append(x.shape), x)[1]), dict(x=R(3, 4)), dynamic_shapes=dict(x={0: "b"}))
    s = seen[0]
    assert len(s) == 2 and len(list(s)) == 2 and s[1] == 4 and isinstance(s[1], int) and mt.is_symbolic(s[0])


def test_y06() -> None:
    """`shape[i] == 0` on a dynamic dim is decided (False) at trace time as a plain bool"""
    seen = []
    m = mk(lambda self, x: (seen.append(x.shape[0] == 0), x if seen[0] else x + 1)[1])
    t = mt.trace(m, dict(x=R(3)), dynamic_shapes=dict(x={0: "n"}))
    assert seen == [False] and names(t) == ["add"]


def test_y07() -> None:
    """`numel() == 0` is decided at trace time"""
    m = mk(lambda self, x: x if x.numel() == 0 else x * 2)
    t = mt.trace(m, dict(x=R(3, 2)), dynamic_shapes=dict(x={0: "n"}))
    assert names(t) == ["mul"]


def test_y08() -> None:
    """`size(i) == 0` and `size()[i] == 0` are decided at trace time"""
    m = mk(lambda self, x: -x if x.size(0) == 0 else (+x if False else x.abs()))
    t = mt.trace(m, dict(x=R(3)), dynamic_shapes=dict(x={0: "n"}))
    assert names(t) == ["abs"]


def test_y09() -> None:
    """comparing two *different* dynamic dims in a branch is refused"""
    m = mk(lambda self, x: x if x.shape[0] == x.shape[1] else x + 1)
    with raises(mt.TraceError):
        mt.trace(m, dict(x=R(3, 4)), dynamic_shapes=dict(x={0: "a", 1: "b"}))


def test_y10() -> None:
    """comparing two static dims chooses the branch"""
    m = mk(lambda self, x, y: x + y if x.shape[0] == y.shape[0] else x)
    assert names(mt.trace(m, dict(x=R(3), y=R(3)))) == ["add"]


def test_y11() -> None:
    """rank is always known, also for derived values (arithmetic with broadcasting, cat, reductions)"""
    m = mk(lambda self, x: (x + 1).flatten() if (x + 1).ndim == 2 else x)
    assert "flatten" in names(mt.trace(m, dict(x=R(2, 2))))


def test_y12() -> None:
    """size arithmetic is recorded, so the graph is valid for other extents"""
    m = mk(lambda self, x: torch.ones((x.shape[0], x.shape[1] + 1)))
    t = mt.trace(m, dict(x=R(4, 4)), dynamic_shapes=dict(x={0: "a", 1: "b"}))
    assert t.gm(R(5, 6)).shape == (5, 7)


def test_y13() -> None:
    """`torch._check(n > 0)` makes n strictly positive: >, >=, <, <=, ==, != against constants <= 0 become plain bools"""
    seen = []

    def f(self, x):
        n = x.nonzero().shape[0] if False else x.sum().int().item()
        torch._check(n > 0)
        seen.extend([n > 0, n >= 0, n < 0, n <= 0, n == 0, n != -3])
        return x

    mt.trace(mk(f), dict(x=torch.ones(3)))
    assert seen == [True, True, False, False, False, True] and all(type(b) is bool for b in seen)


def test_y14() -> None:
    """`torch._check(n != 0)` only excludes zero"""
    seen = []

    def f(self, x):
        n = x.sum().item()
        torch._check(n != 0)
        seen.extend([n == 0, n != 0, n.positive])
        return x

    mt.trace(mk(f), dict(x=torch.ones(2, dtype=torch.long)))
    assert seen == [False, True, False]


def test_y15() -> None:
    """the constraint may be written with the constant on the left"""

    def f(self, x):
        n = x.sum().item()
        torch._check(0 < n)
        return x if n > 0 else -x

    assert names(mt.trace(mk(f), dict(x=torch.ones(2, dtype=torch.long))))[-1:] != ["neg"]


def test_y16() -> None:
    """conjunctions `a > 0 and b > 0` in a check register both constraints"""

    def f(self, x):
        torch._check(x.shape[0] > 0 and x.shape[1] > 0)
        return x if x.shape[0] > 0 and x.shape[1] != 0 else -x

    assert names(mt.trace(mk(f), dict(x=R(2, 3)), dynamic_shapes=dict(x={0: "a", 1: "b"}))) == []


def test_y17() -> None:
    """a check that is already false raises; a true one is silent"""
    with raises(RuntimeError):
        mt.trace(mk(lambda self, x: (torch._check(x.shape[1] == 7), x)[1]), dict(x=R(2, 3)))


def test_y18() -> None:
    """comparisons beyond what is known stay symbolic; using them in a branch is an error"""

    def f(self, x):
        n = x.sum().item()
        torch._check(n > 0)
        return x if n > 1 else -x

    with raises(mt.TraceError):
        mt.trace(mk(f), dict(x=torch.ones(3, dtype=torch.long)))


def test_y19() -> None:
    """symbolic booleans combine with & | ^ ~ == != into graph nodes"""
    m = mk(
        lambda self, x: (lambda n: torch.stack([mt.as_tensor((n == 2) & (n > 0)), mt.as_tensor(~(n < 5) | (n != 1))]))(
            x.sum().item()
        )
    )
    t = mt.trace(m, dict(x=torch.ones(2, dtype=torch.long)))
    assert {"and", "or"} <= set(names(t)) or {"logical_and", "logical_or"} <= set(names(t))


def test_y20() -> None:
    """a known operand folds: `b & False` is False, `b & True` is b, `b | True` is True, `b ^ False` is b"""
    seen = []
    m = mk(
        lambda self, x: (
            lambda b: (seen.extend([b & False, (b & True) is b, b | True, (b | False) is b, False & b]), x)[1]
        )(x.sum().item() > 0)
    )
    mt.trace(m, dict(x=torch.ones(2, dtype=torch.long)))
    assert seen == [False, True, True, True, False]


def test_y21() -> None:
    """`len()` of an input list is usable: known length for a sampled list, explicit `.length()` when the length is symbolic"""
    m = mk(lambda self, xs: xs[0] * len(xs))
    t = mt.trace(m, dict(xs=[R(2), R(2), R(2)]))
    assert torch.equal(t.gm(*[torch.ones(2)] * 3), torch.full((2,), 3.0))


def test_y22() -> None:
    """`.item()` yields a symbolic number (int or float by dtype) that may be used in arithmetic and slices"""
    m = mk(lambda self, x: x * x.sum().item())
    t = mt.trace(m, dict(x=R(3)))
    assert same(t, m, R(3))


def test_y23() -> None:
    """with `param_shapes_constant`, shape, size, dim, ndim, numel, nelement of a parameter are plain values"""
    seen = []
    w = nn.Parameter(R(4, 3))
    m = mk(
        lambda self, x: (
            seen.extend(
                [
                    self.w.shape,
                    self.w.size(),
                    self.w.size(1),
                    self.w.dim(),
                    self.w.ndim,
                    self.w.numel(),
                    self.w.nelement(),
                ]
            ),
            x @ self.w.T,
        )[1],
        w=w,
    )
    t = mt.trace(m, dict(x=R(2, 3)), param_shapes_constant=True)
    assert seen == [(4, 3), (4, 3), 3, 2, 2, 12, 12] and "w" in names(t)


def test_y24() -> None:
    """repr of traced values never fails and names the value"""
    out = []
    mt.trace(
        mk(lambda self, x: (out.append(repr(x) + repr(x.shape) + str(self.w)), x)[1], w=nn.Parameter(R(2))),
        dict(x=R(2)),
    )
    assert isinstance(out[0], str) and out[0]


def test_y25() -> None:
    """transposing properties T, mT, mH (and H) are recorded"""
    m = mk(lambda self, x: x.T @ x.mT.T)
    t = mt.trace(m, dict(x=R(2, 3)))
    assert same(t, m, R(2, 3)) and len(names(t)) >= 4


def test_y26() -> None:
    """a method fetched as an attribute and called later is one method node; unused attributes leave nothing"""

    def f(self, x):
        g = x.clamp
        x.relu
        return g(min=0)

    assert names(mt.trace(mk(f), dict(x=R(2)))) == ["clamp"]


def test_y27() -> None:
    """`torch.cat` works on lists/tuples of traced tensors, with `dim` or `axis`, and mixed with constant tensors"""
    m = mk(lambda self, x, y: torch.cat([x, y], axis=1))
    t = mt.trace(m, dict(x=R(2, 1), y=R(2, 2)))
    assert t.find_one("cat").target is torch.cat and same(t, m, R(2, 1), R(2, 2))


def test_y28() -> None:
    """temporarily replaced torch functions (cat, cond, scan, vmap, _check, is_exporting) are originals again afterwards"""
    keep = (torch.cat, torch.cond, torch.vmap, torch._check, torch.compiler.is_exporting, torch.ops.higher_order.scan)
    mt.trace(mk(lambda self, x: torch.cat([x, x])), dict(x=R(2)))
    assert keep == (
        torch.cat,
        torch.cond,
        torch.vmap,
        torch._check,
        torch.compiler.is_exporting,
        torch.ops.higher_order.scan,
    )


def test_y29() -> None:
    """Python types used as dtypes are translated: bool, int, float, complex"""
    m = mk(lambda self, x: x.to(bool))
    t = mt.trace(m, dict(x=R(2)))
    assert t.val(t.find_one("to")).dtype == torch.bool and same(t, m, R(2))


def test_y30() -> None:
    """creation functions with symbolic sizes are nodes (ones, zeros, full, empty, arange)"""
    for fn in (torch.ones, torch.zeros, torch.arange):
        t = mt.trace(mk(lambda self, x: fn(x.shape[0])), dict(x=R(3)), dynamic_shapes=dict(x={0: "n"}))
        assert t.gm(R(5)).shape == (5,)


def test_y31() -> None:
    """`math` functions of symbolic sizes are recorded so that other extents work"""
    m = mk(lambda self, x: torch.zeros(math.ceil(x.shape[0] / 2)))
    t = mt.trace(m, dict(x=R(5)), dynamic_shapes=dict(x={0: "n"}))
    assert t.gm(R(9)).shape == (5,)


def test_y32() -> None:
    """leaf predicates are given per type and decide per instance from module and qualified name"""
    m = nn.Sequential(MLP(2), MLP(2))
    t = mt.trace(m, dict(input=R(1, 2)), module_leaves={MLP: lambda mod, name: name == "1"})
    assert names(t) == ["0.f1", "0.act", "0.f2", "1"]


def test_y33() -> None:
    """callables given to control-flow operators get unique names, are attached, and are referenced by `get_attr`"""
    m = mk(
        lambda self, x: (
            torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + torch.cond(x.sum() > 1, torch.sin, torch.cos, (x,))
        )
    )
    t = mt.trace(m, dict(x=R(2)))
    a = [n.target for c in t.find("cond") for n in c.args[1:3]]
    assert len(set(a)) == 4 and all(hasattr(t.gm, k) for k in a)


def test_y34() -> None:
    """`torch.cond` is a single node; the traced module takes either branch at run time"""
    m = mk(lambda self, x: torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), [x]))
    t = mt.trace(m, dict(x=R(3)))
    assert names(t).count("cond") == 1
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.allclose(t.gm(x), m(x))


def test_y35() -> None:
    """nested cond and branches that close over parameters"""
    m = mk(lambda self, x: torch.cond(x.sum() > 0, lambda a: self.l(a), lambda a: a * 2, (x,)), l=nn.Linear(2, 2))
    t = mt.trace(m, dict(x=R(1, 2)))
    for x in (torch.ones(1, 2), -torch.ones(1, 2)):
        assert torch.allclose(t.gm(x), m(x))


def test_y36() -> None:
    """`scan` is a node with body, carries, inputs and additional inputs"""
    from torch._higher_order_ops.scan import scan

    m = mk(lambda self, x: scan(lambda c, a: (c + a, c * a), torch.zeros(4), x))
    t = mt.trace(m, dict(x=R(3, 4)))
    assert "scan" in names(t) and [tuple(v.shape) for v in leaves(t.val(t.find_one("scan")))] == [(4,), (3, 4)]


def test_y37() -> None:
    """library code that asks "am I being exported?" receives yes while tracing (and no afterwards)"""
    seen = []
    mt.trace(mk(lambda self, x: (seen.append(torch.compiler.is_exporting()), x)[1]), dict(x=R(1)), exporting=True)
    assert seen == [True] and torch.compiler.is_exporting() is False


def test_y38() -> None:
    """`torch.vmap` inside a model can be traced, also with reductions and in/out dims"""
    m = mk(lambda self, x, y: torch.vmap(lambda a, b: (a * b).sum())(x, y))
    t = mt.trace(m, dict(x=R(3, 4), y=R(3, 4)))
    assert same(t, m, R(3, 4), R(3, 4))


def test_y39() -> None:
    """batch-dim bookkeeping of an exported vmap graph is rewritten to ordinary tensor ops"""
    ep = torch.export.export(mk(lambda self, x: torch.vmap(torch.sin)(x)), (R(3, 2),), strict=False)
    n = mt.passes.remove_batch_dim_nodes(ep.graph)
    assert n == 2 and not [k for k in ep.graph.nodes if "batch_dim" in str(k.target)]


def test_y40() -> None:
    """un-batched results are expanded to the batch size; a moved output dim becomes a movedim"""
    g = vmap_graph(val=(1, 4), batch=3, batch_dim=0, out_dim=0)
    mt.passes.remove_batch_dim_nodes(g)
    assert any("expand" in str(n.target) for n in g.nodes)


def test_y41() -> None:
    """augmented assignment on a local copy becomes functional"""

    def f(self, x):
        y = x.clone()
        y += 2
        return y + 3

    m = mk(f)
    t = mt.trace(m, dict(x=R(2)), remove_inplace=True)
    assert not inplace_nodes(t.graph) and same(t, m, R(2))


def test_y42() -> None:
    """in-place methods add_, sub_, mul_, div_, addcmul_ are replaced and later readers see the new value"""

    def f(self, x):
        y = x.clone()
        y.add_(2)
        y.mul_(y)
        return y

    m = mk(f)
    t = mt.trace(m, dict(x=R(2)), remove_inplace=True)
    assert not inplace_nodes(t.graph) and same(t, m, R(2))


def test_y43() -> None:
    """readers *before* the update keep the old value"""

    def f(self, x):
        y = x.clone()
        old = y * 10
        y.add_(1)
        return old, y

    m = mk(f)
    t = mt.trace(m, dict(x=R(2)), remove_inplace=True)
    assert same(t, m, R(2)) and not inplace_nodes(t.graph)


def test_y44() -> None:
    """slice assignment on a copy"""

    def f(self, x):
        y = x.clone()
        y[:, :2] = y[:, :2] * 2
        return y + 3

    m = mk(f)
    assert same(mt.trace(m, dict(x=R(4, 4)), remove_inplace=True), m, R(4, 4))


def test_y45() -> None:
    """assignment through a boolean mask or an index tensor (also with `...`)"""

    def f(self, x):
        y = x.clone()
        y[y > 0] = 2
        return y

    m = mk(f)
    assert same(mt.trace(m, dict(x=R(3, 3)), remove_inplace=True), m, R(3, 3))


def test_y46() -> None:
    """assignment to an input itself is visible in every later use and in the output"""

    def f(self, x):
        x[:2, :3] = 1
        return x + 2, x

    m = mk(f)
    t = mt.trace(m, dict(x=R(5, 5)))
    assert same(t, m, R(5, 5))


def test_y47() -> None:
    """a read between two assignments uses the intermediate state"""

    def f(self, x):
        k = x.clone()
        k[0] = 1
        e = k.abs()
        k[1] = 0
        return k + e

    m = mk(f)
    assert same(mt.trace(m, dict(x=R(3, 2)), remove_inplace=True), m, R(3, 2))


def test_y48() -> None:
    """in-place functions on a *view* change the base"""

    def f(self, x):
        k = x.clone()
        torch.exp_(k[1:-1, :2])
        return k

    m = mk(f)
    assert same(mt.trace(m, dict(x=R(4, 3)), remove_inplace=True), m, R(4, 3))


def test_y49() -> None:
    """dead-code elimination after the pass does not lose any effect"""

    def f(self, x):
        y = x.clone()
        y[1:].add_(10)
        return y * 2

    m = mk(f)
    t = mt.trace(m, dict(x=R(4)), remove_inplace=True)
    t.graph.eliminate_dead_code()
    t.gm.recompile()
    assert same(t, m, R(4))


def test_y50() -> None:
    """ATen in-place targets in an existing graph are rewritten (add_, sub_, mul_, div_, clamp_, bitwise_*_, logical_not_) and counted"""
    g = fx.Graph()
    x = g.placeholder("x")
    a = g.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    g.output(a)
    assert (
        mt.passes.replace_inplace_targets(g) == 1
        and a.target is torch.ops.aten.add.Tensor
        and mt.passes.replace_inplace_targets(g) == 0
    )


def test_y51() -> None:
    """clone followed by copy_ in an exported graph is resolved"""

    def f(self, x, y):
        c = x.clone()
        z = c + 2
        c.copy_(y)
        return z

    ep = torch.export.export(mk(f), (R(2), R(2)))
    assert mt.passes.remove_inplace(ep.graph) >= 1 and not inplace_nodes(ep.graph)


def test_y52() -> None:
    """the pass reports how many in-place nodes it removed; zero when there are none"""
    t = mt.trace(mk(lambda self, x, y: x + y), dict(x=R(1), y=R(1)))
    assert mt.passes.remove_inplace(t.graph) == 0


def test_y53() -> None:
    """unsupported in-place ops: strict mode raises with the graph, lenient mode returns a negative count and leaves the graph unchanged"""
    g = fx.Graph()
    x = g.placeholder("x")
    g.call_function(torch.ops.demo.mystery_.default, (x,))
    g.output(x)
    before = str(g)
    assert mt.passes.remove_inplace(g, strict=False) < 0 and str(g) == before
    with raises(Exception, match="mystery_"):
        mt.passes.remove_inplace(g, strict=True)


def test_y54() -> None:
    """nested graphs (cond/scan bodies) are processed when asked for"""
    body = fx.symbolic_trace(lambda c: c.clone().add_(1))
    root = nn.Module()
    root.body = body
    g = fx.Graph(root)
    x = g.placeholder("x")
    b = g.get_attr("body")
    g.output(g.call_function(hop, (b, x)))
    mt.passes.remove_inplace(g, recursive=True)
    assert not inplace_nodes(body.graph)


def test_y55() -> None:
    """bookkeeping calls without users (grad-mode switches, autocast enter/exit, scalar/metadata assertions) are dropped"""
    m = mk(lambda self, x: grad_off(lambda: x * 2))
    t = mt.trace(m, dict(x=R(2)), remove_inplace=True)
    assert names(t) == ["mul"]


def test_y56() -> None:
    """with in-place removal switched off, the original in-place nodes are kept (and executed)"""

    def f(self, x):
        y = x.clone()
        y.add_(2)
        return y + 3

    m = mk(f)
    t = mt.trace(m, dict(x=R(2)), remove_inplace=False)
    assert "add" in names(t) and inplace_nodes(t.graph) and same(t, m, R(2))


def test_y57() -> None:
    """a full-range slice is removed and counted"""
    g = fx.Graph()
    x = g.placeholder("x")
    g.output(g.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 9223372036854775807)))
    assert mt.passes.remove_unnecessary_slices(g) == 1 and len(g.nodes) == 2


def test_y58() -> None:
    """real slices stay"""
    g = fx.Graph()
    x = g.placeholder("x")
    g.output(g.call_function(torch.ops.aten.slice.Tensor, (x, 0, 1, 2**63 - 1)))
    assert mt.passes.remove_unnecessary_slices(g) == 0


def test_y59() -> None:
    """`copy_` of an equally shaped value whose target is dead afterwards is replaced by the source; otherwise kept"""
    g = copy_graph((4, 4), (4, 4), reuse=False)
    assert mt.passes.remove_unnecessary_slices(g) == 1 and not any("copy_" in str(n.target) for n in g.nodes)


def test_y60() -> None:
    """erasing a node also erases predecessors used by nothing else, and stops at shared ones"""
    g = fx.Graph()
    x = g.placeholder("x")
    a = g.call_function(torch.sin, (x,))
    b = g.call_function(torch.add, (a, 1))
    g.output(x)
    mt.passes.graph_erase_node(g, b)
    assert [n.op for n in g.nodes] == ["placeholder", "output"]


def test_y61() -> None:
    """list/tuple/dict inputs are flattened into named placeholders (`key_0`, `key_1`, ...) and the flat graph is callable"""
    m = mk(lambda self, x, ys: x + ys[0] + ys[1])
    t = mt.trace(m, dict(x=R(2), ys=[R(2), R(2)]))
    assert phs(t) == ["x", "ys_0", "ys_1"]
    a = (R(2), R(2), R(2))
    assert torch.allclose(t.gm(*a), a[0] + a[1] + a[2])


def test_y62() -> None:
    """naming rule for flattened inputs: single tensors keep their key; unnamed inputs are a0, a1, ..."""
    assert mt.flat_names({"x": R(1), "it": [R(1), R(1)]}) == ["x", "it_0", "it_1"] and mt.flat_names([R(1), R(1)]) == [
        "a0",
        "a1",
    ]


def test_y63() -> None:
    """a key/value cache object is a legal input; its tensors become placeholders"""
    c = kv_cache(layers=1)
    t = mt.trace(mk(lambda self, x, cache: x + cache.layers[0].keys.sum()), dict(x=R(2), cache=c))
    assert len(phs(t)) == 3


def test_y64() -> None:
    """rebuilding a nested structure from flat values (tensors or traced values) keeps types and order"""
    s = [R(1), {"a": R(1), "b": [R(1)]}, (None, R(1))]
    flat, spec = pytree.tree_flatten(s)
    assert mt.unflatten(spec, flat)[1]["b"][0] is s[1]["b"][0]


def test_y65() -> None:
    """the finished graph lints, and every call without users has been explained (side effect) or removed"""

    def f(self, x):
        x.sum()
        x.shape[0] + 1
        y = x * 0
        return x.relu()

    t = mt.trace(mk(f), dict(x=R(2)), remove_inplace=True)
    t.graph.lint()
    assert names(t) == ["relu"]


def test_y66() -> None:
    """tensors stored as plain module attributes, and tensors created by captured closures, are constants of the traced module"""
    m = mk(lambda self, x: x + self.t * 2)
    m.t = R(3)
    t = mt.trace(m, dict(x=R(3)))
    assert same(t, m, R(3))


def test_y67() -> None:
    """a tensor made by an operation the tracer cannot see is detected (error or opaque), never silently frozen"""
    sc = torch.jit.script(twice)
    m = mk(lambda self, x: sc(x) + 1)
    try:
        t = mt.trace(m, dict(x=R(3)))
    except mt.TraceError:
        t = None
    assert t is None or same(t, m, R(3))


def test_y68() -> None:
    """autocast regions: body sub-graphs see the promoted dtype, outer readers get explicit casts"""
    ep = torch.export.export(mk(lambda self, x: autocast_mm(x)), (R(2, 2),))
    n = mt.passes.fix_autocast(ep.graph)
    assert n in (0, 1) and all(v.dtype == torch.bfloat16 for v in autocast_body_vals(ep))
