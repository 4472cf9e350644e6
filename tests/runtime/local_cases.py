"""Ops on shards, each compared with the unsharded op: local code, layouts and arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """`op` on the global `tensors` (they replace `...` in `args`) in layouts `inputs`; results in `outputs`."""

    name: str
    local: str
    op: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()  # indices of tensors that need no gradient

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """The positional arguments: `tensors` in place of `...` (by default at the front); buffers are copied."""
        rest = iter(tensors)
        own = [next(rest) if a is ... else a.clone() if isinstance(a, torch.Tensor) else a for a in self.args]
        return (*rest, *own)


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def labels(classes: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(classes)
    return torch.randint(classes, shape, generator=generator)


def ignoring_unevenly(target: torch.Tensor, ignored: int = -100) -> torch.Tensor:
    """Most labels of the first rank are ignored, and one of the last rank's."""
    target = target.clone()
    flat = target.view(-1)
    flat[: flat.numel() // 3] = ignored
    flat[-2] = ignored
    return target


def cases(mesh: tuple[int, ...]) -> Iterator[Case]:
    """All cases for a mesh; two axes shard two dims, or one dim twice."""
    yield from _shapes(mesh)
    yield from _embeddings(mesh)
    yield from _losses(mesh)
    yield from _norms(mesh)
    yield from _attention(mesh)


def _on(mesh: tuple[int, ...], first: str, second: str = "R") -> str:
    """A layout with `first` on axis 0 and, if there is one, `second` on axis 1."""
    return first if len(mesh) == 1 else f"{first},{second}"


def _shapes(mesh: tuple[int, ...]) -> Iterator[Case]:
    x = numbers(8, 24)
    rows, inner = _on(mesh, "S0"), _on(mesh, "S1@3")
    both = _on(mesh, "S0", "S1")
    yield Case("view", "shape", torch.Tensor.view, (x,), (both,), (_on(mesh, "S0", "S1"),), (8, 4, 6))
    yield Case("reshape", "shape", torch.reshape, (x,), (_on(mesh, "S1"),), (_on(mesh, "S1"),), ((8, 4, -1),))
    yield Case("heads", "shape", torch.Tensor.view, (x,), (inner,), (_on(mesh, "S2"),), (8, 3, 8))
    expanded = (_on(mesh, "S1"),)
    yield Case("expand", "shape", torch.Tensor.expand, (numbers(1, 8),), expanded, expanded, (5, -1))
    new = {"dtype": torch.float64}
    yield Case("zeros", "shape", torch.zeros, (), (), (both,), ((8, 24),), new)
    yield Case("ones", "shape", torch.ones, (), (), (both,), (8, 24), new)
    yield Case("full", "shape", torch.full, (), (), (both,), ((8, 24), 3.5), new)
    yield Case("full by name", "shape", torch.full, (), (), (both,), ((8, 24),), {**new, "fill_value": 2.5})
    yield Case("new_full", "shape", torch.Tensor.new_full, (x,), (rows,), (both,), ((8, 24), 3.5))
    yield Case("new_zeros", "shape", torch.Tensor.new_zeros, (x,), (rows,), (both,), (8, 24))
    yield Case("arange", "shape", torch.arange, (), (), (rows,), (3, 11))
    yield Case("split", "split", torch.split, (x,), (inner,), (inner.replace("S1@3", "S1"),) * 3, (8,), {"dim": 1})
    outputs = (inner.replace("S1@3", "S1"),)
    yield Case("slice", "slice", operator.getitem, (x,), (inner,), outputs, ((..., slice(8, 16)),))
    yield Case("slice from end", "slice", operator.getitem, (x,), (inner,), outputs, ((slice(None), slice(-8, None)),))
    stepped = (_on(mesh, "S1"),)
    yield Case("slice by step", "slice", operator.getitem, (x,), stepped, stepped, ((None, 2, slice(1, None, 3)),))
    yield Case("narrow", "slice", torch.Tensor.narrow, (x,), (inner,), outputs, (1, 8, 8))
    channels = (_on(mesh, "S1"), _on(mesh, "S0"))
    image, kernel = numbers(2, 8, 5), numbers(8, 2, 3)
    yield Case("groups", "groups", F.conv1d, (image, kernel), channels, channels[:1], (), {"groups": 4})
    places = (..., ..., None, 1, 0, 1, 4)
    yield Case("groups by place", "groups", F.conv1d, (image, kernel), channels, channels[:1], places)
    yield Case("mean", "mean", torch.mean, (x,), (both,), (_on(mesh, "P", "P"),))
    if len(mesh) == 2:
        yield Case("mean of summands", "mean", torch.mean, (x,), ("S0,P",), ("P,P",))
    # ties of zeros, distributed unevenly over the rows
    tied, lines = numbers(8, 24).round().clamp(max=0), _on(mesh, "S1", "S0")
    yield Case("amax", "extremum", torch.amax, (tied,), (lines,), (_on(mesh, "R", "S0"),), (1,))
    yield Case("amax, dim kept", "extremum", torch.Tensor.amax, (tied,), (rows,), (_on(mesh, "R"),), (0, True))
    yield Case("min", "extremum", torch.Tensor.min, (-tied,), (both,), (_on(mesh, "R"),))
    yield Case("mse", "mean", F.mse_loss, (x, numbers(8, 24) * 2), (rows, rows), (_on(mesh, "P"),))


def _embeddings(mesh: tuple[int, ...]) -> Iterator[Case]:
    for vocabulary in (12, 7, 3):  # divisible, not divisible, and fewer rows than four ranks
        ids, weight = labels(vocabulary, 4, 3), numbers(vocabulary, 6)
        for second in ("R", "S0@2", "S1") if len(mesh) == 2 else ("R",):
            weights = _on(mesh, "S0", second)
            out = _on(mesh, "P", {"R": "R", "S0@2": "P", "S1": "S2"}[second])
            layouts = (_on(mesh, "R"), weights)
            name = f"embedding {vocabulary} {weights}"
            yield Case(name, "embedding_vocab", F.embedding, (ids, weight), layouts, (out,))
            yield Case(name + " padding", "embedding_vocab", F.embedding, (ids, weight), layouts, (out,), (1,))
            last = {"padding_idx": -1}
            yield Case(name + " last", "embedding_vocab", F.embedding, (ids, weight), layouts, (out,), (), last)
    sharded_ids = (_on(mesh, "R+", "S0"), _on(mesh, "S0", "R+")) if len(mesh) == 2 else (_on(mesh, "R"), "S0")
    out = _on(mesh, "P", "S0")
    yield Case("embedding ids", "embedding_vocab", F.embedding, (labels(7, 4, 3), numbers(7, 6)), sharded_ids, (out,))


def _losses(mesh: tuple[int, ...]) -> Iterator[Case]:
    options: list[dict[str, Any]] = [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"ignore_index": 2, "reduction": "mean"},
        {"reduction": "sum", "label_smoothing": 0.2},
    ]

    def case(name: str, tensors: tuple[torch.Tensor, ...], inputs: tuple[str, ...], output: str, **kwargs: Any) -> Case:
        name = f"cross_entropy {name} {tuple(tensors[0].shape)} {kwargs}"
        return Case(name, "cross_entropy", F.cross_entropy, tensors, inputs, (output,), (), kwargs, frozen=(2,))

    for classes in (12, 7, 3):
        logits, target = numbers(8, classes), labels(classes, 8)
        for kwargs in options:
            given = logits, ignoring_unevenly(target, kwargs.get("ignore_index", -100))
            rows = _on(mesh, "S0", "S0@2")
            yield case("classes", given, (_on(mesh, "S1"), _on(mesh, "R")), _on(mesh, "R"), **kwargs)
            yield case("rows", given, (rows, rows), _on(mesh, "P", "P"), **kwargs)
            if len(mesh) == 2:
                yield case("both", given, ("S0,S1", "S0,R"), "P,R", **kwargs)
                yield case("twice", given, ("S1,S1@2", "R,R"), "R,R", **kwargs)
        each = _on(mesh, "R", "S0")
        given = logits, ignoring_unevenly(target)
        yield case("each", given, (_on(mesh, "S1", "S0"), each), each, reduction="none", label_smoothing=0.1)
    rows, whole = _on(mesh, "S0"), _on(mesh, "R")
    weighted = (numbers(8, 5), ignoring_unevenly(labels(5, 8)), numbers(5).abs())
    yield case("weight", weighted, (rows, rows, whole), _on(mesh, "P"))
    yield case("weight", weighted, (rows, rows, whole), _on(mesh, "P"), label_smoothing=0.3)
    pixels = (numbers(4, 6, 8), ignoring_unevenly(labels(6, 4, 8)))
    yield case("pixels", pixels, (_on(mesh, "S2", "S1"), _on(mesh, "S1")), _on(mesh, "P"))
    yield case("one row", (numbers(7), torch.tensor(4)), (_on(mesh, "S0"), whole), whole)
    split, first = _on(mesh, "S1"), _on(mesh, "S0")
    for classes in (7, 3):
        logits, each, ids = numbers(8, classes), numbers(classes).abs() + 0.1, ignoring_unevenly(labels(classes, 8))
        soft = numbers(8, classes + 1)[:, 1:].softmax(1)
        for kwargs in ({}, {"label_smoothing": 0.3}, {"reduction": "sum"}):
            yield case("classes' weight", (logits, ids, each), (split, whole, first), whole, **kwargs)
            yield case("soft", (logits, soft), (split, split), whole, **kwargs)
            yield case("soft, weight", (logits, soft, each), (split, split, first), whole, **kwargs)
        pixels = (numbers(4, classes, 8), ignoring_unevenly(labels(classes, 4, 8)))
        yield case("classes of pixels", pixels, (split, whole), whole, reduction="sum", label_smoothing=0.1)
        name, inputs = f"nll_loss {classes}", (split, whole)
        yield Case(name, "cross_entropy", F.nll_loss, (logits, ids), inputs, (_on(mesh, "P"),))
        yield Case(f"log_softmax {classes}", "log_softmax", F.log_softmax, (logits,), (split,), (split,), (1,))
        yield Case(f"log_softmax 0, {classes}", "log_softmax", F.log_softmax, (logits.mT,), (first,), (first,), (0,))


