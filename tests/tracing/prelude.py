"""The common imports and helpers of the cases of the rows."""

import contextlib
import copy
import functools
import math
import operator
import re
import warnings
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.fx as fx
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from pytest import raises
import mt

warnings.simplefilter("ignore")
from torch.utils.checkpoint import checkpoint as _ck


def checkpoint(fn, *a, use_reentrant=True, **k):  # early-bound, as user code does
    return _ck(fn, *a, use_reentrant=use_reentrant, **k)


R = torch.randn  # real sample


def meta(*s):
    return torch.empty(*s, device="meta")


def mk(fwd, **attrs):  # tiny module; `fwd(self, ...)` keeps its own signature
    m = type("M", (nn.Module,), {"forward": fwd})()
    for k, v in attrs.items():
        setattr(m, k, v)
    return m


class MLP(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.f1, self.act, self.f2 = nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n)

    def forward(self, x):
        return self.f2(self.act(self.f1(x)))


def tn(t):
    return t if isinstance(t, str) else getattr(t, "__name__", str(t)).strip("_")


def gnames(g):
    return [tn(n.target) for n in g.nodes if n.op not in ("placeholder", "output")]


def names(t):
    return gnames(t.graph)  # t.graph holds no unused size/attribute nodes


def phs(t):
    return [n.name for n in t.graph.nodes if n.op == "placeholder"]


leaves = pytree.tree_leaves


def same(t, m, *a):  # t: Traced or GraphModule
    g = getattr(t, "gm", t)
    c = lambda: copy.deepcopy(a)
    x, y = leaves(g(*c())), leaves(m(*c()))
    return len(x) == len(y) and all(
        torch.allclose(p, q, equal_nan=True) if isinstance(p, torch.Tensor) else p == q for p, q in zip(x, y)
    )


def ids(ps):
    return [id(p) for p in ps]


def pset(ps):
    return {id(p) for p in ps}


def is_fake(v):
    return isinstance(v, torch._subclasses.FakeTensor)


def inplace_nodes(g):
    return [
        n
        for n in g.nodes
        if re.search(
            r"[a-z]_(\.|$)", n.target if isinstance(n.target, str) else str(getattr(n.target, "__name__", n.target))
        )
        and n.op.startswith("call")
        and not tn(n.target).startswith("_")
    ]


@contextlib.contextmanager
def leaf_type(c):
    mt.RobustTracer.register_leaf(c)
    try:
        yield
    finally:
        mt.RobustTracer.unregister_leaf(c)


class count_calls:
    def __init__(self, mod, name):
        self.m, self.k, self.n = mod, name, 0

    def __enter__(self):
        self.o = getattr(self.m, self.k)

        def f(*a, **k):
            self.n += 1
            return self.o(*a, **k)

        setattr(self.m, self.k, f)
        return self

    def __exit__(self, *e):
        setattr(self.m, self.k, self.o)


def capture_attr(m, k):  # list of values assigned to m.k during forward
    out = []
    base = type(m).__setattr__
    type(m).__setattr__ = lambda s, n, v: (out.append(v) if n == k else None, base(s, n, v))[1]
    return out


def hop(g, x):
    return g(x)


def twice(x: torch.Tensor):
    return x * 2


def grad_off(f):
    with torch.no_grad():
        return f()


def autocast_mm(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


def autocast_body_vals(ep):
    return [
        n.meta["val"]
        for k in ep.graph.nodes
        if k.op == "get_attr" and hasattr(getattr(ep.graph_module, k.target, None), "graph")
        for n in getattr(ep.graph_module, k.target).graph.nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    ]


def vmap_graph(val, batch, batch_dim, out_dim):  # placeholder -> _add_batch_dim -> _remove_batch_dim
    from torch._functorch.predispatch import _add_batch_dim, _remove_batch_dim

    g = fx.Graph()
    x = g.placeholder("x")
    x.meta["val"] = torch.empty(val)
    a = g.call_function(_add_batch_dim, (x, batch_dim, 1))
    a.meta["val"] = torch.empty(val)
    r = g.call_function(_remove_batch_dim, (a, 1, batch, out_dim))
    r.meta["val"] = torch.empty(val)
    g.output(r)
    return g


def copy_graph(s0, s1, reuse):
    g = fx.Graph()
    x, y = g.placeholder("x"), g.placeholder("y")
    c = g.call_function(torch.ops.aten.copy_.default, (x, y))
    x.meta["val"], y.meta["val"], c.meta["val"] = torch.empty(s0), torch.empty(s1), torch.empty(s0)
    g.output((c, g.call_function(torch.ops.aten.neg.default, (x,))) if reuse else c)
    return g


if not hasattr(torch.ops.demo, "nometa"):  # pytest imports this file twice, once for doctests
    torch.library.define("demo::nometa", "(Tensor x) -> Tensor")
    torch.library.impl("demo::nometa", "CPU", lambda x: x.clone())
    torch.library.define("demo::mystery_", "(Tensor(a!) x) -> ()")
    torch.library.define("demo::scatter_weird_", "(Tensor(a!) x, Tensor i) -> ()")
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=99,
        )
    ).eval()


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=99, n_positions=32, bos_token_id=0, eos_token_id=0)
    ).eval()


def tiny_bert():
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    ).eval()


def kv_cache(layers):
    from transformers import DynamicCache

    c = DynamicCache()
    for i in range(layers):
        c.update(R(1, 2, 3, 4), R(1, 2, 3, 4), i)
    return c


import pytest

pytestmark = pytest.mark.filterwarnings("ignore")