def _norms(mesh: tuple[int, ...]) -> Iterator[Case]:
    x, weight, bias = numbers(8, 4, 6) * 3 + 100, numbers(4), numbers(4) + 1
    running = (..., torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64), ..., ...)
    per_rank = _on(mesh, "R+")
    for second, channel in (("R", "R"), ("S0@2", "R+"), ("S1", "S0")) if len(mesh) == 2 else (("R", "R"),):
        if second == "S1":
            own = tuple(None if isinstance(a, torch.Tensor) else a for a in running)
        else:
            own = running
        layout, affine = _on(mesh, "S0", second), _on(mesh, "R+", channel)
        name = f"batch_norm {layout}"
        inputs = (layout, affine, affine)
        yield Case(name, "batch_norm", F.batch_norm, (x, weight, bias), inputs, (layout,), (*own, True, 0.3))
    space = _on(mesh, "S2" if mesh[0] == 2 else "S0")
    inputs = (space, per_rank, per_rank)
    yield Case("batch_norm space", "batch_norm", F.batch_norm, (x, weight, bias), inputs, (space,), (*running, True))
    plain = (_on(mesh, "S0"),)
    yield Case("batch_norm bare", "batch_norm", F.batch_norm, (x,), plain, plain, (..., None, None), {"training": True})
    inputs = (plain[0], per_rank, per_rank)
    yield Case("batch_norm eval", "batch_norm", F.batch_norm, (x, weight, bias), inputs, plain, (*running, False))
    for second in ("R", "S0@2") if len(mesh) == 2 else ("R",):
        layout, affine = _on(mesh, "S0", second), _on(mesh, "R+", "R" if second == "R" else "R+")
        name, inputs = f"instance_norm {layout}", (layout, affine, affine)
        own = (*running, True, 0.3)
        yield Case(name, "instance_norm", F.instance_norm, (x, weight, bias), inputs, (layout,), own)
    own = (..., None, None, *running[1:3], True, 0.3, 1e-5, True)
    yield Case("instance_norm built in", "instance_norm", torch.instance_norm, (x,), plain, plain, own)


def _attention(mesh: tuple[int, ...]) -> Iterator[Case]:
    heads = (numbers(2, 4, 8, 5), numbers(2, 4, 8, 5) + 1, numbers(2, 4, 8, 5) - 1)
    whole = _on(mesh, "R+", "S1")
    layouts = (_on(mesh, "S2", "S1"), whole, whole)
    causal = {"is_causal": True}
    attention = F.scaled_dot_product_attention
    yield Case("causal queries", "sdpa_causal", attention, heads, layouts, layouts[:1], (), causal)
    yield from _causal(mesh, heads)
    heads_only = _on(mesh, "S1" if mesh[0] == 2 else "R", "S0")
    for kwargs in ({}, causal, {"scale": 0.2}):
        name, inputs = f"attention without dropout {kwargs}", (layouts, (heads_only,) * 3)
        yield Case(name, "sdpa_dropout", attention, heads, inputs[0], layouts[:1], (), kwargs)
        yield Case(name + " heads", "sdpa_dropout", attention, heads, inputs[1], inputs[1][:1], (), kwargs)
    grouped = (heads[0], *(numbers(2, 2, 6, 5) + i for i in range(2)))
    yield Case(
        "grouped queries",
        "sdpa_dropout",
        attention,
        grouped,
        (heads_only,) * 3,
        (heads_only,),
        (),
        {"enable_gqa": True},
    )
    seen = numbers(1, 1, 8, 8) > 0
    seen[..., 2, :] = False  # a query that attends to nothing
    whole = _on(mesh, "R")
    masked = (*heads, seen)
    yield Case("masked", "sdpa_dropout", attention, masked, (*(heads_only,) * 3, whole), (heads_only,))
    added = (*heads, torch.where(seen, numbers(1, 1, 8, 8), -torch.inf))
    yield Case("bias", "sdpa_dropout", attention, added, (*(heads_only,) * 3, whole), (heads_only,), frozen=(3,))


def _causal(mesh: tuple[int, ...], heads: tuple[torch.Tensor, ...]) -> Iterator[Case]:
    """Queries sharded over all axes: shards of even and odd length, single queries, and no fused kernel."""
    whole = _on(mesh, "R+", "R+")
    layouts = (_on(mesh, "S2", f"S2@{mesh[0]}"), whole, whole)
    odd = 3 * math.prod(mesh)
    few, uneven = (tuple(numbers(2, 4, length, 5) + i for i in range(3)) for length in (math.prod(mesh), odd))
    turned = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in heads)
    tensors = {
        "all axes": heads,
        "one each": few,
        "odd": uneven,
        "grouped": (heads[0], heads[1][:, :2], heads[2][:, 2:]),
        "heads swapped in": turned,
        "strided": tuple(t.mT.contiguous().mT for t in heads),
        "more keys": (heads[0], numbers(2, 4, 12, 5), numbers(2, 4, 12, 5) - 1),
        "fewer keys": (heads[0], numbers(2, 4, 6, 5), numbers(2, 4, 6, 5) - 1),
        "wide values": (*heads[:2], numbers(2, 4, 8, 7)),
        "no heads": tuple(t[:, 0] for t in heads),
    }
    masked = {"more keys", "fewer keys", "wide values", "no heads"}
    for name, given in tensors.items():
        dim = given[0].dim() - 2
        lie = tuple(layout.replace("S2", f"S{dim}") for layout in layouts)
        kwargs = {"is_causal": True, "enable_gqa": name == "grouped"} | ({"scale": 0.3} if name == "odd" else {})
        function = F.scaled_dot_product_attention
        local = "sdpa_causal_mask" if name in masked else "sdpa_causal"
        yield Case(f"causal queries, {name}", local, function, given, lie, lie[:1], (), kwargs)
